"""Kills a process at a chosen moment: before its n-th act on the disk, or in its n-th packet.

The product has no code for it: on the disk Python's audit events are counted, and a store is
reached through a relay that counts what the process sends.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 1200
"""After so long a child has hung."""

_WRITES = ("os.rename", "os.link", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")


def in_child(work: Callable[[], Any]) -> Any:
    """Runs `work` in a process of its own; returns its result, or None if it was killed."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        be_child(writing, work)
    os.close(writing)
    return result_of(pid, reading)


def be_child(writing: int, work: Callable[[], Any]) -> None:
    """Runs `work` in this process, sends its result, and exits."""
    signal.alarm(SECONDS)
    try:
        answer = {"value": work()}
    except BaseException:
        answer = {"error": traceback.format_exc()}
    with os.fdopen(writing, "w") as pipe:
        json.dump(answer, pipe)
    os._exit(0)


def result_of(pid: int, reading: int) -> Any:
    """Reads the result of a child; None if it was killed."""
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return None
    answer = json.loads(text) if text else {"error": f"it ended with status {status}"}
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"]


def watch_disk(root: str, n: int | None, log: Path) -> None:
    """Logs all further acts below `root`, and kills this process before the n-th one."""
    lock, count = threading.Lock(), 0
    out = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  as long as the process

    def act(what: str, path: str) -> None:
        nonlocal count
        if not path.startswith(root) or path == str(log):
            return
        with lock:
            count += 1
            out.write(f"{what} {os.path.relpath(path, root)}\n")
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = args
            if isinstance(path, str) and flags & (os.O_WRONLY | os.O_RDWR):
                act("open", path)
        elif event in _WRITES and isinstance(args[0], str):
            path = args[1] if event in ("os.rename", "os.link") else args[0]
            act(event, os.path.abspath(path))

    real = os.fsync

    def fsync(handle: int) -> None:
        act("fsync", os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    os.fsync = fsync
    sys.addaudithook(hook)


def relay(
    listener: socket.socket, server: tuple[str, int], pid: int, n: int | None, log: Path
) -> None:
    """Relays connections of `listener` until killed; kills `pid` in its n-th packet.

    Of the n-th packet, nothing, half or all is relayed, in turn.
    """
    lock, count = threading.Lock(), 0
    out = open(log, "a", encoding="utf-8", buffering=1)  # noqa: SIM115  as long as the process

    def packet(data: bytes, label: str) -> bytes:
        nonlocal count
        with lock:
            count += 1
            out.write(f"{label}\n")
            if count != n:
                return data
            part = (b"", data[: len(data) // 2], data)[n % 3]
            out.write(f"killed after {len(part)} of {len(data)} bytes of it\n")
            if not part:
                os.kill(pid, signal.SIGKILL)
            return part

    def killed() -> None:
        if n is not None and count == n:
            os.kill(pid, signal.SIGKILL)

    while True:
        client, _ = listener.accept()
        threading.Thread(target=_pass_on, args=(client, server, packet, killed)).start()


def _pass_on(
    client: socket.socket,
    server: tuple[str, int],
    packet: Callable[[bytes, str], bytes],
    killed: Callable[[], None],
) -> None:
    label = ""
    with client, socket.create_connection(server) as upstream, selectors.DefaultSelector() as ready:
        ready.register(client, selectors.EVENT_READ)
        ready.register(upstream, selectors.EVENT_READ)
        while True:
            for key, _ in ready.select():
                try:
                    data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                    if not data:
                        return
                    if key.fileobj is upstream:
                        client.sendall(data)
                        continue
                    head = data.split(b"\r\n", 1)[0].split(b"?")[0]
                    fresh = head.split(b" ")[0] in (b"GET", b"PUT", b"POST", b"HEAD", b"DELETE")
                    label = head.decode("latin-1") if fresh else f"{label.removesuffix(' …')} …"
                    upstream.sendall(packet(data, label))
                    killed()
                except OSError:
                    return
