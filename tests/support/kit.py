"""The conformance kit, and the program beside it that compares answers with it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "schemas" / "conformance"
KIT = FOLDER / "v1"
COMPARE: dict[str, Any] = runpy.run_path(str(FOLDER / "compare.py"))
