"""Sequences: a prompt and one response, as text and as token ids.

A :class:`Draft` is the text of a sequence before it is encoded, and :class:`Tokens` are
its ids. :class:`Sequences` are the sequences of all records of a block, in flat arrays.
Records may also bring ids themselves: functions below check and join these.
"""

from __future__ import annotations

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
    # ``control``: control strings in `text` become ids; ``literal``: they are plain
    # text; ``guarded``: the template's become ids, and the record's are plain text
    mode: Mode
    # Character that ``guarded`` text has inside the record's control strings. It is
    # removed before the text is encoded.
    guard: str = ""
    # Number of characters of a leading system turn, which truncation keeps.
    system_end: int = 0
    from_template: bool = False  # whether a chat template rendered the text


@dataclass(frozen=True, slots=True)
class Tokens:
    """One sequence as ids."""

    ids: Int32
    supervised: Bool
    head: int = 0  # number of leading tokens (BOS, system turn) that truncation keeps
    events: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """Sequences in order, as flat arrays."""

    ids: Int32  # `[N]`, of all sequences, one after another
    supervised: Bool  # `[N]`
    offsets: Int64  # `[S + 1]`, of the sequences in `ids`
    heads: Int64  # `[S]`, see `Tokens.head`
    events: dict[int, list[str]]  # index of a sequence -> its events
    refusals: dict[int, Refused]  # index of a sequence -> why it is refused

    def row(self, i: int) -> Tokens:
        """Return sequence `i`."""
        start, end = self.offsets[i : i + 2]
        return Tokens(
            ids=self.ids[start:end],
            supervised=self.supervised[start:end],
            head=int(self.heads[i]),
            events=self.events.get(i, []),
        )

    @classmethod
    def of(cls, rows: Sequence[Tokens]) -> Sequences:
        """Join single sequences."""
        ids = [NO_IDS] + [tokens.ids for tokens in rows]
        supervised = [NO_IDS.astype(np.bool_)] + [tokens.supervised for tokens in rows]
        lengths = np.array([len(tokens.ids) for tokens in rows], np.int64)
        return cls(
            ids=np.concatenate(ids),
            supervised=np.concatenate(supervised),
            offsets=to_offsets(lengths),
            heads=np.array([tokens.head for tokens in rows], np.int64),
            events={i: tokens.events for i, tokens in enumerate(rows) if tokens.events},
            refusals={},
        )

    def with_rows(
        self, rows: Mapping[int, Tokens], *, insert: bool = False
    ) -> Sequences:
        """Return the sequences with others at the indices of `rows`.

        Args:
            rows: index -> sequence.
            insert: False: they replace sequences; True: they are inserted, at their
                indices in the result.
        """
        inserted = rows if insert else {}
        num_rows = len(self.heads) + len(inserted)
        # Indices, in the result, of the sequences that were here before.
        indices = [i for i in range(num_rows) if i not in inserted]
        tokens = {index: self.row(i) for i, index in enumerate(indices)}
        tokens.update(rows)
        joined = Sequences.of([tokens[i] for i in range(num_rows)])
        refusals = {indices[i]: refusal for i, refusal in self.refusals.items()}
        return replace(joined, refusals=refusals)

    def select(self, is_selected: Bool) -> tuple[Int32, Bool, Int64]:
        """Return ids, supervision and lengths of the sequences where `is_selected`,
        `[S]`.
        """
        lengths = np.diff(self.offsets)
        if is_selected.all():
            return self.ids, self.supervised, lengths
        tokens = np.repeat(is_selected, lengths)
        return self.ids[tokens], self.supervised[tokens], lengths[is_selected]


def common_prefix(a: Int32, b: Int32) -> int:
    """Return the length of the common prefix."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    return int(np.argmax(differ)) if differ.any() else length


def unwrapped(value: Any) -> Any:
    """Return a tensor as an array, a scalar of numpy or torch as a number, others as
    they are.
    """
    if not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    return array if array.ndim else array.item()


def holds_ids(value: object) -> bool:
    """Return True for an array, and for a list that is empty or starts with a whole
    number.
    """
    if not isinstance(value, list):
        return isinstance(value, np.ndarray)
    return not value or type(value[0]) is int


def as_ids(value: object, name: str) -> Int32:
    """Convert a list or an array of ids to int32 `[N]`.

    Raises:
        Refused: they are no ids (``wrong_type``).
    """
    array = _whole_numbers(value)
    if array is None or not _are_ids(array):
        raise wrong_type(
            f"{name} must be token ids, whole numbers in 0..{MAX_ID}", value
        )
    return np.asarray(array, np.int32)


def _are_ids(array: Any) -> bool:
    return len(array) == 0 or bool(array.min() >= 0 and array.max() <= MAX_ID)


def _whole_numbers(value: object) -> Any:
    """Return an array of integers `[N]`; None if the value is something else."""
    if not isinstance(value, list | np.ndarray):
        return None
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        return None
    if array.ndim != 1:
        return None
    is_whole = array.dtype.kind in "iu" or len(array) == 0
    return array if is_whole else None


def supervised_ids(ids: Int32, labels: object, name: str) -> Bool:
    """Return the supervision mask of ids, bool `[N]`, by their labels; without labels
    all are supervised.

    Raises:
        Refused: a label is neither the id at its place nor -100 (``wrong_type``).
    """
    if labels is None:
        return np.ones(len(ids), np.bool_)
    rule = f"each label of {name} must be the id at its place, or {IGNORE_INDEX}"
    array = _whole_numbers(labels)
    if array is None or array.shape != ids.shape:
        raise wrong_type(rule, labels)
    is_ignored = array == IGNORE_INDEX
    if ((array != ids) & ~is_ignored).any():
        raise wrong_type(rule, labels)
    return np.asarray(~is_ignored)


def masked_ids(ids: Int32, mask: object) -> Bool:
    """Return a mask of zeros and ones as bool `[N]`.

    Raises:
        Refused: it is no such mask (``wrong_type``).
    """
    array = np.asarray(mask)
    if array.shape != ids.shape or not np.isin(array, (0, 1)).all():
        raise wrong_type("a mask must have a 0 or a 1 for each of input_ids", mask)
    return array.astype(np.bool_)


def id_sequences(
    prompt: Int32,
    responses: Sequence[Int32],
    supervised: Sequence[Bool],
    tokenizer: Tokenizer | None,
) -> list[Tokens]:
    """Return the sequences of a record of ids, without adding BOS or EOS.

    Args:
        prompt: int32 `[P]`.
        responses: int32 `[R]` each.
        supervised: the mask of each response, bool `[R]`.
        tokenizer: of these ids, if known.

    Raises:
        Refused: an id is not in the vocabulary (``wrong_type``).
    """
    sequences = []
    for response, response_mask in zip(responses, supervised, strict=True):
        ids = np.concatenate([prompt, response], dtype=np.int32)
        mask = np.zeros(len(ids), np.bool_)
        mask[len(prompt) :] = response_mask
        mask[:1] = False  # nothing predicts the first token
        sequences.append(Tokens(ids, mask, _head_of(ids, tokenizer)))
    return sequences


def _head_of(ids: Int32, tokenizer: Tokenizer | None) -> int:
    """Return 1 for ids that begin with BOS, else 0."""
    if tokenizer is None or len(ids) == 0:
        return 0
    if ids.max() >= tokenizer.vocab_size:
        raise Refused(
            "wrong_type", f"id {ids.max()} in a vocabulary of {tokenizer.vocab_size}"
        )
    return int(ids[0] == tokenizer.bos_id)
