from __future__ import annotations

import gc

import numpy as np
import pytest

from packstore.io.dataset import reader as rooms
from packstore.io.dataset.reader import pooled_array


@pytest.fixture(autouse=True)
def nothing_waits(monkeypatch):
    monkeypatch.setattr(rooms, "_waiting", [])


def address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


LOOKS = [
    lambda a: a[3:7],
    lambda a: a[3:7].view(np.int64),
    lambda a: memoryview(a)[3:],
    lambda a: np.asarray(a).reshape(2, -1)[1],
    lambda a: [a][0],
]


@pytest.mark.parametrize("look", LOOKS)
def test_memory_is_used_again_after_its_last_view(look):
    array = pooled_array(1000)
    array[:] = 7
    at, view = address(array), look(array)
    del array
    gc.collect()
    other = pooled_array(1000)
    assert address(other) != at
    other[:] = 8
    assert np.asarray(view).view(np.int32).ravel().tolist() == [7] * (np.asarray(view).nbytes // 4)
    del view
    gc.collect()
    assert address(pooled_array(1000)) == at
