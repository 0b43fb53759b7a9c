"""Traces of Hugging Face ``datasets`` in files: the folders that ``save_to_disk``
writes, split names, and class labels in Arrow metadata.

``datasets`` is not imported. Source of the layout: ``save_to_disk`` in
``src/datasets/arrow_dataset.py`` and ``dataset_dict.py`` of huggingface/datasets.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from packstore.errors import InputError, sentence
from packstore.io.store.location import Location

STATE = "state.json"
"""File of a saved dataset: its data files, and its view of them if it shows only some
of their rows or columns.
"""

INFO = "dataset_info.json"
"""File of a saved dataset: its columns."""

SPLITS = "dataset_dict.json"
"""File of several saved datasets: the names of their folders."""

FILES_WITHOUT_RECORDS = (INFO, "dataset_infos.json")
"""JSON files that describe the records of a folder."""

T = TypeVar("T")
_FileName = Annotated[str, Meta(pattern=r"^(?!\.{1,2}$)[^/\\]+$")]
"""A name in the folder itself: a path could lead out of it."""

_SPLIT = re.compile(
    r"(training|train|testing|test|validation|valid|val|dev|eval)(?=[-_.])"
)
"""Start of a file name that names a split, as ``train.jsonl``."""

_SHARD = re.compile(r"(\w+)-[0-9]{5}-of-[0-9]{5}")
"""File name of one of several files of a split, as ``test_sft-00000-of-00002``."""


def _with_underscore(name: str) -> str:
    return f"_{name}"


class _DataFile(msgspec.Struct):
    filename: _FileName


class _State(msgspec.Struct, rename=_with_underscore):
    data_files: list[_DataFile]
    format_columns: list[str] | None = None
    output_all_columns: bool = False
    indices_files: list[Any] | None = None  # of releases before 2.0
    indices_data_files: list[Any] | None = None


class _Info(msgspec.Struct):
    features: dict[str, Any]


class _SchemaMetadata(msgspec.Struct):
    info: _Info


class _Splits(msgspec.Struct):
    splits: Annotated[list[_FileName], Meta(min_length=1)]


def class_labels(metadata: Mapping[bytes, bytes] | None) -> dict[str, list[str]]:
    """Return column -> names of its values, for columns of class labels.

    A class label is a number on disk, with a name: ``["good", "bad"]`` names 0 and 1.
    Only the names show which answers are good.

    Args:
        metadata: metadata of an Arrow schema; ``datasets`` adds the names there.
    """
    if metadata is None or b"huggingface" not in metadata:
        return {}
    try:
        parsed = msgspec.json.decode(metadata[b"huggingface"], type=_SchemaMetadata)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}

    labels = {}
    for column, feature in parsed.info.features.items():
        if isinstance(feature, dict) and feature.get("_type") == "ClassLabel":
            names = feature.get("names")
            if isinstance(names, list):
                labels[column] = [str(name) for name in names]
    return labels


def require_one_split(folder: Location, names: Iterable[str]) -> None:
    """Raise if the names of a folder's files name different splits.

    ``train.jsonl`` is of the split ``train``, and ``test_sft-00000-of-00002.parquet``
    of ``test_sft``.
    """
    splits = set()
    for name in names:
        split_match = _SPLIT.match(name)
        if split_match is not None:
            shard_match = _SHARD.match(name)
            splits.add(split_match[1] if shard_match is None else shard_match[1])
    if len(splits) <= 1:
        return

    train_splits = sorted(split for split in splits if split.startswith("train"))
    other_splits = sorted(splits.difference(train_splits))
    ordered = [*train_splits, *other_splits]
    remedy = f"Give a glob for one, e.g. {folder.join(ordered[0]).display}*"
    raise several_splits(folder.display, ordered, remedy)


def saved_files(folder: Location, names: Collection[str]) -> list[Location] | None:
    """Return the data files of a folder that ``save_to_disk`` wrote, in order.

    Args:
        folder: any folder.
        names: names of its files.

    Returns:
        None if ``save_to_disk`` did not write the folder.

    Raises:
        InputError: there are several splits, or the saved dataset is a view of its
            files.
    """
    if SPLITS in names:
        splits = _read_json(folder, SPLITS, _Splits).splits
        if len(splits) > 1:
            remedy = f"Give the folder of one, e.g. {folder.join(splits[0]).display}"
            raise several_splits(folder.display, splits, remedy)
        folder = folder.join(splits[0])  # each split has a folder of its own
        names = [entry.name for entry in folder.files()]
    if STATE not in names or INFO not in names:
        return None

    state = _read_json(folder, STATE, _State)
    _refuse_view(state, folder)
    return [folder.join(file.filename) for file in state.data_files]


def _refuse_view(state: _State, folder: Location) -> None:
    """Raise if a saved dataset shows only some columns or rows of its files."""
    if state.format_columns and not state.output_all_columns:
        view = "columns of them"
    elif state.indices_files or state.indices_data_files:
        view = "an order or choice of rows"
    else:
        return
    raise InputError(
        sentence(
            folder.join(STATE).display,
            rule="its rows and columns must be those of its files, in their order",
            found=view,
            remedy="Pack datasets.load_from_disk(FOLDER) in Python, or save that again",
        )
    )


def several_splits(where: str, splits: Collection[Any], remedy: str) -> InputError:
    """Return the error for records of more than one split."""
    names = ", ".join(str(split) for split in splits)
    return InputError(
        sentence(
            where,
            rule="records must come from one split",
            found=f"{len(splits)}: {names}",
            remedy=remedy,
        )
    )


def _read_json(folder: Location, name: str, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(folder.read_bytes(name), type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(
            sentence(
                folder.join(name).display,
                rule="it must be as datasets' save_to_disk writes it",
                found=str(error),
                remedy="Name the data files themselves, or a glob",
            )
        ) from error
