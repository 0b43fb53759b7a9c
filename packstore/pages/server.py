"""Serves the packs of a dataset to a browser on this machine, read-only."""

from __future__ import annotations

import json
import logging
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any
from urllib.parse import parse_qsl

from packstore.errors import ConfigError, PackstoreError, StorageError, quote, told
from packstore.pages.pack_page import pack_page
from packstore.pages.packs import PackReader
from packstore.pages.search import Query, search

ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")
"""Names of this machine that a request may use: a page elsewhere whose name was rebound to this
address uses another."""

TIMEOUT_S = 30
logger = logging.getLogger("packstore")


class PackServer(ThreadingHTTPServer):
    """Serves one dataset on the loopback address, below a path that cannot be guessed.

    Every user of a machine can connect to its loopback address, so that the path is a secret.

    Args:
        reader: reads the packs.
        port: 0: any that is free.

    Attributes:
        url: of the page.

    Raises:
        StorageError: the port is taken, or not permitted.
    """

    daemon_threads = True

    def __init__(self, reader: PackReader, port: int = 0) -> None:
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "must lie in 0..65535"
            raise StorageError(f"port {port} of {ADDRESS}: {reason}. Give another --port.") from (
                error
            )
        self.reader = reader
        self.page = pack_page(reader, None)[0].encode()
        self.root = f"/{secrets.token_urlsafe(16)}/"
        self.url = f"http://{ADDRESS}:{self.server_port}{self.root}"

    def server_bind(self) -> None:
        """Binds the address, without the name service that the base class asks for its name."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs one line, and nothing for a browser that has closed its connection."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            logger.error("internal error: %s", quote(f"{type(error).__name__}: {error}", 300))


class _Handler(BaseHTTPRequestHandler):
    server: PackServer
    server_version, sys_version = "packstore", ""
    timeout = TIMEOUT_S
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def do_GET(self) -> None:
        """Answers the page, a pack or a search."""
        host = (self.headers.get("Host") or "").rpartition(":")
        name = host[0] if host[1] and host[2].isdecimal() else host[2]
        if name not in HOSTS or len(self.headers.get_all("Host", ())) != 1:
            return self._refuse(HTTPStatus.FORBIDDEN)
        path, _, query = self.path.partition("?")
        root = self.server.root
        if not secrets.compare_digest(path[: len(root)].encode(), root.encode()):
            return self._refuse(HTTPStatus.NOT_FOUND)
        what, _, number = path[len(root) :].partition("/")
        reader = self.server.reader
        try:
            if not what:
                return self._answer(self.server.page, "text/html; charset=utf-8")
            if what == "packs" and (pack := _whole(number)) is not None and pack < len(reader):
                return self._json(reader.pack(pack))
            if what == "search" and not number:
                given = dict(parse_qsl(query, max_num_fields=20))
                return self._json(search(reader, Query.of(given), _first(given)))
        except ConfigError as error:
            return self._json({"error": told(error)}, HTTPStatus.BAD_REQUEST)
        except PackstoreError as error:
            return self._json({"error": told(error)}, HTTPStatus.INTERNAL_SERVER_ERROR)
        return self._refuse(HTTPStatus.NOT_FOUND)

    def _only_get(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _only_get

    def end_headers(self) -> None:
        """Adds the headers of every answer: nothing is cached, framed, or read by other pages."""
        for name, value in {
            "Cache-Control": "no-store",
            "Cross-Origin-Opener-Policy": "same-origin",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Content-Security-Policy": "frame-ancestors 'none'",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Logs a request for --log-level debug, without what the client wrote."""
        logger.debug("request answered")

    def _json(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._answer(json.dumps(value).encode(), "application/json", status)

    def _refuse(self, status: HTTPStatus) -> None:
        text = f"{status.value} {status.phrase}\n"
        self._answer(text.encode(), "text/plain; charset=utf-8", status)

    def _answer(self, body: bytes, type_: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", type_)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _first(given: dict[str, str]) -> int:
    """Returns the pack at which a search begins."""
    first = _whole(given.get("from", "0"))
    if first is None:
        raise ConfigError("from must be the number of a pack.")
    return first


def _whole(text: str) -> int | None:
    """Parses a whole number of at most 15 digits; None: it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None
