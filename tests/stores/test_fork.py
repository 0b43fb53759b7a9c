"""A dataset that was opened here is used in a child, forked or spawned."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from typing import Any

import pytest
from stores import Store
from tokenizers import Tokenizer

import packstore


def tokens_of(dataset: packstore.Dataset, answer: Any) -> None:
    answer.put(sum(len(packs.input_ids) for packs in dataset.iter_packs()))


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_opened_here_and_read_in_a_child(
    s3: Store, pairs: Path, tokenizer: Tokenizer, method: str
) -> None:
    dataset = packstore.pack(
        str(pairs), s3.url, tokenizer, pack_size=256, storage_options=s3.options
    )
    total = sum(len(packs.input_ids) for packs in dataset.iter_packs())  # used in this process
    assert b"s3fs" not in pickle.dumps(dataset)  # a URL and options: each process opens its own
    context = multiprocessing.get_context(method)
    for _ in range(2):
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
