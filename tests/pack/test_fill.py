"""Copying tokens into packs: both layouts beside a plain reference, and exact round
trips.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from same import same

from packstore import plan
from packstore.errors import FormatError
from packstore.format import IGNORE_INDEX, KINDS, LAYOUTS, Examples, Packs, check_packs
from packstore.pack.algorithms import STRATEGIES
from packstore.pack.fill import convert, fill, unpack
from packstore.pack.layout import sizes
from packstore.testing import assert_examples_equal, random_examples


def plain_packs(
    examples: Examples, pack_offsets: list[int], layout: str, share: str
) -> list[dict[str, list]]:
    """The definition of the format, one token at a time."""

    def sequence(s: int) -> tuple[list[int], list[bool]]:
        part = slice(*examples.sequence_offsets[s : s + 2])
        return examples.input_ids[part].tolist(), examples.supervised[part].tolist()

    def shared(s: int, other: int) -> int:
        """Tokens of the prompt of `s` with which the sequence `other` begins, too."""
        ids, supervised = sequence(s)
        prompt = ids[: supervised.index(True)]
        other_ids, _ = sequence(other)
        pairs = zip(prompt, other_ids, strict=False)
        return sum(
            1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
        )

    packs = []
    for first, last in itertools.pairwise(pack_offsets):
        row: dict[str, list] = {
            "input_ids": [],
            "labels": [],
            "lengths": [],
            "seq_boundaries": [0],
            "parent_distances": [],
        }
        for e in range(first, last):
            start, stop = examples.example_offsets[e : e + 2]
            first_of_group = (
                start if share == "example" else examples.example_offsets[first]
            )
            for s in range(start, stop):
                skip = 0
                parent = s
                if layout == "shared_prefix":
                    for other in range(first_of_group, s):
                        if shared(s, other) - 1 > skip:
                            skip = shared(s, other) - 1
                            parent = other
                ids, supervised = sequence(s)
                row["input_ids"] += ids[skip:]
                row["labels"] += [
                    i if on else IGNORE_INDEX
                    for i, on in zip(ids, supervised, strict=True)
                ][skip:]
                row["lengths"].append(len(ids))
                row["seq_boundaries"].append(len(row["input_ids"]))
                row["parent_distances"].append(s - parent)
        packs.append(row)
    return packs


def rows(packs: Packs) -> list[dict[str, list]]:
    def row(values: np.ndarray, offsets: np.ndarray, i: int) -> list:
        return values[offsets[i] : offsets[i + 1]].tolist()

    return [
        {
            "input_ids": row(packs.input_ids, packs.token_offsets, i),
            "labels": row(packs.labels, packs.token_offsets, i),
            "lengths": row(packs.lengths, packs.sequence_offsets, i),
            "seq_boundaries": row(packs.seq_boundaries, packs.boundary_offsets, i),
            "parent_distances": row(packs.parent_distances, packs.sequence_offsets, i),
        }
        for i in range(len(packs))
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("supervised", [False, True])
def test_negative_ids_are_refused(layout: str, supervised: bool) -> None:
    """A complement would turn them into other ids."""
    examples = random_examples(3, seed=1)
    examples.input_ids[np.flatnonzero(examples.supervised == supervised)[-1]] = -5
    with pytest.raises(FormatError, match="ids-range"):
        fill(examples, np.array([0, 3]), layout)


cases = st.tuples(
    st.integers(0, 25),
    st.integers(0, 10_000),
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([2, 50]),
)


@settings(deadline=None, max_examples=150)
@given(
    case=cases,
    layout=st.sampled_from(LAYOUTS),
    share=st.sampled_from(["example", "pack"]),
    strategy=st.sampled_from([*STRATEGIES]),
)
def test_packs_are_those_of_the_definition_and_give_the_examples_back(
    case: tuple[int, int, str, int], layout: str, share: str, strategy: str
) -> None:
    n, seed, kind, vocab_size = case
    names = np.array([f"s{i}" for i in range(n)], object)
    columns = {"weight": np.linspace(0, 1, n), "source": names}
    examples = random_examples(n, seed=seed, kind=kind, vocab_size=vocab_size)
    examples = replace(examples, columns=columns)
    made = plan(sizes(examples, layout), pack_size=256, strategy=strategy, seed=seed)
    planned = examples.take(made.order)
    packs = fill(planned, made.offsets, layout, share=share)
    check_packs(packs, layout=layout, pack_size=256, vocab_size=vocab_size)
    assert rows(packs) == plain_packs(planned, made.offsets.tolist(), layout, share)
    if share == "example":
        np.testing.assert_array_equal(np.diff(packs.token_offsets), made.pack_tokens)
    else:
        assert (np.diff(packs.token_offsets) <= made.pack_tokens).all()
    back = unpack(packs)
    assert_examples_equal(back, planned)
    assert_examples_equal(back.take(np.argsort(made.order)), examples)


@settings(deadline=None, max_examples=60)
@given(case=cases)
def test_layouts_turn_into_each_other_without_loss(
    case: tuple[int, int, str, int],
) -> None:
    n, seed, kind, vocab_size = case
    examples = random_examples(n, seed=seed, kind=kind, vocab_size=vocab_size)
    offsets = np.unique(np.append(np.arange(0, n, 3), n)).astype(np.int64)
    concat, shared = (fill(examples, offsets, layout) for layout in LAYOUTS)
    check_packs(convert(concat, "shared_prefix"), layout="shared_prefix")
    assert same(convert(concat, "shared_prefix"), shared)
    assert same(convert(shared, "concat"), concat)
    assert same(convert(shared, "shared_prefix"), shared)
    assert len(shared.input_ids) <= len(concat.input_ids)


@pytest.mark.parametrize("change", [-100, 100])
@pytest.mark.parametrize(
    "column", ["seq_boundaries", "num_responses", "token_offsets", "lengths"]
)
def test_packs_that_contradict_themselves_are_refused(column: str, change: int) -> None:
    packs = fill(random_examples(6, seed=3), np.array([0, 3, 6]), "shared_prefix")
    for i in range(len(getattr(packs, column))):
        broken = getattr(packs, column).copy()
        broken[i] += change
        with pytest.raises(FormatError):
            unpack(replace(packs, **{column: broken}))
