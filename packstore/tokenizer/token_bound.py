"""A lower bound of the number of tokens of a text, for texts too long to encode."""

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
"""Pre-tokenizers that keep every byte; so do the next two, unless they remove matches."""
_CUTTING = ("Split", "Punctuation")
_COMPOSED = 4
"""Most characters that NFC composes to one (Unicode's stability policy)."""


class TokenBound:
    """A lower bound of the tokens of a text.

    It sums 1 / (length of the longest token that contains the byte) over the bytes of the text. A
    token of n bytes adds n terms of at most 1 / n, so at most 1. So the sum is at most the number
    of tokens, if no token represents more bytes than its own.

    Args:
        longest: int `[256]`, length in bytes of the longest token with each byte.
        composes: True if the text is normalised to NFC first, which may shorten it.
    """

    def __init__(self, longest: np.ndarray, composes: bool) -> None:
        self._weights = 1 / np.maximum(longest, 1)
        self._composes = composes

    def least(self, text: str, start: int, enough: int) -> int:
        """Bounds the tokens of `text` from character `start` on; may stop above `enough`."""
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
        """Makes the bound of a byte-level or byte-fallback BPE; None for other tokenizers.

        Other models have an unknown token, which may represent a whole text. The same holds for
        control tokens that strip adjacent white space, and for normalizers and pre-tokenizers that
        remove text.
        """
        model = tokenizer.model
        normal = list(steps(tokenizer.normalizer, "normalizers"))
        cuts = list(steps(tokenizer.pre_tokenizer, "pretokenizers"))
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


def steps(part: Any, children: str) -> Iterator[dict[str, Any]]:
    """Yields the settings of each step of a normalizer or pre-tokenizer."""
    todo = [json.loads(part.__getstate__())] if part is not None else []
    while todo:
        step = todo.pop(0)
        if children in step:
            todo = [*step[children], *todo]
        else:
            yield step


def _grows(step: dict[str, Any]) -> bool:
    """Returns True if a normalizer never shortens a text."""
    if step["type"] == "Replace":
        found = step["pattern"].get("String")
        return found is not None and len(step["content"].encode()) >= len(found.encode())
    return bool(step["type"] == "Prepend")


def _keeps(step: dict[str, Any]) -> bool:
    """Returns True if a pre-tokenizer keeps every byte."""
    kind = step["type"]
    return kind in _KEEPING or (kind in _CUTTING and step["behavior"] != "Removed")


def _longest(names: dict[str, int], added: list[str]) -> np.ndarray:
    """Length of the longest token with each byte, from a byte-level vocabulary."""
    spelled = _byte_of()
    longest = np.ones(256, np.int64)
    tokens = [[spelled[c] for c in name] for name in names if spelled.keys() >= set(name)]
    for token in [*tokens, *(list(text.encode()) for text in added)]:
        longest[token] = np.maximum(longest[token], len(token))
    return longest


def _byte_of() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary represents.

    Printable bytes of Latin-1 represent themselves, the others are characters from 256 on.
    """
    plain = [b for b in range(256) if chr(b) in ByteLevel.alphabet()]
    rest = [b for b in range(256) if b not in plain]
    return {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(rest)}


def _is_composed(text: str) -> bool:
    """Returns True if NFC, of any Unicode version, does not change the text."""
    if text.isascii():
        return True
    return unicodedata.is_normalized("NFC", text) and not any(
        unicodedata.category(character) == "Cn" for character in set(text)
    )
