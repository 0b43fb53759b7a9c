"""Packs a dataset anew each time it is read, from lengths first: other packs in every epoch.

1. Once: the tokens that each example takes in the layout asked for (:mod:`.sizes`).
2. Each epoch: the row groups in a new order, cut into lanes of equal tokens. A lane is packed
   window by window, and what does not fill a pack waits for the next window (:mod:`.plan`).
3. While reading: a window's row groups are read, once, and its packs filled (:mod:`.read`).

Records that are token ids already and were never packed are planned the same way
(:mod:`.tokenized`, :mod:`.records`).

No torch here; needs numba, as packing does.
"""

from packstore.repacking.plan import EpochPlan, plan_epoch
from packstore.repacking.read import read_packs
from packstore.repacking.records import RecordReader, StepPacker, in_one_pack
from packstore.repacking.sizes import ExampleSizes, measure

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
