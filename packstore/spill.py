"""Tokenized examples on local disk between tokenizing and packing.

A plan needs the lengths of all examples before the first pack can be filled. Only those lengths
stay in memory; the tokens go to flat files and are read back through memory maps, in plan order.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

import numpy as np

from packstore.errors import StorageError, sentence
from packstore.io.owned import SPILL, OwnedFolder
from packstore.records import Column, Examples

_DTYPES = {
    "input_ids": np.dtype(np.int32),
    "supervised": np.dtype(np.bool_),
    "sequence_offsets": np.dtype(np.int64),
    "example_offsets": np.dtype(np.int64),
    "reward": np.dtype(np.float32),
    "example_ids": np.dtype(np.int64),
}


class Spill:
    """Collects :class:`Examples` on disk; a context manager that removes its files at the end.

    Carried columns stay in memory: they are few and of any type.

    Args:
        folder: where to put the files; None: the system's folder for temporary files.
    """

    def __init__(self, folder: str | None) -> None:
        try:
            self._folder = OwnedFolder(SPILL, folder)
        except OSError as error:
            raise self._error(error, folder) from error
        self._files: dict[str, BinaryIO] = {}
        self._columns: list[Mapping[str, Column]] = []
        self._tokens = self._sequences = self.num_examples = 0

    def __enter__(self) -> Self:
        for name in _DTYPES:
            self._files[name] = open(Path(self._folder.name, name), "wb")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            try:
                file.close()
            except OSError:  # a full disk was already reported by append
                continue
        self._folder.cleanup()

    def append(self, examples: Examples) -> None:
        """Adds `examples` behind those that are already here.

        Raises:
            StorageError: the disk is full or unwritable.
        """
        arrays = {
            "input_ids": examples.input_ids,
            "supervised": examples.supervised,
            "sequence_offsets": examples.sequence_offsets[:-1] + self._tokens,
            "example_offsets": examples.example_offsets[:-1] + self._sequences,
            "reward": examples.reward,
            "example_ids": examples.example_ids,
        }
        try:
            for name, array in arrays.items():
                self._write(name, array)
        except OSError as error:
            raise self._error(error, self._folder.name) from error
        self._columns.append(examples.columns)
        self._tokens += examples.num_tokens
        self._sequences += examples.num_sequences
        self.num_examples += examples.num_examples

    def examples(self) -> Examples:
        """All examples, their arrays mapped from disk: only what is touched is read."""
        for name, last in (
            ("sequence_offsets", self._tokens),
            ("example_offsets", self._sequences),
        ):
            self._write(name, np.array([last], np.int64))
        for file in self._files.values():
            file.flush()
        if not self.num_examples:
            return Examples.empty()
        arrays = {
            name: np.memmap(Path(self._folder.name, name), dtype, mode="r").view(np.ndarray)
            for name, dtype in _DTYPES.items()
        }
        names = self._columns[0]
        columns = {name: np.concatenate([c[name] for c in self._columns]) for name in names}
        return Examples(**arrays, columns=columns)

    def _write(self, name: str, array: Column) -> None:
        # Not tofile: it tells of a full disk without its errno.
        self._files[name].write(np.ascontiguousarray(array, _DTYPES[name]).data)

    @staticmethod
    def _error(error: OSError, folder: str | None) -> StorageError:
        return StorageError(
            sentence(
                f"spill folder {folder or tempfile.gettempdir()}",
                "temporary files must be writable there",
                error.strerror or str(error),
                "Free some space or name another folder with --spill-dir",
            )
        )
