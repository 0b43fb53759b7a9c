"""Gradients of a model by name, and its log-probs of single sequences."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packstore.format import Examples


def take_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Returns the gradients of all parameters, and clears them."""
    found = {
        name: p.grad.clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    model.zero_grad()
    return found


def alone(model: Any, examples: Examples) -> Iterator[tuple[Tensor, int]]:
    """Log-prob and number of supervised tokens of each sequence, fed to the model by
    itself.
    """
    return ((logps.sum(), len(logps)) for logps in tokens_alone(model, examples))


def tokens_alone(model: Any, examples: Examples) -> Iterator[Tensor]:
    """Log-probs of the supervised tokens of each sequence, fed to the model by
    itself.
    """
    for first, last in pairwise(examples.sequence_offsets.tolist()):
        ids = torch.from_numpy(examples.input_ids[first:last].astype(np.int64))
        on = torch.from_numpy(examples.supervised[first:last].copy())[1:]
        logps = (
            model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
        )
        yield logps.gather(1, ids[1:, None])[:, 0][on]


def scores_alone(model: Any, examples: Examples) -> Iterator[Tensor]:
    """Score of each sequence, fed to a reward model by itself."""
    for first, last in pairwise(examples.sequence_offsets.tolist()):
        ids = torch.from_numpy(examples.input_ids[first:last].astype(np.int64))
        yield model(input_ids=ids[None], use_cache=False).logits[0, 0]


def recompute_layers(model: nn.Module, reentrant: bool = False) -> None:
    """Enables gradient checkpointing, under the name that transformers has for it."""
    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    enable = next(getattr(model, name) for name in names if hasattr(model, name))
    enable({"use_reentrant": reentrant})
