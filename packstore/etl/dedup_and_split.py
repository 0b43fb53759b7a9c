"""Drops duplicates, and splits off examples for validation.

Both compare 8-byte hashes, so the result does not depend on the number of workers, and
memory is 8 bytes for each record. Prompts are compared by their words, as the last
token of a prompt may depend on what follows; pairs by their tokens, which a dataset
stores, so that appended records are compared with those that are there.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from packstore.config import PackConfig, SelectConfig
from packstore.format.arrays import SOURCE_SHIFT, Bool, Examples, Int64
from packstore.format.seeds import U64, derive, mixed
from packstore.io.dataset.dataset import Dataset
from packstore.io.inputs.formats import place_of
from packstore.pack.fill import unpack
from packstore.tokenizer.tally import Tally

DUPLICATES = {"pair": "duplicate_pair", "prompt": "duplicate_prompt"}
"""Setting `dedup` -> reason under which dropped records are counted."""

OTHER_PART = {"train": "for_validation", "validation": "for_training"}
"""Reason under which a part counts the examples of the other part."""


def split_names(config: SelectConfig) -> tuple[str | None, ...]:
    """Returns the names of the datasets that a job makes; None: a single one."""
    return tuple(OTHER_PART) if config.validation_fraction else (None,)


class Selection:
    """Assigns examples to parts, in input order, by their prompts and the seed.

    `repeated` has the ids of the duplicates, int64, sorted; None: an example is a
    duplicate if an earlier call had one with the same key, or `known` has it. `paths`,
    ordinal -> path, name their places.
    """

    def __init__(
        self,
        config: PackConfig,
        repeated: Int64 | None,
        paths: Mapping[int, str],
        known: U64 | None = None,
    ) -> None:
        self._config, self._repeated, self._paths = config, repeated, paths
        self._seen = Seen()
        if known is not None:
            self._seen.add(known)
        self._salt = np.uint64(derive(config.seed, "validation"))

    def __call__(self, examples: Examples, tally: Tally) -> list[Examples]:
        """Returns the examples of each part; counts dropped ones in `tally`."""
        if self._config.dedup != "none" and examples.num_examples:
            if self._repeated is None:
                new = self._seen.add(dedup_keys(examples, self._config))
            else:
                new = ~np.isin(examples.example_ids, self._repeated)
            for i in np.flatnonzero(~new).tolist():
                source, ordinal = divmod(
                    int(examples.example_ids[i]), 1 << SOURCE_SHIFT
                )
                where = place_of(self._paths[source], ordinal)
                tally.drop(
                    DUPLICATES[self._config.dedup],
                    where,
                    "an earlier record has it too",
                )
            if not new.all():
                examples = examples.take(np.flatnonzero(new))
        if not self._config.validation_fraction:
            return [examples]
        # By the prompt: equal ones always share a part.
        drawn = mixed(_prompt_keys(examples) ^ self._salt)
        held = drawn < np.uint64(int(self._config.validation_fraction * 2.0**63) * 2)
        return [
            examples.take(np.flatnonzero(~held)),
            examples.take(np.flatnonzero(held)),
        ]


class Seen:
    """A set of hashes: sorted arrays, each at least twice as long as the next."""

    def __init__(self) -> None:
        self._runs: list[U64] = []

    def add(self, keys: U64) -> Bool:
        """Adds keys; returns bool `[n]`: True for keys that are new."""
        distinct, first = np.unique(keys, return_index=True)
        known = np.zeros(len(distinct), np.bool_)
        for run in self._runs:
            at = np.minimum(np.searchsorted(run, distinct), len(run) - 1)
            known |= run[at] == distinct
        new = np.zeros(len(keys), np.bool_)
        new[first[~known]] = True
        self._runs.append(distinct[~known])
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            last = self._runs.pop()
            self._runs[-1] = np.concatenate([self._runs[-1], last])
            self._runs[-1].sort()
        self._runs = [run for run in self._runs if len(run)]
        return new


def dedup_keys(examples: Examples, config: SelectConfig) -> U64:
    """Returns uint64 `[E]`, keys that are equal for examples that `dedup` treats as
    duplicates.
    """
    return pair_keys(examples) if config.dedup == "pair" else _prompt_keys(examples)


def pair_keys(examples: Examples) -> U64:
    """Returns uint64 `[E]`, hashes of all tokens of each example and of which are
    supervised.
    """
    keys, lengths = np.empty(examples.num_examples, np.uint64), examples.lengths
    sequences = examples.example_offsets.tolist()
    tokens = examples.sequence_offsets[examples.example_offsets].tolist()
    for i, (first, end) in enumerate(itertools.pairwise(sequences)):
        of = slice(*tokens[i : i + 2])
        digest = hashlib.blake2b(lengths[first:end].data, digest_size=8)
        digest.update(examples.input_ids[of].data)
        digest.update(examples.supervised[of].data)
        keys[i] = int.from_bytes(digest.digest(), "little")
    return keys


def stored_keys(dataset: Dataset) -> U64:
    """Returns uint64 `[E]`, the keys of the pairs of a dataset, in its order."""
    groups = range(len(dataset.row_groups))
    keys = [pair_keys(unpack(dataset.read_packs(group))) for group in groups]
    return np.concatenate([np.empty(0, np.uint64), *keys])


def duplicates(keys: Sequence[U64], ids: Sequence[Int64]) -> list[Int64]:
    """Returns the sorted ids, of each part of the input, whose key also belongs to a
    smaller id.
    """
    every = np.concatenate([np.empty(0, np.uint64), *keys])
    every.sort()
    shared = np.unique(every[1:][every[1:] == every[:-1]])
    del every
    # Duplicates are few, mostly: only these are sorted with their ids.
    chosen = [np.isin(k, shared) for k in keys]
    some_keys = [k[c] for k, c in zip(keys, chosen, strict=True)]
    some_ids = [i[c] for i, c in zip(ids, chosen, strict=True)]
    key, id_ = np.concatenate(some_keys), np.concatenate(some_ids)
    order = np.lexsort((id_, key))
    later = np.zeros(len(key), np.bool_)
    later[order[1:]] = key[order[1:]] == key[order[:-1]]
    parts = np.split(later, np.cumsum([len(i) for i in some_ids])[:-1])
    return [np.sort(i[again]) for i, again in zip(some_ids, parts, strict=True)]


def _prompt_keys(examples: Examples) -> U64:
    """Returns uint64 `[E]`: hashes of the prompts."""
    return np.empty(0, np.uint64) if examples.keys is None else examples.keys
