"""How torch.compile takes a backend that is not one kernel: as it is, between two graphs."""

from __future__ import annotations

import torch

from packstore.torch.attention import Attend


def opaque(attend: Attend) -> Attend:
    """`attend`, never traced: a graph that holds the sizes of one batch serves no other."""
    untraced: Attend = torch.compiler.disable(attend)  # type: ignore[no-untyped-call]
    return untraced
