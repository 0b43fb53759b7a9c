"""Uses ``fastokens`` where it gives the same ids as the reference, ``tokenizers``.

Before a job, both encode probes, which are texts that engines are known to encode differently.
During the job, the first records and a sample of all others are encoded by both.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from packstore.config import PackConfig
from packstore.errors import PackstoreError, WrongEngineError, quote, sentence
from packstore.format import seeds
from packstore.format.arrays import Int32, Int64, Rows, example_id
from packstore.tokenizer.encode import assemble
from packstore.tokenizer.record_tokenizer import Encoded
from packstore.tokenizer.records.sequences import Tokens, common_prefix
from packstore.tokenizer.tokenizer import FAST, Tokenizer

log = logging.getLogger("packstore")

LOADING = 6
"""Loading the faster engine takes the time in which the reference encodes a text of a
sixth of the bytes of the tokenizer file (measured with Qwen3's file of 11 MB; somewhat
more with smaller files).
"""

ONE_IN = 1000
"""One in so many records is tokenized again by the reference."""

FEWEST = 200
"""Least number of records of a job that are tokenized again."""

_SHOWN = 8
"""Number of ids of each engine in an error, from two before the first difference."""

PROBES = (
    "",
    " ",
    "\n\n \t\r\n",
    "The quick brown fox, it's 3.14159; e.g. 1,234,567 and 00:59!",
    "  leading, trailing  and   inner   spaces   ",
    "don't we'll I'm THEY'RE l'été ’tis “quoted” — dash… ellipsis",
    "def f(x: int) -> str:\n\treturn f'{x!r}'  # comment\n\n\n    if x:\n        "
    "pass\n",
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
"""Texts that engines are known to encode differently."""

_distrusted: set[str] = set()
"""sha256 of tokenizers for which the faster engine gave wrong ids, in this process."""


def force_reference_engine(sha256: str) -> None:
    """Read the tokenizer file with this hash by the reference, for the rest of this
    process.
    """
    _distrusted.add(sha256)


def is_worthwhile(file_bytes: int, text_bytes: int) -> bool:
    """Return True if a faster engine for a file of `file_bytes` saves time with so much
    text.
    """
    return text_bytes * LOADING > file_bytes


def with_fastest_engine(tokenizer: Tokenizer) -> Tokenizer:
    """Return `tokenizer` with the faster engine that is loading, if probes give equal
    ids.
    """
    is_loading = getattr(tokenizer.engine, "loading", None) is not None
    if not is_loading or tokenizer.sha256 in _distrusted:
        return tokenizer
    with ThreadPoolExecutor(1, "packstore-tokenizer") as pool:
        expected = pool.submit(_encode_probes, tokenizer)
        try:
            candidate = tokenizer.with_engine(FAST)
            is_equal = _are_equal(_encode_probes(candidate), expected.result())
        except PackstoreError as error:
            log.debug("tokenizer engine %s is not used: %s", FAST, error)
            return tokenizer
    # Two libraries that load side by side leave 180 MB freed, but not to the system.
    with contextlib.suppress(AttributeError, OSError, TypeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
    if is_equal:
        return candidate
    log.warning("tokenizer engine %s is not used: its ids differ on probe texts", FAST)
    return tokenizer


def _encode_probes(tokenizer: Tokenizer) -> list[Int32 | Int64]:
    """Return ids and offsets of the probes, with control strings as plain text and as
    ids.
    """
    specials = list(tokenizer.specials)[:200]
    texts = list(PROBES)
    texts += [f"x{special} y{special}" for special in specials]
    as_text = tokenizer.engine.encode_batch(texts, control=False)
    as_ids = tokenizer.engine.encode_batch(texts, control=True)
    return [*as_text, *as_ids]


def _are_equal(a: list[Int32 | Int64], b: list[Int32 | Int64]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


class EngineWatch:
    """Encodes a sample of the faster engine's texts again with the reference, and
    compares.

    The sample depends on the seed and each record's place in the input, not on workers,
    partitions or blocks. Picklable.

    Args:
        tokenizer: of the job, with its engine.
        config: settings of the job.
        sources: number of inputs. The first records of each are in the sample.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, config: PackConfig, sources: int
    ) -> None:
        self._tokenizer = tokenizer
        self._config = config
        self._first_records = -(-FEWEST // max(sources, 1))  # of each input; rounded up
        self._reference: Tokenizer | None = None

    def sample(self, rows: Rows) -> list[int]:
        """Return the indices of the sampled records of `rows`."""
        if self._tokenizer is None or self._tokenizer.engine_name != FAST:
            return []
        ordinals = np.array(rows.ordinals, np.int64)
        ids = example_id(rows.source, 0) + ordinals
        keys = seeds.keys_at(ids.view(np.uint64), self._config.seed, "engine watch")
        is_sampled = (ordinals < self._first_records) | (keys < 2**64 // ONE_IN)
        return [int(index) for index in np.flatnonzero(is_sampled)]

    def compare(self, sample: list[Encoded]) -> None:
        """Compare encodings of the faster engine with the reference's of the same
        texts.

        Raises:
            WrongEngineError: they differ.
        """
        tokenizer = self._tokenizer
        if not sample or tokenizer is None:
            return
        if self._reference is None:
            self._reference = tokenizer.with_engine("tokenizers")
        expected = assemble(
            self._reference, [encoded.draft for encoded in sample], self._config
        )
        for i, encoded in enumerate(sample):
            slow = expected.row(i)
            if _is_same(encoded.tokens, slow):
                continue
            rule = f"tokenizer engine {FAST} must give the ids of the reference"
            difference = _describe_difference(tokenizer, encoded.tokens.ids, slow.ids)
            remedy = f"Remove it from the environment (pip uninstall {FAST})"
            error = WrongEngineError(sentence(encoded.where, rule, difference, remedy))
            error.tokenizer = tokenizer.sha256
            raise error


def _is_same(fast: Tokens, slow: Tokens) -> bool:
    has_same_ids = np.array_equal(fast.ids, slow.ids) and fast.head == slow.head
    return has_same_ids and np.array_equal(fast.supervised, slow.supervised)


def _describe_difference(tokenizer: Tokenizer, fast: Int32, slow: Int32) -> str:
    """Return the text where the ids of two engines differ, and the ids."""
    first_difference = common_prefix(fast, slow)
    start = max(first_difference - 2, 0)
    fast_ids = fast[start : start + _SHOWN].tolist()
    slow_ids = slow[start : start + _SHOWN].tolist()
    if fast_ids == slow_ids:
        return "other supervised tokens"
    return f"{quote(tokenizer.decode(slow_ids))} as {fast_ids}, not {slow_ids}"
