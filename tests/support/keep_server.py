"""Runs one server as long as anybody uses it: ``python keep_server.py KIND FOLDER``.

Each user of the server holds a shared lock on ``FOLDER/users``, which the kernel releases when a
process ends. Once no process holds it, the server is killed and its data removed. Its endpoint, or
the error, is in ``FOLDER/state.json``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from server_kinds import KINDS, Server, Unavailable, free_ports

ATTEMPTS, READY_S, LOOK_S = 4, 60, 0.2


def keep(server: Server, folder: Path) -> None:
    """Starts it, and returns when nobody uses it any more."""
    try:
        program = server.program()
    except Unavailable as reason:
        _tell(folder, {"unavailable": str(reason)})
        return
    for _ in range(ATTEMPTS):
        process, endpoint = _start(server, program, folder)
        try:
            if _wait_until_ready(server, process, endpoint):
                _tell(folder, {"endpoint": endpoint, "pid": process.pid})
                _wait_until_unused(process, folder)
                return
        finally:
            _kill(process)
            shutil.rmtree(folder / "data", ignore_errors=True)
    log = (folder / "log").read_text(errors="replace")[-2000:]
    _tell(folder, {"failed": f"{server.kind} did not start {ATTEMPTS} times: {log}"})


def _start(server: Server, program: list[str], folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    data = folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    ports = free_ports(server.ports)
    # gcsfs reads no times of another zone, and real stores tell none.
    home = {"HOME": str(data), "TMPDIR": str(data), "TZ": "UTC"}
    with open(folder / "log", "ab") as log:
        process = subprocess.Popen(
            [*program, *server.arguments(data, ports)],
            cwd=data,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, **home, **server.environment()},
            start_new_session=True,
            preexec_fn=_die_with_the_keeper,
        )
    return process, f"http://127.0.0.1:{ports[0]}"


def _die_with_the_keeper() -> None:
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _wait_until_ready(server: Server, process: subprocess.Popen[bytes], endpoint: str) -> bool:
    until = time.monotonic() + READY_S
    while time.monotonic() < until and process.poll() is None:
        if server.is_ready(endpoint) and process.poll() is None:
            return True
        time.sleep(0.1)
    return False


def _wait_until_unused(process: subprocess.Popen[bytes], folder: Path) -> None:
    with open(folder / "users", "a", encoding="utf-8") as users:
        while process.poll() is None:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(LOOK_S)
        (folder / "state.json").unlink(missing_ok=True)
        # The next user waits for the lock, finds no state, and starts another server.
        _kill(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _tell(folder: Path, state: dict[str, object]) -> None:
    beside = folder / "state.json.new"
    beside.write_text(json.dumps(state))
    os.replace(beside, folder / "state.json")


if __name__ == "__main__":
    keep(KINDS[sys.argv[1]], Path(sys.argv[2]))
