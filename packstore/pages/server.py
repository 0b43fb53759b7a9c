"""Serves the packs of a dataset to a browser on this machine, read-only."""

from __future__ import annotations

import json
import logging
import re
import secrets
import sys
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

from packstore.errors import PackstoreError, StorageError, message_with_notes, quote
from packstore.pages.packs import PackReader, pack_page

ADDRESS = "127.0.0.1"
HOSTS = (ADDRESS, "localhost")
"""Names of this machine that a request may use: a page elsewhere whose name was rebound
to this address uses another.
"""

HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of every answer: nothing is cached, framed, or read by other pages."""

TEXT = "text/plain; charset=utf-8"
logger = logging.getLogger("packstore")


class PackServer(ThreadingHTTPServer):
    """Serves one dataset on the loopback address at `url`, whose path cannot be
    guessed.

    Every user of a machine can connect to its loopback address, so that the path is a
    secret.
    """

    daemon_threads = True

    def __init__(self, reader: PackReader, port: int = 0) -> None:
        try:
            super().__init__((ADDRESS, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or "must lie in 0..65535"
            text = f"port {port} of {ADDRESS}: {reason}. Give another --port."
            raise StorageError(text) from error
        self.reader = reader
        self.page = pack_page(reader, None)[0].encode()
        self.root = f"/{secrets.token_urlsafe(16)}/"
        self.url = f"http://{ADDRESS}:{self.server_port}{self.root}"

    def server_bind(self) -> None:
        """Binds the address, without the name service that the base class asks for its
        name.
        """
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """Logs one line, and nothing for a browser that has closed its connection."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            logger.error(
                "internal error: %s", quote(f"{type(error).__name__}: {error}", 300)
            )


class _Handler(BaseHTTPRequestHandler):
    server: PackServer
    server_version, sys_version = "packstore", ""
    timeout = 30
    error_content_type = TEXT
    error_message_format = "%(code)d %(message)s\n"

    def do_GET(self) -> None:
        """Answers the page or a pack."""
        hosts = self.headers.get_all("Host", ())
        if len(hosts) != 1 or re.sub(r":\d+$", "", hosts[0]) not in HOSTS:
            return self._refuse(HTTPStatus.FORBIDDEN)
        path, root = self.path.partition("?")[0], self.server.root
        if not secrets.compare_digest(path[: len(root)].encode(), root.encode()):
            return self._refuse(HTTPStatus.NOT_FOUND)
        rest = path[len(root) :]
        if not rest:
            return self._answer(self.server.page, "text/html; charset=utf-8")
        number = re.fullmatch(r"packs/([0-9]{1,15})", rest)
        if number is None or int(number[1]) >= len(self.server.reader):
            return self._refuse(HTTPStatus.NOT_FOUND)
        try:
            value, status = self.server.reader.pack(int(number[1])), HTTPStatus.OK
        except PackstoreError as error:
            value, status = (
                {"error": message_with_notes(error)},
                HTTPStatus.INTERNAL_SERVER_ERROR,
            )
        return self._answer(json.dumps(value).encode(), "application/json", status)

    def _only_get(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED)

    do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = _only_get

    def end_headers(self) -> None:
        """Adds the headers of every answer."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Logs a request, without what the client wrote."""
        logger.debug("request answered")

    def _refuse(self, status: HTTPStatus) -> None:
        self._answer(f"{status.value} {status.phrase}\n".encode(), TEXT, status)

    def _answer(
        self, body: bytes, type_: str, status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", type_)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
