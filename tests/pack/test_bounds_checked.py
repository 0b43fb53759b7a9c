"""The compiled loops run without bounds checks; here once with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from children import run_python


@pytest.mark.slow
def test_no_loop_leaves_its_arrays(tmp_path: Path) -> None:
    """The other tests of this folder, with code that raises IndexError instead of
    straying.
    """
    here = Path(__file__)
    command = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"--ignore={here}"]
    env = {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    done = run_python(*command, here.parent, env=env, cwd=here.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
