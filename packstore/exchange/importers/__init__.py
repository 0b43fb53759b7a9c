"""Formats that a dataset can be made of: one small file each, one line in :data:`IMPORTERS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packstore.config import setting, validate
from packstore.io.storage import Location
from packstore.registry import Registry

if TYPE_CHECKING:
    from packstore.io.dataset import Dataset
    from packstore.pipeline import Progress


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """What every import can be told."""

    tokenizer: str | None = setting(
        None, "the tokenizer of its ids: a tokenizer.json, a folder, or a .model; it is recorded"
    )
    pack_size: int | None = setting(None, "tokens of a pack at most; default: of the longest pack")
    overwrite: bool = setting(False, "replace a dataset that is already there")
    single_writer: bool = setting(
        False,
        "no other job writes there meanwhile: for stores where two could both commit (sftp, …)",
    )

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class Importer:
    """How one format is read.

    Attributes:
        help: one line for ``packstore import --help``.
        examples: command lines.
        options: the class of its options, :class:`ImportOptions` or below it.
        run: ``(source, place, options, progress)`` -> the dataset.
    """

    help: str
    examples: str
    options: type[ImportOptions]
    run: Callable[[Location, Location, Any, Progress], Dataset]


IMPORTERS: Registry[Importer] = Registry(
    "import format",
    {
        "nemo": "packstore.exchange.importers.nemo:IMPORTER",
    },
)
