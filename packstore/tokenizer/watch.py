"""Compares faster ways to encode with the reference, on a sample of a job's records.

The reference is the engine ``tokenizers``.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from packstore.config import TokenizeConfig
from packstore.errors import WrongEngineError, quote, sentence
from packstore.format import seeds
from packstore.format.arrays import Examples, Int64, Rows, example_id
from packstore.tokenizer.fastest import FASTER
from packstore.tokenizer.record_tokenizer import RecordTokenizer
from packstore.tokenizer.tokenizer import Tokenizer

ONE_IN = 1000
"""Of this many records, one is tokenized again by the reference."""

FEWEST = 200
"""Least number of records of a job that are tokenized again."""

_SHOWN = 8
"""Number of ids of each engine in an error, from two before the first difference."""


class EngineWatch:
    """Tokenizes a sample of each block's records again with the reference, and compares.

    The sample depends on the seed and each record's place in the input, not on workers, partitions
    or blocks. Picklable.

    Args:
        tokenizer: the tokenizer of the job.
        config: the settings.
        kind: ``preference``, ``sft`` or ``ranked``.
        seed: seed of the sample.
        sources: number of inputs of the job; the first records of each are in the sample.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: TokenizeConfig, kind: str, seed: int, sources: int
    ) -> None:
        self._tokenizer, self._config, self._kind, self._seed = tokenizer, config, kind, seed
        self._first = -(-FEWEST // max(sources, 1))

    @staticmethod
    def suits(tokenizer: Tokenizer) -> bool:
        """Returns True if `tokenizer` encodes in a faster way than the reference."""
        return tokenizer.engine_name in FASTER

    def __call__(self, rows: Rows, examples: Examples) -> None:
        """Compares the examples of `rows` with those of the reference.

        Raises:
            WrongEngineError: an example differs.
        """
        ordinals = np.array(rows.ordinals, np.int64)
        ids = example_id(rows.source, 0) + ordinals
        at = self.chosen(ordinals, ids)
        if not len(at):
            return
        few = replace(rows, ordinals=ordinals[at].tolist(), values=[rows.values[i] for i in at])
        expected, _ = self._reference(few)
        found = examples.take(np.flatnonzero(np.isin(examples.example_ids, ids[at])))
        if not _same(found, expected):
            raise self._error(few, found, expected)

    def chosen(self, ordinals: Int64, ids: Int64) -> Int64:
        """Returns the indices of the sampled records, from their ordinals and ids."""
        drawn = seeds.keys_at(ids.view(np.uint64), self._seed, "engine watch")
        return np.flatnonzero((ordinals < self._first) | (drawn < 2**64 // ONE_IN))

    @cached_property
    def _reference(self) -> RecordTokenizer:
        reference = self._tokenizer.with_engine("tokenizers")
        return RecordTokenizer(reference, self._config, self._kind)

    def _error(self, rows: Rows, found: Examples, expected: Examples) -> WrongEngineError:
        where, engine = rows.path, self._tokenizer.engine_name
        what = "another choice of records"
        for i, number in enumerate(example_id(rows.source, 0) + np.array(rows.ordinals)):
            fast, slow = (
                e.take(np.flatnonzero(e.example_ids == number)) for e in (found, expected)
            )
            if not _same(fast, slow):
                where, what = rows.where(i), self._difference(fast, slow)
                break
        must = f"tokenizer engine {engine} must give the ids of the reference"
        do = "Set tokenizer_engine to tokenizers (--tokenizer-engine tokenizers)"
        error = WrongEngineError(sentence(where, must, what, do))
        error.tokenizer = self._tokenizer.sha256
        return error

    def _difference(self, found: Examples, expected: Examples) -> str:
        """The text where two examples differ, and its ids."""
        if found.num_examples != expected.num_examples:
            return "that it drops a record which the reference keeps, or keeps one that it drops"
        n = min(len(found.input_ids), len(expected.input_ids))
        differ = np.flatnonzero(found.input_ids[:n] != expected.input_ids[:n])
        start = max((int(differ[0]) if len(differ) else n) - 2, 0)
        ours, theirs = (e.input_ids[start : start + _SHOWN].tolist() for e in (found, expected))
        if ours == theirs:
            return "other supervised tokens"
        return f"{quote(self._tokenizer.decode(theirs))} as {ours}, not {theirs}"

    def __getstate__(self) -> dict[str, Any]:
        return {name: v for name, v in self.__dict__.items() if name != "_reference"}


def _same(a: Examples, b: Examples) -> bool:
    names = ("example_ids", "example_offsets", "sequence_offsets", "input_ids", "supervised")
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in names)
