"""Excludes a backend that is not one kernel from torch.compile, which breaks the graph there."""

from __future__ import annotations

import torch

from packstore.torch.attention import Attend


def opaque(attend: Attend) -> Attend:
    """Returns `attend`, never traced: its graph would be specialised to one batch's sizes."""
    untraced: Attend = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
    return untraced
