"""Log-probs of segments or tokens, and heads of models; see ``README.md``."""

from packstore.torch.logprobs.head import (
    Head,
    PackedPolicy,
    find_head,
    packed_logps,
    packed_top_k,
    segment_scores,
)
from packstore.torch.logprobs.logprobs import (
    HeadLogProbs,
    HeadLogProbsOfIds,
    segment_logps,
    segment_token_counts,
)
from packstore.torch.logprobs.tiles import (
    EAGER,
    HEAD_BACKENDS,
    Passes,
    Projection,
    Tile,
)

__all__ = [
    "EAGER",
    "HEAD_BACKENDS",
    "Head",
    "HeadLogProbs",
    "HeadLogProbsOfIds",
    "PackedPolicy",
    "Passes",
    "Projection",
    "Tile",
    "find_head",
    "packed_logps",
    "packed_top_k",
    "segment_logps",
    "segment_scores",
    "segment_token_counts",
]
