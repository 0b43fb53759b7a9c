"""Repacks a dataset while it is read: other packs in every epoch, planned from lengths.

1. Once: measures the tokens of each example in the requested layout (:mod:`.sizes`).
2. Each epoch: shuffles the row groups and divides them into lanes of equal tokens. A lane is packed
   window by window; examples that fill no pack move to the next window (:mod:`.plan`).
3. While reading: reads a window's row groups once, and fills its packs (:mod:`.read`).

Tokenized records that were never packed are planned the same way (:mod:`.tokenized`,
:mod:`.records`). Needs numba, as packing does, but not torch.
"""

from packstore.online_packing.plan import EpochPlan, plan_epoch
from packstore.online_packing.read import read_packs
from packstore.online_packing.records import RecordReader, StepPacker, in_one_pack
from packstore.online_packing.sizes import ExampleSizes, measure

__all__ = [
    "EpochPlan",
    "ExampleSizes",
    "RecordReader",
    "StepPacker",
    "in_one_pack",
    "measure",
    "plan_epoch",
    "read_packs",
]
