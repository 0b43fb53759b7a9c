"""Training on packs: loader, batches, attention inside segments, log-probs and losses.

``train``, ``evaluate`` and ``write_ref_logps`` are the functions behind the commands
``train``, ``evaluate`` and ``ref-logps``. They and the trainers are imported on first
use. ``README.md`` beside this file has the steps.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from packstore.registry import missing_extra

try:
    import torch as _torch  # noqa: F401
except ModuleNotFoundError as error:
    raise missing_extra("packstore.torch", "torch", error) from error

from packstore.format.arrays import TopK
from packstore.io.side.side import SideWriter, open_side
from packstore.torch.batch.batch import PackedBatch, collate
from packstore.torch.batch.inputs import packed_seq_params
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.in_memory import PackCollator, pack_in_memory
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.integrations.nemo import loss_from_nemo, nemo_metrics
from packstore.torch.logprobs.head import (
    Head,
    PackedPolicy,
    find_head,
    packed_logps,
    packed_top_k,
    segment_scores,
)
from packstore.torch.logprobs.logprobs import segment_logps, segment_token_counts
from packstore.torch.losses.distill import DistillLoss
from packstore.torch.losses.loss import FirstStepCheck, PreferenceLoss
from packstore.torch.losses.pairs import Pairs
from packstore.torch.losses.policy import PolicyLoss, Tokens
from packstore.torch.losses.step_loss import LossOutput, StepDivisor, count_step
from packstore.torch.metrics import Metrics
from packstore.torch.models.compatibility import check_model, check_tokenizer
from packstore.torch.models.compiled import compile_layers
from packstore.torch.models.model import use_packed_attention
from packstore.torch.models.probe import check_isolation
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
from packstore.torch.training.graphs import GraphedStep

__all__ = [
    "ContextShard",
    "ContextSplit",
    "DistillLoss",
    "FirstStepCheck",
    "GraphedStep",
    "Head",
    "LossOutput",
    "Metrics",
    "PackCollator",
    "PackedBatch",
    "PackedDPOTrainer",
    "PackedDataLoader",
    "PackedDataset",
    "PackedPolicy",
    "PackedTrainer",
    "Pairs",
    "PolicyLoss",
    "PreferenceLoss",
    "SideWriter",
    "StepDivisor",
    "Tokens",
    "TopK",
    "check_isolation",
    "check_model",
    "check_reference",
    "check_tokenizer",
    "collate",
    "compile_layers",
    "context_shard",
    "count_step",
    "evaluate",
    "find_head",
    "loss_from_nemo",
    "nemo_metrics",
    "open_side",
    "pack_in_memory",
    "packed_logps",
    "packed_seq_params",
    "packed_top_k",
    "pad_batch",
    "pad_segments",
    "padding_multiple",
    "reduce_segment_sums",
    "segment_logps",
    "segment_scores",
    "segment_token_counts",
    "static_sizes",
    "train",
    "use_packed_attention",
    "write_ref_logps",
]

if TYPE_CHECKING:
    from packstore.torch.integrations.trl_trainer import PackedDPOTrainer
    from packstore.torch.reference.provenance import check_reference
    from packstore.torch.reference.reference import write_ref_logps
    from packstore.torch.training.evaluate import evaluate
    from packstore.torch.training.train import train
    from packstore.torch.training.trainer import PackedTrainer

_LAZY = {
    "check_reference": "packstore.torch.reference.provenance",
    "PackedDPOTrainer": "packstore.torch.integrations.trl_trainer",
    "PackedTrainer": "packstore.torch.training.trainer",
    "evaluate": "packstore.torch.training.evaluate",
    "train": "packstore.torch.training.train",
    "write_ref_logps": "packstore.torch.reference.reference",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'packstore.torch' has no attribute {name!r}")
    try:
        module = importlib.import_module(_LAZY[name])
    except ImportError as error:
        extra = "trl" if name == "PackedDPOTrainer" else "train"
        raise missing_extra(f"packstore.torch.{name}", extra, error) from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted(__all__)
