"""Pads segments to a multiple, for an even split over ranks, and batches to fixed
sizes.

Padding tokens at the end of a segment are ignored by losses and, as attention is
causal, invisible to real tokens. So log-probs, lengths and counts remain those of the
real tokens, in both layouts and with any backend.

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

from packstore.errors import ConfigError
from packstore.format.arrays import IGNORE_INDEX, Column
from packstore.format.schema import KINDS
from packstore.io.manifest.manifest import Manifest
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.layout import offsets

Size = TypeVar("Size", int, Tensor)


def padding_multiple(
    *, context_parallel: int = 1, sequence_parallel: int = 1, fp8: bool = False
) -> int:
    """Returns the smallest multiple for :func:`pad_segments` that fits these settings.

    Each segment then splits into ``2 * context_parallel`` equal chunks, and the tokens
    of each context-parallel rank are divisible by `sequence_parallel`, and by 16 for
    FP8.

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
    chunks = 2 * context_parallel if context_parallel > 1 else 1
    # Transformer Engine multiplies FP8 matrices of a multiple of 16 rows.
    return math.lcm(
        chunks, context_parallel * math.lcm(sequence_parallel, 16 if fp8 else 1)
    )


def round_up(value: Size, multiple: int) -> Size:
    """Rounds `value` up to a multiple of `multiple`."""
    return -(-value // multiple) * multiple


def pad_segments(batch: PackedBatch, multiple: int) -> PackedBatch:
    """Pads every segment of the batch at its end to a multiple of `multiple` tokens.

    Padding tokens have id 0, label -100, and the next positions. `cu_seqlens` (and the
    keys of shared prefixes) then describe the padded segments, `cu_seqlens_unpadded`
    the real ones; fields per segment or example do not change.

    Raises:
        ConfigError: `multiple` is below 1.
    """
    if multiple < 1:
        raise ConfigError(
            f"the multiple of pad_segments must be at least 1; found {multiple}."
        )
    if multiple == 1:
        return batch
    before, unpadded = batch.cu_seqlens.long(), batch.cu_seqlens_unpadded
    padded = round_up(before.diff(), multiple)
    starts, keys = offsets(padded), batch.cu_seqlens_k.diff() + padded - before.diff()
    size = int(starts[-1])
    moved = torch.arange(batch.num_tokens, device=starts.device)
    moved += (starts - before)[batch.segment_ids]

    def spread(values: Tensor, fill: int) -> Tensor:
        return values.new_full((size,), fill).index_copy(0, moved, values)

    return batch.replace(
        input_ids=spread(batch.input_ids, 0),
        labels=spread(batch.labels, IGNORE_INDEX),
        target_index=moved[batch.target_index],
        cu_seqlens=starts.int(),
        max_seqlen=round_up(batch.max_seqlen, multiple),
        max_seqlen_k=int(keys.max()),
        cu_seqlens_unpadded=batch.cu_seqlens if unpadded is None else unpadded,
    )


def static_sizes(
    manifest: Manifest, packs_per_batch: int, *, multiple: int = 1
) -> dict[str, int]:
    """Returns keywords of :func:`pad_batch` into which every batch of a dataset fits.

    They are `num_tokens`, `num_segments` and `max_seqlen`, from the manifest's
    statistics.

    Args:
        manifest: manifest of the dataset.
        packs_per_batch: packs of one batch.
        multiple: the multiple of a preceding :func:`pad_segments`.

    Raises:
        ConfigError: the dataset or a batch has no packs.
    """
    known = manifest.statistics
    if packs_per_batch < 1 or not known.most_segments:
        raise ConfigError(
            "static_sizes needs at least one pack in the dataset and in a batch; "
            f"found {manifest.totals.packs} and {packs_per_batch}."
        )
    padding = known.most_segments * (multiple - 1)
    num_tokens = round_up(packs_per_batch * (manifest.pack_size + padding), multiple)
    # A key run is a shared prefix of any length, followed by a padded segment.
    prefixes = multiple - 1 if manifest.layout == "shared_prefix" else 0
    max_seqlen = round_up(known.longest_sequence + prefixes, multiple)
    tail = math.ceil((num_tokens - packs_per_batch * known.shortest_pack) / max_seqlen)
    segments = packs_per_batch * known.most_segments + round_up(
        tail, _responses(manifest)
    )
    return {
        "num_tokens": num_tokens,
        "num_segments": segments,
        "max_seqlen": max_seqlen,
    }


def pad_batch(
    batch: PackedBatch,
    *,
    num_tokens: int,
    num_segments: int | None = None,
    max_seqlen: int | None = None,
    num_targets: int | None = None,
) -> PackedBatch:
    """Pads the batch to fixed sizes; losses, log-probs and metrics do not change.

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
    longest = batch.max_seqlen if max_seqlen is None else max_seqlen
    if max_seqlen is not None:
        _check_fits("max_seqlen", max_seqlen, max(batch.max_seqlen, batch.max_seqlen_k))
    _check_fits("num_tokens", num_tokens, batch.num_tokens)
    tail = num_tokens - batch.num_tokens
    pieces, responses = math.ceil(tail / longest), _responses(batch)
    extra = round_up(pieces, responses)
    if num_segments is not None:
        _check_fits("num_segments", num_segments, batch.num_segments + extra)
        extra = num_segments - batch.num_segments
        if extra % responses:
            raise ConfigError(
                f"pad_batch: num_segments must be a multiple of {responses}, "
                f"as examples are whole; found {num_segments}."
            )
    lengths = [min(longest, tail - i * longest) for i in range(pieces)] + [0] * (
        extra - pieces
    )
    batch = _add_segments(batch, torch.tensor(lengths, dtype=torch.int32), tail)
    if max_seqlen is not None:
        batch = batch.replace(max_seqlen=max_seqlen, max_seqlen_k=max_seqlen)
    if num_targets is not None:
        _check_fits("num_targets", num_targets, len(batch.target_index))
        # The first token of a row is never supervised: as a target it is ignored.
        batch = batch.replace(target_index=_filled(batch.target_index, num_targets, 0))
    return batch


def _add_segments(batch: PackedBatch, lengths: Tensor, tail: int) -> PackedBatch:
    """Appends segments of `lengths` to the batch, `tail` tokens in all."""
    lengths = lengths.to(batch.lengths.device)
    if not len(lengths):
        return batch
    T, S = batch.num_tokens + tail, batch.num_segments + len(lengths)
    k = _responses(batch) if batch.kind != "scored" else len(lengths)
    E = batch.num_examples + len(lengths) // k

    def ended(starts: Tensor) -> Tensor:
        return torch.cat([starts, (starts[-1] + lengths.cumsum(0)).int()])

    unpadded = batch.cu_seqlens_unpadded
    return batch.replace(
        input_ids=_filled(batch.input_ids, T, 0),
        labels=_filled(batch.labels, T, IGNORE_INDEX),
        cu_seqlens=ended(batch.cu_seqlens),
        cu_seqlens_unpadded=None if unpadded is None else ended(unpadded),
        lengths=torch.cat([batch.lengths, lengths]),
        rewards=_filled(batch.rewards, S, 0),
        ref_logps=None if batch.ref_logps is None else _filled(batch.ref_logps, S, 0),
        example_ids=_filled(batch.example_ids, E, -1),
        num_responses=_filled(batch.num_responses, E, k),
        weights=_filled(batch.weights, E, 0),
        pack_ids=_filled(batch.pack_ids, E, batch.num_packs - 1),
        sources=_filled(batch.sources, E, 0),
        columns={name: _filled_column(x, E) for name, x in batch.columns.items()},
        sequence_columns={
            n: _filled(x, S, 0) for n, x in batch.sequence_columns.items()
        },
    )


def _responses(source: PackedBatch | Manifest) -> int:
    """Responses per example if the kind fixes them, else 1."""
    return KINDS[source.kind] or 1


def _filled(values: Tensor, size: int, fill: float) -> Tensor:
    return pad(values, (0, size - len(values)), value=fill)


def _filled_column(values: Tensor | Column, size: int) -> Tensor | Column:
    if isinstance(values, Tensor):
        return _filled(values, size, 0)
    return np.append(values, np.full(size - len(values), "", values.dtype))


def _check_fits(name: str, allowed: int, size: int) -> None:
    if size > allowed:
        raise ConfigError(
            f"pad_batch({name}={allowed}): the batch must fit; found {size}. "
            "Allow more, for example by static_sizes(manifest, packs_per_batch)."
        )
