"""The explicit mask of one segment, for backends that need it."""

from __future__ import annotations

import torch
from torch import Tensor


def visible(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Returns a bool mask `[queries, keys]`: causal, aligned at the end, within the window."""
    query = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    mask = key <= query
    return mask if window is None else mask & (query - key < window)
