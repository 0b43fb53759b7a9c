"""A lower bound on the number of tokens of a text, for texts that are too long to be encoded."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np
import tokenizers
from tokenizers.pre_tokenizers import ByteLevel

_AT_ONCE = 1 << 20
_KEEPING = ("ByteLevel", "Metaspace", "Digits")
"""Pre-tokenizers that keep every byte; so do the next two, unless they remove what they find."""
_CUTTING = ("Split", "Punctuation")
_COMPOSED = 4
"""Characters that become one at most when a text is put into NFC (Unicode's stability policy)."""


class TokenBound:
    """Tokens that a text has at least.

    A token of n bytes adds at most 1 to the sum, over the bytes of the text, of 1 / (bytes of the
    longest token that holds this byte): each of its n terms is at most 1 / n. So the sum is never
    more than the number of tokens, where no token stands for more bytes than its own.

    Args:
        longest: int `[256]`, bytes of the longest token with this byte.
        composes: whether the text is put into NFC first, which may shorten it.
    """

    def __init__(self, longest: np.ndarray, composes: bool) -> None:
        self._weights = 1 / np.maximum(longest, 1)
        self._composes = composes

    def least(self, text: str, start: int, enough: int) -> int:
        """Tokens of `text` from character `start` on; counted up to `enough`, about."""
        if self._composes and not _is_composed(text):
            return int((len(text) - start) / _COMPOSED * float(self._weights.min()))
        total = 0.0
        for first in range(start, len(text), _AT_ONCE):
            piece = text[first : first + _AT_ONCE].encode(errors="replace")
            counts = np.bincount(np.frombuffer(piece, np.uint8), minlength=256)
            total += float(counts @ self._weights)
            if total > enough:
                break
        return int(total * (1 - 1e-9))

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> TokenBound | None:
        """The bound of a byte-level or byte-fallback BPE; None where tokens may stand for anything.

        Other models have an unknown token, which may stand for a whole text; so may a control token
        that swallows the white space beside it, a normalizer or a pre-tokenizer that removes.
        """
        model = tokenizer.model
        normal = list(_steps(tokenizer.normalizer, "normalizers"))
        cuts = list(_steps(tokenizer.pre_tokenizer, "pretokenizers"))
        added = tokenizer.get_added_tokens_decoder().values()
        composes = [step["type"] for step in normal] == ["NFC"]
        if (
            not isinstance(model, tokenizers.models.BPE)
            or any(token.lstrip or token.rstrip for token in added)
            or not (composes or all(map(_grows, normal)))
            or not all(map(_keeps, cuts))
        ):
            return None
        names = tokenizer.get_vocab(with_added_tokens=True)
        if any(step["type"] == "ByteLevel" for step in cuts):
            if not names.keys() >= set(ByteLevel.alphabet()):
                return None
            return cls(_longest(names, [token.content for token in added]), composes)
        if not model.byte_fallback or not names.keys() >= {f"<0x{b:02X}>" for b in range(256)}:
            return None
        return cls(np.full(256, max(len(name.encode()) for name in names)), composes)


def _steps(part: Any, children: str) -> Iterator[dict[str, Any]]:
    """The settings of a normalizer or pre-tokenizer, step by step."""
    todo = [json.loads(part.__getstate__())] if part is not None else []
    while todo:
        step = todo.pop(0)
        if children in step:
            todo = [*step[children], *todo]
        else:
            yield step


def _grows(step: dict[str, Any]) -> bool:
    """Whether a normalizer never makes a text shorter."""
    if step["type"] == "Replace":
        found = step["pattern"].get("String")
        return found is not None and len(step["content"].encode()) >= len(found.encode())
    return bool(step["type"] == "Prepend")


def _keeps(step: dict[str, Any]) -> bool:
    """Whether a pre-tokenizer leaves every byte in a piece."""
    kind = step["type"]
    return kind in _KEEPING or (kind in _CUTTING and step["behavior"] != "Removed")


def _longest(names: dict[str, int], added: list[str]) -> np.ndarray:
    """Bytes of the longest token with each byte; names of a byte-level vocabulary spell bytes."""
    spelled = _byte_of()
    longest = np.ones(256, np.int64)
    tokens = [[spelled[c] for c in name] for name in names if spelled.keys() >= set(name)]
    for token in [*tokens, *(list(text.encode()) for text in added)]:
        longest[token] = np.maximum(longest[token], len(token))
    return longest


def _byte_of() -> dict[str, int]:
    """The byte that each character stands for in a byte-level vocabulary.

    Printable bytes of Latin-1 stand for themselves, the others for characters from 256 on.
    """
    plain = [b for b in range(256) if chr(b) in ByteLevel.alphabet()]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def _is_composed(text: str) -> bool:
    """Whether NFC, of any version of Unicode, leaves the text as it is."""
    if text.isascii():
        return True
    return unicodedata.is_normalized("NFC", text) and not any(
        unicodedata.category(character) == "Cn" for character in set(text)
    )
