"""Runs work in tasks of a Ray cluster: connected, named by RAY_ADDRESS, or started
locally.

Ray repeats a task whose worker is lost, and results are yielded in the order of the
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
"""Maximum repeats of a task whose worker was lost."""


def run(
    work: Callable[[T], R], items: Iterable[T], num_workers: int | None
) -> Iterator[R]:
    """Yields ``work(item)`` in order; `num_workers` None: a task for each core of the
    cluster.
    """
    started = not ray.is_initialized()
    try:
        try:
            if started:
                # A worker of an earlier call would keep its tokenizer in memory.
                ray.init(
                    log_to_driver=False,
                    include_dashboard=False,
                    configure_logging=False,
                )
            cores = max(1, int(ray.cluster_resources().get("CPU", 1)))
        except Exception as error:  # of Ray's own, and bare ones
            rule = "must start, or be reached (RAY_ADDRESS)"
            remedy = "Set engine local, or see its logs"
            raise PackstoreError(sentence("Ray", rule, str(error), remedy)) from error
        shared = [ray.put(work)]  # in a list, else Ray would load it for every task
        task: Any = ray.remote(_work_on).options(max_retries=MAX_RETRIES, num_cpus=1)
        submit, cancel = partial(task.remote, shared), partial(ray.cancel, force=True)
        yield from in_order(submit, items, 2 * (num_workers or cores), _result, cancel)
    finally:
        if started:
            ray.shutdown()


def _result(task: Any) -> Any:
    try:
        return ray.get(task)
    except RayTaskError as error:
        raise error.cause from None
    except RayError as error:
        raise PackstoreError(
            f"a Ray task was lost {MAX_RETRIES + 1} times ({type(error).__name__}); "
            "nothing was "
            "written. Look at the chat template and the memory of workers; set "
            "num_workers lower."
        ) from error


_loaded: tuple[str, Any] = "", None
"""Id of the work that this process has loaded, and the work: a tokenizer loads as long
as 30 MB of text are tokenized.
"""


def _work_on(shared: Sequence[Any], item: Any) -> Any:
    global _loaded
    # Tasks fill the cores: threads inside each would only contend.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
    template.allow_rendering(template.RENDER_SECONDS, template.RENDER_MEMORY)
    (reference,) = shared
    if _loaded[0] != reference.hex():
        _loaded = "", None  # frees the memory of an earlier call first
        _loaded = reference.hex(), ray.get(reference)
    return _loaded[1](item)
