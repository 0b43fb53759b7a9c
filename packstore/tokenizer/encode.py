"""Encodes texts to token ids and supervision masks: all sequences of a block at once.

Distinct texts are encoded once, in one batch. The rest is numpy over flat ids and offsets; only
sequences with events are handled one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packstore.config import TokenizeConfig
from packstore.format.arrays import Bool, Int32, Int64, concat_offsets, range_indices, to_offsets
from packstore.tokenizer.control import encode_around_controls
from packstore.tokenizer.records.sequences import NO_IDS, Draft, Mode, Sequences
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.tokenizer import Tokenizer


def assemble(tokenizer: Tokenizer, drafts: Sequence[Draft], config: TokenizeConfig) -> Sequences:
    """Encodes drafts, adds BOS and EOS by the settings, and maps boundaries to ids.

    A character boundary maps to the length of the common prefix of the ids of the text before it
    and the ids of the whole text, so a token that merges both sides lies after the boundary.
    """
    places = _Places(drafts)
    ids, offsets, before, before_offsets = _encode(tokenizer, drafts, places)
    lengths = np.diff(offsets)
    events: defaultdict[int, list[str]] = defaultdict(list)
    refused: dict[int, Refused] = {}
    owner = np.array(places.draft, np.int64)
    cuts = _common_prefixes(before, before_offsets, ids, offsets[:-1][owner], lengths[owner])
    merged = (cuts < np.diff(before_offsets)) & np.array(places.of_span, np.bool_)
    for i in dict.fromkeys(owner[merged].tolist()):
        events[i].append("boundary_merged")
        if config.boundary != "longest_common_prefix":
            refused[i] = Refused("boundary_merged", "a token joins prompt and response")
    _check_literal(tokenizer, drafts, ids, offsets, refused)
    supervised = np.zeros(len(ids), np.bool_)
    heads = np.zeros(len(drafts), np.int64)
    if drafts:
        table = _Cuts(lengths, cuts)
        first = offsets[:-1][np.array(places.span_draft, np.int64)]
        starts, ends = table.at(places.span_start), table.at(places.span_end)
        supervised = _ranges(first + starts, first + ends, len(ids))
        heads = table.at(places.head)
    return _wrapped(
        tokenizer, drafts, config, Sequences(ids, supervised, offsets, heads, events, refused)
    )


class _Places:
    """Start and end of spans and system turns, in characters, for all drafts.

    A place is encoded as a number: ``2 * draft`` is the start of a text, ``2 * draft + 1`` its end,
    and ``~b`` the boundary `b`, whose preceding text must be encoded.

    Attributes:
        draft: draft of each boundary.
        at: character position of each boundary.
        of_span: True for each boundary at or in a span.
        span_draft: draft of each span.
        span_start: place of the start of each span.
        span_end: place of the end of each span.
        head: place of the end of each draft's system turn.
    """

    def __init__(self, drafts: Sequence[Draft]) -> None:
        self.draft: list[int] = []
        self.at: list[int] = []
        self.of_span: list[bool] = []
        self.span_draft: list[int] = []
        self.span_start: list[int] = []
        self.span_end: list[int] = []
        self.head: list[int] = []
        for i, draft in enumerate(drafts):
            self._add(i, draft, len(draft.text))

    def _add(self, i: int, draft: Draft, end: int) -> None:
        spans, head = draft.spans, draft.system_end
        if len(spans) == 1 and not head and 0 < spans[0][0] < spans[0][1] == end:
            # The most common case: a prompt and a response.
            self.span_draft.append(i)
            self.span_start.append(~len(self.at))
            self.span_end.append(2 * i + 1)
            self.head.append(2 * i)
            self.draft.append(i)
            self.at.append(spans[0][0])
            self.of_span.append(True)
            return
        known = {0: 2 * i, end: 2 * i + 1}
        for at in sorted({place for span in spans for place in span} | {head}):
            if at not in known:
                known[at] = ~len(self.at)
                self.draft.append(i)
                self.at.append(at)
                self.of_span.append(any(at in span for span in spans))
        for a, b in spans:
            self.span_draft.append(i)
            self.span_start.append(known[a])
            self.span_end.append(known[b])
        self.head.append(known[head])


class _Cuts:
    """Maps places to token positions in their sequence."""

    def __init__(self, lengths: Int64, cuts: Int64) -> None:
        known = np.zeros(2 * len(lengths), np.int64)
        known[1::2] = lengths
        # A boundary is ~b: an index from the end of the table.
        self._table = np.concatenate([known, cuts[::-1]])

    def at(self, places: list[int]) -> Int64:
        """Returns the token position of each place, int64."""
        return self._table[np.array(places, np.int64)]


def _encode(
    tokenizer: Tokenizer, drafts: Sequence[Draft], places: _Places
) -> tuple[Int32, Int64, Int32, Int64]:
    """Ids and offsets of all texts, and of the prefixes that end at a boundary."""
    whole = np.empty(len(drafts), np.int64)
    before = np.empty(len(places.at), np.int64)
    parts: list[tuple[Int32, Int64]] = []
    first = 0
    modes = dict.fromkeys([draft.mode for draft in drafts])
    for mode in modes:
        own: Sequence[int] = range(len(drafts))
        cut: Sequence[int] = range(len(places.draft))
        if len(modes) > 1:
            own = [i for i in own if drafts[i].mode == mode]
            cut = [b for b in cut if drafts[places.draft[b]].mode == mode]
        known: dict[str, int] = {}
        # The same text with another guard is another text.
        for b in cut:
            draft = drafts[places.draft[b]]
            text = draft.guard + draft.text[: places.at[b]]
            before[b] = first + known.setdefault(text, len(known))
        for i in own:
            draft = drafts[i]
            text = draft.guard + draft.text if draft.guard else draft.text
            whole[i] = first + known.setdefault(text, len(known))
        parts.append(_encode_texts(tokenizer, list(known), mode))
        first += len(known)
    if not parts:
        return NO_IDS, np.zeros(1, np.int64), NO_IDS, np.zeros(1, np.int64)
    ids = np.concatenate([p for p, _ in parts]) if len(parts) > 1 else parts[0][0]
    offsets = concat_offsets([o for _, o in parts]) if len(parts) > 1 else parts[0][1]
    return *_rows(ids, offsets, whole), *_rows(ids, offsets, before)


def _encode_texts(tokenizer: Tokenizer, texts: list[str], mode: Mode) -> tuple[Int32, Int64]:
    if mode != "guarded":
        return tokenizer.engine.encode_batch(texts, control=mode == "control")
    rows = encode_around_controls(
        [text[1:] for text in texts],
        tokenizer.specials,
        lambda stretches: tokenizer.engine.encode_batch(stretches, control=False),
        [text[0] for text in texts],
    )
    return np.concatenate(rows), to_offsets(np.array([len(row) for row in rows], np.int64))


def _rows(ids: Int32, offsets: Int64, rows: Int64) -> tuple[Int32, Int64]:
    """Selects rows of a ragged array, without a copy if they are consecutive."""
    if not len(rows):
        return NO_IDS, np.zeros(1, np.int64)
    first = int(rows[0])
    if rows[-1] - first == len(rows) - 1 and bool(np.all(np.diff(rows) == 1)):
        cut = offsets[first : first + len(rows) + 1]
        return ids[cut[0] : cut[-1]], cut - cut[0]
    lengths = np.diff(offsets)[rows]
    return ids[range_indices(offsets[rows], lengths)], to_offsets(lengths)


def _common_prefixes(
    a: Int32, a_offsets: Int64, b: Int32, b_starts: Int64, b_lengths: Int64
) -> Int64:
    """Length of the common prefix of row i of `a` and row i of `b`: int64 `[n]`."""
    lengths = np.minimum(np.diff(a_offsets), b_lengths)
    at = to_offsets(lengths)
    left = a if at[-1] == len(a) else a[range_indices(a_offsets[:-1], lengths)]
    differ = np.flatnonzero(left != b[range_indices(b_starts, lengths)])
    found = lengths.copy()
    rows, first = np.unique(np.searchsorted(at, differ, "right") - 1, return_index=True)
    found[rows] = differ[first] - at[rows]
    return found


def _ranges(starts: Int64, ends: Int64, size: int) -> Bool:
    """True inside any of the ranges: bool `[size]`; a range that ends before its start is empty."""
    some = starts < ends
    steps = np.zeros(size + 1, np.int8)
    np.add.at(steps, starts[some], 1)
    np.subtract.at(steps, ends[some], 1)
    inside: Bool = np.cumsum(steps[:-1], dtype=np.int8) > 0
    return inside


def _check_literal(
    tokenizer: Tokenizer,
    drafts: Sequence[Draft],
    ids: Int32,
    offsets: Int64,
    refused: dict[int, Refused],
) -> None:
    """Refuses plain text that was encoded to control ids (Unigram vocabularies do that)."""
    hint = tokenizer.control_hint
    for i, draft in enumerate(drafts):
        if draft.mode == "control" or hint not in draft.text or i in refused:
            continue
        bare = draft.text.replace(draft.guard, "") if draft.guard else draft.text
        if not tokenizer.controls.search(bare):
            continue
        control = np.array(sorted(tokenizer.special_ids), np.int32)
        expected = 0
        if draft.mode == "guarded":
            expected = len(tokenizer.controls.findall(draft.text))
        if int(np.isin(ids[offsets[i] : offsets[i + 1]], control).sum()) != expected:
            detail = "this tokenizer has no plain form of a control string"
            refused[i] = Refused("special_tokens", detail)


def _wrapped(
    tokenizer: Tokenizer, drafts: Sequence[Draft], config: TokenizeConfig, bare: Sequences
) -> Sequences:
    """Adds BOS and EOS by the settings."""
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    lengths = np.diff(bare.offsets)
    templated = np.array([draft.from_template for draft in drafts], np.bool_)
    first = np.full(len(drafts), -1, np.int64)
    last = first.copy()
    some = lengths > 0
    first[some] = bare.ids[bare.offsets[:-1][some]]
    last[some] = bare.ids[bare.offsets[1:][some] - 1]
    add_bos = np.zeros(len(drafts), np.bool_)
    if bos is not None:
        add_bos[:] = tokenizer.adds_bos & ~templated if config.add_bos is None else config.add_bos
        for i in np.flatnonzero(add_bos & (first == bos)).tolist():
            bare.events.setdefault(i, []).append("bos_deduplicated")
        add_bos &= first != bos
        last[add_bos & ~some] = bos
    add_eos = ~templated if config.append_eos is None else np.full(len(drafts), config.append_eos)
    if eos is None:
        for i in np.flatnonzero(add_eos).tolist():
            bare.events.setdefault(i, []).append("no_eos")
        add_eos = np.zeros(len(drafts), np.bool_)
    else:
        for i in np.flatnonzero(add_eos & templated).tolist():
            if drafts[i].text.rstrip().endswith(str(tokenizer.eos_token)):
                add_eos[i] = False
        add_eos &= last != eos
    heads = bare.heads + add_bos
    if bos is not None:
        heads = np.maximum(heads, (first == bos) | add_bos)
    supervised = bare.supervised
    supervised[bare.offsets[:-1][some & ~add_bos]] = False  # nothing predicts the first token
    if not (add_bos.any() or add_eos.any()):
        return replace(bare, heads=heads)
    offsets = to_offsets(lengths + add_bos + add_eos)
    begins, ends = offsets[:-1][add_bos], offsets[1:][add_eos] - 1
    body = np.ones(offsets[-1], np.bool_)
    body[begins] = body[ends] = False
    ids, supervised = np.empty(len(body), np.int32), np.zeros(len(body), np.bool_)
    ids[body], supervised[body] = bare.ids, bare.supervised
    ids[begins], ids[ends] = bos or 0, eos or 0
    to_end = [
        drafts[i].spans[-1][1] == len(drafts[i].text) for i in np.flatnonzero(add_eos).tolist()
    ]
    supervised[ends] = (some | add_bos)[add_eos] & np.array(to_end, np.bool_)
    return Sequences(ids, supervised, offsets, heads, bare.events, bare.refused)
