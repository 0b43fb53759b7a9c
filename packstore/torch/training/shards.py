"""Shards of torch.distributed.checkpoint, checked before torch reads them.

torch unpickles the file ``.metadata`` of a folder of shards, and values in the shards
that are no tensors, and would run any code in them. Both are read here first, by a
pickle that knows the classes of such files alone; see ``docs/security.md``.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from packstore.errors import FormatError, quote, sentence

METADATA = ".metadata"

_CHECKPOINT = "torch.distributed.checkpoint"

ALLOWED_NAMES = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    (f"{_CHECKPOINT}.metadata", "BytesStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "Metadata"),
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"),
    (f"{_CHECKPOINT}.metadata", "StorageMeta"),
    (f"{_CHECKPOINT}.metadata", "TensorProperties"),
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    ("pathlib", "PosixPath"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}
"""Modules and names that torch writes into ``.metadata``, beside its dtypes."""


class _MetadataUnpickler(pickle.Unpickler):
    """Loads the classes of ``.metadata``, and no others."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of the table, or a dtype."""
        is_dtype = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype
        )
        if is_dtype or (module, name) in ALLOWED_NAMES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def check_shards(folder: Path) -> None:
    """Raise for a folder of shards that would run code as torch loads it; a missing one
    is fine.

    Raises:
        FormatError: ``.metadata``, or a value in a shard, holds more than torch's own
            classes.
    """
    if not folder.is_dir():
        return
    try:
        metadata = read_metadata(folder)
        for content in _pickled_values(folder, metadata):
            torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # a pickle raises errors of any class
        rule = "it must hold nothing but torch's own classes"
        found = quote(f"{type(error).__name__}: {error}", 200)
        remedy = "Resume from your own checkpoints only"
        raise FormatError(
            sentence(f"checkpoint {folder}", rule, found, remedy)
        ) from error


def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of a folder of shards.

    Raises:
        pickle.UnpicklingError: it names a class that torch does not write there.
    """
    with (folder / METADATA).open("rb") as file:
        metadata = _MetadataUnpickler(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(type(metadata).__name__)
    return metadata


def _pickled_values(folder: Path, metadata: Metadata) -> Iterator[bytes]:
    """Yield the values that are no tensors: torch unpickles them, and tensors by
    weights alone.
    """
    kinds = metadata.state_dict_metadata
    pickled = {
        name for name, kind in kinds.items() if isinstance(kind, BytesStorageMetadata)
    }
    for index, place in metadata.storage_data.items():
        if index.fqn not in pickled:
            continue
        if (
            place.transform_descriptors
        ):  # torch would transform the bytes before it loads them
            raise pickle.UnpicklingError(
                f"{index.fqn} by {place.transform_descriptors}"
            )
        with (folder / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            yield file.read(place.length)
