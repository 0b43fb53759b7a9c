"""The formats of NeMo: Aligner's pickled ``.npy``, and packed Parquet like Megatron-Bridge's.

Both are re-done from their documented layout, with a sampler that begins at any sample, as
Megatron's do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from peers_loading.arrows import ROWS, tables
from peers_loading.base import (
    DTYPES,
    IGNORE_INDEX,
    PACK_SIZE,
    Loader,
    Permuted,
    Reader,
    Sample,
    Source,
)

ROWS_PER_GROUP = 500


class AlignerNpy(Reader):
    """A pickled array of dicts of Python lists, loaded whole, padded through lists."""

    def write(self, source: Source, folder: Path) -> None:
        """See :class:`Reader`."""
        folder.mkdir()
        packs = [{name: column.tolist() for name, column in sample.items()} for sample in source]
        np.save(folder / "packs.npy", np.array(packs, object))

    def open(self, folder: Path, scratch: Path) -> Loader:
        """See :class:`Reader`."""
        return Permuted(np.load(folder / "packs.npy", allow_pickle=True), _through_lists)


def _through_lists(samples: list[dict[str, list[Any]]]) -> dict[str, Any]:
    def padded(name: str, filler: int) -> torch.Tensor:
        rows = [s[name] + [filler] * (PACK_SIZE - len(s[name])) for s in samples]
        return torch.IntTensor(rows)

    def joined(name: str) -> torch.Tensor:
        dtype = torch.float32 if name == "reward" else torch.int32
        return torch.tensor([x for s in samples for x in s[name]], dtype=dtype)

    batch: dict[str, Any] = {name: joined(name) for name in ("reward", "lengths", "seq_boundaries")}
    batch["input_ids"], batch["labels"] = padded("input_ids", 0), padded("labels", IGNORE_INDEX)
    batch["segments"] = [len(s["lengths"]) for s in samples]
    return batch


class BridgeParquet(Reader):
    """Ids, an int8 mask and starts of sequences; 500 rows a group, of which one is kept decoded."""

    def write(self, source: Source, folder: Path) -> None:
        """See :class:`Reader`."""
        folder.mkdir()
        writer: Any = None
        for table in tables(source, ROWS):
            labels = table["labels"].combine_chunks()
            mask = pa.ListArray.from_arrays(
                labels.offsets, (labels.values.to_numpy() != IGNORE_INDEX).astype(np.int8)
            )
            columns = {
                "input_ids": table["input_ids"],
                "loss_mask": mask,
                "seq_start_id": table["seq_boundaries"],
            }
            slim = pa.table(columns)
            writer = writer or pq.ParquetWriter(folder / "packs.parquet", slim.schema)
            writer.write_table(slim, ROWS_PER_GROUP)
        writer.close()

    def open(self, folder: Path, scratch: Path) -> Loader:
        """See :class:`Reader`."""
        return Permuted(_CachedGroup(folder / "packs.parquet"))


class _CachedGroup:
    """Rows by position, out of the row group that was read last."""

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path)
        self._group, self._rows = -1, pa.table({})

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def __getitem__(self, index: int) -> Sample:
        group, row = divmod(index, ROWS_PER_GROUP)
        if group != self._group:
            self._rows, self._group = self._file.read_row_group(group), group
        values = {name: self._rows[name][row].as_py() for name in self._rows.column_names}
        ids, starts = np.array(values["input_ids"]), np.array(values["seq_start_id"])
        lengths = np.diff(starts)
        columns = {
            "input_ids": ids,
            "labels": np.where(values["loss_mask"], ids, IGNORE_INDEX),
            "reward": np.resize([1.0, 0.0], len(lengths)),  # it stores none: those are the default
            "lengths": lengths,
            "seq_boundaries": starts,
        }
        return {name: columns[name].astype(dtype) for name, dtype in DTYPES.items()}
