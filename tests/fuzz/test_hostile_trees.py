"""Packs of prefix trees in which any number may be wrong, against an oracle in plain
Python: refused under the name of a rule, or read as the definition of layout
``shared_prefix`` has it.
"""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest
from forests import forest_packs, places_of

from packstore.errors import FormatError
from packstore.format import Packs, check_packs
from packstore.pack.fill import unpack
from packstore.torch import collate

MOST_KEYS = 100
"""Logical tokens that a pack may have: fewer than some packs do."""

LARGEST = 2**31 - 1
EXTREME = (-1, LARGEST, -(2**31), 2**30, 70_000)
RULES_OF_TREES = {
    "parents-count",
    "parent-earlier",
    "prefix-whole",
    "prefix-inside",
    "parent-stores",
    "prefix-repeats",
    "pack-keys",
}

Lists = dict[str, list[int]]


def make(number: int) -> Packs:
    """Two packs of seven sequences, in which one number or a few are others."""
    rng = np.random.default_rng(number)
    seed = int(rng.integers(40))
    _, packs = forest_packs(seed, "sft", size=7)
    # With two token ids, many other parents begin alike.
    ids = packs.input_ids % 2 if seed % 2 else packs.input_ids
    lists: Lists = {
        "parent_distances": packs.parent_distances.tolist(),
        "lengths": packs.lengths.tolist(),
        "seq_boundaries": packs.seq_boundaries.tolist(),
        "signed_ids": np.where(packs.signed_ids >= 0, ids, ~ids).tolist(),
    }
    own_lengths = packs.segment_lengths.tolist()
    for _ in range(rng.choice([1, 1, 1, 3])):
        change(lists, own_lengths, rng)

    arrays = {name: np.array(values, np.int32) for name, values in lists.items()}
    sequence_offsets = np.array([0, 7, len(arrays["lengths"])])
    num_sequences = int(sequence_offsets[-1])
    return Packs(
        **arrays,
        reward=np.ones(num_sequences, np.float32),
        example_ids=np.arange(num_sequences),
        num_responses=np.ones(num_sequences, np.int32),
        token_offsets=packs.token_offsets,
        sequence_offsets=sequence_offsets,
        example_offsets=sequence_offsets,
    )


def change(lists: Lists, own_lengths: list[int], rng: np.random.Generator) -> None:
    """Give a sequence another parent and offset, or change a number of a list."""
    i = int(rng.integers(14))
    distances = lists["parent_distances"]
    lengths = lists["lengths"]
    if len(distances) == len(lengths) == 14 and rng.random() < 0.7:
        how = rng.integers(3)
        if how != 0:
            distances[i] = int(rng.integers(i % 7 + 2))
        if how != 1:
            lengths[i] = own_lengths[i] + int(rng.integers(9))
        return

    values = lists[str(rng.choice([*lists]))]
    place = int(rng.integers(len(values)))
    how = rng.integers(5)
    if how == 0:
        values[place] = int(rng.choice(EXTREME))
    elif how == 1:
        values[place] += int(rng.choice([-2, -1, 1, 2]))
        values[place] = min(max(values[place], -(2**31)), LARGEST)
    elif how == 2:
        other = int(rng.integers(len(values)))
        values[place], values[other] = values[other], values[place]
    elif how == 3:
        values[place] = ~values[place]
    elif values is distances:
        values.append(0)


def id_of(token: int) -> int:
    """Return the id of a signed one."""
    return max(token, ~token)


def is_sound(packs: Packs) -> bool:
    """Return True if both packs obey the definition, one sequence after another."""
    if len(packs.parent_distances) != len(packs.lengths):
        return False
    sequence_edges = packs.sequence_offsets.tolist()
    token_edges = packs.token_offsets.tolist()
    for pack in range(2):
        first = sequence_edges[pack]
        end = sequence_edges[pack + 1]
        tokens = packs.signed_ids[token_edges[pack] : token_edges[pack + 1]]
        is_sound_pack = is_sound_row(
            tokens.tolist(),
            packs.seq_boundaries[first + pack : end + pack + 1].tolist(),
            packs.lengths[first:end].tolist(),
            packs.parent_distances[first:end].tolist(),
        )
        if not is_sound_pack:
            return False
    return True


def is_sound_row(
    tokens: list[int], edges: list[int], lengths: list[int], distances: list[int]
) -> bool:
    """Return True if one pack does, whose segments begin and end at `edges`."""
    if edges[0] != 0 or edges[-1] != len(tokens):
        return False
    sequences: list[list[int]] = []
    offsets: list[int] = []
    for i, length in enumerate(lengths):
        if not 0 <= edges[i] < edges[i + 1] <= len(tokens):
            return False
        own = tokens[edges[i] : edges[i + 1]]
        own_ids = [id_of(token) for token in own]
        if own[0] >= 0 or max(own) < 0 or max(own_ids) >= LARGEST:
            return False

        offset = length - len(own)
        omitted: list[int] = []
        if (distances[i] == 0) != (offset == 0):
            return False
        if distances[i]:
            if not 0 < distances[i] <= i:
                return False
            parent = i - distances[i]
            if not offsets[parent] < offset < len(sequences[parent]):
                return False
            if sequences[parent][offset] != own_ids[0]:
                return False
            omitted = sequences[parent][:offset]
        sequences.append(omitted + own_ids)
        offsets.append(offset)
    return sum(len(sequence) for sequence in sequences) <= MOST_KEYS


def assert_read_as_defined(packs: Packs) -> None:
    """Ids, labels and keys of all sequences are those of their places in the row."""
    signed_ids = packs.signed_ids.tolist()
    offsets = packs.segment_offsets.tolist()
    places = places_of(packs)
    examples = unpack(packs)
    edges = examples.sequence_offsets.tolist()
    for i, keys in enumerate(places):
        tokens = [signed_ids[key] for key in keys]
        ids = examples.input_ids[edges[i] : edges[i + 1]]
        supervised = examples.supervised[edges[i] : edges[i + 1]]
        assert ids.tolist() == [id_of(token) for token in tokens]
        assert supervised.tolist() == [
            place >= offsets[i] and token >= 0 for place, token in enumerate(tokens)
        ]

    batch = collate(packs, "sft")
    keys_of_batch = [*range(batch.num_tokens)]
    if batch.kv_index is not None:
        keys_of_batch = batch.kv_index.tolist()
    assert keys_of_batch == [key for keys in places for key in keys]


@pytest.mark.parametrize("count", [1500, pytest.param(60_000, marks=pytest.mark.slow)])
def test_hostile_trees(count: int) -> None:
    outcomes: Counter[str] = Counter()
    for number in range(count):
        packs = make(number)
        try:
            check_packs(packs, layout="shared_prefix", most_keys=MOST_KEYS)
        except FormatError as error:
            (rule,) = re.findall(r"\[([a-z-]+)\]", str(error))
            assert not is_sound(packs), (number, rule)
            outcomes[rule] += 1
        else:
            assert is_sound(packs), number
            assert_read_as_defined(packs)
            outcomes["sound"] += 1
    assert outcomes.keys() > RULES_OF_TREES
    assert outcomes["sound"] > count / 20
