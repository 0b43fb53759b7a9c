"""The packs, the batch, and the interface that all readers share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

PACK_SIZE = 4096
PACKS_PER_BATCH = 8
SEED = 0
IGNORE_INDEX = -100
DTYPES: dict[str, npt.DTypeLike] = {
    "input_ids": np.int32,
    "labels": np.int32,
    "reward": np.float32,
    "lengths": np.int32,
    "seq_boundaries": np.int32,
}
"""The columns of a pack that every reader gives."""

Array = npt.NDArray[Any]
Sample = Mapping[str, Array]
"""One pack: its columns, one-dimensional."""


class Columns:
    """Packs: values and offsets of each column."""

    columns: Mapping[str, tuple[Array, Array]]

    def __len__(self) -> int:
        return len(self.columns["input_ids"][1]) - 1

    def __getitem__(self, index: int) -> Sample:
        return {
            name: values[offsets[index] : offsets[index + 1]]
            for name, (values, offsets) in self.columns.items()
        }

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))


class Source(Columns):
    """The packs, each column as one flat file with offsets; mapped, so that opening
    costs nothing.

    Args:
        folder: holds ``<column>.npy`` and ``<column>_offsets.npy``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def columns(self) -> dict[str, tuple[Array, Array]]:
        return {
            name: (
                np.load(self.folder / f"{name}.npy", mmap_mode="r"),
                np.load(self.folder / f"{name}_offsets.npy"),
            )
            for name in DTYPES
        }


class Reader:
    """One way of storing and reading packs. Batches are those of :func:`collate` by
    default.
    """

    def write(self, source: Source, folder: Path) -> None:
        """Writes the packs of `source` into the new folder `folder`."""
        raise NotImplementedError

    def open(self, folder: Path, scratch: Path) -> Any:
        """Shuffled batches of 8 packs of one epoch, with ``state_dict`` and
        ``load_state_dict``.

        `scratch` is an empty folder for caches.
        """
        raise NotImplementedError

    def count(self, batch: Any) -> int:
        """Packs of a batch."""
        return len(batch["input_ids"])

    def samples(self, batch: Any) -> Iterable[Sample]:
        """The packs of a batch."""
        sequences = np.cumsum([0, *batch["segments"]])
        bounds = sequences + np.arange(len(sequences))
        columns = {name: batch[name].numpy() for name in DTYPES}
        for i in range(self.count(batch)):
            boundaries = columns["seq_boundaries"][bounds[i] : bounds[i + 1]]
            tokens = slice(0, boundaries[-1])
            segments = slice(sequences[i], sequences[i + 1])
            yield {
                "input_ids": columns["input_ids"][i, tokens],
                "labels": columns["labels"][i, tokens],
                "reward": columns["reward"][segments],
                "lengths": columns["lengths"][segments],
                "seq_boundaries": boundaries,
            }


def identify(sample: Sample) -> int:
    """A number for one pack, which changes with any of its values."""
    digest = hashlib.blake2b(digest_size=7)
    for name, dtype in DTYPES.items():
        digest.update(np.ascontiguousarray(sample[name], dtype))
    return int.from_bytes(digest.digest())


def collate(samples: Sequence[Sample]) -> dict[str, Any]:
    """Ids and labels padded to int32 `[8, 4096]`, the other columns end to end."""
    ids = np.empty((len(samples), PACK_SIZE), np.int32)
    labels = np.empty((len(samples), PACK_SIZE), np.int32)
    for i, sample in enumerate(samples):
        tokens = len(sample["input_ids"])
        ids[i, :tokens], ids[i, tokens:] = sample["input_ids"], 0
        labels[i, :tokens], labels[i, tokens:] = sample["labels"], IGNORE_INDEX
    batch: dict[str, Any] = {
        "input_ids": torch.from_numpy(ids),
        "labels": torch.from_numpy(labels),
    }
    for name in ("reward", "lengths", "seq_boundaries"):
        batch[name] = torch.from_numpy(np.concatenate([s[name] for s in samples]))
    batch["segments"] = [len(s["lengths"]) for s in samples]
    return batch


class Counted:
    """A loader whose position is the number of batches that it gave.

    Args:
        batches: function of a number of batches; makes those behind so many.
    """

    def __init__(self, batches: Callable[[int], Iterable[Any]]) -> None:
        self._batches, self._given = batches, 0

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches(self._given):
            self._given += 1
            yield batch

    def state_dict(self) -> int:
        return self._given

    def load_state_dict(self, state: int) -> None:
        self._given = state
