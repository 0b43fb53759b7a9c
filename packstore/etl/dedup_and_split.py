"""Drops duplicates, and splits off examples for validation.

Both compare *keys*, hashes of 8 bytes, so the result does not depend on the number of
workers, and memory is 8 bytes for each record. The key of a prompt is a hash of its
words (:attr:`Examples.keys`), as its last token may depend on the text behind it. The
key of a pair is a hash of its tokens, which a dataset stores, so that appended records
are compared with the stored ones.
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
from packstore.io.manifest.commit import SPLITS
from packstore.pack.fill import unpack
from packstore.tokenizer.tally import Tally

DUPLICATES = {"pair": "duplicate_pair", "prompt": "duplicate_prompt"}
"""Setting `dedup` -> reason under which dropped records are counted."""

OTHER_SPLIT = dict(zip(SPLITS, ("for_validation", "for_training"), strict=True))
"""Split -> reason under which it counts the examples of the other split."""


def split_names(config: SelectConfig) -> tuple[str | None, ...]:
    """Return the names of the datasets that a job makes; None: a single one."""
    return SPLITS if config.validation_fraction else (None,)


class Selection:
    """Drops duplicates, and assigns examples to splits by their prompts and the seed.

    Args:
        config: settings.
        duplicate_ids: int64 `[n]`, sorted ids of all duplicates, found in an earlier
            pass over the input; None: there was none, so an example is a duplicate if
            an earlier one has the same key, or `stored_keys` has it.
        paths: ordinal of an input -> its path, for the places of duplicates.
        stored_keys: uint64 `[n]`, keys of the examples of the dataset that is
            appended to.
    """

    def __init__(
        self,
        config: PackConfig,
        duplicate_ids: Int64 | None,
        paths: Mapping[int, str],
        stored_keys: U64 | None = None,
    ) -> None:
        self._config = config
        self._duplicate_ids = duplicate_ids
        self._paths = paths
        self._seen = Seen()
        if stored_keys is not None:
            self._seen.add(stored_keys)
        self._salt = np.uint64(derive(config.seed, "validation"))

    def __call__(self, examples: Examples, tally: Tally) -> list[Examples]:
        """Return the examples of each split, in input order; count drops in `tally`."""
        if self._config.dedup != "none" and examples.num_examples:
            examples = self._drop_duplicates(examples, tally)
        fraction = self._config.validation_fraction
        if not fraction:
            return [examples]

        # By the prompt, so that examples of equal prompts share a split.
        draws = mixed(_prompt_keys(examples) ^ self._salt)  # uniform in 0 .. 2**64 - 1
        limit = np.uint64(int(fraction * 2.0**63) * 2)  # fraction * 2**64
        is_validation = draws < limit
        return [
            examples.take(np.flatnonzero(~is_validation)),
            examples.take(np.flatnonzero(is_validation)),
        ]

    def _drop_duplicates(self, examples: Examples, tally: Tally) -> Examples:
        if self._duplicate_ids is None:
            is_new = self._seen.add(dedup_keys(examples, self._config))
        else:
            is_new = ~np.isin(examples.example_ids, self._duplicate_ids)
        if is_new.all():
            return examples

        reason = DUPLICATES[self._config.dedup]
        for example_id in examples.example_ids[~is_new].tolist():
            source, ordinal = divmod(example_id, 1 << SOURCE_SHIFT)
            place = place_of(self._paths[source], ordinal)
            tally.drop(reason, place, "an earlier record has it too")
        return examples.take(np.flatnonzero(is_new))


class Seen:
    """A set of keys.

    They lie in sorted arrays (runs), each at least twice as long as the next, as in a
    log-structured merge tree: of n keys there are at most log2(n) runs to search, and a
    key is sorted again at most log2(n) times.
    """

    def __init__(self) -> None:
        self._runs: list[U64] = []  # each sorted, without duplicates

    def add(self, keys: U64) -> Bool:
        """Add keys; return bool `[n]`, True for keys that are new."""
        distinct, first_positions = np.unique(keys, return_index=True)
        is_known = np.zeros(len(distinct), np.bool_)
        for run in self._runs:
            positions = np.searchsorted(run, distinct)
            # A key above all of the run has the position behind its end.
            positions = np.minimum(positions, len(run) - 1)
            is_known |= run[positions] == distinct
        is_new = np.zeros(len(keys), np.bool_)
        is_new[first_positions[~is_known]] = True

        new_keys = distinct[~is_known]
        if len(new_keys):
            self._runs.append(new_keys)
        while len(self._runs) > 1 and len(self._runs[-2]) < 2 * len(self._runs[-1]):
            last_run = self._runs.pop()
            self._runs[-1] = np.concatenate([self._runs[-1], last_run])
            self._runs[-1].sort()
        return is_new


def dedup_keys(examples: Examples, config: SelectConfig) -> U64:
    """Return uint64 `[E]`, equal for examples that `dedup` treats as duplicates."""
    return pair_keys(examples) if config.dedup == "pair" else _prompt_keys(examples)


def pair_keys(examples: Examples) -> U64:
    """Return uint64 `[E]`, hashes of tokens and supervision of each example."""
    keys = np.empty(examples.num_examples, np.uint64)
    lengths = examples.lengths
    sequence_starts = examples.example_offsets.tolist()
    token_starts = examples.sequence_offsets[examples.example_offsets].tolist()
    for i in range(examples.num_examples):
        sequence_range = slice(sequence_starts[i], sequence_starts[i + 1])
        token_range = slice(token_starts[i], token_starts[i + 1])
        digest = hashlib.blake2b(lengths[sequence_range].data, digest_size=8)
        digest.update(examples.input_ids[token_range].data)
        digest.update(examples.supervised[token_range].data)
        keys[i] = int.from_bytes(digest.digest(), "little")
    return keys


def stored_keys(datasets: Sequence[Dataset]) -> U64:
    """Return uint64 `[E]`, the keys of the pairs of datasets, in their order.

    Pairs of sources that only one of them has are left out: an append that was killed
    between two commits, and is now repeated, has added these.
    """
    num_sources = min(
        len(dataset.manifest.provenance["sources"]) for dataset in datasets
    )
    keys = [np.empty(0, np.uint64)]
    for dataset in datasets:
        for group in range(len(dataset.row_groups)):
            examples = unpack(dataset.read_packs(group))
            is_common = (examples.example_ids >> SOURCE_SHIFT) < num_sources
            keys.append(pair_keys(examples)[is_common])
    return np.concatenate(keys)


def find_duplicates(keys: Sequence[U64], ids: Sequence[Int64]) -> list[Int64]:
    """Return the duplicates of each partition, as sorted ids.

    A duplicate is an example with the key of an example of a smaller id, in any
    partition.

    Args:
        keys: for each partition uint64 `[n]`, the keys of its examples.
        ids: for each partition int64 `[n]`, the ids of the same examples.
    """
    all_keys = np.concatenate([np.empty(0, np.uint64), *keys])
    all_keys.sort()
    repeats_previous = all_keys[1:] == all_keys[:-1]
    shared_keys = np.unique(all_keys[1:][repeats_previous])
    del all_keys  # 8 bytes for each record

    # Duplicates are few, mostly: only examples with shared keys are sorted with ids.
    candidate_keys = []
    candidate_ids = []
    for partition_keys, partition_ids in zip(keys, ids, strict=True):
        is_shared = np.isin(partition_keys, shared_keys)
        candidate_keys.append(partition_keys[is_shared])
        candidate_ids.append(partition_ids[is_shared])
    joined_keys = np.concatenate(candidate_keys)
    joined_ids = np.concatenate(candidate_ids)
    order = np.lexsort((joined_ids, joined_keys))  # by key, then by id
    has_earlier = np.zeros(len(joined_keys), np.bool_)
    has_earlier[order[1:]] = joined_keys[order[1:]] == joined_keys[order[:-1]]

    # Take the joined flags apart again, by partition.
    ends = list(itertools.accumulate(len(ids_) for ids_ in candidate_ids))
    flags_of_partitions = np.split(has_earlier, ends[:-1])
    return [
        np.sort(partition_ids[is_duplicate])
        for partition_ids, is_duplicate in zip(
            candidate_ids, flags_of_partitions, strict=True
        )
    ]


def _prompt_keys(examples: Examples) -> U64:
    """Return uint64 `[E]`: hashes of the prompts; a block without examples has none."""
    return np.empty(0, np.uint64) if examples.keys is None else examples.keys
