"""The checksum that guards every read is tried on a known answer before it is believed."""

from __future__ import annotations

import importlib
import sys
import types
import zlib
from collections.abc import Iterator

import pytest

from packstore.io.shards import checksums


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()
    importlib.reload(checksums)


@pytest.mark.usefixtures("fresh")
def test_a_wrong_crc32_of_isal_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(data: bytes, before: int = 0) -> int:
        return zlib.crc32(data, before) ^ 1

    broken = types.ModuleType("isal.isal_zlib")
    broken.crc32 = wrong  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "isal", types.ModuleType("isal"))
    monkeypatch.setitem(sys.modules, "isal.isal_zlib", broken)
    importlib.reload(checksums)
    assert checksums.crc32_of(b"123456789") == 0xCBF43926
    assert checksums.crc32_of(b"56789", checksums.crc32_of(b"1234")) == 0xCBF43926
