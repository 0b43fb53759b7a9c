"""Plans which examples share a pack, from lengths alone, before any token is copied."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from packstore.config import PlanConfig
from packstore.errors import ConfigError, InputError, sentence
from packstore.format import seeds
from packstore.format.arrays import Int32, Int64
from packstore.pack import statistics
from packstore.pack.algorithms import STRATEGIES, VERSIONS, auto
from packstore.pack.bounds import lower_bound
from packstore.pack.kernels import jit
from packstore.pack.layout import round_up
from packstore.pack.order import ORDERS, STEP

_AT_ONCE = 1 << 18

MAX_PACK_SIZE = 1 << 24
"""Limited because strategies keep a table with one row per possible length."""


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
        strategy: name of the requested strategy.
        chosen: name of the strategy used: `strategy`, or the choice of ``auto``.
        seed: source of every random choice.
        pack_order: ``shuffled``, ``stratified`` or ``plain``.
        shuffle: the strategy got the examples in random order instead of input order.
    """

    order: Int32
    offsets: Int64
    lengths: Int32
    tokens: int
    pack_size: int
    pad_to_multiple: int
    strategy: str
    chosen: str
    seed: int
    pack_order: str
    shuffle: bool

    @property
    def num_packs(self) -> int:
        """P."""
        return len(self.offsets) - 1

    @property
    def num_examples(self) -> int:
        """n."""
        return len(self.order)

    @property
    def sha256(self) -> str:
        """Hash (hex) of lengths, order and offsets, which define the packs except their tokens."""
        digest = hashlib.sha256()
        for array in (self.lengths, self.order, self.offsets):
            for first in range(0, len(array), _AT_ONCE):
                some = array[first : first + _AT_ONCE]
                digest.update(np.ascontiguousarray(some, "<i8").data)
        return digest.hexdigest()

    @cached_property
    def aligned_tokens(self) -> int:
        """Tokens of all examples, padding included."""
        return int(self.lengths.sum(dtype=np.int64))

    @cached_property
    def pack_tokens(self) -> Int64:
        """int64 `[P]`, tokens of each pack, padding included."""
        if not self.num_packs:
            return np.empty(0, np.int64)
        return statistics.sums(self._drawn(), self.offsets)

    @property
    def fill_rate(self) -> float:
        """Fraction of the packs' capacity filled with tokens, 0..1."""
        return self.tokens / (self.num_packs * self.pack_size) if self.num_packs else 0.0

    @property
    def aligned_fill_rate(self) -> float:
        """Fraction of the packs' capacity filled with tokens and padding, 0..1."""
        room = self.num_packs * self.pack_size
        return self.aligned_tokens / room if self.num_packs else 0.0

    @cached_property
    def lower_bound(self) -> int:
        """Lower bound of the packs of any strategy (see :mod:`packstore.pack.bounds`)."""
        return lower_bound(self.lengths, self.pack_size)

    @property
    def gap(self) -> int:
        """Packs over the lower bound."""
        return self.num_packs - self.lower_bound

    @property
    def examples_per_pack(self) -> tuple[int, float, int]:
        """Fewest, mean and most examples of a pack; zeros without packs."""
        if not self.num_packs:
            return 0, 0.0, 0
        number = np.diff(self.offsets)
        return int(number.min()), self.num_examples / self.num_packs, int(number.max())

    def _drawn(self, table: statistics.Float64 | None = None) -> statistics.Drawn:
        """Lengths of the examples, mapped through `table` if given, in the order of the packs."""
        return statistics.Drawn(self.lengths, self.order, table)

    def statistics(self) -> dict[str, Any]:
        """Returns all figures of the plan, as JSON values.

        Besides the properties above: `algorithm`, the name and version of the strategy used (which
        makes the same plan from the same lengths and seed); `randomness` (of log lengths inside
        packs, and over steps of 64 packs; null where undefined) and `megatron_bridge`, with the
        names that Megatron-Bridge and NeMo read (efficiency in percent, of padded lengths).
        """
        fewest, mean, most = self.examples_per_pack
        by_pack = self._drawn()
        logs = self._drawn(np.log(np.maximum(np.arange(int(self.lengths.max(initial=0)) + 1), 1)))
        return {
            "strategy": self.strategy,
            "chosen": self.chosen,
            "algorithm": f"{self.chosen}-{VERSIONS.get(self.chosen, 1)}",
            "seed": self.seed,
            "shuffle": self.shuffle,
            "pack_order": self.pack_order,
            "pack_size": self.pack_size,
            "pad_to_multiple": self.pad_to_multiple,
            "num_packs": self.num_packs,
            "num_examples": self.num_examples,
            "tokens": self.tokens,
            "aligned_tokens": self.aligned_tokens,
            "fill_rate": self.fill_rate,
            "aligned_fill_rate": self.aligned_fill_rate,
            "lower_bound": self.lower_bound,
            "gap": self.gap,
            "examples_per_pack": {"min": fewest, "mean": mean, "max": most},
            "randomness": {
                "icc": statistics.intraclass_correlation(logs, self.offsets),
                "same_decile": statistics.same_decile(by_pack, self.offsets),
                "design_effect": statistics.design_effect(logs, self.offsets, STEP),
            },
            "megatron_bridge": {
                "max_samples_per_bin": most,
                "dataset_max_seqlen": int(self.lengths.max(initial=0)),
                "packing_factor": round(mean, 2),
                "packing_efficiency": round(100 * self.aligned_fill_rate, 2),
                "pack_size": self.pack_size,
                "min_packed_seqlen": int(self.pack_tokens.min()) if self.num_packs else 0,
            },
        }


def plan(
    lengths: npt.ArrayLike,
    *,
    pack_size: int | None = None,
    strategy: str | None = None,
    seed: int | None = None,
    pack_order: Literal["shuffled", "stratified", "plain"] | None = None,
    shuffle: bool | None = None,
    config: PlanConfig | None = None,
) -> Plan:
    """Plans packs for examples of these lengths, as :func:`packstore.pack` does.

    Args:
        lengths: integers `[n]`, tokens of each example in input order, each 1..pack_size. With
            `pad_to_multiple` in `config`, each is rounded up to it; round up the sequences of an
            example before adding them.
        pack_size: most tokens of a pack.
        strategy: a name of ``packstore.pack.algorithms.STRATEGIES``.
        seed: source of every random choice.
        pack_order: order of the packs.
        shuffle: pass the examples to the strategy in random order; False: in input order, so that
            packs hold neighbours.
        config: values of settings not given here; default: the defaults.

    Returns:
        The plan; without packs if there are no examples.

    Raises:
        InputError: `lengths` is not a list of integers, or one of them is out of range.
        ConfigError: a setting is invalid.
    """
    base = config or PlanConfig()
    settings = PlanConfig(
        pack_size=base.pack_size if pack_size is None else pack_size,
        layout=base.layout,
        pad_to_multiple=base.pad_to_multiple,
        strategy=base.strategy if strategy is None else strategy,
        pack_order=base.pack_order if pack_order is None else pack_order,
        seed=base.seed if seed is None else seed,
        shuffle=base.shuffle if shuffle is None else shuffle,
    )
    capacity = settings.pack_size
    if capacity > MAX_PACK_SIZE:
        raise ConfigError(f"setting pack_size must be at most {MAX_PACK_SIZE}; found {capacity}.")
    pack_by = STRATEGIES.load(settings.strategy)
    given = _checked(lengths, capacity)
    checked = given
    if settings.pad_to_multiple > 1:
        checked = _checked(round_up(given, settings.pad_to_multiple), capacity)
    drawn = _drawn(len(checked), settings.seed) if settings.shuffle else None
    arriving = checked if drawn is None else checked[drawn]
    if settings.strategy == "auto":
        chosen, (order, offsets) = auto.choose(arriving, capacity, settings.seed)
    else:
        chosen = settings.strategy
        order, offsets = pack_by(arriving, capacity, settings.seed)
    if drawn is not None:
        order = drawn[order]
    delivery = ORDERS[settings.pack_order](
        np.diff(offsets), _sum_of_squares(checked, order, offsets), settings.seed
    )
    return Plan(
        *_reordered(order, offsets, delivery),
        lengths=checked,
        tokens=int(given.sum(dtype=np.int64)),
        pack_size=capacity,
        pad_to_multiple=settings.pad_to_multiple,
        strategy=settings.strategy,
        chosen=chosen,
        seed=settings.seed,
        pack_order=settings.pack_order,
        shuffle=settings.shuffle,
    )


def _drawn(n: int, seed: int) -> Int32:
    """All examples in random order: int32 `[n]`."""
    return seeds.permutation(n, seed, "examples").astype(np.int32)


def _checked(lengths: npt.ArrayLike, capacity: int) -> Int32:
    """Converts `lengths` to a contiguous int32 array.

    Raises:
        InputError: see :func:`plan`.
    """
    array = np.asarray(lengths)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        found = f"{array.ndim} dimensions of {array.dtype}"
        raise InputError(sentence("lengths", "they must be a list of whole numbers", found))
    if len(array) > np.iinfo(np.int32).max:
        must = "one plan takes at most 2^31 - 1 examples"
        raise InputError(sentence("lengths", must, f"{len(array):,}", "Plan them in parts"))
    if len(array) and (array.min() < 1 or array.max() > capacity):
        i = int(((array < 1) | (array > capacity)).argmax())
        raise InputError(
            sentence(
                f"lengths[{i}]",
                f"each example must have 1 to {capacity} tokens (pack_size)",
                str(array[i]),
                "Drop or shorten what does not fit, or choose a larger pack_size",
            )
        )
    # A read-only array would compile every strategy a second time.
    return np.require(array, np.int32, ["C", "W"])


# Unsigned indices, as in histogram.py: the loops take two thirds of the time.


@jit
def _sum_of_squares(lengths: Int32, order: Int32, offsets: Int64) -> Int64:
    """Sum of the squared lengths of each pack, its attention cost: int64 `[P]`."""
    squares = np.zeros(len(offsets) - 1, np.int64)
    for pack in range(len(squares)):
        for i in range(np.uint64(offsets[pack]), np.uint64(offsets[pack + 1])):
            squares[pack] += np.int64(lengths[np.uint32(order[i])]) ** 2
    return squares


@jit
def _reordered(order: Int32, offsets: Int64, delivery: Int64) -> tuple[Int32, Int64]:
    """Returns order and offsets with the packs in the order of `delivery`."""
    new_order, new_offsets = np.empty(len(order), np.int32), np.empty_like(offsets)
    to = np.uint64(0)
    for place, pack in enumerate(delivery):
        new_offsets[place] = to
        for i in range(np.uint64(offsets[pack]), np.uint64(offsets[pack + 1])):
            new_order[to] = order[i]
            to += np.uint64(1)
    new_offsets[len(delivery)] = to
    return new_order, new_offsets
