"""Engines that run the workers: one file and one line per engine.

An engine is a function ``run(work, items, num_workers) -> Iterator`` that applies the
picklable `work` to every item and yields the results in the order of the items, holding
only a bounded number of items in flight. The result of a job never depends on the
engine or its number of workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from packstore.registry import Registry

Engine = Callable[[Callable[[Any], Any], Iterable[Any], int | None], Iterator[Any]]

Run = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""An engine and its number of workers, or ``map``: yields the results on items, in
order.
"""

ENGINES: Registry[Engine] = Registry(
    "engine",
    {
        "local": "packstore.etl.engines.local:run",
        "ray": "packstore.etl.engines.ray:run",
    },
    extras={"ray": "ray"},
)


def engine_with(name: str, num_workers: int | None) -> Run:
    """Returns the engine of that name with its number of workers; None: it decides."""
    engine = ENGINES.load(name)
    return lambda work, items: engine(work, items, num_workers)


def in_order(
    submit: Callable[[Any], Any],
    items: Iterable[Any],
    most: int,
    result: Callable[[Any], Any] = Future.result,
    cancel: Callable[[Any], Any] = Future.cancel,
) -> Iterator[Any]:
    """Yields the results of the items' tasks, in order; `most` may wait. An error
    cancels them.
    """
    pending: deque[Any] = deque()

    def first() -> Any:
        found = result(pending[0])
        pending.popleft()
        return found

    try:
        for item in items:
            pending.append(submit(item))
            if len(pending) > most:
                yield first()
        while pending:
            yield first()
    finally:
        for task in pending:
            cancel(task)
