"""``packstore.check`` on places that work and on places that do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Faults, faulty, website
from places import Files
from stores import Store
from tokenizers import Tokenizer

import packstore
from packstore import errors


def check(url: str, options: dict[str, Any] | None = None) -> tuple[bool, str]:
    """Whether no finding is a problem, and the findings as lines."""
    findings = packstore.check(url, storage_options=options)
    lines = [f"{finding.level} {finding.check} {finding.text}" for finding in findings]
    return all(finding.ok for finding in findings), "\n".join(lines)


def test_a_store(store: Store, pairs: Path, tokenizer: Tokenizer) -> None:
    ok, text = check(store.url, store.options)
    assert ok, text
    assert "none here yet" in text
    packstore.pack(
        str(pairs), store.url, tokenizer, pack_size=256, storage_options=store.options
    )
    ok, text = check(store.url, store.options)
    assert ok, text
    for part in (
        "version 1, 1 shards",
        "first shard",
        "last shard",
        "only one of two",
        "MB/s",
        "checksums",
    ):
        assert part in text
    assert not [
        name for name in Files(store.url, **store.options).names() if "check" in name
    ]
    if store.kind == "s3":
        uploads = store.client().list_multipart_uploads(
            Bucket=store.bucket, Prefix=store.path
        )
        assert not uploads.get("Uploads")


def test_a_folder_of_splits_on_a_store(store: Store) -> None:
    """Both are checked, and named where one dataset is needed."""
    records = [
        {"prompt": [5, 6, 7 + n], "chosen": [8, 9], "rejected": [9]} for n in range(30)
    ]
    settings = {"pack_size": 64, "validation_fraction": 0.3}
    packstore.pack(records, store.url, storage_options=store.options, **settings)
    ok, text = check(store.url, store.options)
    assert ok, text
    for read in (packstore.open, packstore.scan, packstore.clean):
        with pytest.raises(errors.DatasetNotFoundError) as caught:
            read(store.url, storage_options=store.options)
        for split in ("train", "validation"):
            assert f"{store.url}/{split}" in text
            assert f"{store.url}/{split}" in str(caught.value)


def test_a_folder_that_is_not_there_stays_away(tmp_path: Path) -> None:
    ok, text = check(str(tmp_path / "a" / "b"))
    assert ok, text
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ok, text = check(str(tmp_path / "file" / "x"))
    assert not ok
    assert "problem write" in text


def test_wrong_keys(s3: Store) -> None:
    ok, text = check(s3.url, {**s3.options, "secret": "wrong-secret-987"})
    assert not ok
    assert "problem list" in text
    assert "credentials that the store does not accept" in text
    assert "wrong-secret-987" not in text


def test_a_store_that_replaces_is_found_out(s3: Store) -> None:
    with faulty(s3.endpoint, Faults(0, unconditional=True)) as endpoint:
        ok, text = check(s3.url, s3.through(endpoint).options)
    assert not ok
    assert "problem commit" in text
    assert "two writers could both commit" in text
    assert not Files(s3.url, **s3.options).names()


def test_a_website_can_only_be_read(
    tmp_path: Path, pairs: Path, tokenizer: Tokenizer
) -> None:
    packstore.pack(str(pairs), tmp_path / "ds", tokenizer, pack_size=256)
    with website(tmp_path) as address:
        ok, text = check(f"{address}/ds")
    assert ok, text
    assert "last shard" in text
    assert "not tried: this place can only be read" in text
