"""Computes log-probs of the reference model once, and stores them as a side dataset.

::

    model = load_model("my-sft-model", dtype="bfloat16").to("cuda")
    write_ref_logps(model, packstore.open("prefs-8k"), "prefs-8k-ref")
    data = PackedDataset("prefs-8k", side=["prefs-8k-ref"])     # batch.ref_logps

They are computed as in training: packed attention, the head without logits, the same
precision. Batches are those of ``PackedDataLoader(…)`` in file order on one rank, for
any number of ranks, so the values depend neither on ranks nor on resuming.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import groupby, pairwise, tee
from operator import itemgetter
from pathlib import PurePosixPath
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import nn

from packstore.config import BatchConfig, fingerprint
from packstore.errors import (
    DatasetExistsError,
    DatasetNotFoundError,
    FormatError,
    PackstoreError,
    sentence,
)
from packstore.format.arrays import Int64
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.commit import next_version, require_exclusive
from packstore.io.manifest.side_manifest import PART_FOLDER, REF_LOGPS, SIDE
from packstore.io.side.side import Side, SideWriter, open_side
from packstore.io.store.location import Location
from packstore.io.store.operations import remove_all, remove_empty
from packstore.progress import Progress
from packstore.torch.batch.batch import PackedBatch, collate
from packstore.torch.batch.transfer import (
    CpuCopy,
    delay_by_one,
    inference_batching,
    to_device,
)
from packstore.torch.data.position import Position
from packstore.torch.data.steps import StepCutter
from packstore.torch.data.stream import StoredPacks
from packstore.torch.logprobs.head import PackedPolicy
from packstore.torch.metrics import is_distributed
from packstore.torch.models.compatibility import check_ids, check_model
from packstore.torch.models.unwrap import evaluating
from packstore.torch.reference.provenance import (
    Precision,
    Provenance,
    choose_autocast,
    describe_reference,
)

T = TypeVar("T")
log = logging.getLogger("packstore")

PARTS = 1024
"""Largest number of parts; a killed run loses one part per rank."""

Values = Sequence[npt.NDArray[Any]]
"""Example ids `[E]`, sequences of each `[E]`, log-probs `[S]` in nats."""


def write_ref_logps(
    model: nn.Module,
    dataset: Dataset,
    url: str,
    *,
    mixed_precision: Precision = "auto",
    head: str = "auto",
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
    progress: Progress | None = None,
    **batching: Any,
) -> Side:
    """Runs a model over every pack once and writes the log-prob of each sequence,
    float32.

    A collective call if torch.distributed runs: the ranks share the packs, and rank 0
    commits. A killed run leaves its finished parts in the side dataset's folder; the
    next run with the same model, data and settings verifies and reuses them.

    Args:
        model: a model from :func:`~packstore.torch.models.load.load_model`, whole on
            every rank.
        dataset: a dataset of any kind and layout.
        url: destination of the side dataset: a local folder or an fsspec URL that all
            ranks reach.
        mixed_precision: as in training: ``bf16`` runs under bfloat16 autocast, ``none``
            keeps the autocast around this call; ``auto``: see
            :func:`~packstore.torch.reference.provenance.choose_precision`.
        head: `backend` of :func:`~packstore.torch.segment_logps`.
        overwrite: replace an existing side dataset.
        storage_options: options of the fsspec filesystem of `url`.
        progress: called as packs finish on this rank.
        batching: `packs_per_batch` or `tokens_per_batch`; default: 1 pack, on a CUDA
            device the tokens of 4.

    Returns:
        The side dataset; join it with ``PackedDataset(…, side=[…])``.

    Raises:
        DatasetExistsError: another side dataset exists, and `overwrite` is False; one
            of the same model, data and settings is returned as it is.
        CompatibilityError: the model's vocabulary does not hold the token ids.
        FormatError: the model returns log-probs that are not finite.
        StorageError: no space, no permission, or the store refuses.
    """
    check_model(dataset, model)
    policy = PackedPolicy(model, backend=head)
    lower, device = (
        choose_autocast(mixed_precision, model),
        next(model.parameters()).device,
    )
    chosen: Any = inference_batching(batching, device, dataset.manifest.pack_size)
    config = BatchConfig.of(**chosen)
    location = Location(url, storage_options or {})

    def find_missing() -> tuple[Provenance, list[int] | None]:
        require_exclusive(location)
        with lower():
            provenance = describe_reference(model, dataset)
        for name in ("packs_per_batch", "tokens_per_batch"):
            provenance[name] = getattr(config, name)
        if not overwrite and _is_committed(location, dataset, provenance):
            return provenance, None
        next_version(location, overwrite, SIDE)
        numbers = {
            number
            for number, _ in _batches(StoredPacks(dataset, shuffle=False), config)
        }
        finished = {
            number for number, _ in _Parts(location, dataset, provenance).read()
        }
        return provenance, sorted(numbers - finished)

    provenance, missing = run_on_rank_zero(find_missing)
    if missing is None:
        log.info(
            "%s: already there, of the same model, data and settings", location.display
        )
        return open_side(url, storage_options)
    parts = _Parts(location, dataset, provenance)
    rank, ranks = (
        (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)
    )
    for number, values in _compute_parts(
        policy, dataset, config, lower, missing[rank::ranks], progress
    ):
        parts.put(number, values)
    if is_distributed():
        dist.barrier()
    run_on_rank_zero(lambda: _commit(parts, dataset, provenance, overwrite))
    return open_side(url, storage_options)


def _commit(
    parts: _Parts, dataset: Dataset, provenance: Provenance, overwrite: bool
) -> None:
    """Commits the finished parts as a side dataset."""
    with SideWriter(
        parts.location.url,
        dataset,
        {REF_LOGPS: "list<float32>"},
        provenance=provenance,
        overwrite=overwrite,
        storage_options=dict(parts.location.storage_options),
    ) as writer:
        for _, (ids, counts, logps) in parts.read():
            writer.write(ids, {REF_LOGPS: logps}, counts)
    parts.remove()


def _is_committed(location: Location, dataset: Dataset, provenance: Provenance) -> bool:
    """Returns True if the side dataset was committed by a run like this one."""
    try:
        manifest = open_side(location.url, location.storage_options).manifest
    except DatasetNotFoundError:
        return False
    recorded = manifest.fingerprint, manifest.provenance
    return recorded == (dataset.manifest.fingerprint, provenance)


@torch.no_grad()
def _compute_parts(
    policy: PackedPolicy,
    dataset: Dataset,
    config: BatchConfig,
    lower: Callable[[], AbstractContextManager[Any]],
    numbers: list[int],
    progress: Progress | None,
) -> Iterator[tuple[int, Values]]:
    """Yields number and values of some parts; the model runs in the context made by
    `lower`.
    """
    device = next(policy.parameters()).device
    stream, mine = StoredPacks(dataset, shuffle=False), set(numbers)
    batches, ahead = tee(
        batch for batch in _batches(stream, config) if batch[0] in mine
    )

    def submit_batches() -> Iterator[tuple[int, int, PackedBatch, CpuCopy]]:
        reading = stream.read(places for _, places in ahead)
        for (number, places), packs in zip(batches, reading, strict=True):
            batch = collate(packs, stream.kind)
            with lower():
                check_ids(batch, policy.model)
                logps = policy(to_device(batch, device))
            yield number, int(places[-1]) + 1, batch, CpuCopy(logps.float())

    with evaluating(policy.model):
        for number, group in groupby(delay_by_one(submit_batches()), itemgetter(0)):
            values = []
            for _, done, batch, copy in group:
                ids, counts = batch.example_ids.numpy(), batch.num_responses.numpy()
                logps = copy.wait().numpy()
                if not (finite := np.isfinite(logps)).all():
                    where = f"example {np.repeat(ids, counts)[~finite][0]}"
                    rule = "the model must give finite log-probs"
                    raise FormatError(sentence(where, rule, "NaN or infinity"))
                values.append((ids, counts, logps))
                if progress is not None:
                    progress("reference", done, len(dataset), "packs")
            yield (
                number,
                [np.concatenate(arrays) for arrays in zip(*values, strict=True)],
            )


def _batches(stream: StoredPacks, config: BatchConfig) -> Iterator[tuple[int, Int64]]:
    """Yields part and packs of each batch: those of one rank, so that ranks change no
    value.
    """
    parts = min(PARTS, len(stream))
    for step in StepCutter(stream, Position(), config, 1):
        for first, stop in pairwise(step.edges):
            yield first * parts // len(stream), np.arange(first, stop)


class _Parts:
    """Finished parts: files named by number and hash, in a folder named by what made
    the values.
    """

    def __init__(
        self, location: Location, dataset: Dataset, provenance: Provenance
    ) -> None:
        run = fingerprint([dataset.manifest.fingerprint, provenance])[:16]
        self.location, self.folder = location, f"{PART_FOLDER}{run}"

    def put(self, number: int, values: Values) -> None:
        """Writes a finished part, atomically."""
        file = io.BytesIO()
        np.savez(file, *values)
        name = f"{number:05d}-{hashlib.sha256(file.getbuffer()).hexdigest()}.npz"
        with contextlib.suppress(DatasetExistsError):  # of the same bytes
            self.location.create_bytes(f"{self.folder}/{name}", file.getvalue())

    def read(self) -> Iterator[tuple[int, Values]]:
        """Yields number and values of each part, in order; removes damaged ones."""
        for path in self._paths():
            number, sha256 = PurePosixPath(path).stem.split("-")
            data = self.location.read_bytes(path)
            if hashlib.sha256(data).hexdigest() == sha256:
                with np.load(io.BytesIO(data)) as arrays:
                    yield int(number), list(arrays.values())
            else:
                self.location.remove(path)

    def remove(self) -> None:
        """Removes the parts, after their values were committed."""
        remove_all(self.location, self._paths())
        remove_empty(self.location, self.folder)

    def _paths(self) -> list[str]:
        names = (entry.name for entry in self.location.files(self.folder))
        pattern = re.compile(r"[0-9]{5}-[0-9a-f]{64}\.npz")
        return [f"{self.folder}/{name}" for name in names if pattern.fullmatch(name)]


def run_on_rank_zero(make: Callable[[], T]) -> T:
    """Runs `make` on rank 0; returns its result, or raises its error, on all ranks.
    Collective.
    """
    if not is_distributed():
        return make()
    result: list[Any] = [None, None]
    failure: Exception | None = None
    if dist.get_rank() == 0:
        try:
            result[0] = make()
        except Exception as error:  # out of memory, say: the others would wait for ever
            known = isinstance(error, PackstoreError)
            result[1] = (
                error if known else PackstoreError(f"rank 0 ended with {error!r}.")
            )
            failure = error
    dist.broadcast_object_list(result)
    if failure is not None or result[1] is not None:
        raise failure or result[1]
    value: T = result[0]
    return value
