"""The local engine: order, laziness, errors, dead workers, and scripts without a main
guard.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from small_jobs import write_tokenizer

from packstore.errors import PackstoreError
from packstore.etl.engines import ENGINES

run = ENGINES.load("local")


def square(x: int) -> int:
    time.sleep(0.01 * (x % 3))  # results arrive out of order
    return x * x


def process_and_array(x: int) -> tuple[int, np.ndarray]:
    time.sleep(0.02)
    return os.getpid(), np.full(1000, x)


def in_a_worker(act: Callable[[], object], parent: int, x: int) -> int:
    time.sleep(0.02)
    if os.getpid() != parent:
        act()
    return x


def fail() -> None:
    raise ValueError("seven")


def die() -> None:
    os._exit(9)


def end_by_a_kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_by_the_limit_of_time() -> None:
    os.kill(os.getpid(), signal.SIGPROF)


def do_not_come_back() -> None:
    class Local(Exception): ...

    raise Local("of a class that no other process knows")


@pytest.mark.parametrize("num_workers", [0, 1, 3, None])
def test_results_keep_the_order_of_the_items(num_workers: int | None) -> None:
    assert list(run(square, range(20), num_workers)) == [x * x for x in range(20)]
    assert list(run(square, [], num_workers)) == []


def test_processes_share_the_work_and_their_arrays_can_be_written_to() -> None:
    pids = set()
    for x, (pid, array) in enumerate(run(process_and_array, range(150), 2)):
        pids.add(pid)
        np.testing.assert_array_equal(array, np.full(1000, x))
        array += 1
    assert len(pids) == 2
    assert os.getpid() not in pids  # it reads and writes


def test_items_are_taken_as_they_are_needed() -> None:
    taken = []

    def items() -> Iterator[int]:
        for i in range(1000):
            taken.append(i)
            yield i

    results = run(square, items(), 2)
    next(results)
    assert len(taken) <= 5
    results.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("act", "error", "text"),
    [
        (fail, ValueError, "^seven$"),
        (do_not_come_back, PackstoreError, "Local"),
        (die, PackstoreError, "exit code 9"),
        (end_by_a_kill, PackstoreError, "SIGKILL"),
        (end_by_the_limit_of_time, PackstoreError, "900 s"),
    ],
)
def test_an_error_or_death_of_a_worker_ends_the_work(
    act: Callable[[], None], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        list(run(partial(in_a_worker, act, os.getpid()), range(1000), 2))


def only_here(parent: int) -> int:
    if os.getpid() != parent:
        raise ImportError("no module of 7")
    return parent


class Unreadable:
    """An item that a worker process cannot read, as if its module had changed."""

    def __reduce__(self) -> tuple[Callable[[int], int], tuple[int]]:
        return only_here, (os.getpid(),)


def test_an_item_that_a_worker_cannot_read_is_an_error_of_that_name() -> None:
    with pytest.raises(ImportError, match="no module of 7"):
        list(run(partial(in_a_worker, int, os.getpid()), [Unreadable()] * 1000, 2))


class LoadsOnlyHere:
    """Work that the process that made it can load, and no other: a file that only it
    sees, say.
    """

    def __init__(self) -> None:
        self.home = os.getpid()

    def load(self) -> None:
        if os.getpid() != self.home:
            raise FileNotFoundError("no tokenizer here")

    def __call__(self, x: int) -> int:
        time.sleep(0.02)
        return x


def test_work_that_a_worker_cannot_load_is_an_error_of_that_name() -> None:
    with pytest.raises(FileNotFoundError, match="no tokenizer here"):
        list(run(LoadsOnlyHere(), range(1000), 2))


def test_chats_in_a_daemon_of_a_script_without_a_main_guard(tmp_path: Path) -> None:
    """Templates run in worker processes, also where multiprocessing allows no
    children.
    """
    script, tokenizer = (
        tmp_path / "job.py",
        write_tokenizer(tmp_path / "tokenizer.json"),
    )
    script.write_text(
        "import multiprocessing, packstore\n"
        "turns = [{'role': r, 'content': 'a'} for r in ('user', 'assistant')]\n"
        "def job():\n"
        f"    dataset = packstore.pack([{{'messages': turns}}] * 9, "
        f"{str(tmp_path / 'out')!r},\n"
        f"        {str(tokenizer)!r}, chat_template='chatml', num_workers=2)\n"
        "    print(len(dataset), flush=True)\n"
        "daemon = multiprocessing.get_context('fork').Process(target=job, "
        "daemon=True)\n"
        "daemon.start()\n"
        "daemon.join()\n",
        encoding="utf-8",
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, encoding="utf-8", check=False
    )
    assert done.stdout == "1\n", done.stderr
