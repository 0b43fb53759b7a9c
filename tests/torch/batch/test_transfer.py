"""Inference overlaps: a result is read when the next batch has been started."""

from __future__ import annotations

from typing import Any

import torch

from packstore.torch.batch.transfer import inference_batching, one_late


def test_one_late() -> None:
    seen: list[str] = []

    def started() -> Any:
        for i in range(3):
            seen.append(f"start {i}")
            yield i

    for i in one_late(started()):
        seen.append(f"read {i}")
    assert seen == ["start 0", "start 1", "read 0", "start 2", "read 1", "read 2"]
    assert list(one_late([])) == []


def test_batches_of_several_packs_on_cuda() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert inference_batching({}, cuda, 8192) == {"tokens_per_batch": 4 * 8192}
    assert inference_batching({"packs_per_batch": None}, cuda, 10) == {"tokens_per_batch": 40}
    assert inference_batching({"packs_per_batch": 1}, cuda, 10) == {"packs_per_batch": 1}
    assert inference_batching({}, cpu, 10) == {}
