"""The server of ``packstore view``: this machine only, read-only, and packs as they are
stored.
"""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from packstore import Dataset
from packstore.cli import main


class Address(NamedTuple):
    port: int
    root: str


@pytest.fixture(scope="module")
def server(hostile: Dataset) -> Iterator[Address]:
    """A server, which Ctrl-C ends in one line, whatever it was asked."""
    command = [sys.executable, "-m", "packstore", "view", hostile.url, "--no-browser"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    ) as process:
        told = re.match(r"http://127\.0\.0\.1:(\d+)(/.*/) ", process.stdout.readline())
        yield Address(int(told[1]), told[2])
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=60) == ("\nended\n", "")
    assert process.returncode == 0


def ask(
    server: Address, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def test_the_page_and_a_pack(server: Address, hostile: Dataset, tmp_path: Path) -> None:
    status, headers, page = ask(server, server.root)
    assert status == 200
    assert b"connect-src 'self'" in page
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    status, headers, body = ask(server, f"{server.root}packs/1")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    file = tmp_path / "page.html"
    assert main(["show", hostile.url, "--pack", "1", "--html", str(file)]) == 0
    written = re.search(
        r'id="data">(.*?)</script>', file.read_text(encoding="utf-8"), re.DOTALL
    )
    assert [json.loads(body)] == json.loads(written[1])["embedded"]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8765", 200),  # forwarded by ssh from another port
        ("127.0.0.1", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_a_page_of_a_rebound_name_gets_nothing(
    server: Address, host: str, status: int
) -> None:
    assert ask(server, server.root, Host=host)[0] == status


@pytest.mark.parametrize("hosts", ["", "Host: localhost\r\nHost: evil.example\r\n"])
def test_a_request_names_one_host(server: Address, hosts: str) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(f"GET {server.root} HTTP/1.0\r\n{hosts}\r\n".encode())
    with connection, connection.makefile("rb") as answer:
        assert answer.read().split(b"\r\n")[0].split()[1:2] == [b"403"]


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"]
)
def test_only_get(server: Address, method: str) -> None:
    status, headers, _ = ask(server, server.root, method)
    assert (status, headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/",
            "/packs/0",
            "/wrong-path-of-22-letters/packs/0",
            "ROOT../../../../etc/passwd",
        ),
        *(
            "ROOT%2e%2e/%2e%2e/etc/passwd",
            "ROOTpacks/../../../etc/passwd",
            "ROOTpacks/-1",
        ),
        *("ROOTpacks/9999999999999999999999", "ROOTstyle.css"),
    ],
)
def test_other_paths_are_not_there(server: Address, path: str) -> None:
    raw = path.replace("ROOT", server.root).encode().decode("latin-1")
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(
        f"GET {raw} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode("latin-1")
    )
    with connection, connection.makefile("rb") as answer:
        assert answer.read().split(b"\r\n")[0].split()[1] == b"404"


@pytest.mark.skipif(
    sys.platform != "linux", reason="other systems have one loopback address"
)
def test_no_other_address_is_bound(server: Address) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.port), timeout=5)


def test_a_taken_port_is_an_error(
    server: Address, hostile: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    for port in (server.port, 70000):
        assert main(["view", hostile.url, "--no-browser", "--port", str(port)]) == 1
        assert f"port {port} of 127.0.0.1" in capsys.readouterr().err
