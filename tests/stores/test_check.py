"""``packstore check`` on places that work and on places that do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import Faults, faulty, website
from places import Files
from stores import Store
from tokenizers import Tokenizer

import packstore
from packstore.cli import main


def check(
    capsys: pytest.CaptureFixture[str], url: str, options: dict[str, Any] | None = None
) -> tuple[int, str]:
    """Exit code and output."""
    given = [
        f"{k}={v if isinstance(v, str) else json.dumps(v)}"
        for k, v in (options or {}).items()
    ]
    code = main(
        ["check", url, *(x for option in given for x in ("--storage-option", option))]
    )
    return code, capsys.readouterr().out


def test_a_store(
    store: Store, pairs: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = check(capsys, store.url, store.options)
    assert code == 0, text
    assert "none here yet" in text
    packstore.pack(
        str(pairs), store.url, tokenizer, pack_size=256, storage_options=store.options
    )
    code, text = check(capsys, store.url, store.options)
    assert code == 0, text
    for part in (
        "version 1, 1 shards",
        "first shard",
        "last shard",
        "only one of two",
        "MB/s",
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


def test_a_folder_that_is_not_there_stays_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(capsys, str(tmp_path / "a" / "b"))[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_the_call_returns_the_lines_of_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    findings = packstore.check(str(tmp_path))
    assert all(finding.ok for finding in findings)
    text = check(capsys, str(tmp_path))[1]
    assert [line.split()[1] for line in text.splitlines()] == [
        f.check.split()[0] for f in findings
    ]
    (tmp_path / "file").touch()
    failed = [f for f in packstore.check(str(tmp_path / "file" / "x")) if f.ok is False]
    assert failed


def test_wrong_keys(s3: Store, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = check(capsys, s3.url, {**s3.options, "secret": "wrong-secret-987"})
    assert code == 1
    assert "problem list" in text
    assert "credentials that the store does not accept" in text
    assert "wrong-secret-987" not in text


def test_a_store_that_replaces_is_found_out(
    s3: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    with faulty(s3.endpoint, Faults(0, unconditional=True)) as endpoint:
        code, text = check(capsys, s3.url, s3.through(endpoint).options)
    assert code == 1
    assert "problem commit" in text
    assert "two writers could both commit" in text
    assert not Files(s3.url, **s3.options).names()


def test_a_website_can_only_be_read(
    tmp_path: Path,
    pairs: Path,
    tokenizer: Tokenizer,
    capsys: pytest.CaptureFixture[str],
) -> None:
    packstore.pack(str(pairs), tmp_path / "ds", tokenizer, pack_size=256)
    with website(tmp_path) as address:
        code, text = check(capsys, f"{address}/ds")
    assert code == 0, text
    assert "last shard" in text
    assert "not tried: this place can only be read" in text
