"""What the tokens of a row are to predict: the border between batches and log-probs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Targets:
    """The tokens to predict: int64 `[n]` each.

    Attributes:
        rows: the token of the row whose output predicts the target.
        ids: token id of the target.
        segments: the segment that its log-prob belongs to; S, one past the last, for those that
            only fill up a fixed number of targets.
    """

    rows: Tensor
    ids: Tensor
    segments: Tensor


class TokenRow(Protocol):
    """What log-probs ask of a batch, or of the share of a batch that one rank holds."""

    @property
    def num_tokens(self) -> int:
        """Tokens whose outputs are at hand."""

    @property
    def num_segments(self) -> int:
        """S."""

    @property
    def targets(self) -> Targets:
        """What these tokens are to predict."""
