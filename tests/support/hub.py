"""A Hugging Face hub on this machine: the part of its API by which files are pushed and
read.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

REPO = r"(?:(?P<kind>datasets|models)/)?(?P<name>[\w.-]+/[\w.-]+)"
Files = dict[str, bytes]
Hubs = dict[str, Files]
"""Repository, as ``datasets/me/prefs`` or ``models/me/run`` -> its files."""


class Handler(BaseHTTPRequestHandler):
    """Answers for `repos`; `commits` lists the paths that each commit adds and
    deletes.
    """

    repos: Hubs
    commits: list[tuple[str, list[str], list[str]]]
    meanwhile: Files
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = unquote(urlsplit(self.path).path)
        if path == "/api/repos/create":
            asked = json.loads(body)
            name = asked["name"] if "/" in asked["name"] else f"me/{asked['name']}"
            key = f"{asked.get('type') or 'model'}s/{name}"
            self.repos.setdefault(key, {})
            self._json(
                {"url": f"{self._here()}/{key.removeprefix('models/')}", "name": name}
            )
        elif match := re.fullmatch(f"/api/{REPO}/preupload/main", path):
            modes = {"uploadMode": "regular", "shouldIgnore": False}
            files = [{"path": f["path"], **modes} for f in json.loads(body)["files"]]
            self.repos.setdefault(key_of(match), {}).update(self.meanwhile)
            self._json({"files": files})
        elif match := re.fullmatch(f"/api/{REPO}/commit/main", path):
            lines = [json.loads(line) for line in body.splitlines()]
            files_before = self.repos.setdefault(key_of(match), {})
            parent = lines[0]["value"].get("parentCommit")
            if parent not in (None, revision(files_before)):
                self._send(b"{}", 412, {"Content-Type": "application/json"})
                return
            self._commit(key_of(match), lines)
            place = f"{self._here()}/{key_of(match).removeprefix('models/')}"
            oid = revision(self.repos[key_of(match)])
            self._json({"commitUrl": f"{place}/commit/{oid}", "commitOid": oid})
        elif match := re.fullmatch(f"/api/{REPO}/paths-info/[^/]+", path):
            asked = json.loads(body)["paths"]
            found = tree(self.repos.get(key_of(match), {}))
            self._json([found[p] for p in asked if p in found])
        else:
            self._json({})

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(f"/{REPO}/resolve/[^/]+/(?P<file>.+)", path):
            self._file(self.repos.get(key_of(match)), match["file"])
        elif match := re.fullmatch(f"/api/{REPO}/tree/[^/]+/?(?P<folder>.*)", path):
            self._tree(self.repos.get(key_of(match)), match["folder"])
        elif (match := re.fullmatch(f"/api/{REPO}(/revision/[^/]+)?", path)) and (
            key_of(match) in self.repos
        ):
            files = self.repos[key_of(match)]
            siblings = [{"rfilename": name} for name in files]
            self._json(
                {"id": match["name"], "sha": revision(files), "siblings": siblings}
            )
        elif path == "/api/whoami-v2":
            self._json({"name": "me", "type": "user"})
        else:
            self._missing("RepoNotFound")

    def _commit(self, key: str, lines: list[dict[str, Any]]) -> None:
        files, added, deleted = self.repos.setdefault(key, {}), [], []
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
                added.append(value["path"])
            elif line["key"] == "deletedFile":
                del files[value["path"]]
                deleted.append(value["path"])
        self.commits.append((key, added, deleted))

    def _tree(self, files: Files | None, folder: str) -> None:
        if files is None:
            return self._missing("RepoNotFound")
        below = "recursive=True" in self.path or "recursive=true" in self.path
        prefix = f"{folder}/" if folder else ""
        found = [e for p, e in tree(files).items() if p.startswith(prefix)]
        if not found and folder:
            return self._missing("EntryNotFound")
        return self._json(
            [e for e in found if below or "/" not in e["path"][len(prefix) :]]
        )

    def _file(self, files: Files | None, path: str) -> None:
        if files is None or path not in files:
            return self._missing(
                "EntryNotFound" if files is not None else "RepoNotFound"
            )
        data, status = files[path], 200
        headers = {"ETag": f'"{digest(data)}"', "X-Repo-Commit": revision(files)}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start, stop = (
                int(match[1]),
                min(int(match[2] or len(data)), len(data) - 1) + 1,
            )
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            data, status = data[start:stop], 206
        return self._send(
            data, status, {"Content-Type": "application/octet-stream", **headers}
        )

    def _missing(self, code: str) -> None:
        self._send(
            b"{}", 404, {"X-Error-Code": code, "Content-Type": "application/json"}
        )

    def _json(self, value: Any) -> None:
        self._send(
            json.dumps(value).encode(), 200, {"Content-Type": "application/json"}
        )

    def _send(self, data: bytes, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _here(self) -> str:
        return f"http://{self.headers['Host']}"

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


def key_of(match: re.Match[str]) -> str:
    return f"{match['kind'] or 'models'}/{match['name']}"


def digest(data: bytes) -> str:
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()


def revision(files: Files) -> str:
    """Of its files: clients keep what they have read of a revision."""
    return digest(
        "".join(f"{path}{digest(data)}" for path, data in files.items()).encode()
    )


def tree(files: Files) -> dict[str, dict[str, Any]]:
    """Files and folders as the hub lists them, by path."""
    found: dict[str, dict[str, Any]] = {}
    for path, data in files.items():
        for parent in list(Path(path).parents)[:-1]:
            name = parent.as_posix()
            found[name] = {
                "type": "directory",
                "path": name,
                "size": 0,
                "oid": digest(b""),
            }
        found[path] = {
            "type": "file",
            "path": path,
            "size": len(data),
            "oid": digest(data),
        }
    return found


def folder_files(folder: Path) -> Files:
    """The files of a folder, to put into a repository."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


@contextlib.contextmanager
def served(
    repos: Hubs, meanwhile: Files | None = None
) -> Iterator[tuple[dict[str, str], list[Any]]]:
    """Serves `repos`; yields the environment in which a process uses this hub, and its
    commits.

    `meanwhile` are files that somebody else commits while a client uploads.
    """
    commits: list[Any] = []
    state = {"repos": repos, "commits": commits, "meanwhile": meanwhile or {}}
    handler = type("OwnHandler", (Handler,), state)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    # The hub's own way of transfer needs servers besides.
    env = {"HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    try:
        yield (
            {**env, "HF_TOKEN": "hf_of_this_machine", "HF_DATASETS_OFFLINE": "0"},
            commits,
        )
    finally:
        server.shutdown()
        server.server_close()
