"""Options of imports, and what an import format is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packstore.config import setting, validate
from packstore.io.store.location import Location

if TYPE_CHECKING:
    from packstore.etl.pipeline import Progress
    from packstore.io.dataset.dataset import Dataset


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Options of every import."""

    tokenizer: str | None = setting(
        None, "the tokenizer of the ids, to record: a tokenizer.json, a folder, or a .model"
    )
    pack_size: int | None = setting(None, "most tokens of a pack; default: the longest pack's")
    overwrite: bool = setting(False, "replace an existing dataset")
    single_writer: bool = setting(
        False,
        "no other job writes there meanwhile: for stores where two could both commit (sftp, …)",
    )

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class Importer:
    """An import format.

    Attributes:
        help: one line for ``packstore import --help``.
        examples: command lines.
        options: class of its options, :class:`ImportOptions` or a subclass.
        run: ``(source, place, options, progress)`` -> the dataset.
    """

    help: str
    examples: str
    options: type[ImportOptions]
    run: Callable[[Location, Location, Any, Progress], Dataset]
