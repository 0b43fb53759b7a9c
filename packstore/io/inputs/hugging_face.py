"""Hugging Face ``datasets``: its objects in memory, and the folders that ``save_to_disk`` writes.

It is not imported. Files: ``save_to_disk`` in ``src/datasets/arrow_dataset.py`` and
``dataset_dict.py`` of huggingface/datasets.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import orjson

from packstore.errors import InputError, quote, sentence
from packstore.io.store.location import Location

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
"""Files of a saved dataset: what its files are, what its columns are; the splits of several."""

VIEWS = ("_indices_files", "_indices_data_files", "_format_columns")
"""Entries of the state by which a dataset is a view of its files; old releases wrote indices."""

NO_RECORDS = (INFO, "dataset_infos.json")
"""JSON files that describe the records of a folder."""


_SPLIT = re.compile(r"(training|train|testing|test|validation|valid|val|dev|eval)(?=[-_.])")
_SHARD = re.compile(r"(\w+)-[0-9]{5}-of-[0-9]{5}")


def one_split(source: Any) -> Any:
    """Returns the only split of a ``DatasetDict``; any other source as it is."""
    if isinstance(source, Mapping) and source and all(map(_is_split, source.values())):
        if len(source) > 1:
            first = next(iter(source))
            raise _several("input", source, f"Give one of them, e.g. dataset[{first!r}]")
        (source,) = source.values()
    return source


def plain(source: Any) -> Any:
    """Returns a ``Dataset`` in the format of Python's types; a transform of the user stays.

    Tensors of torch would round a reward to float32.
    """
    if not _is_split(source):
        return source
    form = getattr(source, "format", None) or {}  # an IterableDataset has none, and no transform
    if form.get("type") == "custom":
        return source
    columns = None if form.get("output_all_columns") else form.get("columns")
    return source.with_format(None, columns=columns) if columns else source.with_format(None)


def check_splits(folder: Location, names: Iterable[str]) -> None:
    """Refuses a folder of several splits: ``train.jsonl``, ``test_sft-00000-of-00002.parquet``."""
    splits = {(_SHARD.match(name) or word)[1] for name in names if (word := _SPLIT.match(name))}
    if len(splits) > 1:
        first, *others = sorted(splits, key=lambda split: (not split.startswith("train"), split))
        remedy = f"Give a glob for one, e.g. {folder.join(first).display}*"
        raise _several(folder.display, [first, *others], remedy)


def saved_files(folder: Location, names: Collection[str]) -> list[Location] | None:
    """Returns the data files, in order, that ``save_to_disk`` wrote to a folder, if it did.

    `names` are the files in the folder.
    """
    if SPLITS in names:
        splits = _read(folder, SPLITS).get("splits")
        if not isinstance(splits, list) or not splits:
            raise _unknown(folder.join(SPLITS), "splits", splits)
        if len(splits) > 1:
            remedy = f"Give the folder of one, e.g. {folder.join(str(splits[0])).display}"
            raise _several(folder.display, splits, remedy)
        folder = folder.join(_name(folder.join(SPLITS), splits[0]))
        names = {entry.name for entry in folder.files()}
    if not {STATE, INFO} <= set(names):
        return None
    state, place = _read(folder, STATE), folder.join(STATE)
    views = {name: state.get(name) for name in VIEWS}
    if state.get("_output_all_columns"):
        views["_format_columns"] = None
    if found := next((name for name, view in views.items() if view), None):
        must = "its rows and columns must be those of its files, in their order"
        remedy = "Pack datasets.load_from_disk(FOLDER) in Python, or save that again"
        raise InputError(sentence(place.display, must, f"a view of them ({found})", remedy))
    files = state.get("_data_files")
    if not isinstance(files, list):
        raise _unknown(place, "_data_files", files)
    named = (_name(place, isinstance(f, dict) and f.get("filename")) for f in files)
    return [folder.join(name) for name in named]


def _is_split(value: object) -> bool:
    return hasattr(value, "with_format") and hasattr(value, "features")


def _several(where: str, splits: Collection[Any], remedy: str) -> InputError:
    found = f"{len(splits)}: {', '.join(map(str, splits))}"
    return InputError(sentence(where, "records must come from one split", found, remedy))


def _read(folder: Location, name: str) -> dict[str, Any]:
    place, value = folder.join(name), None
    try:
        value = orjson.loads(place.read_bytes())
    except orjson.JSONDecodeError as error:
        raise _unknown(place, "JSON", str(error)) from error
    if not isinstance(value, dict):
        raise _unknown(place, "an object", value)
    return value


def _name(place: Location, value: object) -> str:
    """Returns the name of a file or folder in the folder of `place`."""
    if not isinstance(value, str) or not value or os.path.basename(value) != value:
        raise _unknown(place, "names of files in this folder", value)
    return value


def _unknown(place: Location, what: str, found: object) -> InputError:
    must = f"it must hold {what}, as datasets' save_to_disk writes it"
    remedy = "Name the data files themselves, or a glob"
    return InputError(sentence(place.display, must, quote(found), remedy))
