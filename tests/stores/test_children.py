"""A dataset opened here and read in a child, which imports this file: it does without
torch.
"""

from __future__ import annotations

import multiprocessing
import pickle
from typing import Any

import pytest
from small_jobs import SETTINGS, pairs
from stores import Store

import packstore


def tokens_of(dataset: packstore.Dataset, answer: Any) -> None:
    answer.put(sum(len(packs.input_ids) for packs in dataset.iter_packs()))


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_opened_here_and_read_in_a_child(s3: Store, method: str) -> None:
    dataset = packstore.pack(pairs(60), s3.url, storage_options=s3.options, **SETTINGS)
    total = sum(
        len(packs.input_ids) for packs in dataset.iter_packs()
    )  # used in this process
    assert b"s3fs" not in pickle.dumps(
        dataset
    )  # a URL and options: each process opens its own
    context = multiprocessing.get_context(method)
    for _ in range(2 if method == "fork" else 1):
        answer = context.Queue()
        child = context.Process(target=tokens_of, args=(dataset, answer), daemon=True)
        child.start()
        try:
            assert answer.get(timeout=120) == total
            child.join(120)
            assert child.exitcode == 0
        finally:
            child.kill()
    assert sum(len(packs.input_ids) for packs in dataset.iter_packs()) == total
