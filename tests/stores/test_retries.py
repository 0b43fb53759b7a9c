"""Asked again, but not for ever, not for nothing, and without losing or leaving anything."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fault_proxy import Faults, faulty
from stores import Store

from packstore.config import RetryConfig
from packstore.errors import ConfigError, DatasetExistsError, StorageError, told
from packstore.io.store import clients
from packstore.io.store.location import Location
from packstore.io.store.operations import abort_upload, uploads
from packstore.io.store.retry import retrying
from packstore.io.store.storage_errors import as_storage_errors

FAST = {"retry_attempts": 3, "retry_backoff": 0.001}


def failing(times: int, error: Exception) -> Callable[[], str]:
    """Raises `error` so often, as a read of a store does, then returns."""
    calls = iter(range(1, 200))

    def call() -> str:
        with as_storage_errors("read", "s3://b/x", {}):
            if (number := next(calls)) <= times:
                raise error
            return f"after {number}"

    return call


def asked(call: Callable[[], str], **config: Any) -> str:
    return retrying(call, RetryConfig(**{"backoff": 0.001, **config}))


class Answer(Exception):
    """An error in the form of botocore's ClientError."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(f"An error occurred ({code})")
        self.response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}


PASSING = [
    *(Answer(str(status), status) for status in (408, 429, 500, 502, 503, 504)),
    Answer("SlowDown", 503),
    Answer("RequestTimeout", 400),
    ConnectionResetError(),
    ConnectionRefusedError(),
    TimeoutError(),
    aiohttp.ClientPayloadError("Response payload is not completed"),
    aiohttp.ServerDisconnectedError(),
]
LASTING = [
    (Answer("AccessDenied", 403), r"permission denied \(AccessDenied\)"),
    (Answer("NoSuchBucket", 404), r"no such bucket \(NoSuchBucket\)"),
    (Answer("ExpiredToken", 400), r"have expired .* Log in again"),
    (Answer("RequestTimeTooSkewed", 403), r"clock is wrong .* Set the clock"),
    (Answer("PermanentRedirect", 301), r"in another region .* Set AWS_DEFAULT_REGION"),
    (Answer("QuotaExceeded", 403), r"no space left in the store"),
    (ValueError("Bucket is requester pays. Set `requester_pays=True`"), "requester_pays=true"),
    (PermissionError(13, "no"), "permission denied"),
    (FileNotFoundError(2, "no"), "no such file"),
    (KeyError("odd"), "KeyError: 'odd'"),
]


@pytest.mark.parametrize("error", PASSING, ids=str)
def test_what_passes_is_asked_again(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        assert asked(failing(2, error)) == "after 3"
    assert caplog.text.count("Retrying in") == 2
    with pytest.raises(StorageError, match=r"Tried 4 times\.$"):
        asked(failing(9, error), attempts=4)


@pytest.mark.parametrize(("error", "text"), LASTING, ids=lambda x: str(x)[:40])
def test_what_lasts_is_not(error: Exception, text: str) -> None:
    calls = failing(1, error)
    with pytest.raises(StorageError, match=text) as caught:
        asked(calls)
    assert "Tried" not in told(caught.value)
    assert calls() == "after 2"


def test_time_alone_is_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default: the waits double up to about 20 s, and the last attempt begins after 120 s."""
    waits: list[float] = []
    monkeypatch.setattr(time, "monotonic", lambda: sum(waits))
    with pytest.raises(StorageError, match=r"(?s)no connection.*Tried \d+ times"):
        retrying(failing(100, ConnectionResetError()), RetryConfig(), pause=waits.append)
    assert sum(waits) == pytest.approx(120)
    assert 0.25 <= waits[0] <= 0.75
    assert 10 <= max(waits) <= 30
    tries = len(waits)
    assert tries > 8
    waits.clear()  # and a store that is back in time is found
    call = failing(tries // 2, TimeoutError())
    assert retrying(call, RetryConfig(), pause=waits.append) == f"after {tries // 2 + 1}"


def test_who_stops_waits_no_longer() -> None:
    with pytest.raises(StorageError) as caught:
        retrying(failing(9, TimeoutError()), RetryConfig(), pause=lambda _: True)
    assert "Tried" not in told(caught.value)


def test_patience_does_not_multiply() -> None:
    inner = failing(3, TimeoutError())  # the fourth works
    with pytest.raises(StorageError, match=r"Tried 3 times\.$"):
        asked(lambda: asked(inner), attempts=3)
    assert inner() == "after 4"


@pytest.mark.parametrize(
    ("error", "tries"),
    [(PermissionError(13, "no"), 4), (FileNotFoundError(2, "no"), 1), (TimeoutError(), 6)],
)
def test_refusals_have_a_bound_of_their_own(error: Exception, tries: int) -> None:
    """In a running training, rights may be renewed; a file that is missing stays missing."""
    call = failing(tries, error)
    with pytest.raises(StorageError):
        retrying(call, RetryConfig(attempts=6, backoff=0), refusals=4)
    assert call() == f"after {tries + 1}"


def test_settings_come_with_the_storage_options() -> None:
    given = {"key": "k", "retry_attempts": "3", "retry_seconds": 1.5}
    config, rest = RetryConfig.split(given)
    assert (config.attempts, config.seconds, rest) == (3, 1.5, {"key": "k"})
    with pytest.raises(ConfigError, match="retry_attempts must be a number; found 'often'"):
        RetryConfig.split({"retry_attempts": "often"})


@contextlib.contextmanager
def reached(store: Store, kind: str, **how: Any) -> Iterator[Location]:
    """The place, whose requests meet faults of a kind."""
    with faulty(store.endpoint, Faults(1.0, kinds=[kind], **how)) as endpoint:
        yield Location(store.url, {**store.through(endpoint).options, **FAST})


def test_a_create_whose_answer_is_lost_has_won(store: Store) -> None:
    """If the client asks again, or packstore does; who had other bytes has lost."""
    with reached(store, "done but lost", most=1) as place:
        place.create_bytes("m", b"ours")
    with reached(store, "done but lost", most=1) as place, pytest.raises(DatasetExistsError):
        place.create_bytes("m", b"another's")
    assert Location(store.url, store.options).read_bytes("m") == b"ours"


@pytest.mark.parametrize("kind", ["refuse", "done but lost", "cut up"])
def test_a_large_file_is_whole_or_not_there(s3: Store, tmp_path: Path, kind: str) -> None:
    """One request of the upload in parts fails, whichever; what is left can be found and ended."""
    path = tmp_path / "large"
    path.write_bytes(bytes(range(256)) * ((2 * clients.PART_BYTES + 4096) // 256))
    place = Location(s3.url, s3.options)
    for first in range(4):
        with reached(s3, kind, most=1, after=first) as through:
            through.put_file(str(path), f"large{first}")
        assert place.read_bytes(f"large{first}") == path.read_bytes()
    text = r"(?s)never: cannot write; .*Tried 3 times"
    with reached(s3, "refuse") as through, pytest.raises(StorageError, match=text):
        through.put_file(str(path), "never")
    assert not place.exists("never")
    for upload in uploads(place) or []:
        abort_upload(place, upload)
    assert uploads(place) == []
