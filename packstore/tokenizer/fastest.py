"""Uses ``fastokens`` where its ids equal those of the reference, ``tokenizers``.

It is probed before a job, compared on the first records, and watched on a sample of all others.
"""

from __future__ import annotations

import itertools
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np

from packstore.config import TokenizeConfig
from packstore.errors import PackstoreError, WrongEngineError, quote, sentence
from packstore.format import seeds
from packstore.format.arrays import Examples, Int32, Int64, Rows, example_id
from packstore.tokenizer.record_tokenizer import RecordTokenizer
from packstore.tokenizer.tokenizer import FAST, Tokenizer

log = logging.getLogger("packstore")

LOADING = 6
"""The faster engine takes as long to load as the reference takes for records of the size of its
file divided by this (measured with Qwen3's file of 11 MB; with smaller files, somewhat more)."""

FIRST = 64
"""Number of first records on which the faster engine must agree with the reference."""

ONE_IN = 1000
"""Of this many records, one is tokenized again by the reference."""

FEWEST = 200
"""Least number of records of a job that are tokenized again."""

_SHOWN = 8
"""Number of ids of each engine in an error, from two before the first difference."""

_COMPARED = ("example_ids", "example_offsets", "sequence_offsets", "input_ids", "supervised")

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
"""sha256 of tokenizers for which the faster engine gave wrong ids, in this process."""


def misread(sha256: str) -> None:
    """Makes the reference read the tokenizer file with this hash, for the rest of this process."""
    _misread.add(sha256)


def pays(tokenizer: Tokenizer, size: int) -> bool:
    """Returns True if the faster engine saves more than it takes to load, for `size` bytes."""
    return size * LOADING > len(tokenizer.payload)


def fastest(tokenizer: Tokenizer) -> Tokenizer:
    """Returns `tokenizer` with the faster engine if its ids are equal on all probes."""
    if tokenizer.engine_name != "tokenizers" or tokenizer.sha256 in _misread:
        return tokenizer
    with ThreadPoolExecutor(1, "packstore-tokenizer") as pool:
        expected = pool.submit(_probed, tokenizer)
        try:
            candidate = tokenizer.with_engine(FAST)
            same = all(map(np.array_equal, expected.result(), _probed(candidate)))
        except PackstoreError as error:
            log.debug("tokenizer engine %s is not used: %s", FAST, error)
            return tokenizer
    if not same:
        log.warning("tokenizer engine %s is not used: its ids differ on probe texts", FAST)
    return candidate if same else tokenizer


def _probed(tokenizer: Tokenizer) -> list[Int32 | Int64]:
    """Ids and offsets of the probes, with control strings as plain text and as ids."""
    texts = [*PROBES, *(f"x{special} y{special}" for special in list(tokenizer.specials)[:200])]
    ways = (tokenizer.engine.encode_batch(texts, control=control) for control in (False, True))
    return list(itertools.chain.from_iterable(ways))


def agreeing(tokenizer: Tokenizer, rows: Rows, config: TokenizeConfig, kind: str) -> Tokenizer:
    """Returns `tokenizer`, or one with the reference if they differ on the first of `rows`."""
    if tokenizer.engine_name != FAST:
        return tokenizer
    first = replace(rows, ordinals=rows.ordinals[:FIRST], values=rows.values[:FIRST])
    stage = RecordTokenizer(tokenizer, config, kind)
    try:
        EngineWatch(stage).compare(first, stage(first)[0])
    except WrongEngineError as error:
        log.warning("tokenizer engine %s is not used: %s", FAST, error)
        return tokenizer.with_engine("tokenizers")
    return tokenizer


class EngineWatch:
    """Tokenizes a sample of the faster engine's records again with the reference, and compares.

    The sample depends on the seed and each record's place in the input, not on workers, partitions
    or blocks. The first records of each of `sources` inputs are in it. Picklable.
    """

    def __init__(self, stage: RecordTokenizer, seed: int = 0, sources: int = 1) -> None:
        self._stage, self._seed = stage, seed
        self._first = -(-FEWEST // max(sources, 1))
        self._reference: RecordTokenizer | None = None

    def sample(self, rows: Rows, examples: Examples) -> tuple[Rows, Examples] | None:
        """Returns the sampled records of `rows` and their examples; None: there are none."""
        tokenizer = self._stage.tokenizer
        if tokenizer is None or tokenizer.engine_name != FAST:
            return None
        ordinals = np.array(rows.ordinals, np.int64)
        ids = example_id(rows.source, 0) + ordinals
        chosen = self.chosen(ordinals, ids)
        if not len(chosen):
            return None
        values = [rows.values[i] for i in chosen]
        kept = np.flatnonzero(np.isin(examples.example_ids, ids[chosen]))
        records = replace(rows, ordinals=ordinals[chosen].tolist(), values=values)
        return records, examples.take(kept)

    def compare(self, sample: Rows, examples: Examples) -> None:
        """Compares the examples of sampled records with those of the reference."""
        tokenizer = self._stage.tokenizer
        assert tokenizer is not None
        if self._reference is None:
            reference = tokenizer.with_engine("tokenizers")
            self._reference = RecordTokenizer(reference, self._stage.config, self._stage.kind)
        expected, _ = self._reference(sample)
        ids = example_id(sample.source, 0) + np.array(sample.ordinals, np.int64)
        for i, number in enumerate(ids):
            fast, slow = (
                e.take(np.flatnonzero(e.example_ids == number)) for e in (examples, expected)
            )
            if not all(np.array_equal(getattr(fast, n), getattr(slow, n)) for n in _COMPARED):
                rule = f"tokenizer engine {FAST} must give the ids of the reference"
                other = _difference(tokenizer, fast, slow)
                remedy = f"Remove it from the environment (pip uninstall {FAST})"
                error = WrongEngineError(sentence(sample.where(i), rule, other, remedy))
                error.tokenizer = tokenizer.sha256
                raise error

    def chosen(self, ordinals: Int64, ids: Int64) -> Int64:
        """Returns the indices of the sampled records, from their ordinals and ids."""
        drawn = seeds.keys_at(ids.view(np.uint64), self._seed, "engine watch")
        return np.flatnonzero((ordinals < self._first) | (drawn < 2**64 // ONE_IN))


def _difference(tokenizer: Tokenizer, fast: Examples, slow: Examples) -> str:
    """The text where two examples differ, and its ids."""
    if fast.num_examples != slow.num_examples:
        return "that it drops a record which the reference keeps, or keeps one that it drops"
    n = min(len(fast.input_ids), len(slow.input_ids))
    differ = np.flatnonzero(fast.input_ids[:n] != slow.input_ids[:n])
    start = max((int(differ[0]) if len(differ) else n) - 2, 0)
    ours, theirs = (e.input_ids[start : start + _SHOWN].tolist() for e in (fast, slow))
    if ours == theirs:
        return "other supervised tokens"
    return f"{quote(tokenizer.decode(theirs))} as {ours}, not {theirs}"
