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
from typing import TypeVar

import numpy as np
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
    manifest: Manifest, packs_per_batch: int, *, multiple: int = 1
) -> dict[str, int]:
    """Return sizes for :func:`pad_batch` that every batch of a dataset fits.

    They are `num_tokens`, `num_segments`, `max_seqlen` and `num_targets`, from the
    manifest's statistics.

    Args:
        manifest: manifest of the dataset.
        packs_per_batch: packs of one batch.
        multiple: the multiple of a preceding :func:`pad_segments`.

    Raises:
        ConfigError: the dataset or a batch has no packs.
    """
    statistics = manifest.statistics
    if packs_per_batch < 1 or not statistics.most_segments:
        raise ConfigError(
            "static_sizes needs at least one pack in the dataset and in a batch; "
            f"found {manifest.totals.packs} and {packs_per_batch}."
        )
    # At most multiple - 1 tokens of padding in each segment.
    padding_of_pack = statistics.most_segments * (multiple - 1)
    padded_pack = manifest.pack_size + padding_of_pack
    num_tokens = round_up(packs_per_batch * padded_pack, multiple)
    # A key run is a shared prefix of any length, followed by a padded segment.
    prefix = multiple - 1 if manifest.layout == "shared_prefix" else 0
    max_seqlen = round_up(statistics.longest_sequence + prefix, multiple)

    # Padding of the batch is the longest if all packs are the shortest; it is divided
    # into segments of at most max_seqlen tokens.
    most_padding = num_tokens - packs_per_batch * statistics.shortest_pack
    padding_segments = math.ceil(most_padding / max_seqlen)
    num_segments = packs_per_batch * statistics.most_segments
    num_segments += round_up(padding_segments, _responses_per_example(manifest))
    return {
        "num_tokens": num_tokens,
        "num_segments": num_segments,
        "max_seqlen": max_seqlen,
        "num_targets": packs_per_batch * statistics.most_targets,
    }


def pad_batch(
    batch: PackedBatch,
    *,
    num_tokens: int,
    num_segments: int | None = None,
    max_seqlen: int | None = None,
    num_targets: int | None = None,
) -> PackedBatch:
    """Pad the batch to fixed sizes; losses, log-probs and metrics do not change.

    With all four sizes every tensor has a fixed shape, except that the number of keys
    (`kv_index`) varies with shared prefixes, and the number of examples for kind
    ``scored``.

    Args:
        batch: the batch; call :func:`pad_segments` before, if segments are to be
            padded.
        num_tokens: T.
        num_segments: S; default: as many as the padding needs.
        max_seqlen: value of the batch's `max_seqlen` and `max_seqlen_k`; no padding
            segment is longer. Default: unchanged.
        num_targets: length of `target_index`; default: unchanged.

    Raises:
        ConfigError: the batch does not fit.
    """
    if max_seqlen is not None:
        longest_sequence = max(batch.max_seqlen, batch.max_seqlen_k)
        _check_fits("max_seqlen", max_seqlen, longest_sequence)
    _check_fits("num_tokens", num_tokens, batch.num_tokens)
    padding = num_tokens - batch.num_tokens
    longest = batch.max_seqlen if max_seqlen is None else max_seqlen
    lengths = [longest] * (padding // longest)
    if padding % longest:
        lengths.append(padding % longest)

    responses = _responses_per_example(batch)
    num_extra = round_up(len(lengths), responses)
    if num_segments is not None:
        _check_fits("num_segments", num_segments, batch.num_segments + num_extra)
        num_extra = num_segments - batch.num_segments
        if num_extra % responses:
            raise ConfigError(
                f"pad_batch: num_segments must be a multiple of {responses}, "
                f"as examples are whole; found {num_segments}."
            )
    lengths += [0] * (num_extra - len(lengths))

    batch = _append_segments(batch, torch.tensor(lengths, dtype=torch.int32), padding)
    if max_seqlen is not None:
        batch = batch.replace(max_seqlen=max_seqlen, max_seqlen_k=max_seqlen)
    if num_targets is not None:
        _check_fits("num_targets", num_targets, len(batch.target_index))
        token_columns = {
            name: map_token_values(values, lambda x: _pad_rows(x, num_targets))
            for name, values in batch.token_columns.items()
        }
        # The first token of a row is never supervised: as a target it is ignored.
        batch = batch.replace(
            target_index=_pad_end(batch.target_index, num_targets, 0),
            token_columns=token_columns,
        )
    return batch


def _append_segments(batch: PackedBatch, lengths: Tensor, tokens: int) -> PackedBatch:
    """Append segments to the batch, in examples of weight 0.

    Args:
        batch: the batch.
        lengths: int32 `[n]`, lengths of the segments; they may be 0.
        tokens: the sum of `lengths`.
    """
    if not len(lengths):
        return batch
    lengths = lengths.to(batch.lengths.device)
    responses = _responses_per_example(batch)
    if batch.kind == "scored":
        responses = len(lengths)  # one example has them all
    T = batch.num_tokens + tokens
    S = batch.num_segments + len(lengths)
    E = batch.num_examples + len(lengths) // responses

    def append_ends(starts: Tensor) -> Tensor:
        return torch.cat([starts, (starts[-1] + lengths.cumsum(0)).int()])

    key_runs = batch.key_runs
    if key_runs is not None:
        # Their keys are their own tokens: one run each, from the start of the segment.
        new_segments = torch.arange(batch.num_segments, S, device=lengths.device)
        own_runs = torch.stack([new_segments, new_segments, new_segments * 0]).int()
        key_runs = torch.cat([key_runs, own_runs], dim=1)

    unpadded = batch.cu_seqlens_unpadded
    ref_logps = batch.ref_logps
    columns = {name: _pad_column(x, E) for name, x in batch.columns.items()}
    sequence_columns = {
        name: _pad_end(x, S, 0) for name, x in batch.sequence_columns.items()
    }
    return batch.replace(
        input_ids=_pad_end(batch.input_ids, T, 0),
        labels=_pad_end(batch.labels, T, IGNORE_INDEX),
        cu_seqlens=append_ends(batch.cu_seqlens),
        cu_seqlens_unpadded=None if unpadded is None else append_ends(unpadded),
        lengths=torch.cat([batch.lengths, lengths]),
        parent_distances=_pad_end(batch.parent_distances, S, 0),
        key_runs=key_runs,
        rewards=_pad_end(batch.rewards, S, 0),
        ref_logps=None if ref_logps is None else _pad_end(ref_logps, S, 0),
        example_ids=_pad_end(batch.example_ids, E, -1),
        num_responses=_pad_end(batch.num_responses, E, responses),
        weights=_pad_end(batch.weights, E, 0),
        pack_ids=_pad_end(batch.pack_ids, E, batch.num_packs - 1),
        sources=_pad_end(batch.sources, E, 0),
        columns=columns,
        sequence_columns=sequence_columns,
    )


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
