"""Copies between CPU and device that do not block, so that the device is never idle.

For inference: the host starts a batch on the device, and then reads the results of the
batch before, while the device works.
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
        # Only copies from page-locked memory do not block.
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
    """Return the batch size of inference: on CUDA 4 packs, unless it is set.

    Args:
        batching: `packs_per_batch` and `tokens_per_batch`, as far as they are set.
        device: device of the model.
        pack_size: tokens per pack.
    """
    has_batch_size = (
        batching.get("packs_per_batch") is not None
        or batching.get("tokens_per_batch") is not None
    )
    if has_batch_size or device.type != "cuda":
        return batching
    # With a small model, a GPU computes one pack in less time than the CPU needs to
    # launch its kernels.
    return {"tokens_per_batch": 4 * pack_size}
