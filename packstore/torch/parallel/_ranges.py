"""Runs of integers as tensors: the torch side of ``packstore.format.arrays``."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def offsets(lengths: Tensor) -> Tensor:
    """Returns the offsets of runs with these lengths, int64 `[n + 1]`."""
    return pad(lengths.cumsum(0), (1, 0))


def owners(lengths: Tensor) -> Tensor:
    """Returns the run of each element, int64 `[sum of lengths]`."""
    return torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """Concatenates the runs ``starts[i] .. + lengths[i]``: int64 `[sum of lengths]`."""
    run = owners(lengths)
    places = torch.arange(len(run), device=run.device)
    return places + (starts - offsets(lengths)[:-1])[run]
