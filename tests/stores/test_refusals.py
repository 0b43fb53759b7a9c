"""Refusals of stores: a named error with a remedy, at once, and without the keys."""

from __future__ import annotations

import re
import traceback
from pathlib import Path
from typing import Any

import pytest
from places import Files
from server_kinds import KINDS, READER_KEY, READER_SECRET, free_ports
from small_jobs import SETTINGS
from small_jobs import pairs as some_pairs
from stores import Store
from tokenizers import Tokenizer

import packstore
from packstore.config import ReadConfig
from packstore.errors import StorageError
from packstore.torch import PackedDataLoader, PackedDataset


def refused(url: str, options: dict[str, Any]) -> list[str]:
    """Returns the errors of reading and writing a dataset, which tell no wrong key."""
    said = []
    for action in (
        lambda: packstore.open(url, options),
        lambda: packstore.open(url, options, version=1),
        lambda: packstore.pack(f"{url}/x.jsonl", "never", storage_options=options),
        lambda: packstore.pack(some_pairs(5), url, storage_options=options, **SETTINGS),
    ):
        with pytest.raises(StorageError) as caught:
            action()
        said.append(packstore.errors.message_with_notes(caught.value))
        told = "".join(traceback.format_exception(caught.value))
        assert not re.search("wrong-secret-987|wrong-key-123|AAAAwrong", told)
    return said


SECRET: dict[str, Any] = {"secret": "wrong-secret-987"}
NOBODY: dict[str, Any] = {"key": None, "secret": None}
KEYS: list[tuple[dict[str, Any], list[str]]] = [
    (
        SECRET,
        [
            "credentials that the store does not accept",
            "Check the key, the secret and the",
        ],
    ),
    (
        {"key": "wrong-key-123", **SECRET},
        ["credentials that the store does not accept"],
    ),
    (
        {**NOBODY, "anon": True},
        ["permission denied (AccessDenied)", "requester_pays=true"],
    ),
    (NOBODY, ["found no credentials. Set them in the environment"]),
]


def test_wrong_keys_and_none(s3: Store) -> None:
    Files(s3.url, **s3.options).write("x.jsonl", b"data")
    for keys, texts in KEYS:
        for told in refused(s3.url, {**s3.options, **keys}):
            assert all(text in told for text in texts), told
            assert "Tried" not in told


def test_a_key_that_may_only_read(s3: Store, pairs: Path, tokenizer: Tokenizer) -> None:
    reader = {**s3.options, "key": READER_KEY, "secret": READER_SECRET}
    packstore.pack(
        str(pairs), s3.url, tokenizer, pack_size=256, storage_options=s3.options
    )
    with pytest.raises(StorageError, match="permission denied"):
        packstore.pack(
            str(pairs),
            s3.url,
            tokenizer,
            pack_size=512,
            overwrite=True,
            storage_options=reader,
        )
    dataset = packstore.open(s3.url, storage_options=reader)
    assert dataset.version == 1
    assert dataset.verify().ok


@pytest.mark.slow
def test_wrong_key_of_azure(azure: Store) -> None:
    Files(azure.url, **azure.options).write("x.jsonl", b"data")
    text = azure.options["connection_string"]
    options = {
        **azure.options,
        "connection_string": text.replace("Key=", "Key=AAAAwrong"),
    }
    for said in refused(azure.url, options):
        assert "permission denied (AuthorizationFailure)" in said


def test_no_such_bucket(store: Store, tmp_path: Path) -> None:
    url, options = KINDS[store.kind].url("never-made") + "/ds", store.options
    for action in (
        lambda: packstore.open(url, options),
        lambda: packstore.pack(some_pairs(5), url, storage_options=options, **SETTINGS),
    ):
        with pytest.raises(StorageError, match="never-made/ds"):
            action()
    for source in (f"{url}/a.jsonl", f"{url}/*.jsonl"):
        with pytest.raises(StorageError, match="never-made"):
            packstore.pack(source, tmp_path / "ds", storage_options=options)


def test_a_bucket_removed_while_it_is_read(
    s3: Store, pairs: Path, tokenizer: Tokenizer
) -> None:
    place = s3.fresh_bucket()
    url = place.url + "/ds"
    options = {**place.options, "retry_attempts": 2, "retry_backoff": 0.01}
    packstore.pack(
        str(pairs),
        url,
        tokenizer,
        pack_size=256,
        row_group_tokens=256,
        storage_options=options,
    )
    reading = ReadConfig(requests=1, read_ahead_bytes=0)
    data = PackedDataset(packstore.open(url, storage_options=options), reading=reading)
    batches = iter(PackedDataLoader(data))
    next(batches)
    client = place.client()
    for item in client.list_objects_v2(Bucket=place.bucket)["Contents"]:
        client.delete_object(Bucket=place.bucket, Key=item["Key"])
    client.delete_bucket(Bucket=place.bucket)
    client.close()
    with pytest.raises(StorageError, match=r"row group \d+"):
        list(batches)


def test_a_refused_connection_is_bounded(s3: Store) -> None:
    (port,) = free_ports(1)
    nobody = s3.through(f"http://127.0.0.1:{port}")
    options = {**nobody.options, "retry_attempts": 3, "retry_backoff": 0}
    with pytest.raises(StorageError, match="Tried 3 times"):
        packstore.open(s3.url, options)
