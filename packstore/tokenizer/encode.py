"""Encodes texts to token ids and supervision masks: all sequences of a block at once.

Distinct texts are encoded once, in one batch; the rest is numpy over flat ids and offsets. Only
sequences with events are handled one by one.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packstore.config import TokenizeConfig
from packstore.format.arrays import Bool, Int32, Int64, ragged_indices, range_indices, to_offsets
from packstore.tokenizer.control import encode_around_controls, holds
from packstore.tokenizer.records.sequences import NO_IDS, Draft, Mode, Sequences
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.tokenizer import Tokenizer


def assemble(tokenizer: Tokenizer, drafts: Sequence[Draft], config: TokenizeConfig) -> Sequences:
    """Encodes drafts, adds BOS and EOS by the settings, and maps places in texts to tokens.

    A place maps to the length of the common prefix of the ids of the text before it and the ids of
    the whole text, so a token that merges both sides lies after the place.
    """
    places = _Places(drafts)
    texts, modes, before = places.texts()
    all_ids, all_offsets = _encode(tokenizer, texts, modes)
    offsets = all_offsets[: len(drafts) + 1]
    ids = all_ids[: offsets[-1]]
    tokens, merged = places.tokens(all_ids, all_offsets, before)
    number = 2 * len(places.owner)  # places of spans come first, those of system turns last
    events: defaultdict[int, list[str]] = defaultdict(list)
    refused: dict[int, Refused] = {}
    for i in np.unique(places.draft[:number][merged[:number]]).tolist():
        events[i].append("boundary_merged")
        if config.on["boundary"] != "keep":
            refused[i] = Refused("boundary", "a token joins prompt and response")
    _check_literal(tokenizer, drafts, ids, offsets, refused)
    first = offsets[:-1][places.owner]
    supervised = _ranges(first + tokens[:number:2], first + tokens[1:number:2], len(ids))
    heads = tokens[number:]
    return _wrapped(
        tokenizer, drafts, config, Sequences(ids, supervised, offsets, heads, events, refused)
    )


class _Places:
    """Places in texts: start and end of each span, in turn, then the end of each system turn.

    `owner`, int64 `[S]`: the draft of each span; `draft` and `characters`, int64 `[P]`: the draft
    of each place, and where in its text it is.
    """

    def __init__(self, drafts: Sequence[Draft]) -> None:
        self._drafts = drafts
        texts, spans, _, _, heads, _ = zip(*drafts, strict=True)
        self._sizes = np.array([*map(len, texts)], np.int64)
        ends = [*itertools.chain.from_iterable(itertools.chain.from_iterable(spans))]
        self.owner = np.repeat(np.arange(len(drafts)), [*map(len, spans)])
        self.draft = np.concatenate([np.repeat(self.owner, 2), np.arange(len(drafts))])
        self.characters = np.array([*ends, *heads], np.int64)

    def texts(self) -> tuple[list[str], list[Mode], Int64]:
        """Returns the texts to encode, their modes, and which of them ends at each place.

        The texts of the drafts come first. Others are distinct; a place at the start or end of its
        text needs none: -1.
        """
        texts = [draft.guard + draft.text for draft in self._drafts]
        modes = [draft.mode for draft in self._drafts]
        known: dict[tuple[Mode, str], int] = {}
        before = np.full(len(self.draft), -1, np.int64)
        inside = (self.characters > 0) & (self.characters < self._sizes[self.draft])
        numbers = []
        of, ends = self.draft[inside].tolist(), self.characters[inside].tolist()
        for draft, end in zip(map(self._drafts.__getitem__, of), ends, strict=True):
            text = draft.guard + draft.text[:end]
            number = known.setdefault((draft.mode, text), len(texts))
            if number == len(texts):
                texts.append(text)
                modes.append(draft.mode)
            numbers.append(number)
        before[inside] = numbers
        return texts, modes, before

    def tokens(self, ids: Int32, offsets: Int64, before: Int64) -> tuple[Int64, Bool]:
        """Returns the token of each place in its sequence, and whether one merges both sides."""
        lengths = np.diff(offsets)
        tokens: Int64 = np.where(self.characters > 0, lengths[self.draft], 0)
        merged = np.zeros(len(tokens), np.bool_)
        inside = np.flatnonzero(before >= 0)
        prefix, whole = before[inside], self.draft[inside]
        compared = np.minimum(lengths[prefix], lengths[whole])
        starts = to_offsets(compared)
        left = ids[range_indices(offsets[prefix], compared)]
        differ = np.flatnonzero(left != ids[range_indices(offsets[whole], compared)])
        rows, at = np.unique(np.searchsorted(starts, differ, "right") - 1, return_index=True)
        common = compared.copy()
        common[rows] = differ[at] - starts[rows]
        tokens[inside] = common
        merged[inside] = common < lengths[prefix]
        return tokens, merged


def _encode(tokenizer: Tokenizer, texts: list[str], modes: list[Mode]) -> tuple[Int32, Int64]:
    """Encodes texts of several modes; returns flat ids and their offsets, in order."""
    if not texts:
        return NO_IDS, np.zeros(1, np.int64)
    ids, lengths, order = [], [], []
    for mode in dict.fromkeys(modes):
        rows = [i for i, other in enumerate(modes) if other == mode]
        some, offsets = _encode_mode(tokenizer, [texts[i] for i in rows], mode)
        if len(rows) == len(texts):
            return some, offsets
        ids.append(some)
        lengths.append(np.diff(offsets))
        order += rows
    offsets, back = to_offsets(np.concatenate(lengths)), np.argsort(order)
    return np.concatenate(ids)[ragged_indices(offsets, back)], to_offsets(np.diff(offsets)[back])


def _encode_mode(tokenizer: Tokenizer, texts: list[str], mode: Mode) -> tuple[Int32, Int64]:
    if mode != "guarded":
        return tokenizer.engine.encode_batch(texts, control=mode == "control")
    return encode_around_controls(
        [text[1:] for text in texts],
        tokenizer.specials,
        lambda stretches: tokenizer.engine.encode_batch(stretches, control=False),
        [text[0] for text in texts],
    )


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
        control = np.array([draft.mode == "control" for draft in drafts], np.bool_)
        others = tokenizer.specials if config.append_eos is None else ()
        closing = (str(tokenizer.eos_token), *others)
        for i in np.flatnonzero(add_eos & (templated | control)).tolist():
            if drafts[i].text.rstrip().endswith(closing):
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
