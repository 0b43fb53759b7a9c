"""The server of ``packstore view``: this machine only, read-only, and packs as they are stored."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from packstore import Dataset
from packstore.cli import main
from packstore.pages.packs import PackReader
from packstore.pages.server import PackServer


@pytest.fixture(scope="module")
def server(hostile: Dataset) -> Iterator[PackServer]:
    tokenizer = Tokenizer.from_file(str(Path(hostile.url).parent / "tokenizer.json"))
    with PackServer(PackReader(hostile, tokenizer.decode)) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.01,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(
    server: PackServer, path: str, method: str = "GET", **headers: str
) -> tuple[int, http.client.HTTPMessage, bytes]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    connection.putrequest(method, path, skip_host="Host" in headers)
    for name, value in headers.items():
        connection.putheader(name, value)
    connection.endheaders()
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, answer.headers, body


def test_the_page_and_a_pack(server: PackServer) -> None:
    status, headers, page = ask(server, server.root)
    assert status == 200
    assert b"connect-src 'self'" in page
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    status, headers, body = ask(server, f"{server.root}packs/1")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == server.reader.pack(1)


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
def test_a_page_of_a_rebound_name_gets_nothing(server: PackServer, host: str, status: int) -> None:
    assert ask(server, server.root, Host=host)[0] == status


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS"])
def test_only_get(server: PackServer, method: str) -> None:
    status, headers, _ = ask(server, server.root, method)
    assert (status, headers["Allow"]) == (405, "GET")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/packs/0",
        "/wrong-path-of-22-letters/packs/0",
        "ROOT../../../../etc/passwd",
        "ROOT%2e%2e/%2e%2e/etc/passwd",
        "ROOTpacks/../../../etc/passwd",
        "ROOTpacks/-1",
        "ROOTpacks/9999999999999999999999",
        "ROOTstyle.css",
    ],
)
def test_other_paths_are_not_there(server: PackServer, path: str) -> None:
    raw = path.replace("ROOT", server.root).encode().decode("latin-1")
    connection = socket.create_connection(server.server_address[:2], timeout=20)
    connection.sendall(f"GET {raw} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode("latin-1"))
    with connection, connection.makefile("rb") as answer:
        assert answer.read().split(b"\r\n")[0].split()[1] == b"404"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have one loopback address")
def test_no_other_address_is_bound(server: PackServer) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", server.server_port), timeout=5)


def test_a_taken_port_is_an_error(
    server: PackServer, hostile: Dataset, capsys: pytest.CaptureFixture[str]
) -> None:
    for port in (server.server_port, 70000):
        assert main(["view", hostile.url, "--no-browser", "--port", str(port)]) == 1
        assert f"port {port} of 127.0.0.1" in capsys.readouterr().err


def test_ctrl_c_ends_it_in_one_line(hostile: Dataset) -> None:
    command = [sys.executable, "-m", "packstore", "view", hostile.url, "--no-browser"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8"
    )
    with process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[0]
        host, _, path = address.removeprefix("http://").partition("/")
        connection = http.client.HTTPConnection(host, timeout=20)
        connection.request("GET", f"/{path}packs/0")
        assert json.loads(connection.getresponse().read())["number"] == 0
        connection.close()
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (0, "\nended\n", "")
