"""The rules for every pack, checked on write and by ``packstore verify``.

Each rule has a name, used by ``schemas/cases`` and in error messages. All checks are
vectorised over the packs of a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from packstore.errors import FormatError, sentence
from packstore.format.arrays import IGNORE_INDEX, Bool, Int32, Int64, Packs, to_offsets

RULES: dict[str, str] = {
    "columns-agree": "labels must be as many as input_ids, lengths as reward, carried "
    "values as "
    "example_ids",
    "spans-ordered": "label_spans must hold ordered start, end pairs inside their pack",
    "boundaries-count": "seq_boundaries must hold one offset more than the pack has "
    "sequences",
    "boundaries-span": "seq_boundaries must run from 0 to the number of tokens",
    "segments-nonempty": "seq_boundaries must increase strictly",
    "responses-count": "the sequences must be those of its examples: K times, or "
    "num_responses",
    "pack-nonempty": "a pack must hold at least one example",
    "pack-size": "a pack must not exceed pack_size tokens",
    "ids-range": "token ids must be at least 0 and below the vocabulary size",
    "labels-are-ids": "a label must be the token id at its place, or -100",
    "first-unsupervised": "the first token of every segment must have label -100",
    "supervised-nonempty": "every sequence must have at least one supervised token",
    "lengths-concat": "in layout concat a length must equal the tokens of its segment",
    "prefix-first-whole": "in layout shared_prefix the first segment of an example "
    "must be whole",
    "prefix-offset": "a segment must leave out all shared prompt tokens but the last, "
    "and no more",
    "reward-finite": "rewards must be finite numbers",
}
"""Rule -> its text in errors."""

Need = Callable[..., None]
"""``need(rule, ok, offsets=None)`` raises unless all of `ok` are true, see
:func:`_require`.
"""

_AT_ONCE = 1 << 16
"""Labels compared at once: they stay in the processor's cache till they are signed."""


def check_packs(
    packs: Packs,
    *,
    layout: str,
    pack_size: int | None = None,
    vocab_size: int | None = None,
    where: str = "packs",
    first_row: int = 0,
) -> None:
    """Checks every rule on every pack.

    Args:
        packs: the packs.
        layout: ``concat`` or ``shared_prefix``.
        pack_size: most tokens of a pack, if known.
        vocab_size: upper bound of ids, if known.
        where: name of the packs in error texts (a shard's path).
        first_row: row number of the first pack in `where`.
    """
    check_structure(packs, layout, pack_size, where, first_row)
    need = partial(_require, where, first_row)
    _check_ids(packs.input_ids, packs.token_offsets, vocab_size, need)
    if layout == "shared_prefix":
        check_prefix(packs, where, first_row)


def check_and_sign(
    ids: Int32,
    labels: Int32 | None,
    offsets: Int64,
    out: Int32,
    vocab_size: int | None,
    where: str,
) -> None:
    """Checks ids and labels (None: all -100), int32 `[N]`; writes the signed ids to
    `out`.
    """
    need, known = partial(_require, where, 0), 0
    _check_ids(ids, offsets, vocab_size, need)
    if labels is None:
        np.invert(ids, out=out)
        return
    for start in range(0, len(ids), _AT_ONCE):
        part = slice(start, start + _AT_ONCE)
        some, their_ids = labels[part], ids[part]
        # No token is counted twice, as ids are not negative.
        known += int(
            np.count_nonzero(some == their_ids) + np.count_nonzero(some == IGNORE_INDEX)
        )
        joint = np.right_shift(some, 31, out=out[part])
        joint ^= their_ids
    if known != len(labels):
        need("labels-are-ids", (labels == ids) | (labels == IGNORE_INDEX), offsets)


def check_structure(
    packs: Packs, layout: str, pack_size: int | None, where: str, first_row: int = 0
) -> Int32:
    """Checks the rules that cost little, of tokens only labels; returns
    `segment_lengths`.
    """
    need = partial(_require, where, first_row)
    segments = _check_boundaries(packs, pack_size, need)
    need("reward-finite", np.isfinite(packs.reward), packs.sequence_offsets)
    _check_supervision(packs, segments, need)
    _check_lengths(packs, segments, layout, need)
    return segments


def _require(
    where: str, first_row: int, rule: str, ok: Bool, offsets: Int64 | None = None
) -> None:
    """Raises at the first False of `ok`: one value per pack, or per element with
    offsets.
    """
    if np.count_nonzero(ok) == len(ok):
        return
    bad = int(np.argmin(ok))
    pack = bad if offsets is None else int(np.searchsorted(offsets, bad, "right")) - 1
    found = "" if offsets is None else f"element {bad - int(offsets[pack])} of the row"
    place = f"{where}, row {first_row + pack}"
    raise FormatError(sentence(place, f"{RULES[rule]} [{rule}]", found))


def _check_ids(ids: Int32, offsets: Int64, vocab_size: int | None, need: Need) -> None:
    top = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    # As unsigned, a negative id is a large one.
    if len(ids) and ids.view(np.uint32).max() >= top:
        need("ids-range", (ids >= 0) & (ids < top), offsets)


def _check_boundaries(packs: Packs, pack_size: int | None, need: Need) -> Int32:
    """Checks the rules that the other checks assume; returns the segments' tokens,
    `[S]`.
    """
    bounds, rows, k = packs.seq_boundaries, packs.sequence_offsets, packs.num_responses
    need("columns-agree", np.array([len(packs.reward) == len(packs.lengths)]))
    need("boundaries-count", np.array([len(bounds) == len(packs.lengths) + len(packs)]))
    if not len(packs):
        return np.empty(0, np.int32)
    where, tokens = packs.boundary_offsets, _steps(packs.token_offsets)
    need("boundaries-span", bounds >= 0, where)  # so that no difference overflows
    need("boundaries-span", bounds[where[:-1]] == 0)
    need("boundaries-span", bounds[where[1:] - 1] == tokens)
    segments = packs.segment_lengths
    need("segments-nonempty", segments > 0, rows)
    need("pack-nonempty", _steps(packs.example_offsets) > 0)
    if pack_size is not None:
        need("pack-size", tokens <= pack_size)
    need("responses-count", k > 0, packs.example_offsets)
    firsts = to_offsets(k)  # first sequence of each example
    need("responses-count", firsts[packs.example_offsets[1:]] == rows[1:])
    return segments


def _steps(offsets: Any) -> Any:
    return (
        offsets[1:] - offsets[:-1]
    )  # as np.diff, in a fifth of the time for few values


def _check_supervision(packs: Packs, segments: Int32, need: Need) -> None:
    """Checks which tokens are supervised: those whose signed ids are not negative."""
    if len(segments):
        starts, rows = to_offsets(segments)[:-1], packs.sequence_offsets
        need("first-unsupervised", packs.signed_ids[starts] < 0, rows)
        need(
            "supervised-nonempty",
            np.maximum.reduceat(packs.signed_ids, starts) >= 0,
            rows,
        )


def _check_lengths(packs: Packs, segments: Int32, layout: str, need: Need) -> None:
    """Checks the tokens that segments omit, for packs with correct shapes."""
    rows, k = packs.sequence_offsets, packs.num_responses
    if layout == "concat":
        need("lengths-concat", packs.lengths == segments, rows)
        return
    left_out = (
        packs.lengths.astype(np.int64) - segments
    )  # int64, as a bad length may overflow
    firsts = to_offsets(k)
    need("prefix-first-whole", left_out[firsts[:-1]] == 0, packs.example_offsets)
    need(
        "prefix-offset",
        (left_out >= 0) & (left_out < np.repeat(segments[firsts[:-1]], k)),
        rows,
    )


def check_prefix(packs: Packs, where: str, first_row: int) -> None:
    """Checks that the offsets of layout shared_prefix follow the definition; the others
    hold.

    A prompt is the tokens before the first supervised one. Two sequences share the
    common prefix of their prompts, and ``offset = max(shared - 1, 0)``. Given the
    offset, two tokens decide: the repeated one must agree (if offset > 0), and the next
    must not be shared.
    """
    offsets, k = packs.segment_offsets, packs.num_responses
    starts, firsts = to_offsets(packs.segment_lengths)[:-1], to_offsets(k)[:-1]
    first = np.repeat(starts[firsts], k)
    where_on = np.flatnonzero(packs.supervised)
    prompt = where_on[np.searchsorted(where_on, starts)] - starts
    first_prompt = np.repeat(prompt[firsts], k)
    ids, end = packs.input_ids, len(packs.input_ids) - 1
    # The first segment has a token at each offset, as its length was checked.
    repeated = ids[starts] == ids[first + offsets]
    following = (
        ids[np.minimum(first + offsets + 1, end)] == ids[np.minimum(starts + 1, end)]
    )
    more = repeated & following & (offsets + 1 < first_prompt) & (prompt > 1)
    right = ((offsets == 0) | (repeated & (offsets + 1 <= first_prompt))) & ~more
    right[firsts] = True
    _require(where, first_row, "prefix-offset", right, packs.sequence_offsets)
