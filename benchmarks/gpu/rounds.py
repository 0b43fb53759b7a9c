"""Rounds: the same pairs, packed in different ways, and what is expected of each way.

A way is ``packing/head``, or ``packing/head/attention``, or either with ``/graphs``:

- ``shared_prefix`` and ``padding_free``: flat rows in packstore's layouts, with its
  attention;
- ``padded_grouped`` and ``padded``: `[2B, longest]` rows with a mask, transformers'
  sdpa; of pairs of similar length, and of random ones;
- ``triton`` and ``eager``: packstore's head, log-probs of supervised tokens without
  logits;
- ``trl``: the head that TRL 1.16 fuses into models; ``logits``: float32 logits of all
  tokens;
- attention: a backend; without it, that of ``auto``;
- ``graphs``: a micro-batch is one CUDA graph, padded to the largest of the round.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from gpu.predictions import CEILINGS, REFERENCE, Work, count_step
from gpu.sizes import Lengths, Sizes, cut, lengths, segments_of

OURS = "shared_prefix/triton"
SAME_HEAD = "padding_free/triton"
RANGES = "shared_prefix/triton/ranges"
GRAPHS = "shared_prefix/triton/graphs"
RANGES_AND_GRAPHS = "shared_prefix/triton/ranges/graphs"
WAYS = (
    OURS,
    SAME_HEAD,
    "padding_free/trl",
    "padded_grouped/trl",
    "padded/trl",
    "shared_prefix/eager",
    "padding_free/eager",
    "padding_free/logits",
    "padded_grouped/logits",
)
"""Ways without a choice of attention; the first two decide."""


class Way(NamedTuple):
    """A way to train, see the module."""

    packing: str
    head: str
    attention: str = "auto"
    has_graphs: bool = False

    @property
    def is_padded(self) -> bool:
        """True for rows with padding and a mask."""
        return self.packing.startswith("padded")


def parse_way(text: str) -> Way:
    """Return the way with this name, see the module."""
    packing, head, *further = text.split("/")
    has_graphs = further[-1:] == ["graphs"]
    if has_graphs:
        further.pop()
    attention = further[0] if further else "auto"
    return Way(packing, head, attention, has_graphs)


class Group(NamedTuple):
    """Ways that are measured in turns, in one process.

    Attributes:
        model: a name of the models in `Sizes`.
        profile: of lengths, a name of `PROFILES`.
        tokens: of a micro-batch.
        ways: names of ways; the first two are measured first.
        seconds: after which no case starts.
        is_compiled: layers are compiled.
    """

    model: str
    profile: str
    tokens: int
    ways: tuple[str, ...]
    seconds: float
    is_compiled: bool = True

    @property
    def name(self) -> str:
        """Begin of the names of its cases."""
        return f"{self.model}/{self.profile}/{self.tokens}"

    @property
    def end(self) -> str:
        """End of the names of its cases."""
        return "/compiled" if self.is_compiled else ""

    def case(self, way: str) -> str:
        """Return the name of the case of a way."""
        return f"{self.name}/{way}{self.end}"

    @property
    def ratio_case(self) -> str:
        """Name of the case with the ratios of the first way to the others."""
        return f"{self.name}/ratios{self.end}"


class Round:
    """The pairs of a round, and their counted work by way.

    Args:
        sizes: models and lengths.
        group: which model and which pairs.
    """

    def __init__(self, sizes: Sizes, group: Group) -> None:
        self.sizes = sizes
        self.group = group
        self.family, self.config = sizes.models[group.model]
        self.is_adapted = group.model in sizes.adapted_models
        rows = lengths(group.profile, 4000, sizes.longest[group.profile])
        # As many full micro-batches of ours as have the tokens of a round.
        num_tokens = sizes.micro_batches * sizes.tokens[0]
        num_batches = -(-num_tokens // group.tokens)
        self.rows: Lengths = np.concatenate(
            cut(rows, "shared_prefix", group.tokens)[:num_batches]
        )

    @cached_property
    def num_pairs(self) -> int:
        """Pairs of a round; each turn of a rollout is one."""
        return self.rows.size // 3

    def batch_rows(self, packing: str) -> list[Lengths]:
        """Return the pairs of each micro-batch."""
        return cut(self.rows, packing, self.group.tokens)

    def work(self, way: Way) -> list[Work]:
        """Return the counted work of each micro-batch."""
        attention = "torch_varlen" if way.attention == "auto" else way.attention
        return [
            count_step(
                self.config,
                segments_of(rows, way.packing),
                way.head,
                is_compiled=self.group.is_compiled,
                is_trained=not self.is_adapted,
                attention=attention,
                has_graphs=way.has_graphs,
            )
            for rows in self.batch_rows(way.packing)
        ]

    def expected_rate(
        self, way: Way, ceilings: Mapping[str, float] = CEILINGS
    ) -> float:
        """Return pairs a second by counting. Padded rows count with the attention of
        flat ones.

        Raises:
            KeyError: the kernels of the way's attention were never counted.
        """
        return self.num_pairs / sum(w.seconds(ceilings) for w in self.work(way))

    def needed(self, way: Way) -> float:
        """Return the operations of a round that MFU counts."""
        return sum(work.needed for work in self.work(way))


def expected_training(
    sizes: Sizes, ceilings: Mapping[str, float] = CEILINGS
) -> dict[str, float]:
    """Return pairs a second of ``train`` by way, see ``end_to_end.WAYS``: those of its
    micro-batches, which have two packs, with a reference in each or a stored one.

    The padding of graphs counts nothing, though it has a third more targets on pairs
    like hh: `train` pads to the largest batch that its dataset allows.
    """
    model = next(iter(sizes.models))
    pairs = Round(sizes, Group(model, "hh", 2 * sizes.pack_size, (OURS,), 0))
    rate = pairs.expected_rate(parse_way(OURS), ceilings)
    graphs_rate = pairs.expected_rate(parse_way(GRAPHS), ceilings)
    return {
        "bfloat16": rate / (1 + REFERENCE),
        "graphs": graphs_rate / (1 + REFERENCE),
        "ref-logps": rate,
    }
