"""Exports datasets as files of other trainers; see ``README.md``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packstore.etl.pipeline import Progress
    from packstore.exchange.exporters import Exported
    from packstore.io.dataset.dataset import Dataset


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
        format: a name in :data:`packstore.exchange.exporters.EXPORTERS`.
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
    from packstore.exchange.exporters import EXPORTERS
    from packstore.io.dataset.dataset import Dataset
    from packstore.io.dataset.dataset import open as open_dataset
    from packstore.io.store.location import Location

    exporter = EXPORTERS.load(format)
    if not isinstance(dataset, Dataset):
        dataset = open_dataset(os.fspath(dataset), storage_options)
    place = Location(os.fspath(out), storage_options or {})
    return exporter.run(dataset, place, exporter.options(**options), progress or _nobody)


def _nobody(stage: str, done: int, total: int | None, unit: str) -> None:
    """Ignores progress."""
