"""A first run says what it waits for."""

from __future__ import annotations

import logging
import time

import numba
import numpy as np
import pytest

from packstore.config import PackConfig
from packstore.etl import warm_up
from packstore.pack import kernels


@pytest.mark.parametrize("compiling", [True, False])
def test_compiling_is_told(
    compiling: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls a loop that no cache holds, or one that needs none."""

    def double(values: np.ndarray) -> np.ndarray:
        return values * 2

    loop = numba.njit(double)
    monkeypatch.setattr(kernels, "_LOOPS", [loop] if compiling else [])

    def run(_: PackConfig) -> None:
        loop(np.ones(3))
        time.sleep(1.1)

    monkeypatch.setattr(warm_up, "_run_loops", run)
    with caplog.at_level(logging.INFO, "packstore"):
        warm_up.warm_up(PackConfig())
    assert ("compiling the loops" in caplog.text) == compiling
