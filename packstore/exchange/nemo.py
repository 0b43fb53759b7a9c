"""Exports NeMo-Aligner's packed DPO file: ``numpy.save`` of an array of dicts of lists.

It is read with ``numpy.load`` by `DPOPackedDataset` (NVIDIA/NeMo-Aligner,
``nemo_aligner/data/nlp/datasets.py``) with ``data.data_impl: packed_jsonl``.

Such a file is the header of an array, and one pickle of all its rows. ``numpy.save``
would need all rows in memory, so the pickle is written piece by piece: opcodes that
rebuild the array and begin a list, the rows, and opcodes that end both (opcodes:
``pickletools.opcodes`` of Python).

A row is a pack of a dataset of layout ``concat``. A dataset of layout ``shared_prefix``
is planned anew, see :mod:`packstore.exchange._rows`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from packstore.exchange import Exported, Exporter, ExportOptions, exists_error
from packstore.exchange._rows import count_rows, plan_rows, rebuilt_examples
from packstore.format.arrays import to_offsets
from packstore.format.schema import flat_column
from packstore.io.manifest.stored_file import decoding
from packstore.io.store.location import Location
from packstore.io.store.staging import BESIDE, Staging

if TYPE_CHECKING:
    from packstore.format.arrays import Examples, Int64, Packs
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
            written = _write(dataset, file, progress)
        if not options.overwrite and place.exists():  # written in the meantime
            raise exists_error(place, "a file")
        staging.store(file.name, "")

    facts: dict[str, object] = {
        "packs": written.rows,
        "pairs": dataset.manifest.pairs,
        "longest pack": written.longest,
        "left out": ", ".join(["example ids", *dataset.manifest.carry]),
        # The matching settings of NeMo-Aligner: its `docs/user-guide/dpo.rst`.
        "model.data.data_impl": "packed_jsonl",
        "model.encoder_seq_length": written.longest,
        "model.micro_batch_size": 1,
        "model.transformer_engine": True,
    }
    return Exported(files=[place.display], facts=facts)


class _Written(NamedTuple):
    """The rows of a file: their number, and the tokens of the longest."""

    rows: int
    longest: int


def _write(dataset: Dataset, file: IO[bytes], progress: Progress) -> _Written:
    """Write all rows."""
    if dataset.manifest.layout == "concat":
        total_rows = len(dataset)
        parts = _packs_as_rows(dataset, progress)
    else:
        total_rows = count_rows(_tokens_of_pairs(dataset), dataset.manifest.pack_size)
        parts = _planned_rows(dataset, progress)

    file.write(_array_header(total_rows))
    longest = 0
    num_rows = 0
    for packs in parts:
        for i in range(len(packs)):
            if num_rows % BATCH == 0:
                if num_rows > 0:
                    file.write(_APPENDS)
                file.write(_MARK)
            file.write(_pickled_row(packs.row(i)))
            num_rows += 1
        longest = max(longest, int(np.diff(packs.token_offsets).max()))
    if num_rows > 0:
        file.write(_APPENDS)
    file.write(_END_OF_ARRAY)
    return _Written(num_rows, longest)


def _packs_as_rows(dataset: Dataset, progress: Progress) -> Iterator[Packs]:
    """Yield the packs of a dataset of layout ``concat``."""
    num_packs = 0
    for packs in dataset.iter_packs():
        yield packs
        num_packs += len(packs)
        progress("export", num_packs, len(dataset), "packs")


def _planned_rows(dataset: Dataset, progress: Progress) -> Iterator[Packs]:
    """Yield packs of whole sequences, planned anew."""
    from packstore.pack.fill import fill

    parts = rebuilt_examples(dataset, progress)
    for planned in plan_rows(parts, dataset.manifest.pack_size, _sizes):
        order = np.array([i for row in planned.rows for i in row], np.int64)
        offsets = to_offsets(np.array([len(row) for row in planned.rows]))
        yield fill(planned.examples, offsets, "concat", order)


def _sizes(examples: Examples) -> Int64:
    """Return the tokens of each example, int64 `[E]`."""
    return np.diff(examples.sequence_offsets[examples.example_offsets])


def _tokens_of_pairs(dataset: Dataset) -> Iterator[Int64]:
    """Yield the tokens of the pairs of each row group, int64 `[E]`: both sequences,
    whole.
    """
    for group in range(len(dataset.row_groups)):
        batch, where, _ = dataset.read_columns(group, ["lengths"])
        with decoding(where):
            lengths, _ = flat_column(batch, "lengths", None)
        yield lengths.astype(np.int64).reshape(-1, 2).sum(axis=1)


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
    kinds=("preference",),
    options=ExportOptions,
    run=_export,
)
