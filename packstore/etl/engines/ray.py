"""Runs work in tasks of a Ray cluster: one that the script has connected to, or that
RAY_ADDRESS names; else Ray is started on this machine for the job.

Ray repeats a task if its worker is lost, and results are yielded in the order of the
items, so neither timing nor failures change the dataset.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError

from packstore.errors import PackstoreError, sentence
from packstore.etl.engines import in_order
from packstore.tokenizer.dialogue import template

T = TypeVar("T")
R = TypeVar("R")

MAX_RETRIES = 3
"""Maximum repeats of a task after its worker was lost."""


def run(
    work: Callable[[T], R], items: Iterable[T], num_workers: int | None
) -> Iterator[R]:
    """Yield ``work(item)`` for every item, in order.

    At most `num_workers` tasks run at once; None: one for each core of the cluster.

    Raises:
        PackstoreError: Ray does not start, or loses a task too often.
    """
    starts_ray = not ray.is_initialized()
    try:
        if starts_ray:
            _start_ray()
        max_tasks = num_workers or _cluster_cores()
        # In a list: Ray would load a bare reference anew for every task.
        shared_work = [ray.put(work)]
        task: Any = ray.remote(_work_on).options(max_retries=MAX_RETRIES, num_cpus=1)
        submit = partial(task.remote, shared_work)
        cancel = partial(ray.cancel, force=True)
        yield from in_order(
            submit, items, max_pending=2 * max_tasks, result=_result_of, cancel=cancel
        )
    finally:
        if starts_ray:
            # A worker of this call would keep its tokenizer in memory.
            ray.shutdown()


def _start_ray() -> None:
    """Start Ray on this machine, or connect to RAY_ADDRESS."""
    try:
        ray.init(log_to_driver=False, include_dashboard=False, configure_logging=False)
    except Exception as error:  # Ray raises RuntimeError, ConnectionError and others
        raise _start_error(error) from error


def _cluster_cores() -> int:
    try:
        return max(1, int(ray.cluster_resources().get("CPU", 1)))
    except Exception as error:  # the cluster may be lost
        raise _start_error(error) from error


def _start_error(error: Exception) -> PackstoreError:
    rule = "must start, or be reached (RAY_ADDRESS)"
    remedy = "Set engine local, or see its logs"
    return PackstoreError(
        sentence(where="Ray", rule=rule, found=str(error), remedy=remedy)
    )


def _result_of(task: Any) -> Any:
    """Return the result of a task, or raise its error."""
    try:
        return ray.get(task)
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        raise PackstoreError(
            f"a Ray task was lost {MAX_RETRIES + 1} times ({type(error).__name__}); "
            "nothing was written. Look at the chat template and the memory of workers; "
            "set num_workers lower."
        ) from error


# In a worker of Ray.


_loaded_id = ""
"""Id of the work that this process has loaded."""

_loaded_work: Any = None
"""The work, kept for the next task: loading a tokenizer takes as long as tokenizing
30 MB of text.
"""


def _work_on(shared_work: Sequence[Any], item: Any) -> Any:
    """Return the result of an item, in a worker of Ray."""
    global _loaded_id, _loaded_work
    # Tasks fill the cores: threads inside each would only contend.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    template.allow_rendering(template.RENDER_SECONDS, template.RENDER_MEMORY)
    (reference,) = shared_work
    if _loaded_id != reference.hex():
        _loaded_work = None  # frees the memory of an earlier call first
        _loaded_work = ray.get(reference)
        _loaded_id = reference.hex()
    return _loaded_work(item)
