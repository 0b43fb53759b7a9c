"""Training on packs: batches, attention inside segments, log-probs, losses, and the loader.

The steps are in ``README.md`` beside this file.
"""

from packstore.torch.collate import PackedBatch, collate
from packstore.torch.compatibility import check_model, check_tokenizer
from packstore.torch.dataset import PackedDataset
from packstore.torch.divisor import StepDivisor, count_step
from packstore.torch.guard import FirstStepGuard
from packstore.torch.head import Head, PackedPolicy, find_head, packed_logps
from packstore.torch.hf_collator import PackCollator, PackedLoss
from packstore.torch.hf_trainer import PackedTrainerMixin
from packstore.torch.inputs import packed_seq_params
from packstore.torch.isolation import check_isolation
from packstore.torch.loader import PackedDataLoader
from packstore.torch.logprobs import segment_logps, segment_token_counts
from packstore.torch.loss import LossOutput, PreferenceLoss
from packstore.torch.metrics import Metrics
from packstore.torch.mix import MixedPacks, Source
from packstore.torch.model import use_packed_attention
from packstore.torch.nemo import loss_from_nemo, nemo_metrics
from packstore.torch.parallel import (
    ContextShard,
    ContextSplit,
    context_shard,
    pad_batch,
    pad_segments,
    padding_multiple,
    reduce_segment_sums,
    static_sizes,
)
from packstore.torch.repack import RepackedPacks, TokenizedPacks
from packstore.torch.unpacked import TokenizedBatches

__all__ = [
    "ContextShard",
    "ContextSplit",
    "FirstStepGuard",
    "Head",
    "LossOutput",
    "Metrics",
    "MixedPacks",
    "PackCollator",
    "PackedBatch",
    "PackedDataLoader",
    "PackedDataset",
    "PackedLoss",
    "PackedPolicy",
    "PackedTrainerMixin",
    "PreferenceLoss",
    "RepackedPacks",
    "Source",
    "StepDivisor",
    "TokenizedBatches",
    "TokenizedPacks",
    "check_isolation",
    "check_model",
    "check_tokenizer",
    "collate",
    "context_shard",
    "count_step",
    "find_head",
    "loss_from_nemo",
    "nemo_metrics",
    "packed_logps",
    "packed_seq_params",
    "pad_batch",
    "pad_segments",
    "padding_multiple",
    "reduce_segment_sums",
    "segment_logps",
    "segment_token_counts",
    "static_sizes",
    "use_packed_attention",
]
