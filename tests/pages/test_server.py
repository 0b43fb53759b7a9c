"""The server of ``packstore view``: this machine only, read-only, and a search that is bounded."""

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
from typing import Any
from urllib.parse import urlencode

import pytest
from tokenizers import Tokenizer

from packstore.cli import main
from packstore.io.dataset.dataset import Dataset
from packstore.pages import search as searching
from packstore.pages.packs import PackReader
from packstore.pages.search import Query, search
from packstore.pages.server import PackServer


def decoder(dataset: Dataset) -> Any:
    tokenizer = Tokenizer.from_file(str(Path(dataset.url).parent / "tokenizer.json"))
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=False)


@pytest.fixture(scope="module")
def server(hostile: Dataset) -> Iterator[PackServer]:
    with PackServer(PackReader(hostile, decoder(hostile))) as made:
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


def test_the_page_a_pack_and_a_search(server: PackServer, hostile: Dataset) -> None:
    status, headers, page = ask(server, server.root)
    assert status == 200
    assert b"connect-src 'self'" in page
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    status, headers, body = ask(server, f"{server.root}packs/1")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == server.reader.pack(1)
    status, _, body = ask(server, f"{server.root}search?record=b.jsonl:3&side=rejected")
    (hit,) = json.loads(body)["hits"]
    assert (hit["id"], hit["side"]) == (str((1 << 40) + 2), "rejected")


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8765", 200),  # forwarded by ssh from another port
        ("127.0.0.1", 200),
        ("evil.example", 403),
        ("evil.example:80", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:80", 403),
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
        "ROOTpacks/1e3",
        "ROOTpacks/²",
        "ROOTpacks/999999",
        "ROOTpacks/9999999999999999999999",
        "ROOTstyle.css",
        "ROOTsearch/0",
    ],
)
def test_other_paths_are_not_there(server: PackServer, path: str) -> None:
    found = path.replace("ROOT", server.root).encode().decode("latin-1")
    connection = socket.create_connection(server.server_address[:2], timeout=20)
    connection.sendall(f"GET {found} HTTP/1.0\r\nHost: localhost\r\n\r\n".encode("latin-1"))
    with connection, connection.makefile("rb") as answer:
        assert answer.read().split(b"\r\n")[0].split()[1] == b"404"


@pytest.mark.parametrize("query", ["shortest=x", "lowest=nan", "id=-1", "from=-1", "from=1.5"])
def test_a_wrong_search_gets_a_sentence(server: PackServer, query: str) -> None:
    status, _, body = ask(server, f"{server.root}search?{query}")
    assert status == 400
    assert json.loads(body)["error"].endswith(".")


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


@pytest.mark.parametrize("error", [BrokenPipeError(), TimeoutError(), KeyError("\x1b[2J")])
def test_a_browser_that_leaves_is_no_error(
    server: PackServer, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    try:
        raise error
    except type(error):
        server.handle_error(None, None)
    own = isinstance(error, KeyError)
    assert [r.message.isprintable() for r in caplog.records] == [True] * own


QUERIES: list[dict[str, str]] = [
    {"text": "GOOD 1"},
    {"text": "</script>", "side": "rejected"},
    {"text": "🙂", "lowest": "2", "highest": "3"},
    {"shortest": "300", "longest": "420"},
    {"id": "7"},
    {"id": str((1 << 40) + 7), "side": "chosen"},
    {"record": "5"},
    {"record": "a.jsonl"},
    {"record": "b.jsonl:20"},
    {"record": "c.jsonl:20"},
    {"text": "nowhere"},
]


def meets(own: dict[str, Any], text: str, query: dict[str, str]) -> bool:
    """The plain reference of one sequence."""
    path, line = own["place"].rsplit(", line ", 1)
    name, colon, wanted = query.get("record", "").rpartition(":")
    if not wanted.isdigit():
        name, wanted = wanted, ""
    assert not (name and wanted) or colon
    return (
        query.get("text", "").lower() in text.lower()
        and query.get("side", own["side"]) == own["side"]
        and query.get("id", own["id"]) == own["id"]
        and name in path
        and wanted in ("", line)
        and float(query.get("shortest", 0)) <= own["length"] <= float(query.get("longest", 1e9))
        and float(query.get("lowest", -1e9)) <= own["reward"] <= float(query.get("highest", 1e9))
    )


@pytest.mark.parametrize("query", QUERIES, ids=urlencode)
@pytest.mark.parametrize("bound", [None, 1], ids=["at once", "in parts"])
def test_a_search_finds_what_a_plain_scan_finds(
    hostile: Dataset, query: dict[str, str], bound: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if bound is not None:
        monkeypatch.setattr(searching, "COST", bound)
    reader = PackReader(hostile, decoder(hostile))
    expected = []
    for number in range(len(reader)):
        pack = reader.read(number)
        for i in range(len(pack.lengths)):
            start, stop = pack.seq_boundaries[i : i + 2]
            text = decoder(hostile)(pack.input_ids[start:stop].tolist())
            if meets(reader.sequence(pack, i), text, query):
                expected.append((number, i))
    found, first, requests = [], 0, 0
    while first is not None and requests <= len(reader):
        part = search(reader, Query.of(query), first)
        found += [(hit["pack"], hit["sequence"]) for hit in part["hits"]]
        first, requests = part["next"], requests + 1
    assert first is None
    assert found == expected
    assert bool(expected) == (query not in ({"record": "c.jsonl:20"}, {"text": "nowhere"}))
    assert requests == 1 or bound is not None


def test_hits_of_one_request_are_bounded(hostile: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(searching, "HITS", 1)
    part = search(PackReader(hostile, None), Query.of({"side": "chosen"}))
    assert part["next"] == 1
    assert {hit["pack"] for hit in part["hits"]} == {0}


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
