"""The rules for every pack, checked on write and by ``packstore verify``.

Each rule has a name, used by ``schemas/cases`` and in error messages. All checks are
vectorised over the packs of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from packstore.errors import FormatError, sentence
from packstore.format.arrays import (
    IGNORE_INDEX,
    Bool,
    Int32,
    Int64,
    Packs,
    ids_of,
    to_offsets,
)

RULES: dict[str, str] = {
    "columns-agree": (
        "labels must be as many as input_ids, lengths as reward, carried values as "
        "example_ids"
    ),
    "boundaries-count": (
        "seq_boundaries must hold one offset more than the pack has sequences"
    ),
    "boundaries-span": (
        "seq_boundaries must start at 0, end at the number of tokens, and stay between"
    ),
    "segments-nonempty": "seq_boundaries must increase strictly",
    "responses-count": (
        "the sequences must be those of its examples: K times, or num_responses"
    ),
    "pack-nonempty": "a pack must hold at least one example",
    "pack-size": "a pack must not exceed pack_size tokens",
    "ids-range": "token ids must be at least 0 and below the vocabulary size",
    "labels-are-ids": "a label must be the token id at its place, or -100",
    "first-unsupervised": "the first token of every segment must have label -100",
    "supervised-nonempty": "every sequence must have at least one supervised token",
    "lengths-concat": "in layout concat a length must equal the tokens of its segment",
    "parents-count": "parent_distances must be as many as lengths",
    "parent-earlier": (
        "a parent must be an earlier segment of its pack: a distance is 0 to the "
        "number of segments before"
    ),
    "prefix-whole": (
        "a segment must leave out tokens if its distance is not 0, and none if it is 0"
    ),
    "prefix-inside": (
        "a segment must leave out fewer tokens than the sequence of its parent has"
    ),
    "parent-stores": ("a segment must leave out more tokens than its parent does"),
    "prefix-repeats": (
        "a segment must begin with the token that follows those it leaves out, in the "
        "sequence of its parent"
    ),
    "pack-keys": "the lengths of a pack must add up to most_keys at most",
    "reward-finite": "rewards must be finite numbers",
}
"""Rule -> its text in errors."""

_LABELS_AT_ONCE = 1 << 16
"""Labels compared at once: they stay in the processor's cache until they are signed."""


@dataclass(frozen=True)
class _Place:
    """The place of packs for errors: a shard's path, and the row of the first pack."""

    where: str
    first_row: int = 0

    def require(self, rule: str, ok: Bool, offsets: Int64 | None = None) -> None:
        """Raise FormatError at the first False of `ok`.

        Args:
            rule: a name of :data:`RULES`.
            ok: bool, one value per pack; or one per element, with `offsets`.
            offsets: int64 `[P + 1]`, offsets of the packs in `ok`.
        """
        if np.count_nonzero(ok) == len(ok):
            return
        position = int(np.argmin(ok))  # of the first False
        pack = position
        element = ""
        if offsets is not None:
            pack = int(np.searchsorted(offsets, position, "right")) - 1
            element = f"element {position - int(offsets[pack])} of the row"
        raise FormatError(
            sentence(
                where=f"{self.where}, row {self.first_row + pack}",
                rule=f"{RULES[rule]} [{rule}]",
                found=element,
            )
        )


def check_packs(
    packs: Packs,
    *,
    layout: str,
    pack_size: int | None = None,
    most_keys: int | None = None,
    vocab_size: int | None = None,
    where: str = "packs",
    first_row: int = 0,
) -> None:
    """Check every rule on every pack.

    Args:
        packs: the packs.
        layout: ``concat`` or ``shared_prefix``.
        pack_size: maximum tokens per pack; None: not checked.
        most_keys: maximum sum of the lengths of a pack; None: not checked.
        vocab_size: upper bound of ids; None: not checked.
        where: name of the packs in error texts (a shard's path).
        first_row: row number of the first pack in `where`.

    Raises:
        FormatError: a pack breaks a rule; names the rule and the row.
    """
    check_structure(packs, layout, pack_size, most_keys, where, first_row)
    place = _Place(where, first_row)
    _check_ids(packs.input_ids, packs.token_offsets, vocab_size, place)


def check_and_sign(
    ids: Int32,
    labels: Int32,
    offsets: Int64,
    out: Int32,
    vocab_size: int | None,
    where: str,
) -> None:
    """Check ids and labels, and write the signed ids to `out`.

    Args:
        ids: int32 `[N]`.
        labels: int32 `[N]`.
        offsets: int64 `[P + 1]`, offsets of the packs in `ids`.
        out: int32 `[N]`.
        vocab_size: upper bound of ids; None: not checked.
        where: name of the packs in error texts.

    Raises:
        FormatError: an id or a label breaks a rule.
    """
    place = _Place(where)
    _check_ids(ids, offsets, vocab_size, place)
    num_valid = 0
    for start in range(0, len(ids), _LABELS_AT_ONCE):
        part = slice(start, start + _LABELS_AT_ONCE)
        labels_part = labels[part]
        ids_part = ids[part]
        # No label is counted twice, as ids are not negative.
        num_valid += int(np.count_nonzero(labels_part == ids_part))
        num_valid += int(np.count_nonzero(labels_part == IGNORE_INDEX))
        # All bits of the sign are set where the label is negative.
        signed = np.right_shift(labels_part, 31, out=out[part])
        signed ^= ids_part
    if num_valid != len(labels):
        is_valid = (labels == ids) | (labels == IGNORE_INDEX)
        place.require("labels-are-ids", is_valid, offsets)


def check_structure(
    packs: Packs,
    layout: str,
    pack_size: int | None,
    most_keys: int | None,
    where: str,
    first_row: int = 0,
) -> Int32:
    """Check the rules that need no tokens but the first of each segment, and the signs
    of all.

    Returns:
        int32 `[S]`, ``packs.segment_lengths``.
    """
    place = _Place(where, first_row)
    segment_lengths = _check_boundaries(packs, pack_size, place)
    place.require("reward-finite", np.isfinite(packs.reward), packs.sequence_offsets)
    if not len(segment_lengths):
        return segment_lengths
    _check_supervision(packs, segment_lengths, place)
    if layout == "concat":
        matches = packs.lengths == segment_lengths
        place.require("lengths-concat", matches, packs.sequence_offsets)
    else:
        check_parents(packs, segment_lengths, where, first_row)
    if most_keys is not None:
        place.require("pack-keys", packs.keys <= most_keys)
    return segment_lengths


def _check_ids(
    ids: Int32, offsets: Int64, vocab_size: int | None, place: _Place
) -> None:
    if not len(ids):
        return
    limit = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    # As unsigned, a negative id is a large one.
    if ids.view(np.uint32).max() >= limit:
        place.require("ids-range", (ids >= 0) & (ids < limit), offsets)


def _check_boundaries(packs: Packs, pack_size: int | None, place: _Place) -> Int32:
    """Check the rules that the other checks assume; return the tokens of the segments,
    int32 `[S]`.
    """
    boundaries = packs.seq_boundaries
    num_sequences = len(packs.lengths)
    has_rewards = len(packs.reward) == num_sequences
    has_boundaries = len(boundaries) == num_sequences + len(packs)
    place.require("columns-agree", np.array([has_rewards]))
    place.require("boundaries-count", np.array([has_boundaries]))
    has_distances = len(packs.parent_distances) == num_sequences
    place.require("parents-count", np.array([has_distances]))
    if not len(packs):
        return np.empty(0, np.int32)

    rows = packs.boundary_offsets
    tokens = _steps(packs.token_offsets)
    # Before segment lengths are computed: no difference of these overflows.
    place.require("boundaries-span", boundaries >= 0, rows)
    place.require("boundaries-span", boundaries[rows[:-1]] == 0)
    place.require("boundaries-span", boundaries[rows[1:] - 1] == tokens)
    segment_lengths = packs.segment_lengths
    place.require("segments-nonempty", segment_lengths > 0, packs.sequence_offsets)

    place.require("pack-nonempty", _steps(packs.example_offsets) > 0)
    if pack_size is not None:
        place.require("pack-size", tokens <= pack_size)

    place.require("responses-count", packs.num_responses > 0, packs.example_offsets)
    sequence_edges = to_offsets(packs.num_responses)
    ends = sequence_edges[packs.example_offsets[1:]]
    place.require("responses-count", ends == packs.sequence_offsets[1:])
    return segment_lengths


def _steps(offsets: Int64) -> Int64:
    """Return the differences of neighbouring offsets, the lengths of rows."""
    # For few values, np.diff takes five times as long.
    return offsets[1:] - offsets[:-1]


def _check_supervision(packs: Packs, segment_lengths: Int32, place: _Place) -> None:
    """Check the supervised tokens, the ones with signed ids that are not negative."""
    starts = to_offsets(segment_lengths)[:-1]
    is_unsupervised = packs.signed_ids[starts] < 0
    place.require("first-unsupervised", is_unsupervised, packs.sequence_offsets)
    has_supervised = np.maximum.reduceat(packs.signed_ids, starts) >= 0
    place.require("supervised-nonempty", has_supervised, packs.sequence_offsets)


def check_parents(
    packs: Packs, segment_lengths: Int32, where: str, first_row: int = 0
) -> None:
    """Check the parents of segments, and how much segments leave out.

    A parent stores the last token that its child leaves out, and the one behind it. So
    the child's sequence is read from stored tokens, whatever its parent leaves out.

    Args:
        packs: the packs.
        segment_lengths: int32 `[S]`, tokens of each segment.
        where, first_row: as for :func:`check_packs`.
    """
    place = _Place(where, first_row)
    offsets = packs.sequence_offsets
    distances = packs.parent_distances
    places = np.arange(len(distances))
    places_in_pack = places - np.repeat(offsets[:-1], _steps(offsets))
    is_earlier = (distances >= 0) & (distances <= places_in_pack)
    place.require("parent-earlier", is_earlier, offsets)

    parents = places - distances
    is_child = distances > 0
    # int64, as a bad length may overflow.
    omitted = packs.lengths.astype(np.int64) - segment_lengths
    place.require("prefix-whole", (omitted == 0) != is_child, offsets)
    is_inside = (omitted >= 0) & (omitted < packs.lengths[parents])
    place.require("prefix-inside", is_inside | ~is_child, offsets)
    parent_stores = omitted > omitted[parents]
    place.require("parent-stores", parent_stores | ~is_child, offsets)

    starts = to_offsets(segment_lengths)[:-1]
    repeated = starts[parents] + omitted - omitted[parents]
    first_ids = ids_of(packs.signed_ids[starts])
    repeats = first_ids == ids_of(packs.signed_ids[repeated])
    place.require("prefix-repeats", repeats | ~is_child, offsets)
