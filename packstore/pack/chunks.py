"""Cuts examples that begin alike into chunks that stand together in a pack.

A pack with shared prefixes stores a beginning once, however many of its sequences have
it. So examples are sorted until those that begin alike are neighbours, and the runs of
such examples are cut into *chunks*; a strategy packs chunks in place of examples.

The order is a walk through the tree of all beginnings: an example stands before those
that extend it. The branches of a node are in random order, so neighbours that share
little are no more alike than any two examples. Only the first sequences of examples are
compared. :func:`packstore.pack.fill.fill` finds all that is shared in a pack, which is
never less than planned here.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packstore.format import seeds
from packstore.format.arrays import (
    Examples,
    Int32,
    Int64,
    ragged_indices,
    to_offsets,
)
from packstore.format.seeds import U64
from packstore.pack.layout import count_keys, round_up, sizes

BLOCK = 16
"""Tokens of a block. Examples are sorted by hashes of the whole blocks that they begin
with, and stand together if they share this many tokens more than all examples do.
"""

CHUNKS_PER_PACK = 4
"""A chunk may end at this fraction of a pack: smaller ones repeat more beginnings, and
of larger ones a pack holds too few to be filled well, or to be random.
"""

MAX_REPEATED = 32
"""A chunk ends before the pack is full only where the next one repeats at most this
fraction of a pack. So rows that have most of their tokens in common stay together.
"""

_LEVELS = 8
"""Bytes of a key of :func:`beginning_keys`."""

_BLOCKS_AT_ONCE = 4096
"""Blocks that are hashed at once, about as many as fit the cache."""


@dataclass(frozen=True, eq=False)
class Chunks:
    """Examples that stand together in a pack, as they begin alike.

    Attributes:
        order: int64 `[n]`, the examples, chunk by chunk.
        offsets: int64 `[C + 1]`; chunk c holds ``order[offsets[c] : offsets[c + 1]]``.
        lengths: int32 `[n]`, tokens that each example of `order` adds to its chunk,
            with padding, besides `common`.
        common: tokens that a pack stores once for all of its chunks.
    """

    order: Int64
    offsets: Int64
    lengths: Int32
    common: int

    @property
    def tokens(self) -> Int32:
        """Tokens that each chunk takes up in a pack, besides `common`: int32 `[C]`."""
        return np.add.reduceat(self.lengths, self.offsets[:-1])

    def in_input_order(self, places: Int64) -> Chunks:
        """Return the chunks in the order of their first examples.

        Args:
            places: int64 `[n]`, the place of each example in the input.
        """
        first_places = np.minimum.reduceat(places[self.order], self.offsets[:-1])
        chunks = first_places.argsort(kind="stable")
        examples = ragged_indices(self.offsets, chunks)
        return Chunks(
            order=self.order[examples],
            offsets=to_offsets(np.diff(self.offsets)[chunks]),
            lengths=self.lengths[examples],
            common=self.common,
        )

    @classmethod
    def concat(cls, parts: Sequence[Chunks]) -> Chunks:
        """Concatenate the chunks of parts of the input, which are numbered on."""
        first_examples = to_offsets(np.array([len(part.order) for part in parts]))
        numbered = zip(parts, first_examples.tolist(), strict=False)
        sizes_of_parts = [np.diff(part.offsets) for part in parts]
        return cls(
            order=np.concatenate([part.order + first for part, first in numbered]),
            offsets=to_offsets(np.concatenate(sizes_of_parts)),
            lengths=np.concatenate([part.lengths for part in parts]),
            common=parts[0].common,
        )


class CommonBeginning:
    """The tokens that all prompts begin with, found in one pass over the examples.

    Attributes:
        ids: int32, the tokens; None before the first example.
    """

    def __init__(self) -> None:
        self.ids: Int32 | None = None

    def add(self, examples: Examples) -> None:
        """Add examples, one at least."""
        starts, _ = _first_sequences(examples)
        shortest = min(_first_prompt_lengths(examples))
        if self.ids is None:
            self.ids = examples.input_ids[starts[0] : starts[0] + shortest].copy()
        length = min(shortest, len(self.ids))
        for start in starts.tolist():
            if not length:
                break
            differs = examples.input_ids[start : start + length] != self.ids[:length]
            if differs.any():
                length = int(differs.argmax())
        self.ids = self.ids[:length]

    def tokens(self, multiple: int = 1) -> int:
        """Return the tokens that every sequence but the first of a pack leaves out.

        Args:
            multiple: stored parts of sequences are rounded up to a multiple of this.
        """
        if self.ids is None:
            return 0
        # The last shared token is stored again: it predicts the token behind it.
        omitted = max(len(self.ids) - 1, 0)
        return omitted // multiple * multiple


def cut_chunks(
    examples: Examples,
    pack_size: int,
    max_keys: int,
    *,
    multiple: int = 1,
    common: int = 0,
    seed: int = 0,
) -> Chunks:
    """Cut examples into chunks, each of which fits a pack.

    Args:
        examples: at least one; each has at most `pack_size` stored tokens, and
            sequences of at most `max_keys` tokens together.
        pack_size: maximum tokens of a pack.
        max_keys: maximum sum of the lengths of the sequences of a pack.
        multiple: the stored part of each sequence is rounded up to a multiple of this.
        common: see :meth:`CommonBeginning.tokens`; of these examples, and of all others
            that are packed with them.
        seed: decides the order of examples that begin differently.
    """
    order = _order_by_beginning(examples, seed)
    tokens = sizes(examples, "shared_prefix", multiple)[order] - np.int32(common)
    shared = _shared_with_previous(examples, order)
    # The last shared token is stored again: it predicts the token behind it.
    omitted = np.maximum(shared - 1, 0)
    _, lengths = _first_sequences(examples)
    lengths = lengths[order]
    saved = round_up(lengths, multiple) - round_up(lengths - omitted, multiple)
    saved = np.maximum(saved - np.int32(common), 0)
    offsets = _cut(
        tokens=tokens.tolist(),
        saved=saved.tolist(),
        keys=count_keys(examples)[order].tolist(),
        capacity=pack_size - common,
        max_keys=max_keys,
    )
    saved[offsets[:-1]] = 0
    return Chunks(order, offsets, tokens - saved, common)


def beginning_keys(examples: Examples, seed: int) -> U64:
    """Return a key for each example: sorted, those that begin alike are neighbours.

    The first byte is a hash of the first 16 tokens, the next one of the first 32, and
    so on to 2048; 0 where an example is shorter. So examples that share the first 500
    tokens have the first five bytes in common. They are eight bytes of memory for each
    example of a partition, of which only some are in memory as a whole.

    Returns:
        uint64 `[E]`.
    """
    starts, lengths = _first_sequences(examples)
    num_blocks = np.minimum(lengths // BLOCK, 1 << (_LEVELS - 1))
    hashes = _hash_blocks(examples.input_ids, starts, num_blocks, seed)
    edges = to_offsets(num_blocks)
    place = np.arange(len(hashes)) - np.repeat(edges[:-1], num_blocks)
    # Sums of hashes that depend on the places of the blocks.
    placed = seeds.mixed(hashes + place.astype(np.uint64) * seeds.GOLDEN)
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(placed)])

    keys = np.zeros(len(starts), np.uint64)
    for level in range(_LEVELS):
        is_long_enough = num_blocks >= 1 << level
        first = edges[:-1][is_long_enough]
        prefix_hash = seeds.mixed(sums[first + (1 << level)] - sums[first])
        byte = prefix_hash >> np.uint64(56)
        keys[is_long_enough] |= byte << np.uint64(56 - 8 * level)
    return keys


def _cut(
    *,
    tokens: list[int],
    saved: list[int],
    keys: list[int],
    capacity: int,
    max_keys: int,
) -> Int64:
    """Return the offsets of the chunks, int64 `[C + 1]`.

    Args:
        tokens: `[n]`, tokens of each example on its own.
        saved: `[n]`, how many of them it leaves out behind the example before it.
        keys: `[n]`, sum of the lengths of its sequences.
        capacity: maximum tokens of a chunk.
        max_keys: maximum keys of a chunk.
    """
    offsets: list[int] = []
    num_tokens = 0
    num_keys = 0
    for place, saved_tokens in enumerate(saved):
        tokens_with_next = num_tokens + tokens[place] - saved_tokens
        keys_with_next = num_keys + keys[place]

        fits = tokens_with_next <= capacity and keys_with_next <= max_keys
        is_large_enough = tokens_with_next > capacity // CHUNKS_PER_PACK
        # Where two would not fit a pack, one shall fill it.
        may_end = is_large_enough and num_tokens <= capacity // 2
        should_end = may_end and saved_tokens <= capacity // MAX_REPEATED
        if place and saved_tokens >= BLOCK and fits and not should_end:
            num_tokens = tokens_with_next
            num_keys = keys_with_next
            continue

        offsets.append(place)
        num_tokens = tokens[place]
        num_keys = keys[place]
    offsets.append(len(tokens))
    return np.array(offsets, np.int64)


def _order_by_beginning(examples: Examples, seed: int) -> Int64:
    """Return the examples in the order of the tree of their beginnings: int64 `[E]`."""
    starts, lengths = _first_sequences(examples)
    num_blocks = lengths // BLOCK
    hashes = _hash_blocks(examples.input_ids, starts, num_blocks, seed)
    # One byte order, so that the result does not depend on the machine.
    hash_bytes = hashes.astype("<u4", copy=False).tobytes()
    edges = (hashes.itemsize * to_offsets(num_blocks)).tolist()
    sort_keys = [
        (hash_bytes[start:end], length)
        for (start, end), length in zip(
            itertools.pairwise(edges), lengths.tolist(), strict=True
        )
    ]
    order = sorted(range(examples.num_examples), key=sort_keys.__getitem__)
    return np.array(order, np.int64)


def _hash_blocks(
    input_ids: Int32, starts: Int64, num_blocks: Int32, seed: int
) -> npt.NDArray[np.uint32]:
    """Return the hashes of the first blocks of some sequences, one after another.

    Source: the multilinear hash of Lemire and Kaser, "Strongly universal string hashing
        is fast", 2014: the upper half of a sum of products.
    """
    ends = (starts + BLOCK * num_blocks).tolist()
    ranges = list(zip(starts.tolist(), ends, strict=True))
    edges = to_offsets(num_blocks)
    factors = seeds.keys(BLOCK, seed, "beginnings")
    hashes = np.empty(edges[-1], np.uint32)
    first = 0
    while first < len(ranges):
        # As many sequences as fit the cache, one at least.
        end = int(np.searchsorted(edges, edges[first] + _BLOCKS_AT_ONCE, "right")) - 1
        end = max(end, first + 1)
        ids = np.concatenate([input_ids[i:j] for i, j in ranges[first:end]])
        blocks = ids.reshape(-1, BLOCK).astype(np.uint64)
        hashes[edges[first] : edges[end]] = (blocks @ factors) >> np.uint64(32)
        first = end
    return hashes


def _shared_with_previous(examples: Examples, order: Int64) -> Int32:
    """Return how many tokens of each prompt the example before it begins with, too.

    Of the first sequences; 0 if they are less than a block.

    Args:
        examples: the examples.
        order: int64 `[E]`, their order.

    Returns:
        int32 `[E]`, in this order.
    """
    input_ids = examples.input_ids
    starts, lengths = _first_sequences(examples)
    prompt_lengths = np.array(_first_prompt_lengths(examples))[order].tolist()
    starts_in_order = starts[order].tolist()
    lengths_in_order = lengths[order].tolist()
    shared = np.zeros(len(order), np.int32)
    for place in range(1, len(order)):
        a = starts_in_order[place - 1]
        b = starts_in_order[place]
        length = min(lengths_in_order[place - 1], prompt_lengths[place])
        if length < BLOCK or input_ids[a] != input_ids[b]:
            continue
        differs = input_ids[a : a + length] != input_ids[b : b + length]
        if differs.any():
            length = int(differs.argmax())
        shared[place] = length
    return shared


def _first_sequences(examples: Examples) -> tuple[Int64, Int32]:
    """Return the starts of the first sequences of examples, int64 `[E]`, and their
    lengths, int32 `[E]`.
    """
    first_sequences = examples.example_offsets[:-1]
    starts = examples.sequence_offsets[first_sequences]
    return starts, examples.lengths[first_sequences]


def _first_prompt_lengths(examples: Examples) -> list[int]:
    """Return the tokens of each example's first sequence before its first supervised
    one.
    """
    flags = examples.supervised.tobytes()
    starts, lengths = _first_sequences(examples)
    prompt_lengths = []
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        first_supervised = flags.find(b"\x01", start, start + length)
        is_all_prompt = first_supervised < 0
        prompt_lengths.append(length if is_all_prompt else first_supervised - start)
    return prompt_lengths
