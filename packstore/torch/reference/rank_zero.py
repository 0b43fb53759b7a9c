"""Work that one rank does for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from packstore.errors import PackstoreError
from packstore.torch.metrics import distributed

T = TypeVar("T")


def run_on_rank_zero(make: Callable[[], T]) -> T:
    """Runs `make` on rank 0; returns its result or raises its error on all ranks. Collective."""
    if not distributed():
        return make()
    made: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            made[0] = make()
        except PackstoreError as error:
            made[1] = error
    dist.broadcast_object_list(made)
    if made[1] is not None:
        raise made[1]
    found: T = made[0]
    return found
