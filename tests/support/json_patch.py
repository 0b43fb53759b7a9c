"""JSON Patch (RFC 6902), of which the tables of cases use two operations."""

from __future__ import annotations

import copy
from typing import Any


def patched(document: Any, operations: list[dict[str, Any]]) -> Any:
    """`document` under a JSON Patch (RFC 6902) of `replace` and `remove`."""
    document = copy.deepcopy(document)
    for operation in operations:
        *parents, last = operation["path"].split("/")
        if not parents:
            document = operation["value"]
            continue
        target = document
        for name in parents[1:]:
            target = target[int(name) if isinstance(target, list) else name]
        place = int(last) if isinstance(target, list) else last
        if operation["op"] == "remove":
            del target[place]
        else:
            assert operation["op"] == "replace"
            assert place in target or isinstance(target, list)
            target[place] = operation["value"]
    return document
