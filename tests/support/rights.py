"""Takes rights from this process: root may do everything, so root becomes
another user.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

NOBODY = 65534


@contextlib.contextmanager
def closed(mode: int, *folders: Path) -> Iterator[None]:
    """A context in which this process has no more rights to `folders` than `mode`
    gives.

    Modules that are first imported inside may not be found: Python itself may lie where
    only root can read. So each test does once before what it does inside.

    Args:
        mode: three octal digits alike, as 0o555.
        folders: absolute; the folders above them may be passed by everybody from now
            on.
    """
    root = os.geteuid() == 0
    before = [folder.stat().st_mode for folder in folders]
    for parent in folders[0].parents:
        if root and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    for folder in folders:
        folder.chmod(mode)
    if root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        for folder, old in zip(folders, before, strict=True):
            folder.chmod(old)
