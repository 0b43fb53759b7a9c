"""The packs, the batch, and the interface that all readers share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

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


class Source:
    """The packs, each column as one flat file with offsets; mapped, so that opening costs nothing.

    Args:
        folder: holds ``<column>.npy`` and ``<column>_offsets.npy``.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return len(self.columns["input_ids"][1]) - 1

    def __getitem__(self, index: int) -> dict[str, Array]:
        return {
            name: values[offsets[index] : offsets[index + 1]]
            for name, (values, offsets) in self.columns.items()
        }

    def __iter__(self) -> Iterator[dict[str, Array]]:
        return map(self.__getitem__, range(len(self)))

    @cached_property
    def columns(self) -> dict[str, tuple[Array, Array]]:
        """Values and offsets of each column."""
        return {
            name: (
                np.load(self.folder / f"{name}.npy", mmap_mode="r"),
                np.load(self.folder / f"{name}_offsets.npy"),
            )
            for name in DTYPES
        }


class Loader(Protocol):
    """The batches of one epoch, and a position in it."""

    def __iter__(self) -> Iterator[Any]:
        """The batches from the position on."""

    def state_dict(self) -> Any:
        """The position after the batches that were given out."""

    def load_state_dict(self, state: Any) -> None:
        """Makes the next iteration begin at a position."""


class Reader:
    """One way of storing and reading packs. Batches are those of :func:`collate` by default."""

    def write(self, source: Source, folder: Path) -> None:
        """Writes the packs of `source` into the new folder `folder`."""
        raise NotImplementedError

    def open(self, folder: Path, scratch: Path) -> Loader:
        """A loader of shuffled batches of 8 packs; `scratch` is an empty folder for caches."""
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

    def fingerprints(self, batch: Any) -> list[int]:
        """A number for each pack of a batch, the same only for the same content."""
        return [self.identify(sample) for sample in self.samples(batch)]

    def identify(self, sample: Sample) -> int:
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
    batch: dict[str, Any] = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
    for name in ("reward", "lengths", "seq_boundaries"):
        batch[name] = torch.from_numpy(np.concatenate([s[name] for s in samples]))
    batch["segments"] = [len(s["lengths"]) for s in samples]
    return batch


class Replayed:
    """A loader without a position: what lies before it is read again and thrown away.

    Args:
        batches: makes the same sequence of batches whenever it is iterated.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = batches
        self._given = self._skip = 0

    def __iter__(self) -> Iterator[Any]:
        for i, batch in enumerate(self._batches):
            if i >= self._skip:
                self._given = i + 1
                yield batch

    def state_dict(self) -> int:
        """Batches that were given out."""
        return self._given

    def load_state_dict(self, state: int) -> None:
        """Skips so many batches."""
        self._skip = state


class Permuted:
    """Batches of a map-style dataset in a seeded random order, which a number of batches seeks in.

    Args:
        dataset: ``len``, and ``__getitem__`` from a position to a pack.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset, self._given = dataset, 0

    def __iter__(self) -> Iterator[Any]:
        order = np.random.default_rng(SEED).permutation(len(self._dataset)).tolist()
        for start in range(self._given * PACKS_PER_BATCH, len(order), PACKS_PER_BATCH):
            items = [self._dataset[i] for i in order[start : start + PACKS_PER_BATCH]]
            self._given = start // PACKS_PER_BATCH + 1
            yield collate(items)

    def state_dict(self) -> int:
        """Batches that were given out."""
        return self._given

    def load_state_dict(self, state: int) -> None:
        """Begins behind so many batches."""
        self._given = state
