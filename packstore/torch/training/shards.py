"""Check shards of torch.distributed.checkpoint before torch reads them.

torch unpickles the file ``.metadata`` of a folder of shards, and those values in shards
that are not tensors. To unpickle is to run any code that a pickle contains. Both are
therefore read here first, without running code: ``.metadata`` by an unpickler that
loads only the classes of such files, the values by torch's own (``weights_only``). See
``docs/security.md``.
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
"""Modules and names that torch writes into ``.metadata``, in addition to dtypes."""


class _MetadataUnpickler(pickle.Unpickler):
    """Loads the classes that torch writes into ``.metadata``, and refuses others."""

    def find_class(self, module: str, name: str) -> Any:
        """Return a class of :data:`ALLOWED_NAMES`, or a dtype of torch."""
        value = getattr(torch, name, None)
        is_dtype = module == "torch" and isinstance(value, torch.dtype)
        if not is_dtype and (module, name) not in ALLOWED_NAMES:
            raise pickle.UnpicklingError(f"{module}.{name}")
        return super().find_class(module, name)


def check_shards(folder: Path) -> None:
    """Raise if torch would run foreign code when it loads a folder of shards.

    A folder that does not exist passes: there is nothing for torch to load.

    Raises:
        FormatError: ``.metadata``, or a value in a shard, holds classes that are not
            torch's own.
    """
    if not folder.is_dir():
        return
    try:
        metadata = read_metadata(folder)
        for content in _pickled_values(folder, metadata):
            torch.load(io.BytesIO(content), weights_only=True)
    except Exception as error:  # a pickle raises errors of any class
        raise FormatError(
            sentence(
                where=f"checkpoint {folder}",
                rule="it must hold nothing but torch's own classes",
                found=quote(f"{type(error).__name__}: {error}", 200),
                remedy="Resume from your own checkpoints only",
            )
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
    """Yield the pickles in shards: the values that are not tensors.

    Tensors need no check, as torch loads them with ``weights_only``.
    """
    pickled_names = set()
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            pickled_names.add(name)

    for index, location in metadata.storage_data.items():
        if index.fqn not in pickled_names:
            continue
        if location.transform_descriptors:
            # torch would load transformed bytes: a check of these proves nothing.
            raise pickle.UnpicklingError(
                f"{index.fqn} by {location.transform_descriptors}"
            )
        with (folder / location.relative_path).open("rb") as file:
            file.seek(location.offset)
            yield file.read(location.length)
