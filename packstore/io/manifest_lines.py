"""A manifest's JSON text, its shards one at a time.

The row groups of a large dataset are most of its manifest, and as Python objects take many times
the memory of their text. Canonical text has a line for each shard, so that the objects of one are
gone before those of the next are made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

_BEGIN = b',\n "shards": [\n'
_END = b"\n ]\n}\n"


def by_line(data: bytes) -> tuple[Any, Iterator[Any]] | None:
    """The JSON object in canonical `data` without its shards, and these, in order; else None.

    Raises:
        orjson.JSONDecodeError: it is not canonical after all; also while the shards are taken.
    """
    begin, end = data.rfind(_BEGIN), len(data) - len(_END)
    if begin < 0 or not data.endswith(_END) or begin + len(_BEGIN) >= end:
        return None
    head = orjson.loads(data[:begin] + b"\n}\n")
    if not isinstance(head, dict) or "shards" in head:
        return None
    return head, _lines(data, begin + len(_BEGIN), end)


def _lines(data: bytes, start: int, end: int) -> Iterator[Any]:
    view = memoryview(data)
    while start < end:
        stop = data.find(b",\n", start, end)
        stop = end if stop < 0 else stop
        yield orjson.loads(view[start:stop])
        start = stop + 2
