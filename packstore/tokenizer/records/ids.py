"""Checks records of token ids, and converts them to sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from packstore.errors import quote
from packstore.format.arrays import IGNORE_INDEX, Bool, Int32
from packstore.tokenizer.records.sequences import Tokens, starts_with
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.tokenizer import Tokenizer

MAX_ID = (1 << 31) - 1


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
    """Converts a list or an array of ids to int32 `[N]`.

    Raises:
        Refused: ``wrong_type``; names the field `name`.
    """
    array = _whole_numbers(value)
    if array is None or (len(array) and (array.min() < 0 or array.max() > MAX_ID)):
        must = f"{name} must be token ids, whole numbers in 0..{MAX_ID}"
        raise Refused("wrong_type", f"{must}, found {quote(value)}")
    return np.asarray(array, np.int32)


def _whole_numbers(value: object) -> Any:
    """Returns an array of integers `[N]`; None if the value is something else."""
    try:
        array = np.asarray(value if isinstance(value, list | np.ndarray) else None)
    except ValueError:  # lists of different lengths
        return None
    if array.ndim == 1 and (array.dtype.kind in "iu" or not len(array)):
        return array
    return None


def supervised_ids(ids: Int32, labels: object, name: str) -> Bool:
    """Returns the supervision mask of ids, bool `[N]`, from their labels; without labels all True.

    Raises:
        Refused: ``wrong_type``; names the field `name`.
    """
    if labels is None:
        return np.ones(len(ids), np.bool_)
    told = _whole_numbers(labels)
    if told is None or told.shape != ids.shape or ((told != ids) & (told != IGNORE_INDEX)).any():
        must = f"each label of {name} must be the id at its place, or {IGNORE_INDEX}"
        raise Refused("wrong_type", f"{must}, found {quote(labels)}")
    on: Bool = told != IGNORE_INDEX
    return on


def masked_ids(ids: Int32, mask: object) -> Bool:
    """Returns a mask of zeros and ones as bool `[N]`.

    Raises:
        Refused: ``wrong_type``.
    """
    on = np.asarray(mask).astype(np.bool_)
    if on.shape != ids.shape:
        raise Refused("wrong_type", "a mask must have one value for each of input_ids")
    return on


def id_sequences(
    prompt: Any,
    responses: Sequence[Any],
    supervised: Sequence[Bool] | None,
    tokenizer: Tokenizer | None,
) -> list[Tokens]:
    """Returns the sequences of a record of ids, without adding BOS or EOS.

    Args:
        prompt: int32 `[N]`.
        responses: int32 `[M]` each.
        supervised: supervision mask of each response; None: all tokens.
        tokenizer: tokenizer with the vocabulary and BOS, if there is one.

    Raises:
        Refused: ``wrong_type``: an id is outside the vocabulary.
    """
    sequences = []
    for i, response in enumerate(responses):
        ids = np.concatenate([prompt, response]).astype(np.int32)
        on = np.arange(len(ids)) >= len(prompt)
        if supervised is not None:
            on[len(prompt) :] = supervised[i]
        on[:1] = False
        head = 0
        if tokenizer is not None:
            if len(ids) and ids.max() >= tokenizer.vocab_size:
                detail = f"id {ids.max()} in a vocabulary of {tokenizer.vocab_size}"
                raise Refused("wrong_type", detail)
            head = int(starts_with(ids, tokenizer.bos_id))
        sequences.append(Tokens(ids, on, head))
    return sequences
