"""Training on packs: batches, attention inside segments, log-probs, losses, and the loader.

The steps are in ``README.md`` beside this file.
"""

from packstore.torch.collate import PackedBatch, collate
from packstore.torch.dataset import PackedDataset
from packstore.torch.isolation import check_isolation
from packstore.torch.loader import PackedDataLoader
from packstore.torch.logprobs import segment_logps, segment_token_counts
from packstore.torch.loss import LossOutput, PreferenceLoss
from packstore.torch.model import check_model, use_packed_attention

__all__ = [
    "LossOutput",
    "PackedBatch",
    "PackedDataLoader",
    "PackedDataset",
    "PreferenceLoss",
    "check_isolation",
    "check_model",
    "collate",
    "segment_logps",
    "segment_token_counts",
    "use_packed_attention",
]
