"""Encodes texts to token ids and supervision masks: all sequences of a block at once.

Distinct texts are encoded once, in one batch. They are cut before their boundaries where that is
proven to change no id (:mod:`packstore.tokenizer.cuts`), so a prompt is encoded once. The rest is
numpy over flat ids and offsets; only sequences with events are handled one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from packstore.config import TokenizeConfig
from packstore.format.arrays import Bool, Int32, Int64, concat_offsets, range_indices, to_offsets
from packstore.tokenizer.control import encode_around_controls, holds
from packstore.tokenizer.cuts import Cuts
from packstore.tokenizer.records.sequences import NO_IDS, Draft, Mode, Sequences
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.tokenizer import Tokenizer


def assemble(
    tokenizer: Tokenizer, drafts: Sequence[Draft], config: TokenizeConfig, *, whole: bool = False
) -> Sequences:
    """Encodes drafts, adds BOS and EOS by the settings, and maps boundaries to ids.

    A character boundary maps to the length of the common prefix of the ids of the text before it
    and the ids of the whole text, so a token that merges both sides lies after the boundary.

    Args:
        tokenizer: the tokenizer.
        drafts: the sequences as text.
        config: the settings.
        whole: encode whole texts, also where :mod:`packstore.tokenizer.cuts` allows to cut them.
    """
    places = _Places(drafts)
    encoded = _encode(tokenizer, drafts, places, whole)
    ids, offsets, cuts = encoded.ids, encoded.offsets, encoded.cuts
    lengths = np.diff(offsets)
    events: defaultdict[int, list[str]] = defaultdict(list)
    refused: dict[int, Refused] = {}
    for b in np.flatnonzero(encoded.merged & np.array(places.of_span, np.bool_)).tolist():
        i = places.draft[b]
        if "boundary_merged" not in events[i]:
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


class _Parts:
    """The texts to encode, and the sequences as lists of them.

    Texts that sequences share are encoded once; only the last part of each is its own.

    Attributes:
        texts: the texts.
        modes: the mode of each text.
        parts: numbers of the texts of all sequences.
        counts: number of parts of each sequence.
        part: for each boundary, the index in `parts` of the part in which it lies.
        before: for each boundary, the text from the start of its part up to it; -1: it lies at the
            start.
    """

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.modes: list[Mode] = []
        self.parts: list[int] = []
        self.counts: list[int] = []
        self.part: list[int] = []
        self.before: list[int] = []
        self._shared: defaultdict[Mode, dict[str, int]] = defaultdict(dict)

    def add(self, draft: Draft, boundaries: Sequence[int], cuts: Cuts | None) -> None:
        """Adds a sequence, cut shortly before each of its boundaries at a place of `cuts`."""
        text, mode, guard, first = draft.text, draft.mode, draft.guard, len(self.parts)
        start = last = 0
        for at in boundaries:
            place = cuts.before(text, at) if cuts else 0
            if cuts and place > start and place >= last:
                self.parts.append(self._share(cuts.part(text, start, place), mode))
                start = place
            last = at
            self.part.append(len(self.parts))
            if at == start:
                self.before.append(-1)
                continue
            # The same text with another guard is another text.
            before = cuts.part(text, start, at) if cuts else guard + text[:at]
            self.before.append(self._share(before, mode))
        self.parts.append(len(self.texts))
        self.texts.append(cuts.part(text, start, len(text)) if cuts else guard + text)
        self.modes.append(mode)
        self.counts.append(len(self.parts) - first)

    def _share(self, text: str, mode: Mode) -> int:
        number = len(self.texts)
        found = self._shared[mode].setdefault(text, number)
        if found == number:
            self.texts.append(text)
            self.modes.append(mode)
        return found

    def encoded(self, tokenizer: Tokenizer) -> _Encoded:
        """Encodes the texts."""
        if not self.texts:
            return _Encoded.empty()
        parts, before = np.array(self.parts, np.int64), np.array(self.before, np.int64)
        modes = dict.fromkeys(self.modes)
        if len(modes) == 1:
            ids, offsets = _encode_texts(tokenizer, self.texts, self.modes[0])
        else:
            of_mode = [[i for i, own in enumerate(self.modes) if own == mode] for mode in modes]
            made = [
                _encode_texts(tokenizer, [self.texts[i] for i in own], mode)
                for own, mode in zip(of_mode, modes, strict=True)
            ]
            ids = np.concatenate([i for i, _ in made])
            offsets = concat_offsets([o for _, o in made])
            row = np.argsort(np.concatenate(of_mode))
            parts, before = row[parts], np.where(before < 0, -1, row[before])
        lengths = np.diff(offsets)
        starts = to_offsets(lengths[parts])
        firsts = to_offsets(np.array(self.counts, np.int64))
        part, whole = np.array(self.part, np.int64), _joined(ids, offsets, parts)
        sequence = np.searchsorted(firsts, part, "right") - 1
        cuts = starts[part] - starts[firsts[sequence]]
        merged = np.zeros(len(part), np.bool_)
        inside = np.flatnonzero(before >= 0)
        if len(inside):
            before, part = before[inside], part[inside]
            common = _common_prefixes(
                _joined(ids, offsets, before),
                lengths[before],
                whole,
                starts[part],
                starts[part + 1],
            )
            cuts[inside] += common
            merged[inside] = common < lengths[before]
        return _Encoded(whole, starts[firsts], cuts, merged)


@dataclass(frozen=True, slots=True)
class _Encoded:
    """Encoded sequences.

    Attributes:
        ids: int32 `[N]`.
        offsets: int64 `[S + 1]`, offsets of the sequences.
        cuts: int64 `[B]`, token position of each boundary in its sequence.
        merged: bool `[B]`, True if a token joins the text before the boundary and that after it.
    """

    ids: Int32
    offsets: Int64
    cuts: Int64
    merged: Bool

    @classmethod
    def empty(cls) -> _Encoded:
        """No sequences."""
        none = np.empty(0, np.int64)
        return cls(NO_IDS, np.zeros(1, np.int64), none, none.astype(np.bool_))


def _encode(
    tokenizer: Tokenizer, drafts: Sequence[Draft], places: _Places, whole: bool
) -> _Encoded:
    parts, b, number = _Parts(), 0, len(places.at)
    cuts = None if whole else tokenizer.cuts
    for i, draft in enumerate(drafts):
        first = b
        while b < number and places.draft[b] == i:
            b += 1
        parts.add(draft, places.at[first:b], None if draft.guard else cuts)
    return parts.encoded(tokenizer)


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


def _joined(ids: Int32, offsets: Int64, rows: Int64) -> Int32:
    """Joins rows of a ragged array, without a copy if they are consecutive."""
    first, last = int(rows[0]), int(rows[-1])
    if last - first == len(rows) - 1 and bool(np.all(np.diff(rows) == 1)):
        return ids[offsets[first] : offsets[last + 1]]
    starts, ends = offsets[rows].tolist(), offsets[rows + 1].tolist()
    return np.concatenate([ids[a:b] for a, b in zip(starts, ends, strict=True)])


def _common_prefixes(a: Int32, a_lengths: Int64, b: Int32, b_starts: Int64, b_ends: Int64) -> Int64:
    """Length of the common prefix of row i of `a` and row i of `b`: int64 `[n]`."""
    lengths = np.minimum(a_lengths, b_ends - b_starts)
    at = to_offsets(lengths)
    left = a if at[-1] == len(a) else a[range_indices(to_offsets(a_lengths)[:-1], lengths)]
    differ = np.flatnonzero(left != b[range_indices(b_starts, lengths)])
    found: Int64 = lengths.copy()
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
        if draft.mode == "control" or i in refused or not holds(draft.text, hint):
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
