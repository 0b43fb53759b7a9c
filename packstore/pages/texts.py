"""Texts of tokens for people: characters that cannot be seen, or that move others, are spelled."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from html import escape

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
_INCOMPLETE = "\ufffd"
_MOST = 8
"""Tokens that are decoded together, at most, to complete a character."""

Decode = Callable[[list[int]], str]


def shown(text: str) -> str:
    """Returns `text` with controls, bidirectional marks and surrogates as ``\\x1b``, ``\\u202e``.

    Tabs and newlines stay. A right-to-left override would show the tokens after it in another
    order.
    """
    return _HIDDEN.sub(lambda found: _spelled(ord(found[0])), text)


def as_html(text: str) -> str:
    """Returns `text` as HTML that is only text."""
    return escape(shown(text))


class TokenTexts:
    """Decodes tokens one by one; caches the text of each id.

    Args:
        decode: decodes ids to text; None: the texts are the ids.
    """

    def __init__(self, decode: Decode | None) -> None:
        self._decode = decode
        self._known: dict[int, str] = {}

    def of(self, ids: Sequence[int]) -> list[str | None]:
        """Returns the text of each token; None: its text is part of the one before it.

        Tokens that hold parts of one character are decoded together.
        """
        if self._decode is None:
            return [f"{i} " for i in ids]
        texts: list[str | None] = [*map(self._one, ids)]
        i = 0
        while i < len(ids):
            i = i + 1 if _INCOMPLETE not in (texts[i] or "") else self._join(ids, texts, i)
        return texts

    def _join(self, ids: Sequence[int], texts: list[str | None], start: int) -> int:
        """Completes the character that begins at `start`; returns the first token after it."""
        assert self._decode is not None
        for end in range(start + 2, min(start + _MOST, len(ids)) + 1):
            if _INCOMPLETE not in (whole := self._decode(list(ids[start:end]))):
                texts[start:end] = [shown(whole), *[None] * (end - start - 1)]
                return end
        return start + 1

    def _one(self, token: int) -> str:
        known = self._known.get(token)
        if known is None:
            assert self._decode is not None
            alone, twice = self._decode([token]), self._decode([token, token])
            # Some decoders drop the space before the first word.
            text = twice[len(alone) :] if twice.startswith(alone) else alone
            known = self._known[token] = shown(text)
        return known


def _spelled(code: int) -> str:
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
