"""A committed dataset, read; see ``README.md``."""

from packstore.io.dataset.dataset import Dataset, open
from packstore.io.dataset.order import PackOrder, permuted
from packstore.io.dataset.pack_index import put_index
from packstore.io.dataset.steps import cut_by_examples
from packstore.io.dataset.verify import TOLERANCE

__all__ = [
    "TOLERANCE",
    "Dataset",
    "PackOrder",
    "cut_by_examples",
    "open",
    "permuted",
    "put_index",
]
