"""The local engine: order, laziness, errors, and scripts without a main guard."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from packstore.errors import PackstoreError
from packstore.etl.engines.local import run


def square(x: int) -> int:
    time.sleep(0.01 * (x % 3))  # results arrive out of order
    return x * x


def fail_at_7(x: int) -> int:
    if x == 7:
        raise ValueError("seven")
    return x


def die_at_7(x: int) -> int:
    if x == 7:
        os._exit(9)
    return x


@pytest.mark.parametrize("num_workers", [0, 1, 2, 4, None])
def test_results_keep_the_order_of_the_items(num_workers: int | None) -> None:
    assert list(run(square, range(20), num_workers)) == [x * x for x in range(20)]


@pytest.mark.parametrize("num_workers", [1, 2])
def test_no_items(num_workers: int) -> None:
    assert list(run(square, [], num_workers)) == []


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


@pytest.mark.parametrize("num_workers", [1, 2])
def test_an_error_of_the_work_arrives_unchanged(num_workers: int) -> None:
    with pytest.raises(ValueError, match="seven"):
        list(run(fail_at_7, range(20), num_workers))


def test_a_dead_worker_is_a_named_error() -> None:
    with pytest.raises(PackstoreError, match="a worker process died"):
        list(run(die_at_7, range(20), 2))


def test_a_script_without_a_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(
        "import operator\n"
        "from packstore.etl.engines.local import run\n"
        "print(list(run(operator.neg, range(5), 2)))\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, encoding="utf-8", check=False
    )
    assert done.stdout == "[0, -1, -2, -3, -4]\n", done.stderr
