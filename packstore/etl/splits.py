"""The two datasets of a job with `validation_fraction`, its *splits*.

They lie in the folders ``train`` and ``validation`` of one place, and grow together: an
append commits one version of each, ``train`` first. If it is killed between the two
commits, one split is *ahead*: it has sources that the other one lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packstore.config.job import last_name_of, parent_of
from packstore.errors import ConfigError, sentence
from packstore.etl.dedup_and_split import OTHER_SPLIT
from packstore.etl.provenance import without_paths
from packstore.io.dataset.dataset import Dataset, find_dataset
from packstore.io.store.location import Location


def split_of(dataset: Dataset) -> str | None:
    """Return ``train`` or ``validation``; None: the dataset is no split."""
    split = dataset.manifest.provenance.get("part")
    return split if isinstance(split, str) and split in OTHER_SPLIT else None


def find_splits(
    url: str, storage_options: Mapping[str, Any] | None
) -> dict[str | None, Dataset]:
    """Return the newest versions of both splits in a folder; empty if it has none.

    Raises:
        ConfigError: there is only one of them, or they are datasets of their own.
    """
    folder = Location(url, storage_options or {})
    datasets: dict[str | None, Dataset] = {}
    for name in OTHER_SPLIT:
        location = folder.join(name)
        dataset = find_dataset(location.url, location.storage_options)
        if dataset is not None:
            datasets[name] = dataset
    if not datasets:
        return {}

    rule = "must hold both datasets of a job with validation_fraction"
    for name in OTHER_SPLIT:
        if name not in datasets:
            raise ConfigError(
                sentence(where=folder.display, rule=rule, found=f"no {name}")
            )
        if split_of(datasets[name]) != name:
            raise ConfigError(
                sentence(
                    where=folder.display,
                    rule=rule,
                    found=f"another dataset in its folder {name}",
                    remedy="Append to one dataset",
                )
            )
    return datasets


def find_sibling(dataset: Dataset) -> Dataset | None:
    """Return the newest version of the other split, if it lies beside `dataset`."""
    split = split_of(dataset)
    if split is None or last_name_of(dataset.location.url) != split:
        return None
    sibling_split = _sibling_of(split)
    folder = Location(parent_of(dataset.location.url), dataset.location.storage_options)
    location = folder.join(sibling_split)
    sibling = find_dataset(location.url, location.storage_options)
    if sibling is None or split_of(sibling) != sibling_split:
        return None
    return sibling


def with_sibling(dataset: Dataset) -> dict[str | None, Dataset]:
    """Return split -> dataset of a dataset and its sibling; None: there is none."""
    sibling = find_sibling(dataset)
    if sibling is None:
        return {None: dataset}
    return {split_of(dataset): dataset, split_of(sibling): sibling}


def refuse_lone_split(dataset: Dataset) -> None:
    """Raise ConfigError for one split: records would be added that belong to the other
    one.
    """
    split = split_of(dataset)
    if split is None:
        return
    if find_sibling(dataset) is not None:
        remedy = f"Append to {parent_of(dataset.url)}, which extends both"
    else:
        remedy = "Keep train and validation in one folder, and append to that folder"
    raise ConfigError(
        sentence(
            where=dataset.url,
            rule="records are appended to both datasets of a job with "
            "validation_fraction, as some belong to the other one",
            found=f"{split} alone",
            remedy=remedy,
        )
    )


def find_ahead(datasets: Mapping[str | None, Dataset]) -> str | None:
    """Return the split that an interrupted append has extended, if there is one.

    Args:
        datasets: both splits.

    Raises:
        ConfigError: their sources differ by more than one append.
    """
    sources = {
        split: without_paths(list(dataset.manifest.provenance["sources"]))
        for split, dataset in datasets.items()
    }
    train, validation = sources
    if sources[train] == sources[validation]:
        return None
    behind, ahead = train, validation
    if len(sources[train]) > len(sources[validation]):
        behind, ahead = validation, train

    num_common = len(sources[behind])
    parts = datasets[ahead].manifest.provenance.get("combined_from", ())
    num_appended = parts[-1]["sources"] if parts else 0
    is_one_append = num_common + num_appended == len(sources[ahead])
    if not is_one_append or sources[ahead][:num_common] != sources[behind]:
        raise ConfigError(
            sentence(
                where=f"{datasets[ahead].url} and {datasets[behind].url}",
                rule="both must be of the same records",
                found=f"{len(sources[ahead])} sources and {num_common}",
                remedy="Pack all records again",
            )
        )
    return ahead


def _sibling_of(split: str) -> str:
    (sibling_split,) = OTHER_SPLIT.keys() - {split}
    return sibling_split
