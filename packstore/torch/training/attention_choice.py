"""Chooses the backend `auto_varlen` or `auto_ranges` for the setting ``auto``.

Log-probs of a policy and of its reference must come from one arithmetic, and a run that
resumes must compute what it computed before. So the choice follows, in this order:

1. the checkpoint to resume from
2. the side datasets with the reference's log-probs
3. a trial on rank 0, on the layout of the first packs

It is made before layers are compiled, and all ranks take rank 0's. Without a CUDA
device with Triton it stays ``auto``.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from packstore.errors import quote
from packstore.io.dataset.dataset import Dataset
from packstore.io.side.side import Side
from packstore.torch.attention import flash
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.data.stream import StoredPacks
from packstore.torch.models.model import use_packed_attention
from packstore.torch.reference.provenance import attention_of, record_calls
from packstore.torch.reference.reference import run_on_rank_zero

logger = logging.getLogger("packstore")

CHOICES = {"torch_varlen": "auto_varlen", "ranges": "auto_ranges"}
"""Backend of flash kernels -> the setting that always uses it."""

BEFORE_CHOICES = "auto_varlen"
"""The backend of runs whose checkpoint names none: it was always this one."""


def choose_attention(
    model: nn.Module,
    device: torch.device,
    dataset: Dataset | None,
    *,
    sides: Iterable[Side] = (),
    batching: Mapping[str, int | None] | None = None,
    seed: int = 0,
) -> str:
    """Return the backend of a model for the setting ``auto``.

    Call it under the autocast of the run. A collective call if torch.distributed runs.

    Args:
        model: a prepared model, on any device.
        device: device of the run.
        dataset: a packed dataset of the run; None: there is none, and no trial.
        sides: side datasets with log-probs of a reference.
        batching: `packs_per_batch` or `tokens_per_batch` of the run.
        seed: seed of the order of packs.

    Returns:
        ``auto_varlen`` or ``auto_ranges``; ``auto`` if there is no choice.
    """
    if attention_of(model) != "auto":
        return "auto"  # the whole model runs once per sequence
    if not (flash.runs_on(device) and find_spec("triton")):
        return "auto"
    autocast_dtype = None
    if torch.is_autocast_enabled(device.type):
        autocast_dtype = torch.get_autocast_dtype(device.type)
    # On all ranks, as weights may be spread over them.
    calls = record_calls(model, device, autocast_dtype)

    def choose() -> str:
        call = _most_frequent(calls)
        if call is None:
            return "auto"  # no flash kernels in this model, or in this precision
        recorded = choice_of_sides(sides)
        if recorded is not None:
            logger.info("attention 'auto' is %r, as of the reference", recorded)
            return recorded
        batch = None if dataset is None else _first_batch(dataset, batching, seed)
        if batch is None:
            return "auto"
        return _choose_by_trial(call, batch.to(device))

    return run_on_rank_zero(choose)


def set_attention_backend(model: nn.Module, backend: str) -> None:
    """Set the backend of a prepared model."""
    use_packed_attention(model, backend, disable_dropout=False)


def attention_of_checkpoint(position: Mapping[str, Any]) -> str:
    """Log and return the backend of a checkpoint's run, from its position.

    ``auto`` if it ran on a device without a choice.
    """
    attention: str = position["settings"].get("attention", BEFORE_CHOICES)
    if attention != "auto":
        logger.info("attention 'auto' is %r, as of the checkpoint", attention)
    return attention


def choice_of_sides(sides: Iterable[Side]) -> str | None:
    """Return the choice by which log-probs were made; None if they had none."""
    for side in sides:
        names = str(side.manifest.provenance.get("attention")).split(", ")
        for name in names:
            if name in CHOICES:
                return CHOICES[name]
    return None


def _most_frequent(calls: Iterable[Any]) -> Any:
    """Return the most frequent call of flash kernels; None if there is none."""
    counts = Counter(call for call in calls if call.backend in CHOICES)
    return counts.most_common(1)[0][0] if counts else None


def _first_batch(
    dataset: Dataset, batching: Mapping[str, int | None] | None, seed: int
) -> PackedBatch | None:
    """Return the first packs of a shuffled epoch as a batch; None if there are none."""
    data = PackedDataset(StoredPacks(dataset, seed), rank=0, world_size=1)
    settings: Any = dict(batching or {})
    with closing(iter(PackedDataLoader(data, **settings))) as batches:  # type: ignore[type-var]
        return next(batches, None)


def _choose_by_trial(call: Any, batch: PackedBatch) -> str:
    """Time both backends; log and return the choice."""
    # Imported here, as it imports torch's compiler, which takes a second.
    from packstore.torch.training import attention_trial

    try:
        result = attention_trial.run_trial(call, batch.layout)
    except Exception as error:  # Triton's compiler and driver raise any class
        reason = quote(f"{type(error).__name__}: {error}", 300)
        logger.warning(
            "attention 'auto' is 'auto_varlen': 'ranges' ends with %s", reason
        )
        return "auto_varlen"
    if not result.is_equal:
        logger.warning(
            "attention 'auto' is 'auto_varlen': outputs and gradients of 'ranges' "
            "differ by %.2g of their norm",
            result.difference,
        )
    else:
        logger.info(
            "attention 'auto' is %r: a layer takes %.3f ms with 'ranges', %.3f ms with "
            "'torch_varlen'",
            result.choice,
            1000 * result.ranges_seconds,
            1000 * result.varlen_seconds,
        )
    return result.choice
