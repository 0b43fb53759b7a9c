"""Fixtures that several areas share."""

from __future__ import annotations

import gc
import os
import signal
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from stores import (  # noqa: F401  fixtures
    azure,
    azure_server,
    gcs,
    gcs_server,
    s3,
    s3_server,
    store,
)

# A shell ignores Ctrl-C in what it runs in the background, and processes that tests
# start and interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Workers of pytest fill the cores; threads of torch beside them cost more than they
# bring. Also in the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Time is not what tests are about, and a busy machine would fail them.
slow = [HealthCheck.too_slow]
settings.register_profile(
    "patient", settings(), deadline=None, suppress_health_check=slow
)
settings.load_profile("patient")


gc.disable()  # until all is loaded


def pytest_collection_finish() -> None:
    """Freezes what is loaded: torch and all else is not searched for garbage again and
    again.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data, where it lies beside the checkout."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real data not beside the checkout (../shared/data)")
    return folder


@pytest.fixture(params=["local", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A path, or a URL, that holds nothing yet."""
    if request.param == "local":
        return str(tmp_path / "ds")
    return f"memory://{uuid.uuid4().hex}/ds"


@pytest.fixture
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides leftovers of dead jobs in the system's temporary folder."""
    own = tmp_path / "temporary"
    own.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(own))


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Pauses the collector of cycles, for tests of text that is nested without end.

    It may run just where the stack is full: the finalizer of something of an earlier
    test then fails, and pytest blames the test that runs.
    """
    gc.disable()
    yield
    gc.enable()
