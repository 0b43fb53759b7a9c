"""Serves the packs of a dataset to a browser on this machine, read-only.

The data may be private. So the server listens on the loopback address only, the path of
its URL holds a random secret, and requests that name another host are refused.
"""

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
from packstore.pages.packs import PackReader, served_page

ADDRESS = "127.0.0.1"

HOSTS = (ADDRESS, "localhost")
"""Hosts that a request may name. A malicious web page may let its own name resolve to
this address (DNS rebinding), but its requests still name its host.
"""

HEADERS = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of every response: nothing is cached, framed, or read by other pages."""

HTML = "text/html; charset=utf-8"
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"

log = logging.getLogger("packstore")


class PackServer(ThreadingHTTPServer):
    """Serves one dataset at `url`, on the loopback address.

    Every user of a machine can connect to its loopback address, so the path of the URL
    begins with a secret, `root`.
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
        self.page = served_page(reader).encode()
        self.root = f"/{secrets.token_urlsafe(16)}/"
        self.url = f"http://{ADDRESS}:{self.server_port}{self.root}"

    def server_bind(self) -> None:
        """Bind the address, without the look-up of its name in the base class."""
        TCPServer.server_bind(self)
        self.server_name = ADDRESS
        self.server_port = self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """Log one line; nothing if the browser has closed its connection."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            text = quote(f"{type(error).__name__}: {error}", 300)
            log.error("internal error: %s", text)


class _Handler(BaseHTTPRequestHandler):
    server: PackServer
    server_version = "packstore"
    sys_version = ""
    timeout = 30
    error_content_type = TEXT
    error_message_format = "%(code)d %(message)s\n"

    def do_GET(self) -> None:
        """Answer with the page or a pack."""
        if not self._names_this_machine():
            self._refuse(HTTPStatus.FORBIDDEN)
            return
        path = self._path_below_root()
        if path is None:
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        if path == "":
            self._answer(self.server.page, HTML)
            return
        match = re.fullmatch(r"packs/([0-9]{1,15})", path)
        if match is None or int(match[1]) >= len(self.server.reader):
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        self._answer_pack(int(match[1]))

    def _names_this_machine(self) -> bool:
        hosts = self.headers.get_all("Host", ())
        return len(hosts) == 1 and re.sub(r":\d+$", "", hosts[0]) in HOSTS

    def _path_below_root(self) -> str | None:
        """Return the path after the secret, without a query; None: it is not below."""
        path = self.path.partition("?")[0]
        root = self.server.root
        # The time of a comparison must not depend on the characters that are right.
        if not secrets.compare_digest(path[: len(root)].encode(), root.encode()):
            return None
        return path[len(root) :]

    def _answer_pack(self, number: int) -> None:
        try:
            value = self.server.reader.pack(number)
        except PackstoreError as error:
            body = json.dumps({"error": message_with_notes(error)}).encode()
            self._answer(body, JSON, HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self._answer(json.dumps(value).encode(), JSON)

    def _refuse_method(self) -> None:
        self._refuse(HTTPStatus.METHOD_NOT_ALLOWED)

    do_HEAD = _refuse_method
    do_POST = _refuse_method
    do_PUT = _refuse_method
    do_PATCH = _refuse_method
    do_DELETE = _refuse_method
    do_OPTIONS = _refuse_method

    def end_headers(self) -> None:
        """Add the headers of every response."""
        for name, value in HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Log a request, without the text of the client."""
        log.debug("request answered")

    def _refuse(self, status: HTTPStatus) -> None:
        self._answer(f"{status.value} {status.phrase}\n".encode(), TEXT, status)

    def _answer(
        self, body: bytes, content_type: str, status: HTTPStatus = HTTPStatus.OK
    ) -> None:
        self.close_connection = True
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
