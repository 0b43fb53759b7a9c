"""Encodes texts to token ids and supervision masks: all sequences of a block at once.

Distinct texts are encoded once, in one batch; the rest is numpy over flat ids and offsets. Only
sequences with events are handled one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from packstore.config import TokenizeConfig
from packstore.format.arrays import Bool, Int32, Int64, ragged_indices, range_indices, to_offsets
from packstore.tokenizer.control import encode_around_controls
from packstore.tokenizer.records.sequences import Draft, Mode, Sequences
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.tokenizer import Tokenizer


def assemble(tokenizer: Tokenizer, drafts: Sequence[Draft], config: TokenizeConfig) -> Sequences:
    """Encodes drafts, adds BOS and EOS by the settings, and maps places in texts to tokens.

    A place maps to the length of the common prefix of the ids of the text before it and the ids of
    the whole text, so a token that merges both sides lies after the place.
    """
    # Places: start and end of each span, in turn, then the end of each system turn.
    places = [(i, at) for i, draft in enumerate(drafts) for span in draft.spans for at in span]
    number = len(places)
    places += [(i, draft.system_end) for i, draft in enumerate(drafts)]
    texts = [(draft.mode, draft.guard + draft.text) for draft in drafts]
    prefixes: dict[tuple[Mode, str], int] = {}  # their numbers follow those of the texts
    before = []  # number of the text before each place; of its own at its start and end
    for i, at in places:
        draft = drafts[i]
        if 0 < at < len(draft.text):
            prefix = draft.mode, draft.guard + draft.text[:at]
            before.append(prefixes.setdefault(prefix, len(texts) + len(prefixes)))
        else:
            before.append(i)
    all_ids, all_offsets = _encode(tokenizer, [*texts, *prefixes])
    owner, characters = np.array(places, np.int64).T
    common, merged = _common_prefixes(all_ids, all_offsets, np.array(before), owner)
    tokens = np.where(characters > 0, common, 0)
    offsets = all_offsets[: len(drafts) + 1]
    ids = all_ids[: offsets[-1]]
    events: defaultdict[int, list[str]] = defaultdict(list)
    refused: dict[int, Refused] = {}
    owner, merged = owner[:number], merged[:number]
    for i in np.unique(owner[merged]).tolist():
        events[i].append("boundary_merged")
        if config.on["boundary"] != "keep":
            refused[i] = Refused("boundary", "a token joins prompt and response")
    _check_literal(tokenizer, drafts, ids, offsets, refused)
    starts, ends = (offsets[owner] + tokens[:number]).reshape(-1, 2).T
    supervised = np.zeros(len(ids), np.bool_)
    supervised[range_indices(starts, np.maximum(ends - starts, 0))] = True
    bare = Sequences(ids, supervised, offsets, tokens[number:], events, refused)
    return _wrapped(tokenizer, drafts, config, bare)


def _common_prefixes(ids: Int32, offsets: Int64, a: Int64, b: Int64) -> tuple[Int64, Bool]:
    """Returns lengths of the common prefixes of rows `a` and `b`, and where `a` is longer."""
    lengths = np.diff(offsets)
    compared = np.where(a == b, 0, np.minimum(lengths[a], lengths[b]))
    starts = to_offsets(compared)
    left, right = (ids[range_indices(offsets[rows], compared)] for rows in (a, b))
    differ = np.flatnonzero(left != right)
    rows, at = np.unique(np.searchsorted(starts, differ, "right") - 1, return_index=True)
    common = np.where(a == b, lengths[a], compared)
    common[rows] = differ[at] - starts[rows]
    return common, common < lengths[a]


def _encode(tokenizer: Tokenizer, texts: Sequence[tuple[Mode, str]]) -> tuple[Int32, Int64]:
    """Encodes texts of several modes; returns flat ids and their offsets, in order."""
    ids, lengths, order = [], [], []
    for mode in dict.fromkeys(mode for mode, _ in texts):
        rows = [i for i, (other, _) in enumerate(texts) if other == mode]
        some, offsets = _encode_mode(tokenizer, [texts[i][1] for i in rows], mode)
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


def _check_literal(
    tokenizer: Tokenizer,
    drafts: Sequence[Draft],
    ids: Int32,
    offsets: Int64,
    refused: dict[int, Refused],
) -> None:
    """Refuses plain text that was encoded to control ids (Unigram vocabularies do that)."""
    for i, draft in enumerate(drafts):
        if draft.mode == "control" or i in refused or tokenizer.control_hint not in draft.text:
            continue
        if not tokenizer.controls.search(draft.text.replace(draft.guard, "")):
            continue
        guarded = draft.mode == "guarded"
        expected = len(tokenizer.controls.findall(draft.text)) if guarded else 0
        found = np.isin(ids[offsets[i] : offsets[i + 1]], [*tokenizer.special_ids])
        if found.sum() != expected:
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
