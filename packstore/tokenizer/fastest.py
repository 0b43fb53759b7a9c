"""Chooses the fastest installed engine whose ids equal the reference's."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from packstore.errors import PackstoreError
from packstore.format.arrays import Int32, Int64
from packstore.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("packstore")

FASTER = ("fastokens", "gigatoken")
"""Engines for the files of ``tokenizers``, the reference; the fastest first."""

LOADING = 6
"""A faster engine takes as long to load as the reference takes for records of the size of its file
divided by this (measured with Qwen3's file of 11 MB; with smaller files, for somewhat more)."""

PROBES = (
    "",
    " ",
    "\n\n \t\r\n",
    "The quick brown fox, it's 3.14159; e.g. 1,234,567 and 00:59!",
    "  leading, trailing  and   inner   spaces   ",
    "don't we'll I'm THEY'RE l'été ’tis “quoted” — dash… ellipsis",
    "def f(x: int) -> str:\n\treturn f'{x!r}'  # comment\n\n\n    if x:\n        pass\n",
    "汉字和标点，。！中文English混排１２３ ｶﾀｶﾅ ひらがな 한국어 조합",
    "العربية עברית हिन्दी ไทยไม่มีวรรค தமிழ் ελληνικά русский",
    "e\u0301 o\u0308 \u1e9b\u0323 \ufb01 ½ Ⅷ ＡＢＣ \u200b\u200d\ufeff\u00a0 zero widths",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇺🇳 👍🏽 🧑🏿‍🚀",
    "\x00\x01\x7f \u0085 \u2028 \ue000 \ufffd \U000e0041 \U0010fffd",
    "https://example.org/a?b=c&d=%20#x user@example.org C:\\dir\\file.txt",
    "{\"a\": [1, -2.5e10, null, true], \"b\": \"\\u00e9\\n\"}",
    "<|im_start|>user\nhi<|im_end|>\n<s> </s><unk><pad><mask>",
    "<think>\n\n</think> [INST] <extra_id_0> <|endoftext|>",
    "a" * 300 + " " * 70 + "!?" * 60 + "\n" * 20,
    "12345678901234567890 1 12 123 1234 12345 3.000.000 0x1F 1e-9 ²³",
)  # fmt: skip
"""Texts of the kinds on which engines are known to disagree."""


_misread: set[str] = set()
"""sha256 of tokenizers for which a faster way gave wrong ids, in this process."""


def misread(sha256: str) -> None:
    """Makes the tokenizer file with this hash be read by the reference, in whole texts."""
    _misread.add(sha256)


def was_misread(sha256: str) -> bool:
    """Returns True after :func:`misread`."""
    return sha256 in _misread


def pays(tokenizer: Tokenizer, size: int) -> bool:
    """Returns True if a faster engine saves more than it takes to load, for `size` bytes."""
    return size * LOADING > len(tokenizer.payload)


def fastest(tokenizer: Tokenizer) -> Tokenizer:
    """Returns `tokenizer` with the fastest engine that has equal ids on all probes.

    Args:
        tokenizer: one with the reference; others are returned as they are.
    """
    if tokenizer.engine_name != "tokenizers" or was_misread(tokenizer.sha256):
        return tokenizer
    with ThreadPoolExecutor(1, "packstore-tokenizer") as pool:
        expected = pool.submit(_of_reference, tokenizer)
        for name in FASTER:
            try:
                candidate = tokenizer.with_engine(name)
                texts, rows = expected.result()
                same = all(map(np.array_equal, rows, _encoded(candidate, texts)))
            except PackstoreError as error:
                log.debug("tokenizer engine %s is not used: %s", name, error)
                continue
            if same:
                return candidate
            log.warning("tokenizer engine %s is not used: its ids differ on probe texts", name)
    return tokenizer


def _of_reference(tokenizer: Tokenizer) -> tuple[list[str], list[Int32 | Int64]]:
    """The probe texts and their ids."""
    specials = list(tokenizer.specials)[:200]
    texts = [*PROBES, *(f"x{special} y{special}" for special in specials)]
    return texts, _encoded(tokenizer, texts)


def _encoded(tokenizer: Tokenizer, texts: Sequence[str]) -> list[Int32 | Int64]:
    """Ids and offsets, with control strings as plain text and as ids."""
    ways = (tokenizer.engine.encode_batch(texts, control=control) for control in (False, True))
    return list(itertools.chain.from_iterable(ways))
