"""Real object stores for tests: one server of each kind, shared by all workers of a session.

The fixtures `s3` (SeaweedFS), `moto`, `azure` (Azurite) and `gcs` (fake-gcs-server) give a
:class:`Store`: a place that holds nothing yet, and the storage options to reach it::

    def test_there(s3: Store) -> None:
        packstore.pack(pairs, s3.url, tokenizer=…, storage_options=s3.options)

The server starts when the first test asks for it and ends with the session. In a script,
``with serving("s3", folder) as endpoint`` does the same.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from server_kinds import BUCKET, KINDS, Unavailable

# gcsfs asks a server for the type of its buckets over TLS, and waits a minute where there is none.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
# What whoever runs the tests has set up must not matter.
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
os.environ["AWS_CONFIG_FILE"] = os.environ["AWS_SHARED_CREDENTIALS_FILE"] = os.devnull
for _name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
    os.environ.pop(_name, None)
for _name in ("AWS_ENDPOINT_URL", "STORAGE_EMULATOR_HOST", "AZURE_STORAGE_CONNECTION_STRING"):
    os.environ.pop(_name, None)
for _name in ("NO_PROXY", "no_proxy"):
    os.environ[_name] = ",".join(filter(None, ("127.0.0.1,localhost", os.environ.get(_name))))

START_S = 600  # an install from npm, or four attempts of a minute


@dataclass(frozen=True)
class Store:
    """A place on a real server.

    Attributes:
        kind: ``s3``, ``moto``, ``azure`` or ``gcs``.
        bucket: its bucket (container); shared with other tests unless `fresh_bucket` made it.
        path: the prefix in it, which is this test's own; empty for a whole bucket.
        endpoint: ``http://127.0.0.1:port`` of the server, or of what stands before it.
    """

    kind: str
    bucket: str
    path: str
    endpoint: str

    @property
    def url(self) -> str:
        """The fsspec URL of the place."""
        return "/".join(filter(None, (KINDS[self.kind].url(self.bucket), self.path)))

    @property
    def options(self) -> dict[str, Any]:
        """Its storage options, with keys."""
        return KINDS[self.kind].options(self.endpoint)

    def through(self, endpoint: str) -> Store:
        """The same place reached over another endpoint, such as that of a proxy."""
        return Store(self.kind, self.bucket, self.path, endpoint)

    def fresh_bucket(self) -> Store:
        """A bucket that holds nothing and that no other test uses."""
        bucket = f"test-{uuid.uuid4().hex[:20]}"
        KINDS[self.kind].make_bucket(self.endpoint, bucket)
        return Store(self.kind, bucket, "", self.endpoint)

    def client(self, **options: Any) -> Any:
        """boto3's client of an S3 server, for what fsspec cannot ask."""
        return KINDS[self.kind].client(self.endpoint, **options)  # type: ignore[attr-defined]


@contextlib.contextmanager
def serving(kind: str, folder: Path) -> Iterator[str]:
    """The endpoint of a server that all processes with the same `folder` share.

    Raises:
        Unavailable: its package cannot be had.
        RuntimeError: it does not start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "users", "a", encoding="utf-8") as users:
        fcntl.flock(users, fcntl.LOCK_SH)
        yield _endpoint(kind, folder)


def _endpoint(kind: str, folder: Path) -> str:
    state = folder / "state.json"
    with open(folder / "starting", "a", encoding="utf-8") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)
        if not state.exists():
            _start_keeper(kind, folder)
    found = json.loads(state.read_text(encoding="utf-8"))
    if "unavailable" in found:
        raise Unavailable(found["unavailable"])
    if "failed" in found:
        raise RuntimeError(found["failed"])
    return str(found["endpoint"])


def _start_keeper(kind: str, folder: Path) -> None:
    state = folder / "state.json"
    with open(folder / "log", "ab") as log:
        keeper = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("keep_server.py")), kind, str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    until = time.monotonic() + START_S
    while not state.exists():
        if keeper.poll() not in (None, 0) or time.monotonic() > until:
            keeper.kill()
            raise RuntimeError(
                f"the keeper of {kind}: {(folder / 'log').read_text(encoding='utf-8')[-2000:]}"
            )
        time.sleep(0.05)
    # It outlives this call on purpose; without this, Python complains that nobody waited for it.
    keeper.returncode = 0


def _session_folder(factory: pytest.TempPathFactory) -> Path:
    base = factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


def _server_fixture(kind: str) -> Any:
    @pytest.fixture(scope="session", name=f"{kind}_server")
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        with contextlib.ExitStack() as stack:
            folder = _session_folder(tmp_path_factory) / "servers" / kind
            try:
                endpoint = stack.enter_context(serving(kind, folder))
            except Unavailable as reason:
                pytest.skip(str(reason))
            yield endpoint

    return server


def _store_fixture(kind: str) -> Any:
    @pytest.fixture(name=kind)
    def store(request: pytest.FixtureRequest) -> Store:
        endpoint = request.getfixturevalue(f"{kind}_server")
        return Store(kind, BUCKET, uuid.uuid4().hex, endpoint)

    store.__doc__ = f"A place on {type(KINDS[kind]).__name__} that holds nothing yet."
    return store


s3_server, moto_server, azure_server, gcs_server = map(_server_fixture, KINDS)
s3, moto, azure, gcs = map(_store_fixture, KINDS)


@pytest.fixture(params=list(KINDS))
def store(request: pytest.FixtureRequest) -> Store:
    """A place on each of the servers in turn."""
    place: Store = request.getfixturevalue(request.param)
    return place
