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


def as_ids(value: object, name: str, *, labels: bool = False) -> Int32:
    """Converts a list of ids, or of labels, to int32 `[N]`.

    Raises:
        Refused: ``wrong_type``; names the field `name`.
    """
    low = IGNORE_INDEX if labels else 0
    if value == []:
        return np.empty(0, np.int32)
    try:
        array = np.asarray(value if isinstance(value, list) else None)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.ndim != 1 or array.dtype.kind != "i" or np.any((array < low) | (array >= 1 << 31)):
        must = f"{name} must be ids, a list of whole numbers"
        raise Refused("wrong_type", f"{must}, found {quote(value)}")
    return array.astype(np.int32)


def supervised_ids(ids: Int32, labels: object) -> Bool:
    """Returns the supervision mask of ids, bool `[N]`, from their labels; without labels all True.

    Raises:
        Refused: ``wrong_type``.
    """
    if labels is None:
        return np.ones(len(ids), np.bool_)
    told = as_ids(labels, "labels", labels=True)
    if len(ids) != len(told) or np.any((told != ids) & (told != IGNORE_INDEX)):
        raise Refused("wrong_type", "each label must be the id at its place, or -100")
    on: Bool = told != IGNORE_INDEX
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
