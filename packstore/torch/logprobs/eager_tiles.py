"""Backend ``eager``: the passes in plain torch, for any device and dtype; the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from packstore.torch.logprobs.tiles import Passes, Projection


def fold(
    state: Tensor, product: Tensor, bias: Tensor | None, targets: Tensor, how: Projection
) -> None:
    """See :class:`Passes`."""
    logits, _ = _logits(product, bias, how)
    fold_logits(state, logits, targets)


def gap(
    product: Tensor,
    bias: Tensor | None,
    log_total: Tensor,
    targets: Tensor,
    upstream: Tensor,
    how: Projection,
    dtype: torch.dtype,
) -> Tensor:
    """See :class:`Passes`."""
    logits, slope = _logits(product, bias, how)
    delta = softmax_gap(logits, log_total, targets).mul_(upstream[:, None])
    if slope is not None:
        delta.mul_(slope)
    return delta.to(dtype)


def fold_rest(
    state: Tensor,
    product: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    how: Projection,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """See :class:`Passes`."""
    before = state[0].clone()
    logits, slope = _logits(product, bias, how)
    rest = fold_logits(state, logits, targets)
    place, inside = _places(targets, rest.shape[-1])
    rest.scatter_(-1, place, rest.gather(-1, place).masked_fill_(inside, 0))
    if slope is not None:
        rest.mul_(slope)
    return rest.to(dtype), before.sub_(state[0]).exp_()


def fold_logits(state: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """Folds finished logits into `state`; overwrites and returns them, relative to the highest."""
    place, inside = _places(targets, logits.shape[-1])
    state[2] += logits.gather(-1, place).where(inside, 0).squeeze(-1)
    highest = torch.maximum(state[0], logits.amax(-1))
    state[1] *= (state[0] - highest).exp_()
    state[1] += logits.sub_(highest[:, None]).exp_().sum(-1)
    state[0] = highest
    return logits


def softmax_gap(logits: Tensor, log_total: Tensor, targets: Tensor) -> Tensor:
    """``[j is the target] - softmax_j`` of finished logits, in place."""
    place, inside = _places(targets, logits.shape[-1])
    delta = logits.sub_(log_total[:, None]).exp_().neg_()
    return delta.scatter_add_(-1, place, inside.to(delta.dtype))


def _places(targets: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Columns to read and write, clamped into the tile, and whether they are the targets."""
    return targets.clamp(0, width - 1)[:, None], ((targets >= 0) & (targets < width))[:, None]


def _logits(product: Tensor, bias: Tensor | None, how: Projection) -> tuple[Tensor, Tensor | None]:
    """Logits of a tile, and the derivative of the softcap at each, if there is one."""
    logits = product.clone() if how.keep_logits else product
    if bias is not None:
        logits.add_(bias)
    if how.scale != 1:
        logits.mul_(how.scale)
    if how.softcap is None:
        return logits, None
    capped = logits.div_(how.softcap).tanh_()
    return capped * how.softcap, 1 - capped * capped


PASSES = Passes(fold, gap, fold_rest)
