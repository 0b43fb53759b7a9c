"""Runs the notebook of the examples, and stores its outputs in it.

python docs/notebook.py [FILE]        # needs the extra dev
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbclient
import nbformat

EXAMPLES = Path(__file__).parents[1] / "examples"
NAME = "quickstart.ipynb"
TIMEOUT_SECONDS = 900


def run_notebook() -> Any:
    """Return the notebook with the outputs of a run in an empty folder."""
    notebook = nbformat.read(EXAMPLES / NAME, nbformat.NO_CONVERT)
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(EXAMPLES / "sample", Path(folder, "sample"))
        client = nbclient.NotebookClient(
            notebook,
            timeout=TIMEOUT_SECONDS,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute()
    # The release of Python would be the only part that differs between machines.
    notebook.metadata.language_info = {"name": "python"}
    return notebook


if __name__ == "__main__":
    file = sys.argv[1] if sys.argv[1:] else EXAMPLES / NAME
    nbformat.write(run_notebook(), file)
