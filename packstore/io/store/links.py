"""The local filesystem, with links taken for what they lead to."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import Any

from fsspec.implementations.local import LocalFileSystem


class LinkFollowingFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """fsspec's, whose listings call a link "other", and whose patterns enter no linked
    folder.
    """

    def ls(self, path: str, detail: bool = False, **kwargs: Any) -> list[Any]:
        """Lists a folder; the type of a link is that of its target, "other" without
        one.
        """
        entries: list[Any] = super().ls(path, detail=detail, **kwargs)
        for entry in entries if detail else ():
            if entry["islink"]:
                with contextlib.suppress(OSError):  # dangling
                    entry["type"] = self.info(entry["name"])["type"]
        return entries

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: Any = "raise",
        **kwargs: Any,
    ) -> Iterator[Any]:
        """Yields folder by folder; raises OSError for one that cannot be listed, or
        holds itself.

        fsspec would leave out the former, and read the files of the latter again and
        again.
        """
        real, above = os.path.realpath(path), kwargs.pop("above", ())
        if real in above:
            raise OSError(errno.ELOOP, f"a link to a folder that it lies in, {path}")
        kwargs["above"] = (*above, real)
        yield from super().walk(path, maxdepth, topdown, "raise", **kwargs)
