"""Datasets and loaders; see ``README.md``."""

from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.in_memory import PackCollator, pack_in_memory
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.data.mix import MixOrder

__all__ = [
    "MixOrder",
    "PackCollator",
    "PackedDataLoader",
    "PackedDataset",
    "pack_in_memory",
]
