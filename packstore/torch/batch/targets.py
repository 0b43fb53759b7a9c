"""Prediction targets of a row of tokens: the interface between batches and log-probs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Targets:
    """The tokens to predict: int64 `[n]` each.

    Attributes:
        rows: index of the token whose output predicts the target.
        ids: token id of the target.
        segments: segment that its log-prob belongs to; S, one past the last, for padding of a
            fixed number of targets.
    """

    rows: Tensor
    ids: Tensor
    segments: Tensor


class TokenRow(Protocol):
    """The part of a batch's interface that log-probs use; also of one rank's share of a batch."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens held here."""

    @property
    def num_segments(self) -> int:
        """S."""

    @property
    def targets(self) -> Targets:
        """The tokens to predict from those held here."""
