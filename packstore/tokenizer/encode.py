"""From texts to token ids and what of them is supervised."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from packstore.config import TokenizeConfig
from packstore.records import Bool, Int32
from packstore.tokenizer.control import encode_around_controls
from packstore.tokenizer.drafts import Draft, Mode
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.tokenizer import Tokenizer

Key = tuple[str, Mode, str]
Encoded = Mapping[Key, Int32]


@dataclass(frozen=True, slots=True)
class Tokens:
    """One sequence as ids.

    Attributes:
        ids: int32 `[n]`.
        supervised: bool `[n]`.
        head: leading tokens (BOS, system turn) that truncation keeps.
        events: what there is to note.
    """

    ids: Int32
    supervised: Bool
    head: int = 0
    events: list[str] = field(default_factory=list)


def encode_drafts(tokenizer: Tokenizer, drafts: Iterable[Draft]) -> Encoded:
    """Ids of all texts of the drafts and of all their beginnings that end at a boundary.

    Each different text is encoded once, all of them in one batch for each mode.
    """
    wanted = dict.fromkeys(key for draft in drafts for key in _keys(draft))
    encoded: dict[Key, Int32] = {}
    for mode in ("control", "literal"):
        keys = [key for key in wanted if key[1] == mode]
        if keys:
            texts = [text for text, _, _ in keys]
            ids, offsets = tokenizer.engine.encode_batch(texts, control=mode == "control")
            encoded |= zip(keys, np.split(ids, offsets[1:-1]), strict=True)
    keys = [key for key in wanted if key[1] == "guarded"]
    if keys:
        rows = encode_around_controls(
            [text for text, _, _ in keys],
            tokenizer.specials,
            lambda texts: tokenizer.engine.encode_batch(texts, control=False),
            [guard for _, _, guard in keys],
        )
        encoded |= zip(keys, rows, strict=True)
    return encoded


def assemble(
    draft: Draft, encoded: Encoded, tokenizer: Tokenizer, config: TokenizeConfig
) -> Tokens:
    """The sequence of a draft: BOS and EOS by the settings, boundaries found among the ids.

    A character boundary lies where the ids of the text up to it stop to agree with the ids of the
    whole text, so a token that merges both sides of a boundary lies behind it.

    Raises:
        Refused: ``boundary_merged`` or ``special_tokens``.
    """
    ids = encoded[draft.text, draft.mode, draft.guard]
    events = []
    cuts = {0: 0, len(draft.text): len(ids)}
    for at in _boundaries(draft):
        before = encoded[draft.text[:at], draft.mode, draft.guard]
        cuts[at] = common_prefix(before, ids)
        merged = cuts[at] < len(before) and any(at in span for span in draft.spans)
        if merged and "boundary_merged" not in events:
            events.append("boundary_merged")
    if events and config.boundary != "longest_common_prefix":
        raise Refused("boundary_merged", "a token joins prompt and response")
    _check_literal(draft, ids, tokenizer)
    supervised = np.zeros(len(ids), np.bool_)
    for start, end in draft.spans:
        supervised[cuts[start] : cuts[end]] = True
    head = cuts[draft.system_end]
    if _wants_bos(draft, ids, tokenizer, config, events):
        ids = np.append(np.int32(tokenizer.bos_id or 0), ids)
        supervised = np.append(np.False_, supervised)
        head += 1
    if _wants_eos(draft, ids, tokenizer, config, events):
        ids = np.append(ids, np.int32(tokenizer.eos_id or 0))
        supervised = np.append(supervised, draft.spans[-1][1] == len(draft.text))
    supervised[:1] = False  # nothing predicts the first token
    return Tokens(ids, supervised, max(head, starts_with(ids, tokenizer.bos_id)), events)


def common_prefix(a: Int32, b: Int32) -> int:
    """Number of leading ids that agree."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(np.argmax(differ)) if differ.any() else n


def starts_with(ids: Int32, token: int | None) -> bool:
    """Whether the first id is `token`."""
    return len(ids) > 0 and int(ids[0]) == token


def _boundaries(draft: Draft) -> list[int]:
    """Characters where spans and the system turn begin or end, the ends of the text apart."""
    places = {place for span in draft.spans for place in span} | {draft.system_end}
    return sorted(places - {0, len(draft.text)})


def _keys(draft: Draft) -> list[Key]:
    texts = [draft.text, *(draft.text[:at] for at in _boundaries(draft))]
    return [(text, draft.mode, draft.guard) for text in texts]


def _check_literal(draft: Draft, ids: Int32, tokenizer: Tokenizer) -> None:
    """Refuses plain text that became control ids all the same (Unigram vocabularies do that)."""
    bare = draft.text.replace(draft.guard, "") if draft.guard else draft.text
    if draft.mode == "control" or not tokenizer.controls.search(bare):
        return
    control = np.array(sorted(tokenizer.special_ids), np.int32)
    expected = 0
    if draft.mode == "guarded":
        expected = len(tokenizer.controls.findall(draft.text))
    if int(np.isin(ids, control).sum()) != expected:
        raise Refused("special_tokens", "this tokenizer has no plain form of a control string")


def _wants_bos(
    draft: Draft, ids: Int32, tokenizer: Tokenizer, config: TokenizeConfig, events: list[str]
) -> bool:
    default = tokenizer.adds_bos and not draft.from_template
    if tokenizer.bos_id is None or not (default if config.add_bos is None else config.add_bos):
        return False
    if starts_with(ids, tokenizer.bos_id):
        events.append("bos_deduplicated")
        return False
    return True


def _wants_eos(
    draft: Draft, ids: Int32, tokenizer: Tokenizer, config: TokenizeConfig, events: list[str]
) -> bool:
    wanted = not draft.from_template if config.append_eos is None else config.append_eos
    if not wanted:
        return False
    if tokenizer.eos_id is None:
        events.append("no_eos")
        return False
    ended = draft.from_template and draft.text.rstrip().endswith(str(tokenizer.eos_token))
    return not ended and not (len(ids) and ids[-1] == tokenizer.eos_id)
