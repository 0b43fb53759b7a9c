"""Compares a faster engine with the reference on some of the records of a job."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from packstore import seeds
from packstore.config import TokenizeConfig
from packstore.errors import WrongEngineError, quote, sentence
from packstore.records import Examples, Int64, Rows, example_id
from packstore.tokenizer.record_tokenizer import RecordTokenizer
from packstore.tokenizer.tokenizer import Tokenizer

ONE_IN = 1000
"""One record of so many is tokenized again."""

FEWEST = 200
"""Records of a job that are tokenized again at least, as far as there are so many."""

_SHOWN = 8
"""Ids of each engine that an error shows, from two before the first that differs."""


class EngineWatch:
    """Tokenizes some records of each block again, and compares.

    Which ones is decided by the seed and the place of a record in the input: not by the workers,
    partitions or blocks. Picklable.

    Args:
        tokenizer: with a faster engine, which works beside the reference.
        config: the settings.
        kind: ``dpo``, ``sft`` or ``ranked``.
        seed: decides which records.
        sources: inputs of the job; of each the first records are looked at.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: TokenizeConfig, kind: str, seed: int, sources: int
    ) -> None:
        self._tokenizer, self._config, self._kind, self._seed = tokenizer, config, kind, seed
        self._first = -(-FEWEST // max(sources, 1))

    def __call__(self, rows: Rows, examples: Examples) -> None:
        """Compares what became of `rows`.

        Raises:
            WrongEngineError: the reference makes something else of one.
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
        """Which of the records with these ordinals and ids are looked at."""
        drawn = seeds.keys_at(ids.view(np.uint64), self._seed, "engine watch")
        return np.flatnonzero((ordinals < self._first) | (drawn < 2**64 // ONE_IN))

    @cached_property
    def _reference(self) -> RecordTokenizer:
        return RecordTokenizer(self._tokenizer.with_engine("tokenizers"), self._config, self._kind)

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
        """The text about which two examples differ, and its ids."""
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
