"""Exports NeMo-Aligner's packed DPO file: ``numpy.save`` of an array of dicts of lists.

It is read with ``numpy.load`` by `DPOPackedDataset` (NVIDIA/NeMo-Aligner,
``nemo_aligner/data/nlp/datasets.py``) with ``data.data_impl: packed_jsonl``.

Such a file is the header of an array, and one pickle of all its rows. ``numpy.save``
would need all rows in memory, so the pickle is written piece by piece: opcodes that
rebuild the array and begin a list, the rows, and opcodes that end both (opcodes:
``pickletools.opcodes`` of Python).
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
    from packstore.format.arrays import Packs
    from packstore.io.dataset.dataset import Dataset
    from packstore.progress import Progress

PICKLE_PROTOCOL = 3
"""Every numpy reads it, and it has no frames, so that rows can be appended."""

PICKLE_HEADER = b"\x80\x03"
"""Opcode and number of the protocol, which begin every pickle."""

_MARK = b"("
"""Opcode: the values up to the next append belong together."""

_APPENDS = b"e"
"""Opcode: append the values since the last mark to the list."""

_END_OF_ARRAY = b"tb."
"""Opcodes: the list completes the state of the array; set it; stop."""

BATCH = 1000
"""Rows between two marks, as in Python's own pickler."""

COLUMNS = ("input_ids", "labels", "reward", "lengths", "seq_boundaries")


def _export(
    dataset: Dataset, place: Location, options: ExportOptions, progress: Progress
) -> Exported:
    if place.is_dir():
        raise exists_error(place, "a folder", remedy="Name a file")
    if not options.overwrite and place.exists():
        raise exists_error(place, "a file")

    with Staging(place, BESIDE) as staging:
        with staging.file() as file:
            longest = _write(dataset, file, progress)
        if not options.overwrite and place.exists():  # written in the meantime
            raise exists_error(place, "a file")
        staging.store(file.name, "")

    facts: dict[str, object] = {
        "packs": len(dataset),
        "pairs": dataset.manifest.pairs,
        "longest pack": longest,
        "left out": ", ".join(["example ids", *dataset.manifest.carry]),
    }
    return Exported(files=[place.display], facts=facts)


def _write(dataset: Dataset, file: IO[bytes], progress: Progress) -> int:
    """Write all packs; return the tokens of the longest."""
    from packstore.pack.fill import convert

    file.write(_array_header(len(dataset)))
    longest = 0
    num_rows = 0
    for packs in dataset.iter_packs():
        if dataset.manifest.layout != "concat":
            packs = convert(packs, "concat")
        for i in range(len(packs)):
            if num_rows % BATCH == 0:
                if num_rows > 0:
                    file.write(_APPENDS)
                file.write(_MARK)
            file.write(_pickled_row(packs.row(i)))
            num_rows += 1
        longest = max(longest, int(np.diff(packs.token_offsets).max()))
        progress("export", num_rows, len(dataset), "packs")
    if num_rows > 0:
        file.write(_APPENDS)
    file.write(_END_OF_ARRAY)
    return longest


def _pickled_row(pack: Packs) -> bytes:
    """Return the opcodes of one pack as a dict of lists."""
    row = {name: getattr(pack, name).tolist() for name in COLUMNS}
    return _without_header_and_stop(pickle.dumps(row, PICKLE_PROTOCOL))


def _array_header(num_rows: int) -> bytes:
    """Return the bytes before the rows of an array of objects.

    They are in the form of numpy 1, which numpy 2 reads, too: the header, then the
    opcodes of ``_reconstruct(ndarray, (0,), b"b")``, and of the start of its state,
    ``(1, (num_rows,), dtype("O8"), False, [``.
    """
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "|O", "fortran_order": False, "shape": (num_rows,)}
    )
    shape = _without_header_and_stop(pickle.dumps((num_rows,), PICKLE_PROTOCOL))
    return b"".join(
        [
            header.getvalue(),
            PICKLE_HEADER,
            b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n",
            b"K\x00\x85C\x01b\x87R(K\x01",
            shape,
            b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R",
            b"(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb\x89]",
        ]
    )


def _without_header_and_stop(data: bytes) -> bytes:
    """Return the opcodes of a pickle that leave its value on the stack."""
    return data[len(PICKLE_HEADER) : -1]


EXPORTER = Exporter(
    help="NeMo-Aligner's packed DPO file (kind preference)",
    out_name="FILE.npy",
    out_help="the file to write",
    examples="  packstore export nemo prefs-8k packed_8192_seed0.npy\n"
    "  packstore export nemo s3://bucket/prefs-8k packed.npy --overwrite\n",
    kind="preference",
    options=ExportOptions,
    run=_export,
)
