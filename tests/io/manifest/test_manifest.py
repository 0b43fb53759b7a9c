from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packstore
from packstore.errors import (
    DatasetExistsError,
    DatasetNotFoundError,
    FormatError,
)
from packstore.io.manifest import commit as module
from packstore.io.manifest.commit import commit, manifest_path, refuse_existing, without_hash
from packstore.io.manifest.manifest import Manifest, read_manifest

pytestmark = pytest.mark.usefixtures("no_collector")


@pytest.fixture(scope="module")
def good(kit, tmp_path_factory) -> bytes:
    """The bytes of a manifest of two shards."""
    made = kit.Written(str(tmp_path_factory.mktemp("m") / "ds"))
    ds = made.dataset([kit.some_packs(60)], shard_tokens=1)
    assert len(ds.manifest.shards) > 1
    return without_hash(ds.location.read_bytes(manifest_path(1)), "manifest")


def parsed(data: bytes, change: Callable[[Any], Any]) -> Manifest:
    value = json.loads(data)
    change(value)
    return Manifest.from_json(json.dumps(value).encode(), "the place")


def test_same_bytes_there_and_back(good):
    manifest = Manifest.from_json(good)
    assert manifest.to_json() == good
    assert json.loads(good)["num_responses"] == 2


def test_convenience(good):
    manifest = Manifest.from_json(good)
    totals = manifest.totals
    assert manifest.pairs == totals.examples == 60
    assert manifest.num_packs == 60
    assert manifest.vocab_size == 50
    assert manifest.fill_rate == totals.tokens / (60 * 64)
    assert manifest.schema.names[:2] == ["input_ids", "labels"]
    histogram = manifest.statistics.length_histogram
    assert sum(histogram.values()) == totals.sequences
    assert list(map(int, histogram)) == sorted(map(int, histogram))


def test_fingerprint_is_of_the_packs(good):
    base = Manifest.from_json(good).fingerprint
    assert parsed(good, lambda m: m.update(strategy="x")).fingerprint == base
    assert parsed(good, lambda m: m["shards"].reverse()).fingerprint != base
    other = parsed(good, lambda m: m["shards"][0].update(example_id_base=7))
    assert other.fingerprint != base


def test_unknown_fields_are_ignored(good):
    def extend(value: dict[str, Any]) -> None:
        value["later"] = {"a": 1}
        value["shards"][0]["later"] = 1
        value["totals"]["later"] = 1

    assert parsed(good, extend).to_json() == good


def fields(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all fields that a reader needs."""
    for name, inner in value.items():
        yield (*path, name)
        if name == "shards":
            yield from fields(inner[0], (*path, name, 0))
        elif isinstance(inner, dict) and name not in OPEN:
            yield from fields(inner, (*path, name))


OPEN = ("dropped", "noted", "length_histogram", "planning", "settings", "tokenizer", "carry")
OPTIONAL = {("num_responses",), ("provenance", "tokenizer"), ("pack_index",)}


def test_every_field_is_needed_and_typed(good):
    paths = [p for p in fields(json.loads(good)) if p not in OPTIONAL]
    assert len(paths) > 50
    for path in paths:
        for wrong in (None, "absent", [[-1]], {"": []}):
            value = copy.deepcopy(json.loads(good))
            at = value
            for step in path[:-1]:
                at = at[step]
            if wrong == "absent":
                del at[path[-1]]
            else:
                if type(wrong) is dict and path[-1] in OPEN:
                    continue
                at[path[-1]] = wrong
            with pytest.raises(FormatError, match="the place") as caught:
                Manifest.from_json(json.dumps(value).encode(), "the place")
            message = str(caught.value)
            assert path[-1].rstrip("s").replace("_", " ") in message.replace("_", " ")
            assert "\n" not in message


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b"1e999"])
def test_not_a_manifest(data):
    with pytest.raises(FormatError, match="the place"):
        Manifest.from_json(data, "the place")


@pytest.mark.parametrize("again", [b"5", b"[]", b"{}", b'"x"', b"null"])
@pytest.mark.parametrize("name", [b'"features": [1]', b'"totals": {"packs": []}'])
def test_a_wrong_field_that_comes_again(good, name, again):
    """The last of two fields of a name counts, but the first must be right as well."""
    field = name.partition(b":")[0]
    text = good.replace(b"{", b"{" + name + b",", 1).rstrip()[:-1] + b"," + field + b":" + again
    with pytest.raises(FormatError, match=r"the place, field (features|totals)"):
        Manifest.from_json(text + b"}", "the place")


@pytest.mark.parametrize("junk", [b'"later\xff": 1,', b'"later": "\xff",', b'"later": ["\xc3("],'])
def test_letters_of_unknown_fields_must_be_utf8(good, junk):
    with pytest.raises(FormatError, match="the place: must be valid JSON"):
        Manifest.from_json(good.replace(b"{", b"{" + junk, 1), "the place")


@settings(max_examples=300)
@given(st.data())
def test_damaged_bytes_raise_nothing_unnamed(good, data):
    start = data.draw(st.integers(0, len(good) - 1))
    stop = data.draw(st.integers(start, min(start + 40, len(good))))
    junk = data.draw(st.binary(max_size=8) | st.sampled_from([b"-1", b"{}", b"[]", b"1e400"]))
    damaged = good[:start] + junk + good[stop:]
    try:
        Manifest.from_json(damaged)
    except FormatError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_versions(kit, place):
    made = kit.Written(place)
    first = made.dataset([kit.some_packs(20)])
    second = made.dataset([kit.some_packs(30)], overwrite=True)
    assert (first.version, second.version) == (1, 2)
    current, number = read_manifest(made.location)
    assert (current.num_packs, number) == (30, 2)
    assert read_manifest(made.location, 1)[0].num_packs == 20
    with pytest.raises(DatasetNotFoundError, match="must have version 3; found 1 to 2"):
        read_manifest(made.location, 3)
    made.location.create_bytes("_packstore/manifest-000009.json.tmp", b"")
    assert read_manifest(made.location)[1] == 2


def test_an_existing_dataset_is_refused(kit, place):
    made = kit.Written(place)
    assert refuse_existing(made.location, overwrite=False) == 1
    ds = made.dataset([kit.some_packs(20)])
    with pytest.raises(DatasetExistsError, match=r"version 1 of one. Name another place, or"):
        refuse_existing(made.location, overwrite=False)
    with pytest.raises(DatasetExistsError, match="only one writer may commit at a time"):
        commit(made.location, replace(ds.manifest, seed=9).to_json(), 1)
    commit(made.location, ds.manifest.to_json(), 1)  # the same text counts as written
    assert refuse_existing(made.location, overwrite=True) == 2


def test_a_huge_manifest_is_neither_written_nor_read(kit, place, monkeypatch):
    made = kit.Written(place)
    ds = made.dataset([kit.some_packs(20)])
    monkeypatch.setattr(module, "MAX_MANIFEST_BYTES", 1000)
    for action in (
        lambda: read_manifest(made.location),
        lambda: commit(made.location, ds.manifest.to_json(), 2),
    ):
        with pytest.raises(FormatError, match="at most 1000 bytes"):
            action()


def test_not_a_dataset(tmp_path):
    with pytest.raises(DatasetNotFoundError, match=r"no such folder\. Check the path"):
        packstore.open(tmp_path / "none")
    with pytest.raises(DatasetNotFoundError, match="Name the folder that `packstore pack` wrote"):
        packstore.open(tmp_path)


def test_text_that_is_not_unicode_is_refused(good):
    manifest = Manifest.from_json(good)
    manifest.provenance["sources"][0]["path"] = "\udcff.jsonl"
    with pytest.raises(FormatError, match="valid Unicode"):
        manifest.to_json()


def test_digits_of_other_scripts_number_no_version(kit, place):
    made = kit.Written(place)
    made.dataset([kit.some_packs(20)])
    for six in ("٠٠٠٠٠٩", "００００００９", "੦੦੦੦੦੯"):
        # As bytes on a disk: a locale may have no such letters.
        name = os.fsdecode(f"_packstore/manifest-{six}.json".encode())
        made.location.create_bytes(name, b"{}")
    assert set(module.versions(made.location)) == {1}
    assert read_manifest(made.location)[1] == 1
    assert refuse_existing(made.location, overwrite=True) == 2
