"""The rules that every pack obeys, checked on write and by ``packstore verify``.

Each rule has a name, used by ``schemas/cases`` and in error messages. All checks are
vectorised over the packs of a batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from packstore.errors import FormatError, sentence
from packstore.records import IGNORE_INDEX, Bool, Int64, Packs

RULES: dict[str, str] = {
    "columns-agree": "labels must be as many as input_ids, lengths as reward, carried values as "
    "example_ids",
    "spans-ordered": "label_spans must hold ordered start, end pairs inside their pack",
    "boundaries-count": "seq_boundaries must hold one offset more than the pack has sequences",
    "boundaries-span": "seq_boundaries must run from 0 to the number of tokens",
    "segments-nonempty": "seq_boundaries must increase strictly",
    "responses-count": "the sequences must be those of its examples: K times, or num_responses",
    "pack-nonempty": "a pack must hold at least one example",
    "pack-size": "a pack must not exceed pack_size tokens",
    "ids-range": "token ids must be at least 0 and below the vocabulary size",
    "labels-are-ids": "a label must be the token id at its place, or -100",
    "first-unsupervised": "the first token of every segment must have label -100",
    "supervised-nonempty": "every sequence must have at least one supervised token",
    "lengths-concat": "in layout concat a length must equal the tokens of its segment",
    "prefix-first-whole": "in layout shared_prefix the first segment of an example must be whole",
    "prefix-offset": "a segment must leave out all shared prompt tokens but the last, and no more",
    "reward-finite": "rewards must be finite numbers",
}
"""Rule -> what must hold."""


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
        pack_size: tokens of a pack at most, if known.
        vocab_size: ids must be below it, if known.
        where: what the packs are, for the error text (a shard's path).
        first_row: row number of the first pack in `where`.

    Raises:
        FormatError: the first broken rule, with its name and the row.
    """

    def fail(rule: str, pack: int, found: str = "") -> None:
        place = f"{where}, row {first_row + pack}"
        raise FormatError(sentence(place, f"{RULES[rule]} [{rule}]", found))

    def need(rule: str, ok: Bool, offsets: Int64 | None = None) -> None:
        """Fails at the first False of `ok`: one value per pack, or per element with its offsets."""
        if not ok.all():
            bad = int(np.argmin(ok))
            pack = bad if offsets is None else int(np.searchsorted(offsets, bad, "right")) - 1
            place = "" if offsets is None else f"element {bad - int(offsets[pack])} of the row"
            fail(rule, pack, place)

    _check_shapes(packs, fail, need)
    tokens, bounds = packs.token_offsets, packs.seq_boundaries
    need("pack-nonempty", np.diff(packs.example_offsets) > 0)
    if pack_size is not None:
        need("pack-size", np.diff(tokens) <= pack_size)
    top = np.iinfo(np.int32).max if vocab_size is None else vocab_size
    ids = packs.input_ids
    # Read as unsigned, an id below 0 is a large one.
    if len(ids) and ids.view(np.uint32).max() >= top:
        need("ids-range", (ids >= 0) & (ids < top), tokens)
    supervised = packs.labels != IGNORE_INDEX
    need("labels-are-ids", supervised <= (packs.labels == ids), tokens)
    need("reward-finite", np.isfinite(packs.reward), packs.sequence_offsets)

    lengths = packs.segment_lengths
    pack_of = np.repeat(np.arange(len(packs)), np.diff(packs.sequence_offsets))
    inside = np.ones(len(bounds), np.bool_)
    inside[packs.boundary_offsets[1:] - 1] = False
    starts = tokens[pack_of] + bounds[inside]
    need("first-unsupervised", ~supervised[starts], packs.sequence_offsets)
    need(
        "supervised-nonempty",
        np.logical_or.reduceat(supervised, starts) if len(starts) else np.ones(0, np.bool_),
        packs.sequence_offsets,
    )
    if layout == "concat":
        need("lengths-concat", packs.lengths == lengths, packs.sequence_offsets)
    else:
        _check_prefix(packs, starts, supervised, need)


def _check_shapes(packs: Packs, fail, need) -> None:  # type: ignore[no-untyped-def]
    """Rules that the other checks take for granted."""
    if len(packs.labels) != len(packs.input_ids) or len(packs.reward) != len(packs.lengths):
        fail("columns-agree", 0)
    if len(packs.seq_boundaries) != len(packs.lengths) + len(packs):
        fail("boundaries-count", 0)
    if not len(packs):
        return
    where, bounds = packs.boundary_offsets, packs.seq_boundaries
    limits = np.repeat(np.diff(packs.token_offsets), np.diff(where))
    need("boundaries-span", (bounds >= 0) & (bounds <= limits), where)
    need("boundaries-span", bounds[where[:-1]] == 0)
    need("boundaries-span", bounds[where[1:] - 1] == np.diff(packs.token_offsets))
    need("segments-nonempty", packs.segment_lengths > 0, packs.sequence_offsets)
    need("responses-count", packs.num_responses > 0, packs.example_offsets)
    per_pack = np.zeros(len(packs), np.int64)
    example_pack = np.repeat(np.arange(len(packs)), np.diff(packs.example_offsets))
    np.add.at(per_pack, example_pack, packs.num_responses)
    need("responses-count", per_pack == np.diff(packs.sequence_offsets))


def _check_prefix(packs: Packs, starts: npt.NDArray[np.int64], supervised: Bool, need) -> None:  # type: ignore[no-untyped-def]
    """The offsets of layout shared_prefix are exactly what the definition gives.

    With p the number of tokens before the first supervised one, two sequences share the leading
    tokens of their prompts on which they agree, and ``offset = max(shared - 1, 0)``. Given the
    offset, it is enough to look at two tokens: the repeated one must agree (if offset > 0), the one
    after it must not be shared.
    """
    rows = packs.sequence_offsets
    offsets = packs.lengths.astype(np.int64) - packs.segment_lengths  # a wild length may overflow
    k = packs.num_responses
    is_first = np.zeros(len(offsets), np.bool_)
    is_first[np.cumsum(k) - k] = True
    need("prefix-first-whole", (offsets == 0) | ~is_first, rows)
    first = starts[np.repeat(np.flatnonzero(is_first), k)]
    where_on = np.flatnonzero(supervised)
    prompt = where_on[np.searchsorted(where_on, starts)] - starts
    first_prompt = np.repeat(prompt[is_first], k)
    ids, end = packs.input_ids, len(packs.input_ids) - 1
    repeated = ids[starts] == ids[np.clip(first + offsets, 0, end)]
    fits = (offsets >= 0) & (offsets + 1 <= first_prompt)
    more = (
        repeated
        & (offsets + 1 < first_prompt)
        & (prompt > 1)
        & (ids[np.minimum(starts + 1, end)] == ids[np.clip(first + offsets + 1, 0, end)])
    )
    need("prefix-offset", is_first | (((offsets == 0) | (repeated & fits)) & ~more), rows)
