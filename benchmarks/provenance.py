"""Machine, versions, commit and command of a run, which stand beside its figures."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from packstore.version import VERSION


def provenance(*packages: str) -> dict[str, Any]:
    """The facts as JSON values; a package that is not installed has the version None."""
    folder, commit = Path(__file__).parent, None
    with suppress(OSError):  # no git there
        git = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
        commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "machine": platform.machine(),
        "system": platform.platform(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "python": platform.python_version(),
        "commit": commit,
        "command": ["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]],
        "versions": {"packstore": VERSION} | {name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None
