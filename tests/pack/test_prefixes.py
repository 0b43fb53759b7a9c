"""Packs of examples that begin alike: all examples, inside the limits, and shared."""

from __future__ import annotations

import numpy as np
import pytest
from forests import examples_of, random_forest
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore.config import PlanConfig
from packstore.errors import InputError
from packstore.format import KINDS, Examples, check_packs
from packstore.pack.algorithms import STRATEGIES
from packstore.pack.chunks import CommonBeginning, cut_chunks
from packstore.pack.fill import fill, unpack
from packstore.pack.layout import count_keys, sizes
from packstore.pack.plan import plan_examples, plan_prefixes
from packstore.testing import assert_examples_equal


def forest(size: int, seed: int, kind: str) -> Examples:
    """Return examples whose sequences have at most 200 tokens, and four of them 800."""
    dialogues = random_forest(seed, size=size, depth=5, longest_turn=40)
    return examples_of(dialogues, kind, seed)


@settings(deadline=None, max_examples=150)
@given(
    size=st.integers(2, 60),
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(sorted(KINDS)),
    pack_size=st.sampled_from([800, 1500, 4000]),
    max_keys=st.sampled_from([800, 2000, None]),
    strategy=st.sampled_from([*STRATEGIES]),
)
def test_a_pack_keeps_its_limits_and_each_example_stands_once(
    size: int,
    seed: int,
    kind: str,
    pack_size: int,
    max_keys: int | None,
    strategy: str,
) -> None:
    examples = forest(size, seed, kind)
    order, offsets = plan_prefixes(examples, pack_size, max_keys, strategy=strategy)
    packs = fill(examples, offsets, "shared_prefix", order, share="pack")
    check_packs(packs, layout="shared_prefix", pack_size=pack_size)
    np.testing.assert_array_equal(np.sort(order), np.arange(examples.num_examples))
    assert packs.keys.max() <= (max_keys or 16 * pack_size)
    assert_examples_equal(unpack(packs), examples.take(order))


@settings(deadline=None, max_examples=100)
@given(
    size=st.integers(2, 60),
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(sorted(KINDS)),
    multiple=st.sampled_from([1, 8, 64]),
    shuffle=st.booleans(),
    max_keys=st.sampled_from([800, 3000, None]),
)
def test_a_plan_of_chunks_leaves_room_for_padding(
    size: int,
    seed: int,
    kind: str,
    multiple: int,
    shuffle: bool,
    max_keys: int | None,
) -> None:
    examples = forest(size, seed, kind)
    n = examples.num_examples
    config = PlanConfig(
        pack_size=1500,
        pad_to_multiple=multiple,
        shuffle=shuffle,
        max_keys=max_keys,
        seed=seed,
    )
    beginning = CommonBeginning()
    for first in range(0, n, 7):
        beginning.add(examples.take(np.arange(first, min(first + 7, n))))
    chunks = cut_chunks(
        examples,
        config.pack_size,
        config.key_limit,
        multiple=multiple,
        common=beginning.tokens(multiple),
        seed=seed,
    )
    lengths = sizes(examples, "shared_prefix", multiple)
    keys = count_keys(examples).astype(np.int32)
    packing = plan_examples(lengths, keys, config, chunks)
    np.testing.assert_array_equal(np.sort(packing.order), np.arange(n))
    packs = fill(
        examples, packing.offsets, "shared_prefix", packing.order, share="pack"
    )
    padded = -(-packs.segment_lengths // multiple) * multiple
    tokens = np.add.reduceat(padded, packs.sequence_offsets[:-1])
    assert (tokens <= packing.pack_tokens).all()
    assert tokens.max() <= 1500
    assert packs.keys.max() <= config.key_limit


@pytest.mark.parametrize("multiple", [1, 8])
def test_rows_with_a_common_beginning_that_fill_packs_keep_the_limit(
    multiple: int,
) -> None:
    """Each rollout fills more than a pack, behind a schema of 300 tokens."""
    rng = np.random.default_rng(0)
    schema = rng.integers(0, 1000, 300).tolist()
    rows = [schema + row for _ in range(6) for row in rollout(rng, 40)]
    rows = [row for row in rows if len(row) <= 1000]
    examples = learned_at_the_end(rows)
    config = PlanConfig(pack_size=1024, pad_to_multiple=multiple)
    beginning = CommonBeginning()
    beginning.add(examples)
    chunks = cut_chunks(
        examples,
        config.pack_size,
        config.key_limit,
        multiple=multiple,
        common=beginning.tokens(multiple),
    )
    lengths = sizes(examples, "shared_prefix", multiple)
    keys = count_keys(examples).astype(np.int32)
    packing = plan_examples(lengths, keys, config, chunks)
    assert packing.pack_tokens.max() <= 1024
    packs = fill(
        examples, packing.offsets, "shared_prefix", packing.order, share="pack"
    )
    padded = -(-packs.segment_lengths // multiple) * multiple
    tokens = np.add.reduceat(padded, packs.sequence_offsets[:-1])
    assert (tokens <= packing.pack_tokens).all()


def rollout(rng: np.random.Generator, turns: int) -> list[list[int]]:
    """A row for each turn, each of which begins with all turns before it."""
    rows = []
    history = rng.integers(0, 1000, 100).tolist()
    for _ in range(turns):
        rows.append(history + rng.integers(0, 1000, 20).tolist())
        history = rows[-1] + rng.integers(0, 1000, 30).tolist()
    return rows


def learned_at_the_end(rows: list[list[int]]) -> Examples:
    """An example of each row, whose last 20 tokens are learned."""
    lengths = [len(row) for row in rows]
    learned = [np.arange(n) >= n - 20 for n in lengths]
    return Examples(
        input_ids=np.concatenate(rows).astype(np.int32),
        supervised=np.concatenate(learned),
        sequence_offsets=np.cumsum([0, *lengths]),
        example_offsets=np.arange(len(rows) + 1),
        reward=np.zeros(len(rows), np.float32),
        example_ids=np.arange(len(rows)),
    )


def stored_tokens(rows: list[list[int]], pack_size: int) -> int:
    examples = learned_at_the_end(rows)
    order, offsets = plan_prefixes(examples, pack_size)
    packs = fill(examples, offsets, "shared_prefix", order, share="pack")
    return int(packs.token_offsets[-1])


def test_turns_of_a_rollout_are_stored_once_wherever_they_stand() -> None:
    """Each row stores its answer, what came before it, and the token that is repeated;
    as no two rollouts begin alike, nothing else can be shared.
    """
    rng = np.random.default_rng(0)
    rollouts = [rollout(rng, 10) for _ in range(20)]
    rows = [row for rows in rollouts for row in rows]
    shuffled = [rows[i] for i in rng.permutation(len(rows))]
    assert stored_tokens(shuffled, 2048) == 20 * (120 + 9 * 51)


def test_a_beginning_of_all_examples_takes_no_room_of_each() -> None:
    """Else packs would be filled to a third."""
    rng = np.random.default_rng(0)
    schema = rng.integers(0, 1000, 300).tolist()
    rows = [schema + rng.integers(0, 1000, 60).tolist() for _ in range(400)]
    tokens = 400 * 61
    num_packs = -(-tokens // (2048 - 299))
    assert stored_tokens(rows, 2048) <= tokens + 299 * (num_packs + 1)


def test_what_does_not_fit_alone_is_refused_by_name() -> None:
    examples = forest(20, 0, "preference")
    longest = int(count_keys(examples).max())
    with pytest.raises(InputError, match="pack_size"):
        plan_prefixes(examples, longest - 1, 10 * longest)
    with pytest.raises(InputError, match="max_keys"):
        plan_prefixes(examples, longest, longest - 1)


@pytest.mark.parametrize("n", [500, 20_000])
def test_a_pack_of_too_many_keys_is_split_in_its_order(n: int) -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 100, n).astype(np.int32)
    keys = (lengths * rng.integers(1, 12, n)).astype(np.int32)
    config = PlanConfig(pack_size=1000)
    free = plan_examples(lengths, keys, config)
    bound = plan_examples(lengths, keys, PlanConfig(pack_size=1000, max_keys=4000))
    np.testing.assert_array_equal(bound.order, free.order)
    assert set(free.offsets) < set(bound.offsets)
    sums = np.add.reduceat(keys[bound.order].astype(np.int64), bound.offsets[:-1])
    assert sums.max() <= 4000
