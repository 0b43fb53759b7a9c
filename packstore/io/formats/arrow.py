"""Arrow IPC: files (also Feather 2) and streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import pyarrow as pa

from packstore.io.formats import Format, Piece, ReadOptions
from packstore.io.tabular import as_input_error, parse, pieces

_MAGIC = b"ARROW1"


def read(stream: BinaryIO, path: str, options: ReadOptions) -> Iterator[Piece]:
    """Batch by batch; the first bytes tell a file from a stream."""
    begin = stream.read(len(_MAGIC))
    stream.seek(0)
    with as_input_error(path, "must be a readable Arrow IPC file or stream"):
        if begin:
            batches = _of_file(stream) if begin == _MAGIC else pa.ipc.open_stream(stream)
            yield from pieces(batches, path, options.block_bytes)


def _of_file(stream: BinaryIO) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_file(stream)
    return map(reader.get_batch, range(reader.num_record_batches))


ARROW = Format(unit="row", read=read, parse=parse, random_access=True)
