"""Requests that fail are sent again: with patience, and without losing or leaving
anything.
"""

from __future__ import annotations

import time
from collections import Counter

import pytest
from fault_proxy import Faults, faulty
from fault_runs import RECORDS, SETTINGS, through
from stores import Store

import packstore
from packstore.config import RetryConfig
from packstore.errors import StorageError
from packstore.io.store import (
    retrying,
)  # the plan of the waits: a pure function of its clock


def test_time_alone_is_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default: the waits double up to about 20 s, and the last attempt begins after
    120 s.
    """
    waits: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: sum(waits))

    def call() -> None:
        error = StorageError("no connection")
        error.transient = True
        raise error

    with pytest.raises(StorageError) as caught:
        retrying(call, RetryConfig(), pause=waits.append)
    assert caught.value.__notes__ == [f"Tried {len(waits) + 1} times."]
    assert sum(waits) == pytest.approx(120)
    assert 0.25 <= waits[0] <= 0.75
    assert 10 <= max(waits) <= 30
    assert len(waits) > 8


@pytest.mark.parametrize(("transient", "tries"), [(None, 4), (False, 1), (True, 6)])
def test_refusals_have_a_bound_of_their_own(transient: bool | None, tries: int) -> None:
    """In a running training, rights may be renewed; a file that is missing stays
    missing.
    """
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        error = StorageError("refused")
        error.transient = transient
        raise error

    def nested() -> None:  # patience does not multiply
        retrying(call, RetryConfig(attempts=9, backoff=0))

    with pytest.raises(StorageError):
        retrying(nested, RetryConfig(attempts=6, backoff=0), max_refusals=4)
    assert len(calls) == tries
    with pytest.raises(StorageError) as caught:  # who is told to stop waits no longer
        retrying(
            call,
            RetryConfig(attempts=6, backoff=0),
            max_refusals=4,
            pause=lambda _: True,
        )
    assert not hasattr(caught.value, "__notes__")


def test_a_setting_of_the_s3_client_leaves_its_retries_off(s3: Store) -> None:
    """Only `retries` among its settings turns them on."""
    packstore.pack(RECORDS, s3.url, storage_options=s3.options, **SETTINGS)
    faults = Faults(1.0, kinds=["slow down"], path="manifest-")
    with faulty(s3.endpoint, faults) as endpoint:
        options = {**through(s3, endpoint), "retry_attempts": 1}
        options["config_kwargs"] = {"s3": {"addressing_style": "path"}}
        with pytest.raises(StorageError):
            packstore.open(s3.url, options)
    assert faults.counts["slow down"] == 1


def test_a_commit_whose_answer_is_lost_has_won(store: Store) -> None:
    """Whoever asks again, the client or packstore."""
    faults = Faults(1.0, kinds=["done but lost"], path="manifest-", most=1)
    if (
        store.kind == "gcs"
    ):  # its names are in bodies: note of the writer, shard, index, manifest
        faults = Faults(1.0, kinds=["done but lost"], path="/upload/", most=1, after=3)
    with faulty(store.endpoint, faults) as endpoint:
        options, settings = (
            through(store, endpoint),
            {**SETTINGS, "shard_tokens": 1 << 20},
        )
        made = packstore.pack(RECORDS, store.url, storage_options=options, **settings)
    assert faults.counts["done but lost"] == 1
    assert (
        store.kind != "gcs" or faults.counts["requests"] == 5
    )  # only the last one again
    assert made.version == packstore.open(store.url, store.options).version == 1
    assert packstore.open(store.url, store.options).verify().ok


@pytest.mark.parametrize(
    "kind",
    [
        "refuse",
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("done but lost", "cut up")),
    ],
)
def test_a_large_file_is_whole_or_not_there(s3: Store, kind: str) -> None:
    """One request of the upload in parts fails, whichever: 16 MB are written and read
    back.
    """
    counts = Counter[str]()
    for first in range(4):
        faults = Faults(1.0, kinds=[kind], path="-large", most=1, after=first)
        with faulty(s3.endpoint, faults) as endpoint:
            options = {**through(s3, endpoint), "retry_attempts": 3}
            trials = packstore.check(s3.url, storage_options=options)
        counts += faults.counts
        assert all(trial.ok for trial in trials), trials
    assert counts[kind] >= 3
    faults = Faults(1.0, kinds=["refuse"], path="-large")
    with faulty(s3.endpoint, faults) as endpoint:
        options = {**through(s3, endpoint), "retry_attempts": 3}
        failed = [
            t for t in packstore.check(s3.url, storage_options=options) if t.ok is False
        ]
    assert "Tried 3 times" in failed[0].text
