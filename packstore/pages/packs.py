"""Packs as JSON values for the page that draws them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from packstore.format.arrays import SOURCE_SHIFT, Bool, Int32, Int64, Packs
from packstore.io.dataset.dataset import Dataset
from packstore.io.inputs.pieces import place_of
from packstore.pack.layout import round_up
from packstore.pages.texts import Decode, TokenTexts, shown

KEPT_GROUPS = 4
"""Row groups kept in memory, for steps between neighbouring packs."""

TRUNCATED = ("truncated_prompt", "truncated_response")
"""Events that packing counts for records that it has truncated."""

SLACK = 2
"""Tokens that the end of a turn, which a truncated response keeps, may be short of the limit."""

_LONGEST_VALUE = 300
"""Characters of a carried value that are shown."""


def side_of(kind: str, response: int) -> str:
    """Returns the name of sequence `response`, from 0, of an example."""
    if kind == "preference":
        return ("chosen", "rejected")[response]
    return "response" if kind == "sft" else f"response {response + 1}"


def record_place(provenance: Mapping[str, Any], example_id: int) -> str:
    """Returns the input file and place of an example's record, as far as the manifest has it."""
    source, ordinal = divmod(example_id, 1 << SOURCE_SHIFT)
    sources = provenance.get("sources", ())
    known = source < len(sources) and sources[source].get("path")
    return place_of(known or f"source {source}", ordinal)


class PackReader:
    """Reads single packs of a dataset, with texts. Thread-safe.

    Args:
        dataset: the dataset.
        decode: decodes ids to text; None: token ids are shown in place of text.
    """

    def __init__(self, dataset: Dataset, decode: Decode | None) -> None:
        self.dataset, self.decode = dataset, decode
        self._texts = TokenTexts(decode)
        self.group = functools.lru_cache(KEPT_GROUPS)(dataset.read_packs)

    def __len__(self) -> int:
        return len(self.dataset)

    @property
    def limit(self) -> int:
        """Most tokens of a sequence by the settings of the dataset."""
        m = self.dataset.manifest
        own = (m.provenance.get("settings") or {}).get("max_length")
        return min(own, m.pack_size) if isinstance(own, int) and own > 0 else m.pack_size

    @property
    def truncated(self) -> int | None:
        """Records that packing truncated; None: repacked, so that an earlier dataset counts them.

        Which ones they are is not recorded.
        """
        if "repacked_from" in self.dataset.manifest.provenance:
            return None
        noted = self.dataset.manifest.records.noted
        return sum(noted.get(event, 0) for event in TRUNCATED)

    def at_limit(self, pack: Packs) -> Bool:
        """Returns the examples that are as long as permitted, bool `[E]`: all truncated ones, too.

        One has a sequence of :attr:`limit` tokens, or fills a whole pack, but for the rounding:
        truncation ends as soon as both bounds hold, so each sequence of a truncated example is at
        most `SLACK` tokens and a multiple of padding shorter than it might be.
        """
        m, counts = self.dataset.manifest, pack.num_responses
        multiple = int(m.statistics.planning.get("pad_to_multiple", 1))
        first = np.cumsum(counts) - counts
        stored = np.add.reduceat(round_up(np.diff(pack.seq_boundaries), multiple), first)
        longest = np.maximum.reduceat(pack.lengths, first)
        full: Bool = stored > m.pack_size - counts * (multiple + SLACK)
        return full | (longest >= self.limit - SLACK)

    def about(self) -> dict[str, Any]:
        """Returns the facts of the dataset that the page needs."""
        m = self.dataset.manifest
        sides = ("chosen", "rejected") if m.kind == "preference" else ()
        return {
            "packs": len(self),
            "packSize": m.pack_size,
            "layout": m.layout,
            "kind": m.kind,
            "sides": sides,
            "truncated": self.truncated,
            "texts": self.decode is not None,
        }

    def read(self, number: int) -> Packs:
        """Returns one pack; raises like :meth:`packstore.io.dataset.dataset.Dataset.read_packs`."""
        offsets = self.dataset.group_offsets
        group = int(np.searchsorted(offsets, number, "right")) - 1
        return self.group(group).row(number - int(offsets[group]))

    def pack(self, number: int) -> dict[str, Any]:
        """Returns pack `number` as a JSON value; ids are complemented where unsupervised."""
        pack = self.read(number)
        bounds = pack.seq_boundaries.tolist()
        texts: list[str | None] = []
        for start, stop in itertools.pairwise(bounds):
            texts += self._texts_of(pack.signed_ids[start:stop])
        return {
            "number": number,
            "ids": pack.signed_ids.tolist(),
            "texts": texts,
            "sequences": [self.sequence(pack, i) for i in range(len(pack.lengths))],
            "atLimit": self.at_limit(pack).tolist(),
            "columns": columns_of(pack),
        }

    def sequence(self, pack: Packs, i: int) -> dict[str, Any]:
        """Returns what is known of sequence `i` of a pack besides its tokens."""
        example, response = place_in_pack(pack, i)
        start, stop = pack.seq_boundaries[i : i + 2].tolist()
        kind, provenance = self.dataset.manifest.kind, self.dataset.manifest.provenance
        example_id = int(pack.example_ids[example])
        return {
            "example": example,
            "id": str(example_id),
            "place": shown(record_place(provenance, example_id)),
            "side": side_of(kind, response),
            "start": start,
            "stop": stop,
            "length": int(pack.lengths[i]),
            "reward": float(f"{pack.reward[i]:.6g}"),
        }

    def _texts_of(self, signed_ids: Int32) -> list[str | None]:
        """Decodes a sequence; a text never crosses an edge of the supervision."""
        on = signed_ids >= 0
        ids = np.where(on, signed_ids, ~signed_ids)
        runs = np.split(ids, np.flatnonzero(np.diff(on)) + 1)
        return [text for run in runs for text in self._texts.of(run.tolist())]


def place_in_pack(pack: Packs, sequence: int) -> tuple[int, int]:
    """Returns the example of a sequence, and its number in the example."""
    ends: Int64 = np.cumsum(pack.num_responses)
    example = int(np.searchsorted(ends, sequence, "right"))
    return example, sequence - int(ends[example] - pack.num_responses[example])


def columns_of(pack: Packs) -> list[dict[str, str]]:
    """Returns the carried values of each example as text."""
    names = list(pack.columns)
    return [
        {shown(n): _value(pack.columns[n][e]) for n in names} for e in range(len(pack.example_ids))
    ]


def _value(value: object) -> str:
    text = shown(str(value))
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
