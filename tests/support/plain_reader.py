"""The reader beside the format, which imports nothing of packstore: what it says is
expected.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[2] / "examples" / "readers" / "reader.py"
READER: dict[str, Any] = runpy.run_path(str(PATH))
