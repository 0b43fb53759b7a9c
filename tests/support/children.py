"""A Python of its own: what it is given, and what it says."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def run_python(
    *arguments: object, env: dict[str, str] | None = None, **how: Any
) -> subprocess.CompletedProcess[str]:
    """Runs it to its end, well or not; `env` is what its environment has beside that of
    here.
    """
    command = [sys.executable, *map(str, arguments)]
    how = {"env": os.environ | (env or {}), "timeout": 3000, **how}
    return subprocess.run(
        command, capture_output=True, encoding="utf-8", check=False, **how
    )
