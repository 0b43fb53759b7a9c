"""The page that draws packs: some embedded as JSON, or asking the server that it came
from.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from packstore.format.arrays import SOURCE_SHIFT, Packs, ids_of
from packstore.io.dataset.dataset import Dataset
from packstore.io.inputs.formats import place_of
from packstore.pages import frame
from packstore.pages.frame import shown

MOST_PACKS = 300
MOST_BYTES = 20_000_000
"""Bounds of a page with embedded packs, of their number and of their JSON."""

KEPT_GROUPS = 4
"""Row groups kept in memory, for steps between neighbouring packs."""

_LONGEST_VALUE = 300
"""Characters of a carried value that are shown."""
_INCOMPLETE = "\ufffd"
_JOINED = 8
"""Tokens that are decoded together, at most, to complete a character."""

Decode = Callable[[list[int]], str]


SIDES = {"preference": ("chosen", "rejected"), "sft": ("response",)}
"""Kind -> names of the sequences of an example; others are numbered."""


class PackReader:
    """Reads single packs of a dataset, with texts, or ids if `decode` is None.
    Thread-safe.
    """

    def __init__(self, dataset: Dataset, decode: Decode | None) -> None:
        self.dataset, self.decode = dataset, decode
        self._groups = functools.lru_cache(KEPT_GROUPS)(dataset.read_packs)
        self._texts: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, number: int) -> Packs:
        """Returns one pack; raises like
        :meth:`packstore.io.dataset.dataset.Dataset.read_packs`.
        """
        offsets = self.dataset.group_offsets
        group = int(np.searchsorted(offsets, number, "right")) - 1
        return self._groups(group).row(number - int(offsets[group]))

    def pack(self, number: int) -> dict[str, Any]:
        """Returns pack `number` as a JSON value; ids are complemented where
        unsupervised.
        """
        pack = self.read(number)
        texts: list[str | None] = []
        for start, stop in itertools.pairwise(pack.seq_boundaries.tolist()):
            signed = pack.signed_ids[
                start:stop
            ]  # no text crosses an edge of the supervision
            edges = np.flatnonzero(np.diff(signed >= 0)) + 1
            for run in np.split(ids_of(signed), edges):
                texts += self.texts(run.tolist())
        return {
            "number": number,
            "ids": pack.signed_ids.tolist(),
            "texts": texts,
            "sequences": self.sequences(pack),
            "columns": columns_of(pack),
        }

    def sequences(self, pack: Packs) -> list[dict[str, Any]]:
        """Returns what is known of each sequence of a pack besides its tokens."""
        m = self.dataset.manifest
        sources = m.provenance.get("sources", ())
        numbered = tuple(
            f"response {i + 1}" for i in range(max(pack.num_responses, default=0))
        )
        sequences: list[dict[str, Any]] = []
        for example, number in enumerate(pack.example_ids.tolist()):
            source, ordinal = divmod(number, 1 << SOURCE_SHIFT)
            path = source < len(sources) and sources[source].get("path")
            place = shown(place_of(path or f"source {source}", ordinal))
            for side in SIDES.get(m.kind, numbered)[: pack.num_responses[example]]:
                i = len(sequences)
                start, stop = pack.seq_boundaries[i : i + 2].tolist()
                numbers = {
                    "length": int(pack.lengths[i]),
                    "reward": float(f"{pack.reward[i]:.6g}"),
                }
                about = {
                    "example": example,
                    "id": str(number),
                    "place": place,
                    "side": side,
                }
                sequences.append({**about, "start": start, "stop": stop, **numbers})
        return sequences

    def texts(self, ids: Sequence[int]) -> list[str | None]:
        """Returns the text of each token; None: it is part of the one before (a
        character).
        """
        if self.decode is None:
            return [f"{i} " for i in ids]
        texts: list[str | None] = [self._text(i) for i in ids]
        start = 0
        while start < len(ids):
            stop = start + 1
            if _INCOMPLETE in (texts[start] or ""):
                for end in range(start + 2, min(start + _JOINED, len(ids)) + 1):
                    if _INCOMPLETE not in (whole := self.decode(list(ids[start:end]))):
                        texts[start:end] = [shown(whole), *[None] * (end - start - 1)]
                        stop = end
                        break
            start = stop
        return texts

    def _text(self, token: int) -> str:
        if token not in self._texts and self.decode is not None:
            alone, twice = self.decode([token]), self.decode([token, token])
            # Some decoders drop the space before the first word.
            text = twice[len(alone) :] if twice.startswith(alone) else alone
            self._texts[token] = shown(text)
        return self._texts[token]


def columns_of(pack: Packs) -> list[dict[str, str]]:
    """Returns the carried values of each example as text."""
    columns: list[dict[str, str]] = [{} for _ in pack.example_ids]
    for name, values in pack.columns.items():
        for column, value in zip(columns, values, strict=True):
            text = shown(str(value))
            long = len(text) > _LONGEST_VALUE
            column[shown(name)] = text[: _LONGEST_VALUE - 1] + "…" if long else text
    return columns


def pack_page(reader: PackReader, numbers: range | None) -> tuple[str, str]:
    """Returns a page, and a sentence on what it leaves out; without `numbers` it asks a
    server.
    """
    m = reader.dataset.manifest
    packs: list[dict[str, Any]] = []
    left, size = "", 0
    for number in numbers or ():
        pack = reader.pack(number)
        size += len(frame.embedded(pack))
        if packs and (size > MOST_BYTES or len(packs) == MOST_PACKS):
            left = (
                f"The page holds packs {packs[0]['number']} to {number - 1} of the "
                f"{len(numbers or ())} asked for: at most {MOST_PACKS} packs, and "
                f"{MOST_BYTES // 1_000_000} MB. `packstore view` shows all of them."
            )
            break
        packs.append(pack)
    about = {
        "packs": len(reader),
        "packSize": m.pack_size,
        "layout": m.layout,
        "sides": SIDES["preference"] if m.kind == "preference" else (),
        "embedded": None if numbers is None else packs,
        "note": left
        if reader.decode
        else f"{left} Token ids stand in place of text.".strip(),
    }
    facts = (
        f"kind {m.kind}, layout {m.layout}, {len(reader):,} packs of "
        f"{m.pack_size:,} tokens"
    )
    page = frame.page(
        reader.dataset.url,
        f"{facts}, fill {m.fill_rate:.1%}, version {reader.dataset.version}",
        [frame.asset("packs.html")],
        style=frame.asset("packs.css"),
        script=frame.asset("packs.js"),
        data=about,
        connect=numbers is None,
    )
    return page, left
