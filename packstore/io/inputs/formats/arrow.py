"""Arrow IPC: files (also Feather 2) and streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from packstore.io.inputs.pieces import Format, Piece, ReadOptions
from packstore.io.inputs.tabular import as_input_error, parse, pieces

_OPTIONS = pa.ipc.IpcReadOptions(use_threads=False)  # our threads read; see io/dataset/reader.py


def read(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    """Yields a piece for each batch."""
    with as_input_error(path, "must be a readable Arrow IPC file or stream"):
        yield from pieces(batches(stream), path, options.block_bytes)


def batches(stream: BinaryIO) -> Iterator[pa.RecordBatch]:
    """Yields the record batches; tells a file from a stream by the first bytes."""
    magic = stream.read(6)
    stream.seek(0)
    if magic == b"ARROW1":
        file = pa.ipc.open_file(stream, options=_OPTIONS)
        yield from map(file.get_batch, range(file.num_record_batches))
    elif magic:
        yield from pa.ipc.open_stream(stream, options=_OPTIONS)


ARROW = Format(unit="row", read=read, parse=parse, random_access=True)
