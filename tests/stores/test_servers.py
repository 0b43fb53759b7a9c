"""The servers that the tests start: they hold bytes, and honour what the commit rests on."""

from __future__ import annotations

import pytest
from stores import Store

from packstore.errors import DatasetExistsError
from packstore.io.storage import Location


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
