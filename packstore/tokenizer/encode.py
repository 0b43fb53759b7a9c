"""Encodes texts to token ids and supervision masks: all sequences of a block at once.

A draft (:class:`Draft`) is the text of one sequence, with its supervised spans. To know
which tokens a span has, the text before each end of it is encoded, too: the tokens that
it shares with the whole text lie before the place. All texts are encoded in one batch;
all else is numpy over flat ids and offsets. Only sequences with an event, such as a
token that joins prompt and response, are handled one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from packstore.config import TokenizeConfig
from packstore.format.arrays import (
    Bool,
    Int32,
    Int64,
    ragged_indices,
    range_indices,
    to_offsets,
)
from packstore.tokenizer.control import encode_around_controls
from packstore.tokenizer.records.sequences import Draft, Mode, Sequences
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.tokenizer import Tokenizer

EMPTY = -1
"""In place of the first and last id of a sequence without tokens."""

NO_TOKEN = -2
"""In place of the id of a BOS or EOS token that a tokenizer does not have."""


class _Place(NamedTuple):
    """A place in the text of a draft."""

    draft: int  # its index
    character: int


class _Encoding(NamedTuple):
    """Encoded drafts, and the tokens at some places in them.

    Attributes:
        ids: token ids of all drafts, int32 `[N]`.
        offsets: offsets of the drafts in `ids`, int64 `[drafts + 1]`.
        tokens_before: number of the draft's tokens before each place, int64
            `[places]`.
        is_merged: whether a token joins both sides of a place, bool `[places]`.
    """

    ids: Int32
    offsets: Int64
    tokens_before: Int64
    is_merged: Bool


def assemble(
    tokenizer: Tokenizer, drafts: Sequence[Draft], config: TokenizeConfig
) -> Sequences:
    """Return drafts as sequences of ids, with BOS and EOS by the settings."""
    bounds = _span_bounds(drafts)
    num_bounds = len(bounds)
    system_ends = [_Place(i, draft.system_end) for i, draft in enumerate(drafts)]
    encoding = _encode_drafts(tokenizer, drafts, [*bounds, *system_ends])

    drafts_of_bounds = np.array([place.draft for place in bounds], np.int64)
    first_tokens = encoding.offsets[drafts_of_bounds]
    token_bounds = first_tokens + encoding.tokens_before[:num_bounds]
    sequences = Sequences(
        ids=encoding.ids,
        supervised=_supervision(len(encoding.ids), token_bounds),
        offsets=encoding.offsets,
        heads=encoding.tokens_before[num_bounds:],
        events={},
        refusals={},
    )

    is_merged = encoding.is_merged[:num_bounds]
    _note_merged_boundaries(sequences, drafts_of_bounds[is_merged], config)
    _refuse_encoded_controls(tokenizer, drafts, sequences)
    return _with_bos_and_eos(tokenizer, drafts, config, sequences)


def _span_bounds(drafts: Sequence[Draft]) -> list[_Place]:
    """Return the start and the end of each supervised span, in turn."""
    bounds = []
    for i, draft in enumerate(drafts):
        for start, end in draft.spans:
            bounds.append(_Place(i, start))
            bounds.append(_Place(i, end))
    return bounds


def _supervision(num_tokens: int, bounds: Int64) -> Bool:
    """Return the mask of tokens between bounds: start and end of each span, in turn."""
    starts, ends = bounds.reshape(-1, 2).T
    # If tokens are merged at an end, the common prefix there may be the shorter one.
    lengths = np.maximum(ends - starts, 0)
    supervised = np.zeros(num_tokens, np.bool_)
    supervised[range_indices(starts, lengths)] = True
    return supervised


def _encode_drafts(
    tokenizer: Tokenizer, drafts: Sequence[Draft], places: Sequence[_Place]
) -> _Encoding:
    """Encode drafts, and map places in their texts to tokens.

    A place maps to the length of the common prefix of the ids of the text before it and
    the ids of the whole text, so a token that merges both sides lies after the place.
    """
    # A guard, which is empty or one character, is passed in front of the text.
    texts = [(draft.mode, draft.guard + draft.text) for draft in drafts]
    # Row of each distinct text before a place; these rows follow the rows of `texts`.
    prefixes: dict[tuple[Mode, str], int] = {}
    # For each place, the row of the text before it. At the start and the end of a draft
    # nothing needs to be encoded: the row of the draft itself.
    rows_before = []
    for place in places:
        draft = drafts[place.draft]
        if not 0 < place.character < len(draft.text):
            rows_before.append(place.draft)
            continue
        prefix = (draft.mode, draft.guard + draft.text[: place.character])
        rows_before.append(prefixes.setdefault(prefix, len(texts) + len(prefixes)))
    ids, offsets = _encode(tokenizer, [*texts, *prefixes])

    place_array = np.array(places, np.int64)
    owners = place_array[:, 0]
    characters = place_array[:, 1]
    common, is_merged = _common_prefixes(ids, offsets, np.array(rows_before), owners)
    draft_offsets = offsets[: len(drafts) + 1]
    return _Encoding(
        ids=ids[: draft_offsets[-1]],
        offsets=draft_offsets,
        tokens_before=np.where(characters > 0, common, 0),
        is_merged=is_merged,
    )


def _common_prefixes(
    ids: Int32, offsets: Int64, a: Int64, b: Int64
) -> tuple[Int64, Bool]:
    """Return the lengths of the common prefixes of rows `a` and `b`, and where `a` is
    longer.

    Args:
        ids: int32 `[N]`.
        offsets: offsets of the rows in `ids`.
        a: int64 `[pairs]`, rows.
        b: int64 `[pairs]`, rows.
    """
    lengths = np.diff(offsets)
    # A row is equal to itself: nothing is compared.
    compared = np.where(a == b, 0, np.minimum(lengths[a], lengths[b]))
    starts = to_offsets(compared)
    ids_of_a = ids[range_indices(offsets[a], compared)]
    ids_of_b = ids[range_indices(offsets[b], compared)]
    differ = np.flatnonzero(ids_of_a != ids_of_b)

    row_of_difference = np.searchsorted(starts, differ, "right") - 1
    rows, first_of_row = np.unique(row_of_difference, return_index=True)
    common = np.where(a == b, lengths[a], compared)
    common[rows] = differ[first_of_row] - starts[rows]
    return common, common < lengths[a]


def _encode(
    tokenizer: Tokenizer, texts: Sequence[tuple[Mode, str]]
) -> tuple[Int32, Int64]:
    """Return flat ids of texts of several modes, and their offsets, in order."""
    rows_by_mode: dict[Mode, list[int]] = {}
    for row, (mode, _) in enumerate(texts):
        rows_by_mode.setdefault(mode, []).append(row)
    if len(rows_by_mode) == 1:
        return _encode_mode(tokenizer, [text for _, text in texts], texts[0][0])

    ids = []
    lengths = []
    order = []
    for mode, rows in rows_by_mode.items():
        mode_ids, mode_offsets = _encode_mode(
            tokenizer, [texts[row][1] for row in rows], mode
        )
        ids.append(mode_ids)
        lengths.append(np.diff(mode_offsets))
        order += rows
    offsets = to_offsets(np.concatenate(lengths))
    rows_in_order = np.argsort(order)
    ids_in_order = np.concatenate(ids)[ragged_indices(offsets, rows_in_order)]
    return ids_in_order, to_offsets(np.diff(offsets)[rows_in_order])


def _encode_mode(
    tokenizer: Tokenizer, texts: list[str], mode: Mode
) -> tuple[Int32, Int64]:
    if mode != "guarded":
        return tokenizer.engine.encode_batch(texts, control=mode == "control")
    guards = [text[0] for text in texts]
    guarded_texts = [text[1:] for text in texts]
    return encode_around_controls(
        guarded_texts,
        specials=tokenizer.specials,
        encode=partial(tokenizer.engine.encode_batch, control=False),
        guards=guards,
    )


def _note_merged_boundaries(
    sequences: Sequences, rows: Int64, config: TokenizeConfig
) -> None:
    """Note, or refuse, sequences with a token that joins prompt and response."""
    for row in np.unique(rows).tolist():
        sequences.events[row] = ["boundary_merged"]
        if config.on["boundary"] != "keep":
            sequences.refusals[row] = Refused(
                "boundary", "a token joins prompt and response"
            )


def _refuse_encoded_controls(
    tokenizer: Tokenizer, drafts: Sequence[Draft], sequences: Sequences
) -> None:
    """Refuse sequences with plain text that was encoded to control ids.

    Unigram vocabularies do that. Only the control strings of a ``guarded`` draft that
    have no guard inside should have become ids.
    """
    for row, draft in enumerate(drafts):
        if draft.mode == "control" or row in sequences.refusals:
            continue
        if tokenizer.control_hint not in draft.text:
            continue
        unguarded_text = draft.text.replace(draft.guard, "")
        if not tokenizer.controls.search(unguarded_text):
            continue
        num_expected = 0
        if draft.mode == "guarded":
            num_expected = len(tokenizer.controls.findall(draft.text))
        ids = sequences.ids[sequences.offsets[row] : sequences.offsets[row + 1]]
        num_controls = np.isin(ids, [*tokenizer.special_ids]).sum()
        if num_controls != num_expected:
            detail = "this tokenizer has no plain form of a control string"
            sequences.refusals[row] = Refused("special_tokens", detail)


def _with_bos_and_eos(
    tokenizer: Tokenizer,
    drafts: Sequence[Draft],
    config: TokenizeConfig,
    bare: Sequences,
) -> Sequences:
    """Return sequences with BOS and EOS by the settings.

    Args:
        tokenizer: has the ids of BOS and EOS.
        drafts: the texts of the sequences.
        config: settings of the job.
        bare: the sequences without added tokens; their mask and events are changed.
    """
    bos = NO_TOKEN if tokenizer.bos_id is None else tokenizer.bos_id
    eos = NO_TOKEN if tokenizer.eos_id is None else tokenizer.eos_id
    has_tokens = np.diff(bare.offsets) > 0
    first_rows = bare.offsets[:-1][has_tokens]
    first_ids = np.full(len(drafts), EMPTY, np.int64)
    first_ids[has_tokens] = bare.ids[first_rows]
    last_ids = np.full(len(drafts), EMPTY, np.int64)
    last_ids[has_tokens] = bare.ids[bare.offsets[1:][has_tokens] - 1]

    adds_bos = _needs_bos(tokenizer, drafts, config)
    _note(bare, "bos_deduplicated", np.flatnonzero(adds_bos & (first_ids == bos)))
    adds_bos &= first_ids != bos
    last_ids[adds_bos & ~has_tokens] = bos

    adds_eos = _needs_eos(tokenizer, drafts, config)
    if eos == NO_TOKEN:
        _note(bare, "no_eos", np.flatnonzero(adds_eos))
        adds_eos[:] = False
    adds_eos &= last_ids != eos

    # Without a BOS before it, nothing predicts the first token: it is not learned.
    is_unpredicted = ~adds_bos[has_tokens]
    bare.supervised[first_rows[is_unpredicted]] = False
    # Truncation keeps BOS, whether it was added here or was in the text.
    heads = np.maximum(bare.heads + adds_bos, first_ids == bos)
    if not (adds_bos.any() or adds_eos.any()):
        return replace(bare, heads=heads)

    offsets = to_offsets(np.diff(bare.offsets) + adds_bos + adds_eos)
    places_of_bos = offsets[:-1][adds_bos]
    places_of_eos = offsets[1:][adds_eos] - 1
    is_text = np.ones(offsets[-1], np.bool_)
    is_text[places_of_bos] = False
    is_text[places_of_eos] = False

    ids = np.empty(len(is_text), np.int32)
    ids[is_text] = bare.ids
    ids[places_of_bos] = bos
    ids[places_of_eos] = eos

    supervised = np.zeros(len(is_text), np.bool_)
    supervised[is_text] = bare.supervised
    ends_supervised = np.array(
        [_is_end_supervised(draft) for draft in drafts], np.bool_
    )
    supervised[places_of_eos] = ((has_tokens | adds_bos) & ends_supervised)[adds_eos]
    return Sequences(ids, supervised, offsets, heads, bare.events, bare.refusals)


def _needs_bos(
    tokenizer: Tokenizer, drafts: Sequence[Draft], config: TokenizeConfig
) -> Bool:
    """Return the mask of sequences that begin with BOS: by the setting, else by the
    tokenizer.
    """
    if tokenizer.bos_id is None:
        return np.zeros(len(drafts), np.bool_)
    if config.add_bos is not None:
        return np.full(len(drafts), config.add_bos)
    if not tokenizer.adds_bos:
        return np.zeros(len(drafts), np.bool_)
    return np.array([not draft.from_template for draft in drafts], np.bool_)


def _needs_eos(
    tokenizer: Tokenizer, drafts: Sequence[Draft], config: TokenizeConfig
) -> Bool:
    """Return the mask of sequences that get an EOS.

    With `append_eos` all get one, unless their text ends with EOS already. By default
    those without a chat template do, unless their text ends with any control string.
    """
    endings: tuple[str, ...] = (str(tokenizer.eos_token),)
    if config.append_eos is None:
        endings = (*endings, *tokenizer.specials)
        needs_eos = [not draft.from_template for draft in drafts]
    else:
        needs_eos = [config.append_eos] * len(drafts)
    if tokenizer.eos_id is not None:
        for i, draft in enumerate(drafts):
            if needs_eos[i] and (draft.from_template or draft.mode == "control"):
                needs_eos[i] = not draft.text.rstrip().endswith(endings)
    return np.array(needs_eos, np.bool_)


def _is_end_supervised(draft: Draft) -> bool:
    return len(draft.spans) > 0 and draft.spans[-1][1] == len(draft.text)


def _note(sequences: Sequences, event: str, rows: Iterable[np.int64]) -> None:
    for row in rows:
        sequences.events.setdefault(int(row), []).append(event)
