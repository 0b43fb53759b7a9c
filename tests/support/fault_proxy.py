"""A proxy between a client and a real server, which breaks requests at a given rate.

Each request draws its fault from a seeded generator; `FATES` lists them. The request is
forwarded with its own `Host`, so that signatures stay valid.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import random
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from smoke import Ranges

LATE_S = STALE_S = 3.0
LISTING = re.compile(r"[?&]list-type=2(&|$)")
XML = (
    '<?xml version="1.0" '
    'encoding="UTF-8"?><Error><Code>{}</Code><Message>m</Message></Error>'
)
ERRORS = {
    "error 403": (403, ""),
    "error 500": (500, "InternalError"),
    "error 503": (503, ""),
    "slow down": (503, "SlowDown"),
}
READING, WRITING, REMOVING = {"GET"}, {"PUT", "POST"}, {"PUT", "DELETE"}
ALL = {"GET", "HEAD", "PUT", "POST", "DELETE"}
FATES: dict[str, set[str]] = {
    "refuse": ALL,  # the connection ends before anything is done
    **dict.fromkeys(("error 500", "error 503", "slow down"), ALL),
    "delay": ALL,
    "done but lost": ALL,  # it is done, and the connection ends without an answer
    "done but 500": ALL,  # it is done, and an error is returned
    "cut": READING,  # half of the body, then the connection ends
    "truncate": READING,  # half of the body, and headers that fit it
    "flip": READING,  # one bit of the body
    "flip up": WRITING,  # one bit of what is sent
    "cut up": WRITING,  # half of what is sent
}
RARE = {
    "error 403": ALL,
    "late": REMOVING,  # the connection ends, and it is done up to LATE_S later
    "stale": READING,  # a listing gets an answer that it got up to STALE_S before
    "wait": ALL,  # as "delay", up to LATE_S
}
"""Faults that are drawn only if `kinds` names them."""


@dataclass
class Answer:
    """An answer of the server."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass
class Faults:
    """Rate and kinds of the faults.

    Attributes:
        rate: share of the requests that fail, 0 to 1.
        seed: of the fates.
        kinds: which of `FATES` and `RARE`; all of `FATES` if empty.
        after: requests that pass before the first fault.
        path: only requests whose path has it count, and fail.
        unconditional: a put that must replace nothing, and is refused, looks done.
        most: number of faults, at most.
        counts: how often each was drawn, and the number of requests.
    """

    rate: float
    seed: int = 0
    kinds: Sequence[str] = ()
    after: int = 0
    path: str = ""
    unconditional: bool = False
    most: int = 1 << 30
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng, self._lock = random.Random(self.seed), threading.Lock()

    def draw(self, method: str, path: str) -> tuple[str, random.Random]:
        """The fate of the next request, empty if it passes, and a generator for its
        details.
        """
        if self.path not in path:
            return "", self._rng
        with self._lock:
            self.counts["requests"] += 1
            details = random.Random(self._rng.random())
            fitting = [k for k in self.kinds or FATES if method in (FATES | RARE)[k]]
            met = self.counts.total() - self.counts["requests"]
            spared = (
                self._rng.random() >= self.rate or self.counts["requests"] <= self.after
            )
            if spared or met >= self.most or not fitting:
                return "", details
            kind = self._rng.choice(fitting)
            self.counts[kind] += 1
        return kind, details


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def handle_any(self) -> None:
        kind, rng = self.server.faults.draw(self.command, self.path)
        body = self._body()
        if kind == "refuse":
            self._hang_up()
        elif kind in ERRORS:
            self._fail(kind)
        elif kind == "stale" and (old := self.server.listed(self.path)):
            self._answer(old)
        else:
            if kind in ("delay", "wait"):
                time.sleep(rng.uniform(0.05, 0.3 if kind == "delay" else LATE_S))
            if kind == "late":
                self._hang_up()
                time.sleep(rng.uniform(0, LATE_S))
            if kind == "flip up" and body:
                body = flipped(body, rng)
            try:
                answer = self._forward(
                    body, len(body) // 2 if kind == "cut up" else len(body)
                )
            except (OSError, http.client.HTTPException):
                self._hang_up()
                return
            if (
                self.command == "GET"
                and answer.status == 200
                and LISTING.search(self.path)
            ):
                self.server.lists[self.path] = (time.monotonic(), answer)
            if self.server.faults.unconditional and answer.status == 412:
                answer = Answer(200, [], b"")
            self._give(kind, answer, rng)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any

    def _give(self, kind: str, answer: Answer, rng: random.Random) -> None:
        half = answer.body[: len(answer.body) // 2]
        if kind in ("done but lost", "cut up", "late"):
            self._hang_up()
        elif kind == "done but 500":
            self._fail("error 500")
        elif kind == "cut" and answer.body:
            self._answer(answer, half)
            self._hang_up()
        elif kind == "truncate":
            self._answer(Answer(answer.status, answer.headers, half))
        elif kind == "flip" and answer.body:
            self._answer(
                Answer(answer.status, answer.headers, flipped(answer.body, rng))
            )
        else:
            self._answer(answer)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _forward(self, body: bytes, sent: int) -> Answer:
        connection = http.client.HTTPConnection(*self.server.behind, timeout=60)
        with contextlib.closing(connection):
            connection.putrequest(self.command, self.path, True, True)
            dropped = ("transfer-encoding", "content-length", "expect", "connection")
            for name, value in self.headers.items():
                if name.lower() not in dropped:
                    connection.putheader(name, value)
            connection.putheader("Content-Length", str(len(body)))
            connection.endheaders(body[:sent])
            if sent < len(body):
                raise OSError("cut on the way up")
            response = connection.getresponse()
            hop = ("transfer-encoding", "connection", "keep-alive")
            headers = [(n, v) for n, v in response.getheaders() if n.lower() not in hop]
            return Answer(response.status, headers, response.read())

    def _fail(self, kind: str) -> None:
        status, code = ERRORS[kind]
        body = XML.format(code).encode() if code else b""
        self._answer(Answer(status, [("Content-Type", "application/xml")], body))

    def _answer(self, answer: Answer, sent: bytes | None = None) -> None:
        head = self.command == "HEAD"
        self.send_response_only(answer.status)
        for name, value in answer.headers:
            if name.lower() != "content-length" or head:
                self.send_header(name, value)
        if not head or "content-length" not in {
            name.lower() for name, _ in answer.headers
        }:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if not head:
            self.wfile.write(answer.body if sent is None else sent)

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        """Overrides the printing of each request."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, behind: tuple[str, int], faults: Faults) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind, self.faults = behind, faults
        self.lists: dict[str, tuple[float, Answer]] = {}

    def listed(self, path: str) -> Answer | None:
        """Returns the answer to a listing a short time ago."""
        at, answer = self.lists.get(path, (-STALE_S, None))
        return answer if time.monotonic() - at < STALE_S else None

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that have disconnected."""


def flipped(data: bytes, rng: random.Random) -> bytes:
    """`data` with one bit changed."""
    out = bytearray(data)
    out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)


@contextlib.contextmanager
def faulty(endpoint: str, faults: Faults) -> Iterator[str]:
    """The endpoint of a proxy before the server at `endpoint`."""
    parts = urlsplit(endpoint)
    with _running(_Server((str(parts.hostname), parts.port or 80), faults)) as address:
        yield address


@contextlib.contextmanager
def website(folder: Path) -> Iterator[str]:
    """The endpoint of a server that gives the files of a folder, and ranges of them."""
    handler = functools.partial(Ranges, directory=str(folder))
    with _running(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as address:
        yield address


@contextlib.contextmanager
def _running(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
