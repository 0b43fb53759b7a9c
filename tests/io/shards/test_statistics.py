from __future__ import annotations

from packstore.format import IGNORE_INDEX
from packstore.io.shards.shard import (
    PackCounter,
    Spread,
    Statistics,
    Totals,
)
from packstore.io.shards.shard import pack_figures as figures_of
from packstore.testing import random_examples


def test_counted_by_hand(kit):
    packs = kit.concat_packs(random_examples(31, kind="ranked", seed=3), 3)
    rows = range(len(packs))
    tokens = [int(packs.token_offsets[i + 1] - packs.token_offsets[i]) for i in rows]
    segments = [int(packs.sequence_offsets[i + 1] - packs.sequence_offsets[i]) for i in rows]
    lengths = packs.lengths.tolist()
    supervised = [
        int((packs.labels[a:b] != IGNORE_INDEX).sum())
        for a, b in zip(packs.token_offsets[:-1], packs.token_offsets[1:], strict=True)
    ]
    counter = PackCounter()
    for part in kit.split(packs, [1, 4, 4, 9]):
        counter.add(figures_of(part, "ranked"), part.lengths)
    assert counter.totals(5) == Totals(
        packs=11,
        examples=31,
        sequences=len(lengths),
        tokens=sum(tokens),
        supervised_tokens=sum(supervised),
        logical_tokens=sum(lengths),
        bytes=5,
    )
    buckets = [1 << (length.bit_length() - 1) for length in lengths]
    assert counter.statistics(100, {"a": 1}) == Statistics(
        fill_rate=sum(tokens) / 1100,
        examples_per_pack=Spread(min=1, mean=31 / 11, max=3),
        longest_sequence=max(lengths),
        most_segments=max(segments),
        shortest_pack=min(tokens),
        length_histogram={str(b): buckets.count(b) for b in sorted(set(buckets))},
        planning={"a": 1},
    )


def test_buckets_begin_at_powers_of_two(kit):
    counter = PackCounter()
    packs = kit.some_packs(5)
    packs.lengths[:] = [1, 2, 3, 4, 7, 8, 2**20 - 1, 2**20, 2**30, 2**31 - 1]
    counter.add(figures_of(packs, "preference"), packs.lengths)
    assert counter.statistics(100, {}).length_histogram == {
        "1": 1,
        "2": 2,
        "4": 2,
        "8": 1,
        str(2**19): 1,
        str(2**20): 1,
        str(2**30): 2,
    }
