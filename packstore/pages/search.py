"""Finds sequences by record, id, text, side, length and reward, a bounded part at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from packstore.errors import ConfigError, quote
from packstore.format.arrays import SOURCE_SHIFT, Bool, Int64, Packs, ids_of
from packstore.format.schema import flat_column
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.stored_file import decoding
from packstore.pages.packs import PackReader, place_in_pack, side_of
from packstore.pages.texts import shown

HITS = 50
"""Sequences that one request finds, at most."""

COST = 1 << 23
"""Tokens that one request reads, at most; a decoded one counts `DECODING` times, an id once."""

DECODING = 16
AROUND = 48
"""Characters of text shown on each side of a match."""


@dataclass(frozen=True, kw_only=True)
class Query:
    """Conditions on a sequence, all of which must hold; empty ones hold always.

    Attributes:
        text: part of its text, in any case.
        record: ``FILE:LINE``, ``LINE`` or ``FILE`` of its record; the line counts from 1, the file
            may be the end of its path.
        id: its example id.
        side: ``chosen`` or ``rejected``.
        shortest, longest: bounds of its length, in tokens.
        lowest, highest: bounds of its reward.
        limit: not empty: its example is at the limit (:meth:`.PackReader.at_limit`).
    """

    text: str = ""
    record: str = ""
    id: str = ""
    side: str = ""
    shortest: str = ""
    longest: str = ""
    lowest: str = ""
    highest: str = ""
    limit: str = ""

    @classmethod
    def of(cls, given: Mapping[str, str]) -> Query:
        """Makes a query from the parameters of a request; ignores others."""
        query = cls(**{f.name: given.get(f.name, "").strip() for f in fields(cls)})
        for name in ("shortest", "longest", "lowest", "highest"):
            query.number(name)
        if query.id and not re.fullmatch(r"\d{1,18}", query.id):
            raise ConfigError(f"an example id must be a whole number; found {quote(query.id)}.")
        return query

    def number(self, name: str) -> float | None:
        """Returns a bound, or None.

        Raises:
            ConfigError: it is no number.
        """
        text = getattr(self, name)
        try:
            value = float(text) if text else None
        except ValueError:
            raise ConfigError(f"{name} must be a number; found {quote(text)}.") from None
        if value is not None and not np.isfinite(value):
            raise ConfigError(f"{name} must be a finite number; found {quote(text)}.")
        return value

    def examples(self, example_ids: Int64, dataset: Dataset) -> Bool:
        """Returns the examples that `id` and `record` permit, bool `[E]`."""
        found = np.ones(len(example_ids), np.bool_)
        if self.id:
            found &= example_ids == int(self.id)
        if self.record:
            file, _, line = self.record.rpartition(":")
            if not line.isdecimal():
                file, line = self.record, ""
            if line:
                found &= example_ids & ((1 << SOURCE_SHIFT) - 1) == int(line[:18]) - 1
            if file:
                sources = dataset.manifest.provenance.get("sources", ())
                known = [i for i, s in enumerate(sources) if file in (s.get("path") or "")]
                found &= np.isin(example_ids >> SOURCE_SHIFT, known)
        return found

    def sequences(self, pack: Packs, reader: PackReader) -> list[int]:
        """Returns the sequences of a pack that meet all conditions but `text`."""
        dataset = reader.dataset
        examples = self.examples(pack.example_ids, dataset)
        if self.limit:
            examples &= reader.at_limit(pack)
        found = np.repeat(examples, pack.num_responses)
        for values, low, high in (
            (pack.lengths, self.number("shortest"), self.number("longest")),
            (pack.reward, self.number("lowest"), self.number("highest")),
        ):
            found &= True if low is None else values >= np.float32(low)
            found &= True if high is None else values <= np.float32(high)
        chosen: list[int] = np.flatnonzero(found).tolist()
        if self.side:
            kind = dataset.manifest.kind
            chosen = [i for i in chosen if side_of(kind, place_in_pack(pack, i)[1]) == self.side]
        return chosen


def search(reader: PackReader, query: Query, first: int = 0) -> dict[str, Any]:
    """Searches packs in file order from `first` on, until a bound of one request is reached.

    Returns:
        `hits`: for each the number of its `pack` and `sequence`, what is known of it, and `match`:
        the text before, in and after the match. `next`: the pack to continue at; None: no more.

    Raises:
        StorageError: a file is missing, or the store refuses.
        IntegrityError: a checksum does not match.
    """
    dataset, hits, cost = reader.dataset, list[dict[str, Any]](), 0
    moved = False  # a request gets on by a pack at least, whatever it costs
    at = int(np.searchsorted(dataset.group_offsets, first, "right")) - 1
    for group in range(max(at, 0), len(dataset.row_groups)):
        start = int(dataset.group_offsets[group])
        rows: Sequence[int] = range(int(dataset.group_rows[group]))
        if query.id or query.record:
            rows, seen = _rows_with(dataset, group, query)
            cost += seen
        for row in rows:
            number = start + row
            if number < first:
                continue
            if moved and (cost >= COST or len(hits) >= HITS):
                return {"hits": hits, "next": number}
            moved = True
            pack = reader.read(number)
            cost += len(pack.signed_ids)
            for i in query.sequences(pack, reader):
                ids = pack.signed_ids[slice(*pack.seq_boundaries[i : i + 2])]
                match = _match(reader, ids_of(ids).tolist(), query.text)
                cost += DECODING * len(ids) if query.text else 0
                if match is None:
                    continue
                own = reader.sequence(pack, i)
                hits.append({"pack": number, "sequence": i, **own, "match": match})
        if cost >= COST and group + 1 < len(dataset.row_groups):
            return {"hits": hits, "next": int(dataset.group_offsets[group + 1])}
    return {"hits": hits, "next": None}


def _rows_with(dataset: Dataset, group: int, query: Query) -> tuple[list[int], int]:
    """Returns the rows of a row group that hold an example sought, and the examples read."""
    batch, where, base = dataset.read_columns(group, ("example_ids",))
    with decoding(where):
        ids, offsets = flat_column(batch, "example_ids", None)
    found = np.flatnonzero(query.examples(ids + np.int64(base), dataset))
    rows = np.unique(np.searchsorted(offsets, found, "right") - 1)
    return rows.tolist(), len(ids)


def _match(reader: PackReader, ids: list[int], text: str) -> list[str] | None:
    """Returns the text before, in and after the first match; empty ones for no `text`."""
    if not text:
        return ["", "", ""]
    whole = " ".join(map(str, ids)) if reader.decode is None else reader.decode(ids)
    found = re.search(re.escape(text), whole, re.IGNORECASE)
    if found is None:
        return None
    start, end = found.span()
    around = whole[max(start - AROUND, 0) : start], found[0], whole[end : end + AROUND]
    return [shown(part) for part in around]
