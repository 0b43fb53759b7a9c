"""Engines that run the workers: one file, and one line in :data:`ENGINES`, per engine.

An engine is a function ``run(work, items, num_workers) -> Iterator`` that applies the
picklable function `work` to every item and yields the results in the order of the
items, holding only a bounded number of items in flight. The result of a job never
depends on the engine or its number of workers. (These engines are not the engines of a
tokenizer.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from packstore.registry import Registry

Engine = Callable[[Callable[[Any], Any], Iterable[Any], int | None], Iterator[Any]]

Run = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""Applies a function to items: an engine with its number of workers, or ``map``."""

ENGINES: Registry[Engine] = Registry(
    "engine",
    {
        "local": "packstore.etl.engines.local:run",
        "ray": "packstore.etl.engines.ray:run",
    },
    extras={"ray": "ray"},
)


def engine_with(name: str, num_workers: int | None) -> Run:
    """Return the engine of that name with its number of workers; None: it decides."""
    engine = ENGINES.load(name)

    def run(work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return engine(work, items, num_workers)

    return run


def in_order(
    submit: Callable[[Any], Any],
    items: Iterable[Any],
    max_pending: int,
    result: Callable[[Any], Any] = Future.result,
    cancel: Callable[[Any], Any] = Future.cancel,
) -> Iterator[Any]:
    """Yield the results of the items' tasks, in order; an error cancels the others.

    Args:
        submit: starts the task of an item.
        items: the items.
        max_pending: maximum number of tasks that run or wait, besides the first.
        result: waits for a task, and returns its result.
        cancel: cancels a task.
    """
    pending: deque[Any] = deque()

    def first_result() -> Any:
        # The task stays among the pending ones until it is done: else an error while
        # waiting would not cancel it.
        value = result(pending[0])
        pending.popleft()
        return value

    try:
        for item in items:
            pending.append(submit(item))
            if len(pending) > max_pending:
                yield first_result()
        while pending:
            yield first_result()
    finally:
        for task in pending:
            cancel(task)
