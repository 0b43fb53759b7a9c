"""The explicit mask of one segment, for backends that need it."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(
    queries: int, keys: int, window: int | None, chunk: int | None, device: torch.device
) -> Tensor:
    """Returns a bool mask `[queries, keys]`, causal and aligned at the end; see `Attend`."""
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    mask = key <= query
    if window is not None:
        mask &= query - key < window
    if chunk is not None:
        mask &= key >= query // chunk * chunk
    return mask
