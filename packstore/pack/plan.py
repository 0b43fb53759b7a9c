"""Plans which examples share a pack, from lengths alone, before any token is copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from packstore.config import PlanConfig
from packstore.errors import ConfigError, InputError, sentence
from packstore.format import seeds
from packstore.format.arrays import Int32, Int64
from packstore.format.html import card
from packstore.pack.algorithms import STRATEGIES
from packstore.pack.kernels import jit
from packstore.pack.layout import round_up

MAX_PACK_SIZE = 1 << 24
"""Limited because strategies keep a table with one row per possible length."""


_SUMS = ("num_packs", "num_examples", "tokens", "aligned_tokens")


@dataclass(frozen=True, eq=False)
class Plan:
    """The examples of each pack, and the order of the packs.

    Attributes:
        order: int32 `[n]`, the examples (positions in `lengths`), pack by pack.
        offsets: int64 `[P + 1]`; pack i holds ``order[offsets[i]:offsets[i + 1]]``.
        lengths: int32 `[n]`, tokens of each example, padding included.
        tokens: tokens of all examples, without padding.
        pack_size: most tokens of a pack.
        pad_to_multiple: multiple to which sequences are padded at load.
        strategy: name of the strategy.
        seed: source of every random choice.
        shuffle: the strategy got the examples in random order, and the packs were
            shuffled.
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

    def _repr_html_(self) -> str:
        fewest, mean, most = self.examples_per_pack
        facts = {
            "packs": f"{self.num_packs:,} of {self.pack_size:,} tokens",
            "examples": self.num_examples,
            "examples per pack": f"{fewest:,} to {most:,}, mean {mean:.2f}",
            "tokens": f"{self.tokens:,}, fill {self.fill_rate:.2%}",
            "strategy": self.strategy,
        }
        first = self.order[: self.offsets[1]] if self.num_packs else self.order[:0]
        return card("Plan", facts, self.lengths[first].tolist(), self.pack_size)

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
        number = np.diff(self.offsets)
        return int(number.min()), self.num_examples / self.num_packs, int(number.max())

    def statistics(self) -> dict[str, Any]:
        """Returns all figures of the plan, as JSON values.

        Besides the properties above: `megatron_bridge`, with the names that
        Megatron-Bridge and NeMo read (efficiency in percent, of padded lengths).
        """
        fewest, _, most = self.examples_per_pack
        names = ("strategy", "seed", "shuffle", "pack_size", "pad_to_multiple")
        settings = {name: getattr(self, name) for name in names}
        sums = {name: getattr(self, name) for name in _SUMS}
        shortest = int(self.pack_tokens.min()) if self.num_packs else 0
        longest = int(self.lengths.max(initial=0))
        return _statistics(settings, sums, (fewest, most), (shortest, longest))


def merged_statistics(plans: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the statistics over all packs of several plans of the same settings, at
    least one.
    """
    examples = [plan["examples_per_pack"] for plan in plans]
    bridge = [plan["megatron_bridge"] for plan in plans]
    shortest = min(figures["min_packed_seqlen"] for figures in bridge)
    longest = max(figures["dataset_max_seqlen"] for figures in bridge)
    return _statistics(
        plans[0],
        {name: sum(plan[name] for plan in plans) for name in _SUMS},
        (
            min(figures["min"] for figures in examples),
            max(figures["max"] for figures in examples),
        ),
        (shortest, longest),
    )


def _statistics(
    settings: dict[str, Any],
    sums: dict[str, int],
    per_pack: tuple[int, int],
    tokens: tuple[int, int],
) -> dict[str, Any]:
    """`per_pack`: fewest and most examples; `tokens`: of the shortest pack, the longest
    example.
    """
    room = max(sums["num_packs"] * settings["pack_size"], 1)
    mean = sums["num_examples"] / max(sums["num_packs"], 1)
    aligned_fill_rate = sums["aligned_tokens"] / room
    return {
        **settings,
        **sums,
        "fill_rate": sums["tokens"] / room,
        "aligned_fill_rate": aligned_fill_rate,
        "examples_per_pack": {"min": per_pack[0], "mean": mean, "max": per_pack[1]},
        "megatron_bridge": {
            "max_samples_per_bin": per_pack[1],
            "dataset_max_seqlen": tokens[1],
            "packing_factor": round(mean, 2),
            "packing_efficiency": round(100 * aligned_fill_rate, 2),
            "pack_size": settings["pack_size"],
            "min_packed_seqlen": tokens[0],
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
    """Plans packs for examples of these lengths, as :func:`packstore.pack` does.

    Args:
        lengths: integers `[n]`, tokens of each example in input order, each
            1..pack_size. With `pad_to_multiple` in `config`, each is rounded up to it;
            round up the sequences of an example before adding them.
        pack_size: most tokens of a pack.
        strategy: a name of ``packstore.pack.algorithms.STRATEGIES``.
        seed: source of every random choice.
        shuffle: pass the examples to the strategy in random order, and shuffle the
            packs; False: in input order, so that packs hold neighbours.
        config: values of settings not given here; default: the defaults.

    Returns:
        The plan; without packs if there are no examples.

    Raises:
        InputError: `lengths` is not a list of integers, or one of them is out of range.
        ConfigError: a setting is invalid.
    """
    given = {
        "pack_size": pack_size,
        "strategy": strategy,
        "seed": seed,
        "shuffle": shuffle,
    }
    settings = PlanConfig.of(
        config, **{n: value for n, value in given.items() if value is not None}
    )
    capacity = settings.pack_size
    if capacity > MAX_PACK_SIZE:
        raise ConfigError(
            f"setting pack_size must be at most {MAX_PACK_SIZE}; found {capacity}."
        )
    pack_by = STRATEGIES.load(settings.strategy)
    exact = padded = _check_lengths(lengths, capacity)
    if settings.pad_to_multiple > 1:
        padded = _check_lengths(round_up(exact, settings.pad_to_multiple), capacity)
    if settings.shuffle:
        drawn = seeds.permutation(len(padded), settings.seed, "examples").astype(
            np.int32
        )
        order, offsets = pack_by(padded[drawn], capacity, settings.seed)
        packs = seeds.permutation(len(offsets) - 1, settings.seed, "pack order")
        order, offsets = _reorder_packs(drawn[order], offsets, packs)
    else:
        order, offsets = pack_by(padded, capacity, settings.seed)
    return Plan(
        order=order,
        offsets=offsets,
        lengths=padded,
        tokens=int(exact.sum(dtype=np.int64)),
        pack_size=capacity,
        pad_to_multiple=settings.pad_to_multiple,
        strategy=settings.strategy,
        seed=settings.seed,
        shuffle=settings.shuffle,
    )


def _check_lengths(lengths: npt.ArrayLike, capacity: int) -> Int32:
    """Converts `lengths` to a contiguous int32 array, or raises as :func:`plan`
    says.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        found = f"{array.ndim} dimensions of {array.dtype}"
        raise InputError(
            sentence("lengths", "they must be a list of whole numbers", found)
        )
    if len(array) > np.iinfo(np.int32).max:
        rule = "one plan takes at most 2^31 - 1 examples"
        raise InputError(
            sentence("lengths", rule, f"{len(array):,}", "Plan them in parts")
        )
    if len(array) and (array.min() < 1 or array.max() > capacity):
        i = int(((array < 1) | (array > capacity)).argmax())
        rule = f"each example must have 1 to {capacity} tokens (pack_size)"
        remedy = "Drop or shorten what does not fit, or choose a larger pack_size"
        raise InputError(sentence(f"lengths[{i}]", rule, str(array[i]), remedy))
    # A read-only array would compile every strategy a second time.
    return np.require(array, np.int32, ["C", "W"])


# Indices are unsigned: numba checks signed ones for negative values, which takes as
# long as the work (measured: 1.8 against 0.8 ns).


@jit
def _pack_sums(lengths: Int32, order: Int32, offsets: Int64) -> Int64:
    """Sums the lengths of each pack: int64 `[P]`."""
    tokens = np.zeros(len(offsets) - 1, np.int64)
    for pack in range(len(tokens)):
        for i in range(np.uint64(offsets[pack]), np.uint64(offsets[pack + 1])):
            tokens[pack] += lengths[np.uint32(order[i])]
    return tokens


@jit
def _reorder_packs(order: Int32, offsets: Int64, packs: Int64) -> tuple[Int32, Int64]:
    """Returns order and offsets with the packs in the order of the permutation
    `packs`.
    """
    new_order, new_offsets = np.empty(len(order), np.int32), np.empty_like(offsets)
    to = np.uint64(0)
    for place, pack in enumerate(packs):
        new_offsets[place] = to
        for i in range(np.uint64(offsets[pack]), np.uint64(offsets[pack + 1])):
            new_order[to] = order[i]
            to += np.uint64(1)
    new_offsets[len(packs)] = to
    return new_order, new_offsets
