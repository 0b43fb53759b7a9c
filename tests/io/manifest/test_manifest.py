"""Manifests: every field is needed and typed, unknown ones pass, versions are
numbers.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from places import Files

import packstore
from packstore.errors import (
    DatasetExistsError,
    DatasetNotFoundError,
    FormatError,
    IntegrityError,
    StorageError,
)
from packstore.torch import SideWriter, open_side

pytestmark = pytest.mark.usefixtures("no_collector")
MANIFEST = "_packstore/manifest-000001.json"


class Reader:
    """Reads the text of a manifest from a place of its own."""

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self.path = folder / MANIFEST
        self.path.parent.mkdir(parents=True)

    def __call__(self, data: bytes) -> Any:
        self.path.write_bytes(data)
        return packstore.open(self.where).manifest

    def changed(self, data: bytes, change: Callable[[Any], Any]) -> Any:
        value = json.loads(data)
        change(value)
        return self(json.dumps(value).encode())


@pytest.fixture(scope="module")
def good(kit, tmp_path_factory) -> bytes:
    """The text of a manifest of several shards, without its hash."""
    ds = kit.made(tmp_path_factory.mktemp("m") / "ds", shard_tokens=1)
    assert len(ds.manifest.shards) > 1
    return ds.manifest.to_json()


@pytest.fixture(scope="module")
def read(tmp_path_factory) -> Reader:
    return Reader(tmp_path_factory.mktemp("r") / "ds")


def test_same_bytes_there_and_back(good, read):
    manifest = read(good)
    assert manifest.to_json() == good
    assert json.loads(good)["num_responses"] == 2
    totals = manifest.totals
    assert manifest.pairs == manifest.num_packs == totals.examples == 60
    assert manifest.fill_rate == totals.tokens / (60 * 64)
    assert manifest.schema.names[:2] == ["input_ids", "labels"]
    with_size = read.changed(
        good, lambda m: m["provenance"].update(tokenizer={"vocab_size": 50})
    )
    assert (manifest.vocab_size, with_size.vocab_size) == (None, 50)


def test_fingerprint_is_of_the_packs(good, read):
    base = read(good).fingerprint
    assert read.changed(good, lambda m: m.update(strategy="x")).fingerprint == base
    assert read.changed(good, lambda m: m["shards"].reverse()).fingerprint != base
    other = read.changed(good, lambda m: m["shards"][0].update(example_id_base=7))
    assert other.fingerprint != base


USED = {"on": {}, "chat_template": "", "pad_to_multiple": 2}
USED |= dict.fromkeys(("name", "path", "sha256", "vocab_sha256", "probe_sha256"), "")
USED |= {"bos_id": 0, "eos_id": 0, "pad_id": 0, "vocab_size": 9, "files": {}}
USED |= {
    "chat_template_sha256": "",
    "tool_use_template": "",
    "tool_use_template_sha256": "",
}
"""Members of settings or of a tokenizer that are used, with one right value."""


def test_members_of_open_objects_that_are_used_have_types(good, read):
    """A path that is a number would be an open file; texts in `on` were taken for
    mappings.
    """
    for name, right in USED.items():
        of = "settings" if name in ("on", "pad_to_multiple") else "tokenizer"
        for value in (right, True, -1, 1.5, "x", [], ["x"], {"a": 1}, 2**70):
            about = {"settings": {}, "tokenizer": {}} | {of: {name: value}}
            text = json.loads(good)
            text["provenance"].update(about)
            if type(value) is type(right) and value in (right, "x"):
                assert read(json.dumps(text).encode()).provenance[of] == {name: value}
            else:
                with pytest.raises(FormatError, match=rf"provenance\.{of}\.{name}"):
                    read(json.dumps(text).encode())


@pytest.mark.parametrize(
    "bound", ["", "a", "3", "0", "-1", "2147483648", "01", "1.0", "９"]
)
def test_buckets_of_lengths_are_powers_of_two(good, read, bound):
    with pytest.raises(FormatError, match="length_histogram"):
        read.changed(
            good, lambda m: m["statistics"]["length_histogram"].update({bound: 1})
        )


DEEP_OR_LONG = {
    "lists": b"[" * 5_000_000,
    "objects": b'{"a":' * 1_000_000,
    "digits": b'{"format_version": ' + b"9" * 5_000_000 + b"}",
    "an exponent": b'{"format_version": 1e999999999}',
    "a long key": b'{"' + b"a" * 5_000_000 + b'": 1}',
}


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{", b"[]", b"null", b"\xff", b"1e999"),
        *(pytest.param(data, id=name) for name, data in DEEP_OR_LONG.items()),
    ],
)
def test_not_a_manifest(data, read):
    with pytest.raises(FormatError, match=MANIFEST) as caught:
        read(data)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize(
    ("first", "last"),
    [
        (b'"kind": "sft",', b""),
        (b"", b', "kind" : "preference"'),
        (b"", b', "\\u006bind": 1'),  # k
        (b'"later": {"a": {}, "b": ["}"], "a": 1},', b""),
        (b'"a\\"{": 1, "b": "\\\\", "a\\u0022{": 1,', b""),
        (b'"\\\\": 1, "c": [{"c": 1}, {"c": 2}], "\\u005c": 1,', b""),
    ],
)
def test_two_members_of_one_name(good, read, first, last):
    """Of which parsers take either."""
    text = good.replace(b"{", b"{" + first, 1).rstrip()[:-1] + last + b"}"
    with pytest.raises(FormatError, match=MANIFEST):
        read(text)


def test_one_name_in_several_objects_and_texts(good, read):
    more = {
        "a": [{"a": 1}, {"a": 2}],
        "b": '"a": {',
        "\\": "\\",
        '\\"': "}",
        "a\\": {"é": {}},
        "\n": 1,
    }
    text = b"{" + json.dumps({"later": more, **more}).encode()[1:-1] + b"," + good[1:]
    assert read(text).to_json() == good


def test_a_hash_of_side_data_that_is_not_the_last_field(tmp_path, kit):
    """Nobody would compare it."""
    with SideWriter(
        str(tmp_path / "side"), kit.made(tmp_path / "ds", 1), {"x": "int64"}
    ) as writer:
        writer.write(np.array([0]), {"x": np.array([1])})
    path = tmp_path / "side/_packstore/side-000001.json"
    path.write_bytes(path.read_bytes()[:-2] + b', "later": 1}')
    with pytest.raises(FormatError, match="sha256"):
        open_side(str(tmp_path / "side"))


@pytest.mark.parametrize(
    "junk",
    [
        b'"later\xff": 1,',
        b'"later": "\xff",',
        b'"later": ["\xc3("],',
        b'"\x80\\n": 1,',
        b'"\x80":1,"\x80":1,',
    ],
)
def test_letters_of_unknown_fields_must_be_utf8(good, read, junk):
    with pytest.raises(FormatError, match=MANIFEST):
        read(good.replace(b"{", b"{" + junk, 1))


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_raise_nothing_unnamed(good, read, data):
    start = data.draw(st.integers(0, len(good) - 1))
    stop = data.draw(st.integers(start, min(start + 40, len(good))))
    junk = data.draw(
        st.binary(max_size=8) | st.sampled_from([b"-1", b"{}", b"[]", b"1e400"])
    )
    try:
        read(good[:start] + junk + good[stop:])
    except FormatError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_versions(kit, place):
    first, second = kit.made(place, 20), kit.made(place, 30, overwrite=True)
    assert (first.version, second.version) == (1, 2)
    with pytest.raises(DatasetExistsError, match="version 2"):
        kit.made(place, 20)
    current, old = packstore.open(place), packstore.open(place, version=1)
    assert (len(current), current.version, len(old)) == (30, 2, 20)
    with pytest.raises(DatasetNotFoundError, match="version 3"):
        packstore.open(place, version=3)
    for name in ("000009.json.tmp", "0000009.json", "9.json", "000000.json"):
        Files(place).write(f"_packstore/manifest-{name}", b"")
    with pytest.raises(DatasetNotFoundError, match="version 0"):
        packstore.open(place, version=0)
    for six in ("٠٠٠٠٠٩", "００００００９", "੦੦੦੦੦੯"):  # digits of other scripts
        # As bytes on a disk: a locale may have no such letters.
        Files(place).write(
            os.fsdecode(f"_packstore/manifest-{six}.json".encode()), b"{}"
        )
    assert packstore.open(place).version == 2
    assert kit.made(place, 10, overwrite=True).version == 3


def test_a_huge_manifest_is_neither_written_nor_read(kit, ds, tmp_path, monkeypatch):
    """The size in the listing decides. One of that size takes minutes to make, so less
    is huge.
    """
    with monkeypatch.context() as patch:
        patch.setattr("packstore.io.manifest.commit.MAX_MANIFEST_BYTES", 1000)
        with pytest.raises(FormatError, match="1000 bytes"):
            kit.made(tmp_path / "other")
    with open(f"{ds.url}/{MANIFEST}", "ab") as file:
        file.truncate((256 << 20) + 1)
    with pytest.raises(FormatError, match=str(256 << 20)):
        packstore.open(ds.url)


def test_not_a_dataset(tmp_path):
    with pytest.raises(DatasetNotFoundError, match="none"):
        packstore.open(str(tmp_path / "none"))
    with pytest.raises(DatasetNotFoundError, match="packstore pack"):
        packstore.open(str(tmp_path))
    with pytest.raises(DatasetNotFoundError, match="packstore ref-logps"):
        open_side(str(tmp_path))


def test_text_that_is_not_unicode_is_refused(good, read):
    manifest = read(good)
    manifest.provenance["sources"][0]["path"] = "\udcff.jsonl"
    with pytest.raises(FormatError, match="Unicode"):
        manifest.to_json()


DENSE = {  # values that take far more memory than text
    "empty lists": b"[" + b",".join([b"[]"] * 4_000_000) + b"]",
    "lists of one": b"[" + b",".join([b"[1]"] * 3_000_000) + b"]",
    "short texts": b"[" + b",".join([b'"ab"'] * 4_000_000) + b"]",
    "names": b"{" + b",".join(b'"%06d":1' % i for i in range(4_000_000)) + b"}",
    "numbers": b"[" + b",".join([b"1.5"] * 9_000_000) + b"]",
}


@pytest.mark.parametrize("values", DENSE)
def test_a_manifest_of_many_small_values_is_refused_before_it_is_parsed(
    values, good, read
):
    change = good.replace(b'"settings":{', b'"settings":{"x":%s,' % DENSE[values], 1)
    with pytest.raises(FormatError, match="memory"):
        read(change)


def test_a_name_that_repeats_among_many_is_refused_in_linear_time(good, read):
    members = [b'"%06d":1' % i for i in range(300_000)] + [b'"299999":1']
    names = b"{" + b",".join(members) + b"}"
    change = good.replace(b'"settings":{', b'"settings":{"x":%s,' % names, 1)
    with pytest.raises(FormatError, match=r"two members of one name.*299999"):
        read(change)


def test_a_torn_manifest_names_the_ways_out(kit, place):
    """A system without links and exclusive renames may leave one after a crash."""
    kit.made(place, 20), kit.made(place, 30, overwrite=True)
    files = Files(place)
    for end in (1000, 0):
        second = files.read(MANIFEST.replace("1", "2"))[:end]
        files.write(MANIFEST.replace("1", "2"), second)
        told = rf"{end} bytes.*version=1"
        for read in (packstore.open, packstore.clean):
            with pytest.raises(IntegrityError, match=told):
                read(place)
    assert len(packstore.open(place, version=1)) == 20
    assert kit.made(place, 10, overwrite=True).version == 3
    assert packstore.open(place).version == 3


@pytest.mark.parametrize("links", [True, False], ids=["links", "no links"])
def test_an_error_after_the_commit_says_that_the_version_is_there(
    kit, tmp_path, monkeypatch, links
):
    """A disk that fails at the last sync of a folder; none can be asked to."""
    kit.made(tmp_path, 20)
    sync, there = os.fsync, tmp_path / MANIFEST.replace("1", "2")

    def fail(handle: int) -> None:
        if there.exists():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        sync(handle)

    def refuse(*_: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fail)
        if not links:
            patch.setattr("os.link", refuse)
        told = "version 2"
        with pytest.raises(StorageError, match=told) as caught:
            kit.made(tmp_path, 30, overwrite=True)
    assert "denied" not in str(caught.value)
    assert packstore.open(str(tmp_path)).verify().ok
    assert packstore.open(str(tmp_path)).version == 2
