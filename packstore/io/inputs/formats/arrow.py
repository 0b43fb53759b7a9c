"""Arrow IPC: files (also Feather 2) and streams."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import BinaryIO

import pyarrow as pa

from packstore.io.inputs.pieces import Format, Piece, ReadOptions
from packstore.io.inputs.tabular import as_input_error, parse, pieces

_MAGIC = b"ARROW1"
_OPTIONS = pa.ipc.IpcReadOptions(
    use_threads=False
)  # our own threads read; see io/dataset/reader.py


def read(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    """Yields a piece for each batch; tells a file from a stream by the first bytes."""
    begin = stream.read(len(_MAGIC))
    stream.seek(0)
    with as_input_error(path, "must be a readable Arrow IPC file or stream"):
        if begin:
            opened = _of_file if begin == _MAGIC else partial(pa.ipc.open_stream, options=_OPTIONS)
            yield from pieces(opened(stream), path, options.block_bytes)


def _of_file(stream: BinaryIO) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_file(stream, options=_OPTIONS)
    return map(reader.get_batch, range(reader.num_record_batches))


ARROW = Format(unit="row", read=read, parse=parse, random_access=True)
