"""Reports of progress: one type for all calls that take long."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int | None, str], None]
"""Called with a stage, how much of it is done, the total (None: unknown), and the unit;
often, so it decides itself when to draw. Reading and writing call it from two threads
where they overlap.
"""
