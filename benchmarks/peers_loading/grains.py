"""Grain on ArrayRecord files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from peers_loading.base import DTYPES, PACKS_PER_BATCH, SEED, Loader, Reader, Sample, Source
from peers_loading.base import collate as together


class Grain(Reader):
    """One record a pack; a globally shuffled ``MapDataset``, read by two threads."""

    def write(self, source: Source, folder: Path) -> None:
        """See :class:`Reader`."""
        folder.mkdir()
        out = ArrayRecordWriter(str(folder / "packs.array_record"), "group_size:1")
        for sample in source:
            out.write(_to_bytes(sample))
        out.close()

    def open(self, folder: Path, scratch: Path) -> Loader:
        """See :class:`Reader`."""
        source = grain.sources.ArrayRecordDataSource([str(folder / "packs.array_record")])
        data = (
            grain.MapDataset.source(source)
            .shuffle(seed=SEED)
            .map(_from_bytes)
            .batch(PACKS_PER_BATCH, batch_fn=together)
        )
        return _Iterated(data.to_iter_dataset(grain.ReadOptions(num_threads=2)))


class _Iterated:
    """Grain keeps the position in the iterator."""

    def __init__(self, data: Any) -> None:
        self._batches = iter(data)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._batches)

    def state_dict(self) -> Any:
        return self._batches.get_state()

    def load_state_dict(self, state: Any) -> None:
        self._batches.set_state(state)


def _to_bytes(sample: Sample) -> bytes:
    """Sizes of the columns, then the columns: all of them have values of four bytes."""
    sizes = np.array([len(sample[name]) for name in DTYPES], np.int32)
    return b"".join(part.tobytes() for part in (sizes, *(sample[name] for name in DTYPES)))


def _from_bytes(data: bytes) -> Sample:
    sizes = np.frombuffer(data, np.int32, len(DTYPES))
    starts = 4 * np.cumsum([len(DTYPES), *sizes])
    return {
        name: np.frombuffer(data, dtype, size, start)
        for (name, dtype), size, start in zip(
            DTYPES.items(), sizes.tolist(), starts[:-1].tolist(), strict=True
        )
    }
