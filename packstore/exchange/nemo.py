"""NeMo-Aligner's packed DPO file: ``numpy.save`` of an array of dicts of lists.

It is read with ``numpy.load`` by `DPOPackedDataset` (NVIDIA/NeMo-Aligner,
``nemo_aligner/data/nlp/datasets.py``) with ``data.data_impl: packed_jsonl``. Rows are
written one by one, so memory is bounded here; the reader loads the whole file.
"""

from __future__ import annotations

import io
import pickle
from typing import IO, TYPE_CHECKING

import numpy as np

from packstore.exchange import Exported, Exporter, ExportOptions, exists_error
from packstore.io.store.location import Location
from packstore.io.store.staging import BESIDE, Staging

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset
    from packstore.progress import Progress

PROTOCOL = 3
"""Pickle protocol: every numpy reads it, and it has no frames, so that rows can be
appended.
"""

BATCH = 1000
"""Rows between two marks, as in Python's own pickler."""

COLUMNS = ("input_ids", "labels", "reward", "lengths", "seq_boundaries")


def _run(
    dataset: Dataset, place: Location, options: ExportOptions, progress: Progress
) -> Exported:
    if place.is_dir():
        raise exists_error(place, "a folder", "Name a file")
    if not options.overwrite and place.exists():
        raise exists_error(place, "a file")
    with Staging(place, BESIDE) as staging:
        with staging.file() as file:
            longest = _write(dataset, file, progress)
        if not options.overwrite and place.exists():
            raise exists_error(place, "a file")
        staging.store(file.name, "")
    left_out = ", ".join(["example ids", *dataset.manifest.carry])
    facts = {
        "packs": len(dataset),
        "pairs": dataset.manifest.pairs,
        "longest pack": longest,
    }
    return Exported([place.display], {**facts, "left out": left_out})


def _write(dataset: Dataset, file: IO[bytes], progress: Progress) -> int:
    """Writes all packs; returns the tokens of the longest."""
    from packstore.pack.fill import convert

    longest = done = 0
    before, after = _frame(len(dataset))
    file.write(before)
    for packs in dataset.iter_packs():
        if dataset.manifest.layout != "concat":
            packs = convert(packs, "concat")
        for i in range(len(packs)):
            if done % BATCH == 0:
                file.write(b"e(" if done else b"(")
            pack = packs.row(i)
            row = {name: getattr(pack, name).tolist() for name in COLUMNS}
            file.write(pickle.dumps(row, PROTOCOL)[2:-1])
            done += 1
        longest = max(longest, int(np.diff(packs.token_offsets).max()))
        progress("export", done, len(dataset), "packs")
    file.write(b"e" if done else b"")
    file.write(after)
    return longest


def _frame(rows: int) -> tuple[bytes, bytes]:
    """The bytes around the rows of an array of objects, in numpy 1's form, which 2
    reads too.
    """
    header = io.BytesIO()
    shape = {"descr": "|O", "fortran_order": False, "shape": (rows,)}
    np.lib.format.write_array_header_1_0(header, shape)
    count = pickle.dumps((rows,), PROTOCOL)[2:-1]
    before = (
        b"\x80\x03cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R"
        b"(K\x01" + count + b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R"
        b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb\x89]"
    )
    return header.getvalue() + before, b"tb."


EXPORTER = Exporter(
    help="NeMo-Aligner's packed DPO file (kind preference)",
    out=("FILE.npy", "the file to write"),
    examples="  packstore export nemo prefs-8k packed_8192_seed0.npy\n"
    "  packstore export nemo s3://bucket/prefs-8k packed.npy --overwrite\n",
    kind="preference",
    options=ExportOptions,
    run=_run,
)
