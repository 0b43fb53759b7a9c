"""Exports datasets as text, or as files of other trainers; see ``README.md``."""

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


@dataclass(frozen=True, kw_only=True)
class Exported:
    """The result of an export.

    Attributes:
        files: URLs of the files, without secrets.
        facts: label -> value, to be printed, e.g. the number of rows; None: unknown.
    """

    files: list[str]
    facts: dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Exporter:
    """An export format.

    Attributes:
        help, examples: texts of the command line.
        out_name, out_help: name of the destination on the command line, and its help.
        kinds: kinds of the datasets that the format can hold.
        options: class of the options.
        run: ``(dataset, place, options, progress)`` -> the result; writes the files at
            the location `place`.
    """

    help: str
    examples: str
    out_name: str
    out_help: str
    kinds: tuple[str, ...]
    options: type[ExportOptions]
    run: Callable[[Dataset, Location, Any, Progress], Exported]


EXPORTERS: Registry[Exporter] = Registry(
    "export format",
    {
        "text": "packstore.exchange.text:EXPORTER",
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
    """Export a dataset to text, or to files of another trainer.

    Args:
        format: a name in :data:`packstore.exchange.EXPORTERS`.
        dataset: a dataset, or its folder or URL.
        out: path or URL of the file or folder to write.
        storage_options: passed to the fsspec filesystems of `dataset` and `out`.
        progress: called with the progress.
        options: fields of the format's options, e.g. of
            :class:`packstore.exchange.megatron.MegatronOptions`.

    Raises:
        CompatibilityError: the format cannot hold such a dataset.
        PackstoreError: see :mod:`packstore.errors`; `out` is then unchanged.
    """
    from packstore.io.dataset.dataset import Dataset
    from packstore.io.dataset.dataset import open as open_dataset

    exporter = EXPORTERS.load(format)
    if not isinstance(dataset, Dataset):
        dataset = open_dataset(os.fspath(dataset), storage_options)
    kind = dataset.manifest.kind
    if kind not in exporter.kinds:
        kinds = " or ".join(exporter.kinds)
        raise CompatibilityError(
            sentence(
                dataset.url,
                rule=f"export as {format} needs a dataset of kind {kinds}",
                found=f"kind {kind}",
            )
        )
    place = Location(os.fspath(out), storage_options or {})
    return exporter.run(
        dataset, place, exporter.options(**options), progress or _no_progress
    )


def _no_progress(stage: str, count: int, total: int | None, unit: str) -> None:
    """Report nothing."""


def exists_error(
    location: Location,
    existing: str,
    remedy: str = "Name another place, or replace it (overwrite)",
) -> DatasetExistsError:
    """Return the error for a destination that holds `existing`."""
    return DatasetExistsError(
        sentence(
            location.display, rule="must not exist yet", found=existing, remedy=remedy
        )
    )
