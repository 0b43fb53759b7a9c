"""packstore: Parquet and Arrow, read as :class:`PackedBatch` and padded as the
others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import DataLoader

import packstore
from packstore.format.arrays import Packs, to_offsets
from packstore.torch import PackedBatch, PackedDataLoader, PackedDataset
from peers_loading.base import PACK_SIZE, PACKS_PER_BATCH, SEED, Reader, Sample, collate
from peers_loading.texts import EXAMPLES

_OFFSETS = {
    "input_ids": "token_offsets",
    "labels": "token_offsets",
    "reward": "sequence_offsets",
    "lengths": "sequence_offsets",
    "seq_boundaries": "boundary_offsets",
}


class Packed(Reader):
    """``PackedDataLoader``: flat batches with all that attention and loss need."""

    def __init__(self, form: str) -> None:
        self.form = form

    def write(self, source: Any, folder: Path) -> None:
        """Packs the examples that lie beside the source; same settings, so the same
        packs.
        """
        examples = source.folder / EXAMPLES
        packstore.pack(
            str(examples), str(folder), pack_size=PACK_SIZE, format=self.form
        )

    def export(self, folder: Path, to: Path) -> dict[str, int]:
        """Writes the packs as flat files, the source of all other readers; returns
        totals.
        """
        dataset = packstore.open(str(folder))
        parts = list(dataset.iter_packs())
        for name, offsets in _OFFSETS.items():
            lengths = [np.diff(getattr(p, offsets)) for p in parts]
            np.save(
                to / f"{name}.npy", np.concatenate([getattr(p, name) for p in parts])
            )
            np.save(to / f"{name}_offsets.npy", to_offsets(np.concatenate(lengths)))
        totals = dataset.manifest.totals
        names = ("packs", "tokens", "supervised_tokens", "sequences")
        return {name: getattr(totals, name) for name in names}

    def open(self, folder: Path, scratch: Path) -> PackedDataLoader:
        data = PackedDataset(str(folder), seed=SEED)
        return PackedDataLoader(data, packs_per_batch=PACKS_PER_BATCH)

    def count(self, batch: PackedBatch) -> int:
        """Packs of a batch. Asks for ids and labels, which the other readers have made
        by now.
        """
        assert len(batch.input_ids) == len(batch.labels)
        return batch.num_packs

    def samples(self, batch: PackedBatch) -> Iterable[Sample]:
        """The packs of a batch, cut out of its flat row."""
        pack_of_segment = np.repeat(batch.pack_ids.numpy(), batch.num_responses.numpy())
        cuts = np.searchsorted(pack_of_segment, np.arange(batch.num_packs + 1))
        starts = batch.cu_seqlens.numpy()
        for first, last in itertools.pairwise(cuts):
            tokens = slice(starts[first], starts[last])
            yield {
                "input_ids": batch.input_ids.numpy()[tokens],
                "labels": batch.labels.numpy()[tokens],
                "reward": batch.rewards.numpy()[first:last],
                "lengths": batch.lengths.numpy()[first:last],
                "seq_boundaries": starts[first : last + 1] - starts[first],
            }


class Padded(Packed):
    """``PackedDataset`` in torch's DataLoader, with the collation of the other
    readers.
    """

    def open(self, folder: Path, scratch: Path) -> Any:
        data = PackedDataset(str(folder), seed=SEED)
        return DataLoader(data, batch_size=PACKS_PER_BATCH, collate_fn=_together)

    count = Reader.count
    samples = Reader.samples


def _together(packs: list[Packs]) -> dict[str, Any]:
    return collate([{name: getattr(p, name) for name in _OFFSETS} for p in packs])
