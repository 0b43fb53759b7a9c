"""Runs of integers as tensors: the torch side of ``packstore.records``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def offsets(lengths: Tensor) -> Tensor:
    """int64 `[n + 1]` offsets of runs with these lengths."""
    return pad(lengths.cumsum(0), (1, 0))


def owners(lengths: Tensor) -> Tensor:
    """int64 `[sum of lengths]`: the run of each element."""
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """int64 `[sum of lengths]`: all integers of the runs ``starts[i] .. + lengths[i]``, in turn."""
    run = owners(lengths)
    places = torch.arange(len(run), device=run.device)
    return places + (starts - offsets(lengths)[:-1])[run]
