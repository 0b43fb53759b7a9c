"""Copies between CPU and device that no side waits for: inference without gaps on the
device.

The host starts a batch, and only then reads the result of the batch before, while the
device works.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from packstore.torch.batch.batch import PackedBatch

T = TypeVar("T")


def to_device(batch: PackedBatch, device: torch.device) -> PackedBatch:
    """Return the batch on `device`, copied without waiting."""
    is_on_cpu = not batch.cu_seqlens.is_cuda
    if device.type == "cuda" and is_on_cpu and not batch.cu_seqlens.is_pinned():
        # A copy from other than page-locked memory would wait.
        batch = batch.pin_memory()
    return batch.to(device, non_blocking=True)


def tensor_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on `device`, copied without waiting."""
    if device.type == "cuda" and not values.is_cuda:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


class CpuCopy:
    """A copy of a tensor on its way to the CPU."""

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


def delay_by_one(items: Iterable[T]) -> Iterator[T]:
    """Yield each item after the next one was produced."""
    iterator = iter(items)
    try:
        previous = next(iterator)
    except StopIteration:
        return
    for item in iterator:
        yield previous
        previous = item
    yield previous


def inference_batching(
    batching: dict[str, int | None], device: torch.device, pack_size: int
) -> dict[str, int | None]:
    """Return the batching settings of inference: by default on CUDA the tokens of 4
    packs.
    """
    has_batch_size = (
        batching.get("packs_per_batch") is not None
        or batching.get("tokens_per_batch") is not None
    )
    if has_batch_size or device.type != "cuda":
        return batching
    # One pack of a small model is launched more slowly than it is computed.
    return {"tokens_per_batch": 4 * pack_size}
