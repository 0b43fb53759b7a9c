"""A case of the conformance kit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

Row = dict[str, Any]
Files = dict[str, bytes]


@dataclass
class Case:
    """A dataset, with side datasets or without, and what a reader must make of it.

    Attributes:
        name, about: of the case.
        kind, layout: of the dataset.
        files: the files of the dataset; none if another case writes them.
        dataset: the name of its folder.
        sides: the files of each side dataset, by the name of its folder.
        expect: the packs that it decodes to; None if it must be refused.
        refuse: names under which it may be refused.
    """

    name: str
    about: str
    kind: str = "sft"
    layout: str = "concat"
    files: Files = field(default_factory=dict)
    dataset: str = ""
    sides: dict[str, Files] = field(default_factory=dict)
    expect: list[Row] | None = None
    refuse: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.dataset = self.dataset or self.name

    def beside(self, name: str, files: Files | None = None) -> Self:
        """Adds a side dataset."""
        self.sides[name] = files or {}
        return self
