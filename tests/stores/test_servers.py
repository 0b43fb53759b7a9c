"""The servers that the tests start: they hold bytes, and honour what the commit rests on."""

from __future__ import annotations

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from stores import Store

from packstore.errors import DatasetExistsError
from packstore.io.store.location import Location


def test_a_store_holds_bytes_and_creates_once(store: Store) -> None:
    place = Location(store.url, store.options)
    assert place.files() == []
    place.create_bytes("a/one.bin", b"first")
    with pytest.raises(DatasetExistsError, match="must not exist yet"):
        place.create_bytes("a/one.bin", b"second")
    assert [tuple(e) for e in place.files("a")] == [("one.bin", 5)]
    assert place.read_bytes("a/one.bin", 1, 3) == b"ir"
    place.remove("a/one.bin")
    assert place.files("a") == []
    bucket = store.fresh_bucket()
    assert Location(bucket.url, bucket.options).files() == []


def test_of_many_creators_exactly_one_wins(store: Store) -> None:
    place, start = Location(store.url, store.options), threading.Barrier(8)

    def create(number: int, path: str) -> list[int]:
        start.wait()
        with contextlib.suppress(DatasetExistsError):
            place.create_bytes(path, b"%d" % number * 1000)
            return [number]
        return []

    for path in ("0.json", "1.json", "2.json"):
        with ThreadPoolExecutor(8) as pool:
            (winner,) = itertools.chain(*pool.map(create, range(8), [path] * 8))
        assert place.read_bytes(path) == b"%d" % winner * 1000
