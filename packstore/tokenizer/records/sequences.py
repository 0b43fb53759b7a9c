"""Sequences as text and as ids: single ones, or all of a block in flat arrays; records of ids."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from packstore.format.arrays import IGNORE_INDEX, Bool, Int32, Int64, to_offsets
from packstore.tokenizer.dialogue.template import Span
from packstore.tokenizer.refusals import Refused, wrong_type
from packstore.tokenizer.tokenizer import Tokenizer

MAX_ID = (1 << 31) - 1
NO_IDS = np.empty(0, np.int32)

Mode = Literal["control", "literal", "guarded"]


class Draft(NamedTuple):
    """One sequence before it is encoded."""

    text: str  # prompt and response
    spans: Sequence[Span]  # supervised characters (start, end), in order
    # ``control``: control strings in `text` become ids; ``literal``: they are plain text;
    # ``guarded``: they become ids unless they contain `guard`, which is not part of the text
    mode: Mode
    guard: str = ""
    system_end: int = 0  # end of a leading system turn, which truncation keeps
    from_template: bool = False


@dataclass(frozen=True, slots=True)
class Tokens:
    """One sequence as ids."""

    ids: Int32
    supervised: Bool
    head: int = 0  # number of leading tokens (BOS, system turn) that truncation keeps
    events: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The sequences of some drafts, in order, as flat arrays."""

    ids: Int32
    supervised: Bool
    offsets: Int64
    heads: Int64  # see `Tokens`
    events: dict[int, list[str]]  # by sequence
    refused: dict[int, Refused]  # by sequence

    def row(self, i: int) -> Tokens:
        """Returns sequence `i`."""
        start, end = self.offsets[i : i + 2]
        events = self.events.get(i, [])
        return Tokens(self.ids[start:end], self.supervised[start:end], int(self.heads[i]), events)

    @classmethod
    def of(cls, rows: Sequence[Tokens]) -> Sequences:
        """Joins single sequences."""
        return cls(
            ids=np.concatenate([NO_IDS, *(t.ids for t in rows)]),
            supervised=np.concatenate([NO_IDS.astype(np.bool_), *(t.supervised for t in rows)]),
            offsets=to_offsets(np.array([len(t.ids) for t in rows], np.int64)),
            heads=np.array([t.head for t in rows], np.int64),
            events={i: t.events for i, t in enumerate(rows) if t.events},
            refused={},
        )

    def with_rows(self, rows: Mapping[int, Tokens], *, insert: bool = False) -> Sequences:
        """Returns the sequences with `rows` replaced, or inserted with `insert`."""
        if not rows:
            return self
        number = len(self.heads) + insert * len(rows)
        places = [i for i in range(number) if i not in rows or not insert]
        every = {place: self.row(i) for i, place in enumerate(places)} | dict(rows)
        refused = {places[i]: why for i, why in self.refused.items()}
        return replace(Sequences.of([every[i] for i in range(number)]), refused=refused)

    def kept(self, keep: Bool) -> tuple[Int32, Bool, Int64]:
        """Returns ids, supervision and lengths of the sequences where `keep`, `[S]`, is True."""
        lengths = np.diff(self.offsets)
        if keep.all():
            return self.ids, self.supervised, lengths
        tokens = np.repeat(keep, lengths)
        return self.ids[tokens], self.supervised[tokens], lengths[keep]


def common_prefix(a: Int32, b: Int32) -> int:
    """Returns the length of the common prefix."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(np.argmax(differ)) if differ.any() else n


def unwrapped(value: Any) -> Any:
    """Returns a tensor as an array, a scalar of numpy or torch as a number, the rest as it is."""
    if not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    return array if array.ndim else array.item()


def holds_ids(value: object) -> bool:
    """Returns True for an array, and for a list that is empty or starts with a whole number."""
    if isinstance(value, np.ndarray):
        return True
    return isinstance(value, list) and (not value or type(value[0]) is int)


def as_ids(value: object, name: str) -> Int32:
    """Converts a list or an array of ids to int32 `[N]`."""
    array = _whole_numbers(value)
    if array is None or (len(array) and (array.min() < 0 or array.max() > MAX_ID)):
        raise wrong_type(f"{name} must be token ids, whole numbers in 0..{MAX_ID}", value)
    return np.asarray(array, np.int32)


def _whole_numbers(value: object) -> Any:
    """Returns an array of integers `[N]`; None if the value is something else."""
    try:
        array = np.asarray(value if isinstance(value, list | np.ndarray) else None)
    except ValueError:  # lists of different lengths
        return None
    return array if array.ndim == 1 and (array.dtype.kind in "iu" or not len(array)) else None


def supervised_ids(ids: Int32, labels: object, name: str) -> Bool:
    """Returns the supervision mask of ids, bool `[N]`, by their labels; without, all True."""
    if labels is None:
        return np.ones(len(ids), np.bool_)
    array = _whole_numbers(labels)
    ignored = array == IGNORE_INDEX
    if array is None or array.shape != ids.shape or ((array != ids) & ~ignored).any():
        rule = f"each label of {name} must be the id at its place, or {IGNORE_INDEX}"
        raise wrong_type(rule, labels)
    return np.asarray(~ignored)


def masked_ids(ids: Int32, mask: object) -> Bool:
    """Returns a mask of zeros and ones as bool `[N]`."""
    on = np.asarray(mask)
    if on.shape != ids.shape or not np.isin(on, (0, 1)).all():
        raise wrong_type("a mask must have a 0 or a 1 for each of input_ids", mask)
    return on.astype(np.bool_)


def id_sequences(
    prompt: Any,
    responses: Sequence[Any],
    supervised: Sequence[Bool] | None,
    tokenizer: Tokenizer | None,
) -> list[Tokens]:
    """Returns the sequences of a record of ids, without adding BOS or EOS.

    `supervised`: the mask of each response, None: all tokens; `tokenizer`: of these ids, if known.
    """
    sequences = []
    masks = supervised or itertools.repeat(np.True_)
    for response, mask in zip(responses, masks, strict=False):
        ids = np.concatenate([prompt, response], dtype=np.int32)
        on = np.zeros(len(ids), np.bool_)
        on[len(prompt) :] = mask
        on[:1] = False
        head = 0
        if tokenizer is not None:
            if len(ids) and ids.max() >= tokenizer.vocab_size:
                detail = f"id {ids.max()} in a vocabulary of {tokenizer.vocab_size}"
                raise Refused("wrong_type", detail)
            head = int(len(ids) > 0 and ids[0] == tokenizer.bos_id)
        sequences.append(Tokens(ids, on, head))
    return sequences
