"""A few tokens that ask for gigabytes, as each sequence leaves out nearly all of itself."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from packstore.errors import FormatError, UnsupportedFormatError
from packstore.format import Packs, check_packs
from packstore.pack.fill import unpack


def chain(num_sequences: int) -> Packs:
    """One pack, in which each sequence is the one before it and a token more."""
    one_pack = np.array([0, num_sequences])
    return Packs(
        signed_ids=np.tile(np.array([~5, 5], np.int32), num_sequences),
        reward=np.ones(num_sequences, np.float32),
        lengths=np.arange(2, num_sequences + 2, dtype=np.int32),
        seq_boundaries=np.arange(0, 2 * num_sequences + 2, 2, dtype=np.int32),
        parent_distances=np.minimum(np.arange(num_sequences, dtype=np.int32), 1),
        example_ids=np.arange(num_sequences),
        num_responses=np.ones(num_sequences, np.int32),
        token_offsets=2 * one_pack,
        sequence_offsets=one_pack,
        example_offsets=one_pack,
    )


def peak_of(read: Callable[[], object]) -> int:
    """Return the bytes that a call takes at most."""
    tracemalloc.start()
    try:
        read()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return peak


def test_keys_are_counted_before_memory_is_taken() -> None:
    """200 kB of tokens have the keys of 6 GB."""
    packs = chain(50_000)
    num_tokens = len(packs.signed_ids)

    def check() -> None:
        with pytest.raises(FormatError, match="pack-keys"):
            check_packs(packs, layout="shared_prefix", most_keys=16 * num_tokens)

    def rebuild() -> None:
        with pytest.raises(UnsupportedFormatError, match=str(packs.keys[0])):
            unpack(packs)

    for read in (check, rebuild):
        assert peak_of(read) < 100 * num_tokens


def test_sequences_take_memory_by_their_tokens() -> None:
    """Not by the depth of their tree."""
    packs = chain(2000)
    assert peak_of(lambda: unpack(packs)) < 20 * int(packs.keys[0])
