"""Which object a store has at a place: what it was replaced by is then known by its name."""

from __future__ import annotations

from packstore.errors import StorageError
from packstore.io.storage import Location

_NAMES = ("VersionId", "version_id", "generation", "ETag", "etag", "e_tag", "md5Hash")


def object_version(location: Location, path: str) -> str:
    """Version id or ETag of a file, named; empty where the filesystem tells none.

    Args:
        location: a dataset.
        path: a file in it.
    """
    try:
        info = location._info(path) or {}
    except StorageError:
        return ""
    found = ((name, str(info[name]).strip('"')) for name in _NAMES if info.get(name))
    return next((f"{name} {value}" for name, value in found if value != "null"), "")
