"""Hugging Face ``datasets``: its objects in memory, and the folders that
``save_to_disk`` writes.

It is not imported. Files: ``save_to_disk`` in ``src/datasets/arrow_dataset.py`` and
``dataset_dict.py`` of huggingface/datasets.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from packstore.errors import InputError, sentence
from packstore.io.store.location import Location

STATE, INFO, SPLITS = "state.json", "dataset_info.json", "dataset_dict.json"
"""Files of a saved dataset: what its files are, what its columns are; the splits of
several.
"""

T = TypeVar("T")
_Name = Annotated[str, Meta(pattern=r"^(?!\.{1,2}$)[^/\\]+$")]

NO_RECORDS = (INFO, "dataset_infos.json")
"""JSON files that describe the records of a folder."""

_SPLIT = re.compile(
    r"(training|train|testing|test|validation|valid|val|dev|eval)(?=[-_.])"
)
_SHARD = re.compile(r"(\w+)-[0-9]{5}-of-[0-9]{5}")


class _File(msgspec.Struct):
    filename: _Name


class _State(msgspec.Struct, rename=lambda name: f"_{name}"):
    data_files: list[_File]
    format_columns: list[str] | None = None
    output_all_columns: bool = False
    indices_files: list[Any] | None = None  # of releases before 2.0
    indices_data_files: list[Any] | None = None


class _Info(msgspec.Struct):
    features: dict[str, Any]


class _Metadata(msgspec.Struct):
    info: _Info


class _Splits(msgspec.Struct):
    splits: Annotated[list[_Name], Meta(min_length=1)]


def require_one_split(source: Any) -> Any:
    """Returns the only split of a ``DatasetDict``; any other source as it is."""
    if isinstance(source, Mapping) and source and all(map(_is_split, source.values())):
        if len(source) > 1:
            first = next(iter(source))
            raise _several(
                "input", source, f"Give one of them, e.g. dataset[{first!r}]"
            )
        (source,) = source.values()
    return source


def plain(source: Any) -> Any:
    """Returns a ``Dataset`` in Python's types (torch's round rewards); a user's
    transform stays.
    """
    if not _is_split(source):
        return source
    form = (
        getattr(source, "format", None) or {}
    )  # an IterableDataset has none, and no transform
    if form.get("type") == "custom":
        return source
    columns = None if form.get("output_all_columns") else form.get("columns")
    return (
        source.with_format(None, columns=columns)
        if columns
        else source.with_format(None)
    )


def records_of(source: Iterable[Any]) -> Iterable[Any]:
    """Returns the records of a ``Dataset`` without the null members that Arrow adds to
    structs, and with the names of class labels; those of any other iterable as they
    are.
    """
    if not _is_split(source):
        return source
    features = getattr(source, "features", None) or {}
    return (
        {
            name: _plain_value(value, features.get(name))
            for name, value in record.items()
        }
        for record in source
    )


def class_labels(metadata: Mapping[bytes, bytes] | None) -> dict[str, list[str]]:
    """Returns the names of the values of each column of class labels, from a schema's
    metadata.

    Their numbers say nothing: a set may call its good answers 0.
    """
    try:
        info = msgspec.json.decode(
            (metadata or {})[b"huggingface"], type=_Metadata
        ).info
    except (KeyError, msgspec.DecodeError, UnicodeDecodeError):
        return {}
    found = {
        name: feature["names"]
        for name, feature in info.features.items()
        if isinstance(feature, dict)
        and feature.get("_type") == "ClassLabel"
        and "names" in feature
    }
    return {
        name: [*map(str, names)]
        for name, names in found.items()
        if isinstance(names, list)
    }


def _plain_value(value: Any, feature: Any) -> Any:
    if isinstance(value, int) and hasattr(feature, "int2str"):
        return feature.names[value] if value >= 0 else None
    return _without_nulls(value, feature)


def _without_nulls(value: Any, feature: Any) -> Any:
    """Removes null members from a value of a feature; None: of an unknown one."""
    inner = getattr(feature, "feature", None)
    if isinstance(feature, list):
        (inner,) = feature
    elif feature is not None and inner is None and not isinstance(feature, Mapping):
        return value  # of one value, or of JSON, whose nulls are its own
    if isinstance(value, list):
        return [_without_nulls(item, inner) for item in value]
    if not isinstance(value, dict):
        return value
    members = feature or {}
    return {
        name: _without_nulls(item, members.get(name))
        for name, item in value.items()
        if item is not None
    }


def check_splits(folder: Location, names: Iterable[str]) -> None:
    """Refuses a folder of several splits: ``train.jsonl``,
    ``test_sft-00000-of-00002.parquet``.
    """
    splits = {
        (_SHARD.match(name) or word)[1]
        for name in names
        if (word := _SPLIT.match(name))
    }
    if len(splits) > 1:
        first, *others = sorted(
            splits, key=lambda split: (not split.startswith("train"), split)
        )
        remedy = f"Give a glob for one, e.g. {folder.join(first).display}*"
        raise _several(folder.display, [first, *others], remedy)


def saved_files(folder: Location, names: Collection[str]) -> list[Location] | None:
    """Returns the data files, in order, that ``save_to_disk`` wrote to a folder of
    `names`.
    """
    if SPLITS in names:
        first, *others = splits = _read(folder, SPLITS, _Splits).splits
        if others:
            remedy = f"Give the folder of one, e.g. {folder.join(first).display}"
            raise _several(folder.display, splits, remedy)
        folder = folder.join(first)
        names = {entry.name for entry in folder.files()}
    if not {STATE, INFO} <= set(names):
        return None
    state = _read(folder, STATE, _State)
    chosen = not state.output_all_columns and state.format_columns
    if chosen or state.indices_files or state.indices_data_files:
        rule = "its rows and columns must be those of its files, in their order"
        found = "columns of them" if chosen else "an order or choice of rows"
        remedy = "Pack datasets.load_from_disk(FOLDER) in Python, or save that again"
        raise InputError(sentence(folder.join(STATE).display, rule, found, remedy))
    return [folder.join(file.filename) for file in state.data_files]


def _is_split(value: object) -> bool:
    return hasattr(value, "with_format") and hasattr(value, "features")


def _several(where: str, splits: Collection[Any], remedy: str) -> InputError:
    found = f"{len(splits)}: {', '.join(map(str, splits))}"
    return InputError(
        sentence(where, "records must come from one split", found, remedy)
    )


def _read(folder: Location, name: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(folder.read_bytes(name), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        rule = "it must be as datasets' save_to_disk writes it"
        remedy = "Name the data files themselves, or a glob"
        raise InputError(
            sentence(folder.join(name).display, rule, str(error), remedy)
        ) from error
