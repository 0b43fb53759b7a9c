"""Padding of segments to a multiple, for an even split over ranks, and of batches to
fixed sizes.

Padding tokens at the end of a segment are ignored by losses and, as attention is
causal, invisible to real tokens. So log-probs, lengths and counts do not change, in
both layouts and with any backend.

Batches of fixed shape are for CUDA graphs, torch.compile without recompiling, and
pipeline stages. Their extra tokens form separate segments at the end, further segments
are empty, and both belong to examples of weight 0, with log-prob 0 and without a
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from packstore.errors import ConfigError, sentence
from packstore.format.arrays import IGNORE_INDEX, Column, map_token_values
from packstore.format.schema import KINDS
from packstore.io.manifest.manifest import Manifest
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.layout import offsets

Size = TypeVar("Size", int, Tensor)


def padding_multiple(
    *, context_parallel: int = 1, sequence_parallel: int = 1, fp8: bool = False
) -> int:
    """Return the smallest multiple for :func:`pad_segments` that fits these settings.

    Each padded segment splits into ``2 * context_parallel`` equal chunks, see
    :meth:`ContextSplit.zigzag`. The number of tokens of each context-parallel rank is a
    multiple of `sequence_parallel`, and of 16 for FP8.

    Args:
        context_parallel: number of ranks that share a row of tokens.
        sequence_parallel: number of tensor-parallel ranks with sequence parallelism; 1
            without.
        fp8: True if matrix products run in FP8.
    """
    if min(context_parallel, sequence_parallel) < 1:
        raise ConfigError(
            "context_parallel and sequence_parallel must be at least 1; "
            f"found {context_parallel} and {sequence_parallel}."
        )
    num_chunks = 2 * context_parallel if context_parallel > 1 else 1
    # Transformer Engine multiplies FP8 matrices of a multiple of 16 rows.
    tokens_of_rank = math.lcm(sequence_parallel, 16 if fp8 else 1)
    return math.lcm(num_chunks, context_parallel * tokens_of_rank)


def round_up(value: Size, multiple: int) -> Size:
    """Round `value` up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


def pad_segments(batch: PackedBatch, multiple: int) -> PackedBatch:
    """Pad every segment of the batch at its end to a multiple of `multiple` tokens.

    Padding tokens have id 0, label -100, and the next positions; no other segment has
    them as keys. `cu_seqlens` (and the keys of shared prefixes) then describe the
    padded segments, `cu_seqlens_unpadded` the segments before; fields per segment or
    example do not change.

    Raises:
        ConfigError: `multiple` is below 1.
    """
    if multiple < 1:
        raise ConfigError(
            f"the multiple of pad_segments must be at least 1; found {multiple}."
        )
    if multiple == 1:
        return batch
    starts = batch.cu_seqlens.long()
    lengths = starts.diff()
    padded_lengths = round_up(lengths, multiple)
    padded_starts = offsets(padded_lengths)
    num_tokens = int(padded_starts[-1])
    key_lengths = batch.cu_seqlens_k.diff() + padded_lengths - lengths

    # The place of each token in the padded row.
    places = torch.arange(batch.num_tokens, device=starts.device)
    places += (padded_starts - starts)[batch.segment_ids]

    def spread(values: Tensor, fill: int) -> Tensor:
        return values.new_full((num_tokens,), fill).index_copy(0, places, values)

    unpadded = batch.cu_seqlens_unpadded
    return batch.replace(
        input_ids=spread(batch.input_ids, 0),
        labels=spread(batch.labels, IGNORE_INDEX),
        target_index=places[batch.target_index],
        cu_seqlens=padded_starts.int(),
        max_seqlen=round_up(batch.max_seqlen, multiple),
        max_seqlen_k=int(key_lengths.max()),
        cu_seqlens_unpadded=batch.cu_seqlens if unpadded is None else unpadded,
    )


def static_sizes(
    manifests: Manifest | Sequence[Manifest],
    packs_per_batch: int,
    *,
    multiple: int = 1,
) -> dict[str, int]:
    """Return sizes for :func:`pad_batch` that every batch of a dataset fits.

    They are `num_packs`, `num_tokens`, `num_segments`, `max_seqlen` and `num_targets`,
    with shared prefixes also `num_keys` and `num_runs`, and for kind ``scored``
    `num_examples`. All follow from the statistics of the manifest.

    Args:
        manifests: manifest of the dataset, or those of the datasets of a mix.
        packs_per_batch: packs of one batch.
        multiple: the multiple of a preceding :func:`pad_segments`.

    Raises:
        ConfigError: the dataset or a batch has no packs.
    """
    if isinstance(manifests, Manifest):
        manifests = [manifests]
    manifests = [manifest for manifest in manifests if manifest.totals.packs]
    if packs_per_batch < 1 or not manifests:
        raise ConfigError(
            "static_sizes needs at least one pack in the dataset and in a batch; "
            f"found {sum(manifest.totals.packs for manifest in manifests)} and "
            f"{packs_per_batch}."
        )
    statistics = [manifest.statistics for manifest in manifests]
    most_segments = max(stats.most_segments for stats in statistics)
    most_targets = max(stats.most_targets for stats in statistics)
    shortest_pack = min(stats.shortest_pack for stats in statistics)
    shares_prefixes = any(m.layout == "shared_prefix" for m in manifests)

    # At most multiple - 1 tokens of padding in each segment.
    padding_of_pack = most_segments * (multiple - 1)
    padded_pack = max(m.pack_size for m in manifests) + padding_of_pack
    num_tokens = round_up(packs_per_batch * padded_pack, multiple)
    # A key run is a shared prefix of any length, followed by a padded segment.
    prefix = multiple - 1 if shares_prefixes else 0
    longest_sequence = max(stats.longest_sequence for stats in statistics)
    max_seqlen = round_up(longest_sequence + prefix, multiple)

    # Padding of the batch is the longest if all packs are the shortest; it is divided
    # into segments of at most max_seqlen tokens.
    most_padding = num_tokens - packs_per_batch * shortest_pack
    padding_segments = math.ceil(most_padding / max_seqlen)
    real_segments = packs_per_batch * most_segments
    sizes = {
        "num_packs": packs_per_batch,
        "num_tokens": num_tokens,
        "num_segments": real_segments,
        "max_seqlen": max_seqlen,
        "num_targets": packs_per_batch * most_targets,
    }

    if shares_prefixes:
        most_shared = max(stats.most_keys - stats.shortest_pack for stats in statistics)
        missing_keys = packs_per_batch * most_shared  # if no segment omits any
        key_segments = math.ceil(missing_keys / max_seqlen)
        # In a chain, each segment reads all segments of its pack before it.
        most_pairs = most_segments * (most_segments - 1) // 2
        shared_runs = packs_per_batch * min(most_shared, most_pairs)
        padding_runs = key_segments + math.ceil(missing_keys / num_tokens) * (
            real_segments + padding_segments
        )
        sizes["num_keys"] = num_tokens + missing_keys
        padding_segments += key_segments + 1  # the last one for the missing runs
        sizes["num_runs"] = shared_runs + padding_runs

    responses = max(_responses_per_example(manifest) for manifest in manifests)
    if manifests[0].kind == "scored":
        most_examples = max(stats.examples_per_pack.max for stats in statistics)
        sizes["num_examples"] = packs_per_batch * most_examples + 1
        # Each padding example has a segment.
        padding_segments += sizes["num_examples"]
    sizes["num_segments"] += round_up(padding_segments, responses)
    if shares_prefixes:
        sizes["num_runs"] += sizes["num_segments"]  # the own run of each
    return sizes


def pad_batch(
    batch: PackedBatch,
    *,
    num_tokens: int,
    num_segments: int | None = None,
    max_seqlen: int | None = None,
    num_targets: int | None = None,
    num_keys: int | None = None,
    num_runs: int | None = None,
    num_examples: int | None = None,
    num_packs: int | None = None,
) -> PackedBatch:
    """Pad the batch to fixed sizes; losses, log-probs and metrics do not change.

    With all sizes of :func:`static_sizes` every tensor has a fixed shape, also those of
    ``batch.layout``. Pad before the batch is moved to a GPU, which would have to be
    waited for.

    Args:
        batch: the batch; call :func:`pad_segments` before, if segments are to be
            padded.
        num_tokens: T.
        num_segments: S; default: as many as the padding needs.
        max_seqlen: value of the batch's `max_seqlen` and `max_seqlen_k`; no padding
            segment is longer. Default: unchanged.
        num_targets: length of `target_index`; default: unchanged.
        num_keys: L, length of `kv_index`. The missing keys are tokens of the row, as
            keys of empty padding segments; `key_runs` is then never None. Default: as
            many as the tokens of the padding add.
        num_runs: R, runs in `key_runs`, with `num_keys` only. Default: as many as the
            keys need.
        num_examples: E, for kind ``scored``, where the number of examples does not
            follow from the number of segments; default: one more, for all padding.
        num_packs: P, as the last batch of a step may have fewer; default: unchanged.

    Raises:
        ConfigError: the batch does not fit.
    """
    longest = batch.max_seqlen
    longest_keys = batch.max_seqlen_k
    if max_seqlen is not None:
        _check_fits("max_seqlen", max_seqlen, max(longest, longest_keys))
        longest = longest_keys = max_seqlen
    _check_fits("num_tokens", num_tokens, batch.num_tokens)
    padding = num_tokens - batch.num_tokens
    lengths = _split_evenly(padding, longest)
    key_lengths = []
    if num_keys is not None:
        _check_fits("num_keys", num_keys, batch.num_keys + padding)
        num_missing_keys = num_keys - batch.num_keys - padding
        key_lengths = _split_evenly(num_missing_keys, longest_keys)
    # The last padding segment takes the missing runs, which are empty like itself.
    num_fillers = 0 if num_runs is None else 1

    responses = _responses_per_example(batch)
    num_extra = round_up(len(lengths) + len(key_lengths) + num_fillers, responses)
    if num_segments is not None:
        _check_fits("num_segments", num_segments, batch.num_segments + num_extra)
        num_extra = num_segments - batch.num_segments
        if num_extra % responses:
            raise ConfigError(
                f"pad_batch: num_segments must be a multiple of {responses}, "
                f"as examples are whole; found {num_segments}."
            )
    num_responses = _padding_responses(batch, num_extra, num_examples)
    missing_keys = [*[0] * len(lengths), *key_lengths]
    missing_keys += [0] * (num_extra - len(missing_keys))
    lengths += [0] * (num_extra - len(lengths))
    padded = _append_segments(batch, lengths, missing_keys, num_responses)
    if num_keys is not None or batch.key_runs is not None:
        padded["key_runs"] = _append_runs(batch, lengths, missing_keys, num_runs)
    changes: dict[str, Any] = {}
    if num_packs is not None:
        _check_fits("num_packs", num_packs, batch.num_packs)
        changes["num_packs"] = num_packs
    if max_seqlen is not None:
        changes["max_seqlen"] = changes["max_seqlen_k"] = max_seqlen
    if num_targets is not None:
        _check_fits("num_targets", num_targets, len(batch.target_index))
        changes["token_columns"] = {
            name: map_token_values(values, partial(_pad_rows, size=num_targets))
            for name, values in batch.token_columns.items()
        }
        # The first token of a row is never supervised: as a target it is ignored.
        changes["target_index"] = _pad_end(batch.target_index, num_targets, 0)
    return batch.replace(**padded, **changes)


def _split_evenly(total: int, longest: int) -> list[int]:
    """Return lengths of at most `longest` that add up to `total`."""
    lengths = [longest] * (total // longest)
    if total % longest:
        lengths.append(total % longest)
    return lengths


def _padding_responses(
    batch: PackedBatch, num_segments: int, num_examples: int | None
) -> list[int]:
    """Return the number of segments of each padding example.

    Args:
        batch: the batch before.
        num_segments: number of padding segments.
        num_examples: number of examples of the padded batch; None: see
            :func:`pad_batch`.
    """
    responses = _responses_per_example(batch)
    num_extra = num_segments // responses
    if batch.kind == "scored":
        num_extra = min(1, num_segments)
    if num_examples is not None:
        _check_fits("num_examples", num_examples, batch.num_examples + num_extra)
        num_extra = num_examples - batch.num_examples
    if batch.kind != "scored":
        if num_extra * responses != num_segments:
            raise ConfigError(
                f"pad_batch: num_examples is for kind 'scored'; of kind {batch.kind!r} "
                f"each example has {responses} segments."
            )
        return [responses] * num_extra
    if num_extra > num_segments:
        raise ConfigError(
            f"pad_batch: each of {num_extra} padding examples needs a segment; found "
            f"{num_segments}. Raise num_segments."
        )
    if not num_extra:
        return []
    return [*[1] * (num_extra - 1), num_segments - num_extra + 1]


def _append_segments(
    batch: PackedBatch,
    lengths: list[int],
    missing_keys: list[int],
    num_responses: list[int],
) -> dict[str, Any]:
    """Return the changed fields of the batch with more segments, in examples of weight
    0.

    Args:
        batch: the batch.
        lengths: length of each new segment; it may be 0.
        missing_keys: for each, the number of keys that are not its own tokens; 0 if it
            has any.
        num_responses: number of segments of each new example.
    """
    T = batch.num_tokens + sum(lengths)
    S = batch.num_segments + len(lengths)
    E = batch.num_examples + len(num_responses)
    new_lengths = _int32(lengths, batch)
    # An empty segment with keys is the end of a sequence that omits all of them.
    new_logical_lengths = new_lengths + _int32(missing_keys, batch)

    def append_ends(starts: Tensor) -> Tensor:
        return torch.cat([starts, (starts[-1] + new_lengths.cumsum(0)).int()])

    unpadded = batch.cu_seqlens_unpadded
    ref_logps = batch.ref_logps
    return {
        "input_ids": _pad_end(batch.input_ids, T, 0),
        "labels": _pad_end(batch.labels, T, IGNORE_INDEX),
        "cu_seqlens": append_ends(batch.cu_seqlens),
        "cu_seqlens_unpadded": None if unpadded is None else append_ends(unpadded),
        "lengths": torch.cat([batch.lengths, new_logical_lengths]),
        "parent_distances": _pad_end(batch.parent_distances, S, 0),
        "rewards": _pad_end(batch.rewards, S, 0),
        "ref_logps": None if ref_logps is None else _pad_end(ref_logps, S, 0),
        "example_ids": _pad_end(batch.example_ids, E, -1),
        "num_responses": torch.cat([batch.num_responses, _int32(num_responses, batch)]),
        "weights": _pad_end(batch.weights, E, 0),
        "pack_ids": _pad_end(batch.pack_ids, E, batch.num_packs - 1),
        "sources": _pad_end(batch.sources, E, 0),
        "columns": {name: _pad_column(x, E) for name, x in batch.columns.items()},
        "sequence_columns": {
            name: _pad_end(x, S, 0) for name, x in batch.sequence_columns.items()
        },
        "_shared_tokens": batch._shared_tokens + sum(missing_keys),
    }


def _append_runs(
    batch: PackedBatch,
    lengths: list[int],
    missing_keys: list[int],
    num_runs: int | None,
) -> Tensor:
    """Return `key_runs` with the runs of new segments, int32 `[3, R]`.

    Args:
        batch: the batch before.
        lengths: length of each new segment.
        missing_keys: for each, the number of keys that are not its own tokens.
        num_runs: R; None: as many as it takes.
    """
    num_segments = batch.num_segments
    runs = batch.key_runs
    if runs is None:
        segments = torch.arange(num_segments, device=batch.lengths.device).int()
        runs = torch.stack([segments, segments, torch.zeros_like(segments)])

    new_segments = np.arange(num_segments, num_segments + len(lengths))
    new_runs = np.stack([new_segments, new_segments, np.zeros_like(new_segments)])
    if any(missing_keys):
        old_lengths = batch.cu_seqlens.diff().tolist()
        all_lengths = np.array([*old_lengths, *lengths])
        key_runs = _runs_of_missing_keys(all_lengths, np.array(missing_keys))
        key_runs[0] += num_segments  # readers among all segments
        new_runs = np.hstack([key_runs, new_runs])
        # By reader; the own run, which came last, stays behind the others.
        new_runs = new_runs[:, np.argsort(new_runs[0], kind="stable")]
    if num_runs is not None:
        _check_fits("num_runs", num_runs, runs.shape[1] + new_runs.shape[1])
        num_fillers = num_runs - runs.shape[1] - new_runs.shape[1]
        new_runs = np.hstack([new_runs, np.tile(new_runs[:, -1:], num_fillers)])
    added = torch.from_numpy(new_runs.astype(np.int32))
    return torch.cat([runs, added.to(runs.device)], dim=1)


def _runs_of_missing_keys(
    lengths: npt.NDArray[np.int64], missing_keys: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Return runs of the row that make up the keys of empty segments, int64 `[3, n]`.

    The row is read from its start, again and again, so that its tokens have about
    equally many copies: a backward pass sums the copies of a token one by one.

    Args:
        lengths: int64 `[S]`, lengths of the segments of the row.
        missing_keys: int64 `[m]`, number of keys of each reader.
    """
    num_keys = int(missing_keys.sum())
    segments = np.flatnonzero(lengths)
    segment_ends = np.cumsum(lengths[segments])
    row_length = int(segment_ends[-1])
    num_passes = math.ceil(num_keys / row_length)
    ends_of_passes = segment_ends + row_length * np.arange(num_passes)[:, None]

    # A run ends where its segment ends, or where its reader has all keys.
    reader_ends = np.cumsum(missing_keys)
    all_ends = np.concatenate([ends_of_passes.ravel(), reader_ends])
    ends = np.unique(all_ends[(all_ends > 0) & (all_ends <= num_keys)])
    tokens = np.diff(ends, prepend=0)
    starts = ends - tokens
    readers = np.searchsorted(reader_ends, starts, side="right")
    places = np.searchsorted(segment_ends, starts % row_length, side="right")
    return np.stack([readers, segments[places], tokens])


def _int32(values: list[int], batch: PackedBatch) -> Tensor:
    """Return a tensor on the device of the batch."""
    return torch.tensor(values, dtype=torch.int32, device=batch.lengths.device)


def _responses_per_example(source: PackedBatch | Manifest) -> int:
    """Return the responses per example if the kind fixes them, else 1."""
    return KINDS[source.kind] or 1


def _pad_end(values: Tensor, size: int, fill: float) -> Tensor:
    """Pad a vector at its end."""
    return pad(values, (0, size - len(values)), value=fill)


def _pad_rows(values: Tensor, size: int) -> Tensor:
    """Pad a vector or matrix with rows of zeros at its end."""
    rows = values.new_zeros((size - len(values), *values.shape[1:]))
    return torch.cat([values, rows])


def _pad_column(values: Tensor | Column, size: int) -> Tensor | Column:
    """Pad a column of numbers with 0, a column of strings with empty ones."""
    if isinstance(values, Tensor):
        return _pad_end(values, size, 0)
    padding = np.full(size - len(values), "", values.dtype)
    return np.append(values, padding)


def _check_fits(name: str, limit: int, size: int) -> None:
    """Raise ConfigError for a size of a batch above its limit in an argument."""
    if size > limit:
        raise ConfigError(
            sentence(
                where=f"pad_batch({name}={limit})",
                rule="the batch must fit",
                found=str(size),
                remedy=(
                    "Allow more, for example by static_sizes(manifest, packs_per_batch)"
                ),
            )
        )
