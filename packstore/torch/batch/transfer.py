"""Copies between CPU and device that no side waits for: inference without gaps on the
device.

The host starts a batch, and only then reads the result of the one before, while the
device works.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import TypeVar

import torch
from torch import Tensor

from packstore.torch.batch.batch import PackedBatch

T = TypeVar("T")


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """Returns the batch on `device`; copied from page-locked memory, for which nobody
    waits.
    """
    if device.type == "cuda" and not batch.cu_seqlens.is_cuda:
        batch = batch if batch.cu_seqlens.is_pinned() else batch.pin_memory()
    return batch.to(device, non_blocking=True)


def tensor_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of the CPU on `device`, likewise."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class CpuCopy:
    """A tensor on its way to the CPU; the call waits for it and returns it."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.to("cpu", non_blocking=True)  # into page-locked memory
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def wait(self) -> Tensor:
        """Return the tensor on the CPU, once its values have arrived."""
        if self._event is not None:
            self._event.synchronize()
        return self._values


def delay_by_one(started: Iterable[T]) -> Iterator[T]:
    """Yields each item after the next one was taken from `started`."""
    return (item for item, _ in pairwise(chain(started, [None])) if item is not None)


def inference_batching(
    batching: dict[str, int | None], device: torch.device, pack_size: int
) -> dict[str, int | None]:
    """Returns what was given for inference; by default on CUDA the tokens of 4
    packs.
    """
    is_set = any(
        batching.get(name) is not None
        for name in ("packs_per_batch", "tokens_per_batch")
    )
    if is_set or device.type != "cuda":
        return batching
    # One pack of a small model is launched more slowly than it is computed.
    return {"tokens_per_batch": 4 * pack_size}
