"""Packs as one flat row; see ``README.md``."""

from packstore.torch.batch.batch import PackedBatch, StepInfo, collate
from packstore.torch.batch.layout import AttentionLayout, Targets

__all__ = [
    "AttentionLayout",
    "PackedBatch",
    "StepInfo",
    "Targets",
    "collate",
]
