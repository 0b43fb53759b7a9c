"""Fixtures that several areas share."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from stores import (  # noqa: F401  fixtures
    azure,
    azure_server,
    gcs,
    gcs_server,
    moto,
    moto_server,
    s3,
    s3_server,
    store,
)

# Time is not what tests are about, and a busy machine would fail them.
settings.register_profile("patient", settings(), deadline=None)
settings.load_profile("patient")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real data, where it lies beside the checkout."""
    folder = Path(__file__).parents[2] / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("real data not beside the checkout (../shared/data)")
    return folder
