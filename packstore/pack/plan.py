"""Plans which examples share a pack, from lengths alone, before tokens are copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packstore.config import PlanConfig
from packstore.errors import ConfigError, InputError, sentence
from packstore.format import seeds
from packstore.format.arrays import (
    Examples,
    Int32,
    Int64,
    ragged_indices,
    to_offsets,
)
from packstore.format.html import card
from packstore.pack.algorithms import STRATEGIES
from packstore.pack.chunks import Chunks, CommonBeginning, cut_chunks
from packstore.pack.jit import jit
from packstore.pack.layout import count_keys, round_up, sizes

MAX_PACK_SIZE = 1 << 24
"""Limited because strategies keep a table with one row per possible length."""

# Attributes of a plan in its statistics; over several plans, sums are added.
_SETTINGS = ("strategy", "seed", "shuffle", "pack_size", "pad_to_multiple")
_SUMS = ("num_packs", "num_examples", "tokens", "aligned_tokens")


@dataclass(frozen=True, eq=False)
class Plan:
    """The examples of each pack, and the order of the packs.

    Attributes:
        order: int32 `[n]`, the examples (positions in `lengths`), pack by pack.
        offsets: int64 `[P + 1]`; pack i holds ``order[offsets[i]:offsets[i + 1]]``.
        lengths: int32 `[n]`, tokens of each example, padding included.
        tokens: number of tokens of all examples, without padding.
        pack_size: maximum tokens per pack.
        pad_to_multiple: multiple to which sequences are padded at load.
        strategy: name of the strategy.
        seed: random seed.
        shuffle: whether the strategy got the examples in random order, and the packs
            were shuffled.
    """

    order: Int32
    offsets: Int64
    lengths: Int32
    tokens: int
    pack_size: int
    pad_to_multiple: int
    strategy: str
    seed: int
    shuffle: bool

    def __repr__(self) -> str:
        return (
            f"Plan(packs={self.num_packs}, examples={self.num_examples}, "
            f"pack_size={self.pack_size}, tokens={self.tokens}, "
            f"fill_rate={self.fill_rate:.4f})"
        )

    def _repr_html_(self) -> str:
        fewest, mean, most = self.examples_per_pack
        facts = {
            "packs": f"{self.num_packs:,} of {self.pack_size:,} tokens",
            "examples": self.num_examples,
            "examples per pack": f"{fewest:,} to {most:,}, mean {mean:.2f}",
            "tokens": f"{self.tokens:,}, fill {self.fill_rate:.2%}",
            "strategy": self.strategy,
        }
        first_pack = self.order[: self.offsets[1]] if self.num_packs else self.order[:0]
        parts = self.lengths[first_pack].tolist()
        return card("Plan", facts, parts=parts, size=self.pack_size)

    @property
    def num_packs(self) -> int:
        """P."""
        return len(self.offsets) - 1

    @property
    def num_examples(self) -> int:
        """n."""
        return len(self.order)

    @cached_property
    def aligned_tokens(self) -> int:
        """Tokens of all examples, padding included."""
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def pack_tokens(self) -> Int64:
        """int64 `[P]`, tokens of each pack, padding included."""
        return _pack_sums(self.lengths, self.order, self.offsets)

    @property
    def fill_rate(self) -> float:
        """Fraction of the packs' capacity filled with tokens, 0..1."""
        return self.tokens / max(self.num_packs * self.pack_size, 1)

    @property
    def aligned_fill_rate(self) -> float:
        """Fraction of the packs' capacity filled with tokens and padding, 0..1."""
        return self.aligned_tokens / max(self.num_packs * self.pack_size, 1)

    @property
    def examples_per_pack(self) -> tuple[int, float, int]:
        """Fewest, mean and most examples of a pack; zeros without packs."""
        if not self.num_packs:
            return 0, 0.0, 0
        counts = np.diff(self.offsets)
        mean = self.num_examples / self.num_packs
        return int(counts.min()), mean, int(counts.max())

    def with_lengths(self, lengths: Int32, tokens: int) -> Plan:
        """Return the plan with the figures of its packs, which may share prefixes.

        Args:
            lengths: int32 `[n]`, tokens of each example in its pack, padding included,
                pack by pack.
            tokens: number of tokens of all examples, without padding.
        """
        lengths_of_examples = np.empty_like(lengths)
        lengths_of_examples[self.order] = lengths
        return replace(self, lengths=lengths_of_examples, tokens=tokens)

    def statistics(self) -> dict[str, Any]:
        """Return all figures of the plan, as JSON values.

        Besides the properties above: `megatron_bridge`, with the names that
        Megatron-Bridge and NeMo read (efficiency in percent, of padded lengths).
        """
        fewest, _, most = self.examples_per_pack
        return _statistics(
            settings={name: getattr(self, name) for name in _SETTINGS},
            sums={name: getattr(self, name) for name in _SUMS},
            fewest_examples=fewest,
            most_examples=most,
            shortest_pack=int(self.pack_tokens.min()) if self.num_packs else 0,
            longest_example=int(self.lengths.max(initial=0)),
        )


def merged_statistics(plans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the statistics over all packs of several plans of the same settings, at
    least one.
    """
    examples_per_pack = [plan["examples_per_pack"] for plan in plans]
    lengths = [plan["megatron_bridge"] for plan in plans]
    return _statistics(
        settings={name: plans[0][name] for name in _SETTINGS},
        sums={name: sum(plan[name] for plan in plans) for name in _SUMS},
        fewest_examples=min(figures["min"] for figures in examples_per_pack),
        most_examples=max(figures["max"] for figures in examples_per_pack),
        shortest_pack=min(figures["min_packed_seqlen"] for figures in lengths),
        longest_example=max(figures["dataset_max_seqlen"] for figures in lengths),
    )


def _statistics(
    *,
    settings: dict[str, Any],
    sums: dict[str, int],
    fewest_examples: int,
    most_examples: int,
    shortest_pack: int,
    longest_example: int,
) -> dict[str, Any]:
    """Return the statistics of one plan or several: sums, rates and extremes.

    Args:
        settings: the values of `_SETTINGS`.
        sums: the values of `_SUMS`.
        fewest_examples: of a pack.
        most_examples: of a pack.
        shortest_pack: in tokens, padding included.
        longest_example: in tokens, padding included.
    """
    capacity = max(sums["num_packs"] * settings["pack_size"], 1)
    mean_examples = sums["num_examples"] / max(sums["num_packs"], 1)
    aligned_fill_rate = sums["aligned_tokens"] / capacity
    return {
        **settings,
        **sums,
        "fill_rate": sums["tokens"] / capacity,
        "aligned_fill_rate": aligned_fill_rate,
        "examples_per_pack": {
            "min": fewest_examples,
            "mean": mean_examples,
            "max": most_examples,
        },
        "megatron_bridge": {
            "max_samples_per_bin": most_examples,
            "dataset_max_seqlen": longest_example,
            "packing_factor": round(mean_examples, 2),
            "packing_efficiency": round(100 * aligned_fill_rate, 2),
            "pack_size": settings["pack_size"],
            "min_packed_seqlen": shortest_pack,
        },
    }


def plan(
    lengths: npt.ArrayLike,
    *,
    pack_size: int | None = None,
    strategy: str | None = None,
    seed: int | None = None,
    shuffle: bool | None = None,
    config: PlanConfig | None = None,
) -> Plan:
    """Plan packs for examples of these lengths, as :func:`packstore.pack` does.

    Args:
        lengths: integers `[n]`, tokens of each example in input order, each
            1..pack_size. With `pad_to_multiple` in `config`, each is rounded up to it;
            round up the sequences of an example before adding them.
        pack_size: maximum tokens per pack.
        strategy: a name of ``packstore.pack.algorithms.STRATEGIES``.
        seed: random seed.
        shuffle: pass the examples to the strategy in random order, and shuffle the
            packs; False: in input order, so that packs hold neighbours.
        config: settings for the arguments that are None (default: their defaults).

    Returns:
        The plan; without packs if there are no examples.

    Raises:
        InputError: `lengths` is not a list of integers, or one of them is out of range.
        ConfigError: a setting is invalid.
    """
    arguments = {
        "pack_size": pack_size,
        "strategy": strategy,
        "seed": seed,
        "shuffle": shuffle,
    }
    explicit = {name: value for name, value in arguments.items() if value is not None}
    settings = PlanConfig.of(config, **explicit)
    _check_pack_size(settings)
    exact_lengths = _validate_lengths(lengths, settings.pack_size)
    padded_lengths = exact_lengths
    if settings.pad_to_multiple > 1:
        rounded = round_up(exact_lengths, settings.pad_to_multiple)
        padded_lengths = _validate_lengths(rounded, settings.pack_size)

    order, offsets = _assign_packs(padded_lengths, settings.pack_size, settings)
    tokens = int(exact_lengths.sum(dtype=np.int64))
    return _build_plan(order, offsets, padded_lengths, tokens, settings)


def plan_examples(
    lengths: Int32, keys: Int32, config: PlanConfig, chunks: Chunks | None = None
) -> Plan:
    """Plan packs whose sequences have at most ``config.key_limit`` tokens together.

    A pack that would have more is split, in its order, between chunks. The lengths of a
    plan of chunks are those of the chunks, and the most that the packs can have.

    Args:
        lengths: int32 `[n]`, tokens that each example takes up on its own, with
            padding: 1..pack_size.
        keys: int32 `[n]`, sum of the lengths of each example's sequences, at most
            ``config.key_limit``.
        config: settings.
        chunks: examples that stand together, in the order of the input; None: each on
            its own.

    Raises:
        InputError: one of `lengths` is out of range.
        ConfigError: a setting is invalid.
    """
    _check_pack_size(config)
    lengths = _validate_lengths(lengths, config.pack_size)
    if chunks is None:
        order, offsets = _assign_packs(lengths, config.pack_size, config)
        offsets = _limit_keys(order, offsets, keys, config.key_limit)
    else:
        order, offsets = _assign_chunks(chunks, keys, config)
        lengths = np.empty_like(lengths)
        lengths[chunks.order] = chunks.lengths
        lengths[order[offsets[:-1]]] += chunks.common
    tokens = int(lengths.sum(dtype=np.int64))
    return _build_plan(order, offsets, lengths, tokens, config)


def plan_prefixes(
    examples: Examples,
    pack_size: int,
    max_keys: int | None = None,
    *,
    strategy: str = "pool",
) -> tuple[Int32, Int64]:
    """Plan packs of examples that begin alike, to store their beginnings once.

    For examples in memory, such as the rollouts of a step; 512 rows of agents' turns,
    4 million tokens, take 20 ms. A row stands before those that extend it. Pass the
    result to :func:`packstore.pack.fill.fill`, with ``share="pack"``.

    Args:
        examples: E examples.
        pack_size: maximum tokens of a pack.
        max_keys: maximum sum of the lengths of the sequences of a pack; None: 16 times
            `pack_size`.
        strategy: a name of ``packstore.pack.algorithms.STRATEGIES``.

    Returns:
        The order of the examples, int32 `[E]`; and the offsets of the packs in it,
        int64 `[P + 1]`.

    Raises:
        InputError: an example on its own does not fit a pack.
        ConfigError: a setting is invalid.
    """
    config = PlanConfig(
        pack_size=pack_size, max_keys=max_keys, strategy=strategy, shuffle=False
    )
    if not examples.num_examples:
        return np.empty(0, np.int32), np.zeros(1, np.int64)
    keys = count_keys(examples)
    _check_keys(keys, config.key_limit)
    lengths = _validate_lengths(sizes(examples, "shared_prefix"), pack_size)

    beginning = CommonBeginning()
    beginning.add(examples)
    chunks = cut_chunks(
        examples, pack_size, config.key_limit, common=beginning.tokens()
    )
    chunks = chunks.in_input_order(np.arange(examples.num_examples))
    packing = plan_examples(lengths, keys.astype(np.int32), config, chunks)
    return packing.order, packing.offsets


def _check_pack_size(config: PlanConfig) -> None:
    if config.pack_size > MAX_PACK_SIZE:
        raise ConfigError(
            f"setting pack_size must be at most {MAX_PACK_SIZE}; "
            f"found {config.pack_size}."
        )


def _check_keys(keys: Int64, limit: int) -> None:
    """Raise InputError for an example whose sequences are longer than a pack's may be
    together.
    """
    if keys.max() > limit:
        i = int(keys.argmax())
        raise InputError(
            sentence(
                where=f"examples[{i}]",
                rule=f"its sequences must have at most {limit} tokens together "
                "(max_keys)",
                found=str(keys[i]),
                remedy="Split its sequences over several examples, or raise max_keys",
            )
        )


def _build_plan(
    order: Int32, offsets: Int64, lengths: Int32, tokens: int, config: PlanConfig
) -> Plan:
    return Plan(
        order=order,
        offsets=offsets,
        lengths=lengths,
        tokens=tokens,
        pack_size=config.pack_size,
        pad_to_multiple=config.pad_to_multiple,
        strategy=config.strategy,
        seed=config.seed,
        shuffle=config.shuffle,
    )


def _validate_lengths(lengths: npt.ArrayLike, capacity: int) -> Int32:
    """Return `lengths` as a contiguous int32 array, or raise as :func:`plan` does."""
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise InputError(
            sentence(
                where="lengths",
                rule="they must be a list of whole numbers",
                found=f"{array.ndim} dimensions of {array.dtype}",
            )
        )
    if len(array) > np.iinfo(np.int32).max:
        raise InputError(
            sentence(
                where="lengths",
                rule="one plan takes at most 2^31 - 1 examples",
                found=f"{len(array):,}",
                remedy="Plan them in parts",
            )
        )
    if len(array) and (array.min() < 1 or array.max() > capacity):
        i = int(((array < 1) | (array > capacity)).argmax())
        raise InputError(
            sentence(
                where=f"lengths[{i}]",
                rule=f"each example must have 1 to {capacity} tokens (pack_size)",
                found=str(array[i]),
                remedy="Drop or shorten what does not fit, or choose a larger "
                "pack_size",
            )
        )
    # A read-only array would compile every strategy a second time.
    return np.require(array, np.int32, ["C", "W"])


def _assign_packs(
    lengths: Int32, capacity: int, settings: PlanConfig
) -> tuple[Int32, Int64]:
    """Return order and offsets of the plan, see :class:`Plan`."""
    strategy = STRATEGIES.load(settings.strategy)
    if not settings.shuffle:
        return strategy(lengths, capacity, settings.seed)

    examples = seeds.permutation(len(lengths), settings.seed, "examples")
    shuffled = examples.astype(np.int32)
    order, offsets = strategy(lengths[shuffled], capacity, settings.seed)

    packs = seeds.permutation(len(offsets) - 1, settings.seed, "pack order")
    return _reorder_packs(shuffled[order], offsets, packs)


def _assign_chunks(
    chunks: Chunks, keys: Int32, settings: PlanConfig
) -> tuple[Int32, Int64]:
    """Return order and offsets of a plan of chunks, see :class:`Plan`.

    Args:
        chunks: each has at most ``settings.key_limit`` keys.
        keys: int32 `[n]`, of each example.
        settings: settings.
    """
    capacity = settings.pack_size - chunks.common
    chunk_order, chunk_offsets = _assign_packs(chunks.tokens, capacity, settings)
    # A chunk stays whole: its second part would store its beginning again.
    chunk_keys = np.add.reduceat(
        keys[chunks.order], chunks.offsets[:-1], dtype=np.int32
    )
    chunk_offsets = _limit_keys(
        chunk_order, chunk_offsets, chunk_keys, settings.key_limit
    )
    order = chunks.order[ragged_indices(chunks.offsets, chunk_order)]
    examples_per_chunk = np.diff(chunks.offsets)[chunk_order]
    offsets = to_offsets(examples_per_chunk)[chunk_offsets]
    return order.astype(np.int32), offsets


def _limit_keys(order: Int32, offsets: Int64, keys: Int32, limit: int) -> Int64:
    """Return the offsets of packs of at most `limit` keys, see `_split_by_keys`."""
    # Mostly no pack has more, and then no loop is loaded to split them.
    if _pack_sums(keys, order, offsets).max(initial=0) <= limit:
        return offsets
    return _split_by_keys(order, offsets, keys, limit)


# Indices are unsigned: numba checks signed ones for negative values, which takes as
# long as the work (measured: 1.8 against 0.8 ns).


@jit
def _pack_sums(lengths: Int32, order: Int32, offsets: Int64) -> Int64:
    """Return the sum of the lengths of each pack: int64 `[P]`."""
    tokens = np.zeros(len(offsets) - 1, np.int64)
    for pack in range(len(tokens)):
        for i in range(np.uint64(offsets[pack]), np.uint64(offsets[pack + 1])):
            tokens[pack] += lengths[np.uint32(order[i])]
    return tokens


@jit
def _split_by_keys(order: Int32, offsets: Int64, keys: Int32, limit: int) -> Int64:
    """Return the offsets of packs of at most `limit` keys, int64.

    Args:
        order: int32 `[n]`, examples.
        offsets: int64 `[P + 1]`, offsets of the packs in `order`.
        keys: int32 `[n]`, of each example at most `limit`.
        limit: maximum sum of the keys of a pack.
    """
    new_offsets = np.empty(len(order) + 1, np.int64)
    num_packs = 0
    for pack in range(len(offsets) - 1):
        num_keys = np.int64(limit + 1)  # so that a pack begins
        for i in range(offsets[pack], offsets[pack + 1]):
            num_keys += keys[order[i]]
            if num_keys > limit:
                new_offsets[num_packs] = i
                num_packs += 1
                num_keys = np.int64(keys[order[i]])
    new_offsets[num_packs] = len(order)
    return new_offsets[: num_packs + 1].copy()


@jit
def _reorder_packs(order: Int32, offsets: Int64, packs: Int64) -> tuple[Int32, Int64]:
    """Return order and offsets with the packs in the order of a permutation `packs`."""
    new_order = np.empty(len(order), np.int32)
    new_offsets = np.empty_like(offsets)
    end = np.uint64(0)
    for place, pack in enumerate(packs):
        new_offsets[place] = end
        for i in range(np.uint64(offsets[pack]), np.uint64(offsets[pack + 1])):
            new_order[end] = order[i]
            end += np.uint64(1)
    new_offsets[len(packs)] = end
    return new_order, new_offsets
