"""Finds the datasets of a job that has committed already, as schedulers repeat finished jobs."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from packstore.config import PackConfig
from packstore.errors import DatasetExistsError, DatasetNotFoundError, quote, sentence
from packstore.etl.provenance import with_lineage, without_paths
from packstore.etl.sources import ExampleReader, RecordExampleReader
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.store.location import Location

log = logging.getLogger("packstore")


def finished_before(
    places: Mapping[str | None, Location],
    open_examples: Callable[[], ExampleReader],
    config: PackConfig,
) -> dict[str | None, Dataset]:
    """Returns the datasets that this job has committed before, by part.

    The input is read only if all else agrees, and then hashed, not tokenized.

    Args:
        places: part -> location of its dataset; a single dataset is part None.
        open_examples: opens the input; called if a dataset is at one of the places.
        config: all settings.

    Raises:
        DatasetExistsError: a dataset of other input or settings is there; names the differences.
        MissingFilesError: files of the dataset are missing.
    """
    newest = {part: _newest(place) for part, place in places.items()}
    there = {part: dataset for part, dataset in newest.items() if dataset is not None}
    if not there:
        return {}
    reader = open_examples()
    for part, dataset in there.items():
        _refuse_other(dataset, _about(reader, part, config, []), without=("sources", "lineage"))
    if isinstance(reader, RecordExampleReader):
        if len(there) < len(places) and not reader.inputs:  # such an input can be read only once
            _refuse(next(iter(there.values())), "only one part of two")
        reader.read_through()
    for part, dataset in there.items():
        _refuse_other(dataset, _about(reader, part, config, None))
        dataset.require_files()
    return there


def _newest(place: Location) -> Dataset | None:
    try:
        return open_dataset(place.url, place.storage_options)
    except DatasetNotFoundError:
        return None


def _about(
    reader: ExampleReader, part: str | None, config: PackConfig, sources: Sequence[Any] | None
) -> dict[str, Any]:
    """Returns the provenance for the manifest, with `sources` for an input not read yet."""
    about = with_lineage(reader.provenance(sources), reader.kind, config)
    found: dict[str, Any] = json.loads(json.dumps({**about, "part": part} if part else about))
    return found


def _refuse_other(dataset: Dataset, now: Mapping[str, Any], without: Sequence[str] = ()) -> None:
    """Raises :class:`DatasetExistsError` if the provenance of `dataset` is not `now`."""
    before, now = (
        {n: value for n, value in without_paths(_of_any_engine(about)).items() if n not in without}
        for about in (dataset.manifest.provenance, now)
    )
    if before != now:
        _refuse(dataset, "; ".join(_differences(before, now)[:2]))


def _of_any_engine(about: Mapping[str, Any]) -> Mapping[str, Any]:
    """Removes the tokenizer engine from `about`: all engines give the same ids."""
    if not about.get("tokenizer"):
        return about
    kept = {n: v for n, v in about["tokenizer"].items() if n not in ("engine", "engine_version")}
    return {**about, "tokenizer": kept}


def _refuse(dataset: Dataset, difference: str) -> None:
    must = "must not hold another dataset yet"
    found = f"version {dataset.version} of one ({difference})"
    do = "Name another place, or overwrite it (overwrite=True, --overwrite)"
    raise DatasetExistsError(sentence(dataset.url, must, found, do))


def _differences(other: Mapping[str, Any], about: Mapping[str, Any]) -> list[str]:
    """Lists the differences of two jobs, as `name X then, Y now` for each changed field."""
    before, now = dict(_flat(other)), dict(_flat(about))
    names = [n for n in {**now, **before} if n.split(".")[0] in about]
    names = [n for n in names if before.get(n) != now.get(n)]
    causes = [n for n in names if n != "lineage"]
    return [
        f"{name} {quote(before.get(name), 24)} then, {quote(now.get(name), 24)} now"
        for name in causes or names
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, inner in value.items():
        if isinstance(inner, list) and inner and all(isinstance(i, Mapping) for i in inner):
            inner = {str(i): part for i, part in enumerate(inner)}
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", list(inner) if isinstance(inner, tuple) else inner
