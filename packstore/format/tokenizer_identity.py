"""Hashes that identify a tokenizer independent of the bytes of its file.

Programs that load and save a ``tokenizer.json`` change its bytes: the order of keys,
rounded numbers, an added post-processor, another form of a pre-tokenizer. The token of
each id, and the ids of a text, must not change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

PROBES = (
    "The quick brown fox jumps over the lazy dog.",
    " leading space, and  two  spaces;   three",
    "Don't you think it's they'll, we've, I'm? SHOULDN'T",
    "In 2024, 1234567890 items at $3.50 (12%) make 0x1F4A9.",
    "\n\n    def f(x):\n\treturn [x**2 for _ in range(10)]  # done\r\n",
    "naïve café, Ångström; nai\u0308ve cafe\u0301, ﬁne ½ ²",
    "日本語のテキスト。中文，没有空格！한국어 문장",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "👩‍👩‍👧‍👦 🏳️‍🌈 ☃ → ∑ 𝔘𝔫𝔦",
    "https://example.com/a_b-c?d=e&f=%20#g user@host",
    "aaaaaaaaaaaaaaaa      -----------====\t\t\t",
    "camelCaseWord snake_case_word HTTPServer v1.2.3-rc4",
)
"""Texts that distinguish tokenizers by their ids: words, cases, digits, spaces, code,
scripts and symbols.
"""


def vocabulary_sha256(tokens: Iterable[str | None]) -> str:
    """Return the sha256 (hex) of the token of each id from 0 on, None for a gap."""
    text = json.dumps(list(tokens))
    return hashlib.sha256(text.encode()).hexdigest()


def probe_sha256(ids: Sequence[Sequence[int]]) -> str:
    """Return the sha256 (hex) of the ids of each of `PROBES`, encoded without special
    tokens.
    """
    text = json.dumps([[int(i) for i in row] for row in ids])
    return hashlib.sha256(text.encode()).hexdigest()
