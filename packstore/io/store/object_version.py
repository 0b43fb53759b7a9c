"""Identifies the object that a store has at a path, to detect replaced ones."""

from __future__ import annotations

from packstore.errors import StorageError
from packstore.io.store.location import Location

_NAMES = ("VersionId", "version_id", "generation", "ETag", "etag", "e_tag", "md5Hash")


def object_version(location: Location, path: str) -> str:
    """Returns the version id or ETag of a file, with its label; empty if there is none.

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
