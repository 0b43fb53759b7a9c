"""Hive-partitioned folders: ``lang=en/year=2024/part.parquet`` gives its records two fields.

Values are text, or integers where every file of the folder has one; ``%20`` and the like are
decoded, and Hive's name of null is null.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import unquote

from packstore.io.store.location import Location

_LEVEL = re.compile(r"([^._=][^=]*)=(.*)", re.DOTALL)
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
_NULL = "__HIVE_DEFAULT_PARTITION__"


def hive_files(folder: Location) -> list[str]:
    """Returns the files in all subfolders named ``NAME=VALUE``, as paths below `folder`, sorted.

    Raises:
        StorageError: the store refuses.
    """
    found = []
    for level in folder.folders():
        if _LEVEL.fullmatch(level):
            inner = folder.join(level)
            names = [name for name, _ in inner.files() if name[0] not in "._"]
            found += [f"{level}/{name}" for name in [*names, *hive_files(inner)]]
    return found


def hive_columns(paths: Sequence[str]) -> list[Mapping[str, str | int | None]]:
    """Returns the fields that the folders of each path give, for the files of one folder."""
    rows: list[dict[str, str | None]] = []
    for path in paths:
        levels = filter(None, map(_LEVEL.fullmatch, path.split("/")[:-1]))
        rows.append({unquote(m[1]): None if m[2] == _NULL else unquote(m[2]) for m in levels})
    texts = {
        name
        for row in rows
        for name, value in row.items()
        if value is not None and not _INTEGER.fullmatch(value)
    }
    return [{n: v if v is None or n in texts else int(v) for n, v in row.items()} for row in rows]
