"""The type of progress reports, of every call that takes long."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int | None, str], None]
"""Called with the stage, the amount done, the total (None: unknown), and the unit.

Calls are frequent, and come from two threads while reading and writing overlap.
"""
