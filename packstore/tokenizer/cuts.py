"""Places where a text may be cut: the ids of its parts are the ids of the whole.

A prompt is part of several sequences, and every boundary of a span needs the ids of the text before
it. With a cut shortly before the boundary, all this is encoded once, but for a few characters.

A cut lies before a space that follows a visible ASCII character or, for some tokenizers, before a
newline that follows an ASCII letter or digit. That it changes no id is proven from the tokenizer's
file, as follows; a tokenizer without the proof encodes whole texts.

- Added tokens hold no white space, begin and end in no letter or digit, and do not depend on the
  text beside them.
- The normalizer is a Unicode normal form (neither character composes with the one before it), or it
  writes spaces as "▁".
- Pre-tokenizers with patterns: no alternative matches both characters of the cut, and none looks
  beyond its end except ``\\s+(?!\\S)``, which ends before the character that precedes the cut. So
  all matches before a cut, and all after it, are those of the two parts; and as ``\\s+`` matches at
  the cut, a piece ends there.
- BPE without pre-tokenizer: no token has a "▁" behind another character, so no merge joins both
  sides, and the merges of one side do not depend on the other. If the normalizer writes a "▁"
  before every text, it writes that of the cut: the letters or digits beside it belong to no added
  token.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable
from typing import Any

import tokenizers

from packstore.tokenizer.token_bound import steps

LOOK_BACK = 400
"""Maximum distance of a cut from the boundary behind it, in characters."""

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LETTERS_AND_DIGITS = frozenset(string.ascii_letters + string.digits)

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ONE_BEFORE = r"[^\r\n\p{L}\p{N}]?"

ALTERNATIVES = frozenset({
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", CONTRACTIONS, "'(?i:[sdmt]|ll|ve|re)"),
    *(r" ?\p{L}+", r" ?\p{N}+", r"\p{L}+", r"\p{N}+", r"\p{N}", r"\p{N}{1,3}", "[0-9]"),
    *(rf"{_ONE_BEFORE}\p{{L}}+", rf"{_ONE_BEFORE}+\p{{L}}+"),
    *(f"{_ONE_BEFORE}{_UPPER}*{_LOWER}+{end}" for end in ("", f"{CONTRACTIONS}?")),
    *(f"{_ONE_BEFORE}{_UPPER}+{_LOWER}*{end}" for end in ("", f"{CONTRACTIONS}?")),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*"),
    *(r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
    *("[一-龥぀-ゟ゠-ヿ]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"),
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""",
    *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
})  # fmt: skip
"""Alternatives of the patterns of GPT-2, GPT-4 and Llama 3, GPT-4o, Qwen, Mistral and DeepSeek.

None matches a space behind another visible character, or a newline behind a letter or digit.
"""

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of a `ByteLevel` pre-tokenizer with `use_regex`."""

NORMAL_FORMS = ("NFC", "NFD", "NFKC", "NFKD")

_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PREPEND = {"type": "Prepend", "prepend": "▁"}


class Cuts:
    """Finds the places where texts may be cut.

    Args:
        newlines: a cut may lie before a newline.
        prepends: the normalizer writes a space before every text, so the space at a cut is left out
            of the text after it.
    """

    def __init__(self, *, newlines: bool, prepends: bool) -> None:
        self._newlines, self._prepends = newlines, prepends

    def before(self, text: str, at: int) -> int:
        """Returns the last place at or before `at`, a character position; 0 if none is near."""
        least = max(at - LOOK_BACK, 1)
        place = text.rfind(" ", least, at + 1)
        while place > 0 and not self._divides(text, place, at):
            place = text.rfind(" ", least, place)
        place = max(place, 0)
        if not self._newlines:
            return place
        line = text.rfind("\n", max(least, place), at + 1)
        while line > 0 and text[line - 1] not in LETTERS_AND_DIGITS:
            line = text.rfind("\n", max(least, place), line)
        return max(place, line)

    def _divides(self, text: str, place: int, at: int) -> bool:
        """True if a cut may lie before the space at `place`."""
        if not self._prepends:
            return "!" <= text[place - 1] <= "~"
        # No added token lies beside the space, and the text between it and `at` is not empty.
        beside = text[place - 1], text[place + 1 : place + 2] or " "
        return place + 1 != at and LETTERS_AND_DIGITS.issuperset(beside)

    def part(self, text: str, start: int, end: int) -> str:
        """Returns the text to encode for ``text[start:end]``, where `start` is 0 or a cut."""
        return text[start + (self._prepends and start > 0) : end]

    @classmethod
    def of(cls, tokenizer: tokenizers.Tokenizer) -> Cuts | None:
        """Returns the cuts of a tokenizer; None without a proof."""
        model = tokenizer.model
        if (
            not isinstance(model, tokenizers.models.BPE)
            or model.continuing_subword_prefix
            or model.end_of_word_suffix
            or not all(map(_is_closed, tokenizer.get_added_tokens_decoder().values()))
        ):
            return None
        normal = list(steps(tokenizer.normalizer, "normalizers"))
        pieces = list(steps(tokenizer.pre_tokenizer, "pretokenizers"))
        if all(step["type"] in NORMAL_FORMS for step in normal):
            return cls(newlines=True, prepends=False) if _splits(pieces) else None
        prepends = normal[0] == _PREPEND
        if normal[prepends:] != [_SPACE] or pieces or _joins(tokenizer.get_vocab()):
            return None
        return cls(newlines=False, prepends=prepends)


def _is_closed(added: tokenizers.AddedToken) -> bool:
    """True if an added token holds no cut, and does not depend on the text beside it."""
    if added.lstrip or added.rstrip or added.single_word:
        return False
    return not re.search(r"\s|▁|^[A-Za-z0-9]|[A-Za-z0-9]$", added.content)


def _splits(pieces: Iterable[dict[str, Any]]) -> bool:
    """True if pre-tokenizers end a piece at every cut, and nothing else depends on it."""
    patterns: list[str] = []
    for step in pieces:
        kind = step["type"]
        if kind == "Split" and step["behavior"] == "Isolated" and not step["invert"]:
            patterns.append(step["pattern"].get("Regex", ""))
        elif kind == "ByteLevel" and not step["add_prefix_space"]:
            patterns += [GPT2] if step["use_regex"] else []
        elif kind != "Digits":
            return False
    found = [set(alternatives(pattern)) for pattern in patterns]
    return all(some <= ALTERNATIVES for some in found) and any(r"\s+" in some for some in found)


def _joins(vocabulary: Iterable[str]) -> bool:
    """True if a token has a "▁" behind another character."""
    return any("▁" in name.lstrip("▁") for name in vocabulary)


def alternatives(pattern: str) -> list[str]:
    """Splits a pattern at each ``|`` outside of groups and classes."""
    found, depth, in_class, start, i = [], 0, False, 0, 0
    while i < len(pattern):
        character = pattern[i]
        if character == "\\":
            i += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == "|" and not depth:
            found.append(pattern[start:i])
            start = i + 1
        i += 1
    return [*found, pattern[start:]]
