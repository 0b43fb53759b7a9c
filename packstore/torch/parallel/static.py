"""Batches of fixed shape: CUDA graphs, torch.compile without recompiling, pipeline stages.

Padding is explicit: extra tokens form separate segments at the end, further segments are empty, and
both belong to examples of weight 0. No real segment changes, and padding has log-prob 0 without a
gradient.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from packstore.errors import ConfigError
from packstore.format.arrays import IGNORE_INDEX, Column
from packstore.format.schema import KINDS
from packstore.io.manifest.manifest import Manifest
from packstore.torch.batch.collate import PackedBatch
from packstore.torch.parallel.padding import round_up


def static_sizes(manifest: Manifest, packs_per_batch: int, *, multiple: int = 1) -> dict[str, int]:
    """Returns keywords of :func:`pad_batch` into which every batch of a dataset fits.

    They are `num_tokens`, `num_segments` and `max_seqlen`, from the manifest's statistics.

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
    segments = packs_per_batch * known.most_segments + round_up(tail, _responses(manifest))
    return {"num_tokens": num_tokens, "num_segments": segments, "max_seqlen": max_seqlen}


def pad_batch(
    batch: PackedBatch,
    *,
    num_tokens: int,
    num_segments: int | None = None,
    max_seqlen: int | None = None,
    num_targets: int | None = None,
) -> PackedBatch:
    """Pads the batch to fixed sizes; losses, log-probs and metrics do not change.

    With all four sizes every tensor has a fixed shape, except that the number of keys (`kv_index`)
    varies with shared prefixes, and the number of examples for kind ``ranked``.

    Args:
        batch: the batch; call :func:`pad_segments` before, if segments are to be padded.
        num_tokens: T.
        num_segments: S; default: as many as the padding needs.
        max_seqlen: value of the batch's `max_seqlen` and `max_seqlen_k`; no padding segment is
            longer. Default: unchanged.
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
    lengths = [min(longest, tail - i * longest) for i in range(pieces)] + [0] * (extra - pieces)
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
    segment = torch.arange(len(lengths), device=lengths.device)
    segment = segment.repeat_interleave(lengths, output_size=tail)
    ends = lengths.cumsum(0)
    place = torch.arange(tail, device=lengths.device) - (ends - lengths)[segment]
    k = _responses(batch) if batch.kind != "ranked" else len(lengths)
    E = batch.num_examples + len(lengths) // k

    def ended(offsets: Tensor) -> Tensor:
        return torch.cat([offsets, (offsets[-1] + ends).int()])

    unpadded, cu_seqlens = batch.cu_seqlens_unpadded, ended(batch.cu_seqlens)
    kv_index = batch.kv_index
    if kv_index is not None:
        kv_index = torch.cat([kv_index, torch.arange(batch.num_tokens, T, device=place.device)])
    return batch.replace(
        input_ids=_filled(batch.input_ids, T, 0),
        labels=_filled(batch.labels, T, IGNORE_INDEX),
        position_ids=torch.cat([batch.position_ids, place]),
        segment_ids=torch.cat([batch.segment_ids, segment + batch.num_segments]),
        cu_seqlens=cu_seqlens,
        cu_seqlens_k=cu_seqlens if batch.kv_index is None else ended(batch.cu_seqlens_k),
        cu_seqlens_unpadded=None if unpadded is None else ended(unpadded),
        kv_index=kv_index,
        lengths=torch.cat([batch.lengths, lengths]),
        rewards=_filled(batch.rewards, S, 0),
        ref_logps=None if batch.ref_logps is None else _filled(batch.ref_logps, S, 0),
        example_ids=_filled(batch.example_ids, E, -1),
        num_responses=_filled(batch.num_responses, E, k),
        weights=_filled(batch.weights, E, 0),
        pack_ids=_filled(batch.pack_ids, E, batch.num_packs - 1),
        sources=_filled(batch.sources, E, 0),
        columns={name: _filled_column(x, E) for name, x in batch.columns.items()},
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
