"""Control strings (``<|im_end|>``) inside texts: finding them, and encoding around them."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from packstore.format.arrays import Int32, Int64, to_offsets
from packstore.tokenizer.refusals import Refused

Encode = Callable[[Sequence[str]], tuple[Int32, Int64]]


@functools.lru_cache(maxsize=8)
def control_pattern(specials: frozenset[str]) -> re.Pattern[str]:
    """Returns a pattern that matches any of `specials`, the longest first; nothing if empty."""
    names = sorted(specials, key=len, reverse=True)
    return re.compile("(" + "|".join(map(re.escape, names)) + ")" if names else "([^\\s\\S])")


def holds(text: str, hint: str) -> bool:
    """Returns ``hint in text``; fast if the first character of `hint` is rare."""
    return hint[:1] in text and hint in text


def encode_around_controls(
    texts: Sequence[str], specials: Mapping[str, int], encode: Encode, guards: Sequence[str] = ()
) -> tuple[Int32, Int64]:
    """Encodes texts: control strings become their ids, all other text is encoded by `encode`.

    The character in `guards` of each text is removed from what is between control strings; inserted
    into a control string, it prevents a match.
    """
    pattern = control_pattern(frozenset(specials))
    cut = [pattern.split(text) for text in texts]
    if guards:
        cut = [[p.replace(g, "") for p in parts] for parts, g in zip(cut, guards, strict=True)]
    plain = [part for parts in cut for part in parts[::2] if part]
    ids, offsets = encode(plain)
    stretches = iter(np.split(ids, offsets[1:-1]))
    rows = [
        [
            np.array([specials[p]], np.int32) if i % 2 else next(stretches)
            for i, p in enumerate(parts)
            if p
        ]
        for parts in cut
    ]
    lengths = np.array([sum(map(len, row)) for row in rows], np.int64)
    return np.concatenate([ids[:0], *itertools.chain.from_iterable(rows)]), to_offsets(lengths)


def free_characters(text: str, count: int) -> list[str]:
    """Return `count` characters of the last private-use area that do not occur in `text`.

    Raises:
        Refused: there are fewer: a dialogue of tens of thousands of turns takes several for each.
    """
    taken = frozenset() if text.isascii() else frozenset(text)
    free = (c for c in map(chr, range(0x100000, 0x10FFFE)) if c not in taken)
    characters = list(itertools.islice(free, count))
    if len(characters) < count:
        detail = f"{count:,} places to mark, and {len(characters):,} unused characters to mark them"
        raise Refused("template_refused", detail, "Split the record")
    return characters
