"""Real object stores for tests: one server of each kind for a session.

The fixtures `s3` (SeaweedFS), `gcs` (fake-gcs-server) and `azure` (Azurite) give a
:class:`Store`: a place that holds nothing yet, and the storage options to reach it::

    def test_there(s3: Store) -> None:
        packstore.pack(pairs, s3.url, tokenizer=…, storage_options=s3.options)

The server starts when the first test asks for it and ends with the session. In a
script, ``with serving("s3", folder) as endpoint`` does the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from server_kinds import BUCKET, KINDS, Unavailable, free_ports

# gcsfs asks a server for the type of its buckets over TLS, and waits a minute where
# there is none.
os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
# What whoever runs the tests has set up must not matter.
os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
os.environ["AWS_CONFIG_FILE"] = os.environ["AWS_SHARED_CREDENTIALS_FILE"] = os.devnull
for _name in (
    "PROFILE",
    "ACCESS_KEY_ID",
    "SECRET_ACCESS_KEY",
    "SESSION_TOKEN",
    "ENDPOINT_URL",
):
    os.environ.pop(f"AWS_{_name}", None)
for _name in ("STORAGE_EMULATOR_HOST", "AZURE_STORAGE_CONNECTION_STRING"):
    os.environ.pop(_name, None)
for _name in ("NO_PROXY", "no_proxy"):
    os.environ[_name] = ",".join(
        filter(None, ("127.0.0.1,localhost", os.environ.get(_name)))
    )

ATTEMPTS, READY_S = 4, 60


@dataclass(frozen=True)
class Store:
    """A place on a real server of a kind (``s3``, ``gcs``, ``azure``).

    The prefix `path` in the bucket is this test's own, if empty, the whole bucket.
    `endpoint` (``http://127.0.0.1:port``) is that of the server, or of what stands
    before it.
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
        return KINDS[self.kind].options(self.endpoint)  # type: ignore[no-any-return]

    def through(self, endpoint: str) -> Store:
        """The same place reached over another endpoint, such as that of a proxy."""
        return replace(self, endpoint=endpoint)

    def fresh_bucket(self) -> Store:
        """A bucket that holds nothing and that no other test uses."""
        bucket = f"test-{uuid.uuid4().hex[:20]}"
        KINDS[self.kind].make_bucket(self.endpoint, bucket)
        return replace(self, bucket=bucket, path="")

    def client(self) -> Any:
        """botocore's client of an S3 server, for what fsspec cannot ask."""
        return KINDS[self.kind].client(self.endpoint)


@contextlib.contextmanager
def serving(kind: str, folder: Path) -> Iterator[str]:
    """Runs a server with its data in `folder`; yields its endpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    for _ in range(ATTEMPTS):
        ports = free_ports(KINDS[kind].PORTS)
        endpoint = f"http://127.0.0.1:{ports[0]}"
        with open(folder / "log", "ab") as log:
            process = subprocess.Popen(
                KINDS[kind].command(folder, ports),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # gcsfs reads no times of another zone, and real stores tell none.
                env={
                    **os.environ,
                    "HOME": str(folder),
                    "TMPDIR": str(folder),
                    "TZ": "UTC",
                },
                start_new_session=True,
                preexec_fn=_die_with_the_tests,
            )
        try:
            until = time.monotonic() + READY_S
            while time.monotonic() < until and process.poll() is None:
                if KINDS[kind].is_ready(endpoint):
                    yield endpoint
                    return
                time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = (folder / "log").read_text(encoding="utf-8", errors="replace")[-2000:]
    raise RuntimeError(f"{kind} did not start {ATTEMPTS} times: {text}")


def _die_with_the_tests() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _server_fixture(kind: str) -> Any:
    @pytest.fixture(scope="session", name=f"{kind}_server")
    def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
        try:
            with serving(kind, tmp_path_factory.mktemp(f"server-{kind}")) as endpoint:
                yield endpoint
        except Unavailable as reason:
            pytest.skip(str(reason))

    return server


def _store_fixture(kind: str) -> Any:
    @pytest.fixture(name=kind)
    def store(request: pytest.FixtureRequest) -> Store:
        """A place on the server that holds nothing yet."""
        endpoint = request.getfixturevalue(f"{kind}_server")
        return Store(kind, BUCKET, uuid.uuid4().hex, endpoint)

    return store


s3_server, gcs_server, azure_server = map(_server_fixture, KINDS)
s3, gcs, azure = map(_store_fixture, KINDS)


@pytest.fixture(params=["s3", "gcs", pytest.param("azure", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest) -> Store:
    """A place on each of the servers in turn."""
    place: Store = request.getfixturevalue(request.param)
    return place
