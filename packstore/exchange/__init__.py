"""Exports datasets as files of other trainers; see ``README.md``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from packstore.config import Settings, setting
from packstore.errors import CompatibilityError, DatasetExistsError, sentence
from packstore.io.store.location import Location
from packstore.registry import Registry

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset
    from packstore.progress import Progress


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Settings):
    """Options of every export."""

    overwrite: bool = setting(False, "replace existing files")


@dataclass(frozen=True)
class Exported:
    """URLs of the files written, without secrets, and facts about them, by name."""

    files: list[str]
    facts: dict[str, object]


@dataclass(frozen=True)
class Exporter:
    """An export format: texts of the command line, its options, and the datasets it can
    hold.

    `run`: ``(dataset, place, options, progress)`` -> the result.
    """

    help: str
    out: tuple[str, str]
    examples: str
    kind: str
    options: type[ExportOptions]
    run: Callable[[Dataset, Location, Any, Progress], Exported]


EXPORTERS: Registry[Exporter] = Registry(
    "export format",
    {
        "nemo": "packstore.exchange.nemo:EXPORTER",
        "megatron": "packstore.exchange.megatron:EXPORTER",
    },
)


def export(
    format: str,
    dataset: Dataset | str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Exported:
    """Exports a dataset to a file of another trainer.

    Args:
        format: a name in :data:`packstore.exchange.EXPORTERS`.
        dataset: a dataset, or its folder or URL.
        out: path or URL of the file or folder to write.
        storage_options: passed to the fsspec filesystems of `dataset` and `out`.
        progress: called with the progress.
        options: options of the format.

    Returns:
        The files written, and facts about them.

    Raises:
        CompatibilityError: the format cannot hold such a dataset.
        PackstoreError: see :mod:`packstore.errors`; `out` is then unchanged.
    """
    from packstore.io.dataset.dataset import Dataset
    from packstore.io.dataset.dataset import open as open_dataset

    exporter = EXPORTERS.load(format)
    if not isinstance(dataset, Dataset):
        dataset = open_dataset(os.fspath(dataset), storage_options)
    if (kind := dataset.manifest.kind) != exporter.kind:
        rule = f"export as {format} needs a dataset of kind {exporter.kind}"
        raise CompatibilityError(sentence(dataset.url, rule, f"kind {kind}"))
    place = Location(os.fspath(out), storage_options or {})
    report = progress or (lambda *_: None)
    return exporter.run(dataset, place, exporter.options(**options), report)


def exists_error(
    location: Location,
    found: str,
    remedy: str = "Name another place, or replace it (overwrite)",
) -> DatasetExistsError:
    """Returns the error for an output that is there."""
    return DatasetExistsError(
        sentence(location.display, "must not exist yet", found, remedy)
    )
