"""Computes log-probs of the reference model once, and stores them as a side dataset.

::

    model = load_model("my-sft-model", dtype="bfloat16").to("cuda")
    write_ref_logps(model, packstore.open("prefs-8k"), "prefs-8k-ref")
    data = PackedDataset("prefs-8k", side=["prefs-8k-ref"])     # batch.ref_logps

They are computed as in training: packed attention, the head without logits, the same precision.
Batches are those of ``PackedDataLoader(…)`` in file order on one rank, for any number
of ranks, so the values depend neither on ranks nor on resuming.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from packstore.config import BatchConfig, fingerprint
from packstore.errors import FormatError, sentence
from packstore.format.arrays import Float32, Int64
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.commit import refuse_existing, require_exclusive
from packstore.io.manifest.side_manifest import REF_LOGPS, SIDE
from packstore.io.side.side import Side, SideWriter, open_side
from packstore.io.store.location import Location
from packstore.progress import Progress
from packstore.torch.batch.collate import PackedBatch, collate
from packstore.torch.batch.transfer import Fetched, inference_batching, one_late, to_device
from packstore.torch.data.position import Position, Unseen
from packstore.torch.data.ranks import assign_ranks
from packstore.torch.data.steps import Step, StepCutter
from packstore.torch.data.stream import StoredPacks
from packstore.torch.logprobs.head import PackedPolicy
from packstore.torch.metrics import distributed
from packstore.torch.models.compatibility import check_model
from packstore.torch.models.unwrap import evaluating
from packstore.torch.reference.arithmetic import Precision, autocast, choose_precision
from packstore.torch.reference.ref_parts import PARTS, Parts, Values, run_on_rank_zero
from packstore.torch.reference.reference_fingerprint import Provenance, describe_reference


def write_ref_logps(
    model: nn.Module,
    dataset: Dataset,
    url: str,
    *,
    mixed_precision: Precision = "auto",
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
    progress: Progress | None = None,
    **batching: Any,
) -> Side:
    """Runs a model over every pack once and writes the log-prob of each sequence, float32.

    A collective call if torch.distributed runs: the ranks share the packs, and rank 0 commits. A
    killed run leaves its finished parts in the side dataset's folder; the next run with the same
    model, data and settings verifies and reuses them.

    Args:
        model: a model from :func:`~packstore.torch.models.load.load_model`, whole on every rank.
        dataset: a dataset of any kind and layout.
        url: destination of the side dataset: a local folder or an fsspec URL that all ranks reach.
        mixed_precision: ``bf16`` runs under bfloat16 autocast, as training with that setting does;
            ``none`` keeps the autocast that is active around this call, if any; ``auto``: the
            choice of training, see
            :func:`~packstore.torch.reference.arithmetic.choose_precision`.
        overwrite: replace an existing side dataset.
        storage_options: options of the fsspec filesystem of `url`.
        progress: called as packs finish on this rank.
        batching: `packs_per_batch` or `tokens_per_batch`; default: 1 pack, on a CUDA device the
            tokens of 4.

    Returns:
        The side dataset; join it with ``PackedDataset(…, side=[…])``.

    Raises:
        DatasetExistsError: a side dataset exists, and `overwrite` is False.
        CompatibilityError: the model's vocabulary does not hold the token ids.
        FormatError: the model returns log-probs that are not finite.
        StorageError: no space, no permission, or the store refuses.
    """
    check_model(dataset, model)
    weight = next(model.parameters())
    precision = choose_precision(mixed_precision, weight.device, weight.dtype)
    lower = partial(autocast, weight.device, precision)
    size = dataset.manifest.pack_size
    chosen: Any = inference_batching(batching, weight.device, size)
    config = BatchConfig.of(**chosen)
    location = Location(url, storage_options or {})

    def parts_of(provenance: Provenance) -> Parts:
        return Parts(location, fingerprint([dataset.manifest.fingerprint, provenance])[:16])

    def begin() -> tuple[Provenance, list[int]]:
        require_exclusive(location)
        refuse_existing(location, overwrite, SIDE)
        with lower():
            provenance = describe_reference(model, dataset)
        for name in ("packs_per_batch", "tokens_per_batch"):
            provenance[name] = getattr(config, name)
        numbers = {number for number, _ in _parts(dataset, _cutter(dataset, config))}
        return provenance, parts_of(provenance).missing(numbers)

    def finish() -> None:
        with SideWriter(
            url,
            dataset,
            {REF_LOGPS: "list<float32>"},
            provenance=provenance,
            overwrite=overwrite,
            storage_options=storage_options,
        ) as writer:
            for ids, counts, logps in parts.read():
                writer.write(ids, {REF_LOGPS: logps}, counts)
        parts.remove()

    provenance, missing = run_on_rank_zero(begin)
    parts = parts_of(provenance)
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if distributed() else (0, 1)
    mine = set(missing[rank::ranks])
    for number, values in _computed(model, dataset, config, lower, mine, progress):
        parts.put(number, values)
    if distributed():
        dist.barrier()
    run_on_rank_zero(finish)
    return open_side(url, storage_options)


@torch.no_grad()
def _computed(
    model: nn.Module,
    dataset: Dataset,
    config: BatchConfig,
    lower: Callable[[], AbstractContextManager[Any]],
    mine: set[int],
    progress: Progress | None,
) -> Iterator[tuple[int, Values]]:
    """Yields the values of each part in `mine`; the model runs in the context made by `lower`."""
    policy, device = PackedPolicy(model), next(iter(model.parameters())).device

    def started() -> Iterator[tuple[int, int, PackedBatch, Fetched]]:
        for number, place, batch in _batches(dataset, config, mine):
            with lower():
                logps = policy(to_device(batch, device))
            yield number, place, batch, Fetched(logps.float())

    with evaluating(model):
        for number, batches in groupby(one_late(started()), itemgetter(0)):
            values = []
            for _, place, batch, logps in batches:
                values.append(_values(batch, logps()))
                if progress is not None:
                    progress("reference", place, len(dataset), "packs")
            ids, counts, wide = (np.concatenate(x) for x in zip(*values, strict=True))
            yield number, (ids, counts, wide)


def _batches(
    dataset: Dataset, config: BatchConfig, mine: set[int]
) -> Iterator[tuple[int, int, PackedBatch]]:
    """Yields number of the part, packs up to here, and the batch, in file order."""
    cutter = _cutter(dataset, config)
    ahead: deque[tuple[int, int, int]] = deque()

    def wanted() -> Iterator[Int64]:
        for number, step in _parts(dataset, cutter):
            if number not in mine:
                continue
            for places, fillers in assign_ranks(step, 0, 1, config):
                ahead.append((number, step.stop, fillers))
                yield cutter.unseen[places]

    for packs in cutter.stream.read(wanted()):
        number, place, fillers = ahead.popleft()
        yield number, place, collate(packs, cutter.stream.kind, fillers=fillers)


def _cutter(dataset: Dataset, config: BatchConfig) -> StepCutter:
    """Makes the steps of one rank in file order, so that batches do not depend on ranks."""
    stream = StoredPacks(dataset, shuffle=False)
    return StepCutter(stream, Unseen(len(stream), Position()), config, 1)


def _parts(dataset: Dataset, cutter: StepCutter) -> Iterator[tuple[int, Step]]:
    """Yields each step, which is one batch, with the number of its part."""
    parts = min(PARTS, len(dataset))
    return ((step.start * parts // len(dataset), step) for step in cutter)


def _values(batch: PackedBatch, logps: Tensor) -> Values:
    """The values to store for a batch, without its fillers; both on the CPU."""
    counts, ids = batch.num_responses.numpy(), batch.example_ids.numpy()
    real = batch.weights.numpy() > 0
    wide: Float32 = logps.numpy()
    if not np.isfinite(wide).all():
        where = f"example {np.repeat(ids, counts)[~np.isfinite(wide)][0]}"
        needed = "the model must give finite log-probs"
        raise FormatError(sentence(where, needed, "NaN or infinity"))
    return ids[real], counts[real], wide[np.repeat(real, counts)]
