"""Computes log-probs of the reference model once, and stores them as a side dataset.

Example::

    model = load_model("my-sft-model", dtype="bfloat16").to("cuda")
    write_ref_logps(model, packstore.open("prefs-8k"), "prefs-8k-ref")
    data = PackedDataset("prefs-8k", side=["prefs-8k-ref"])     # batch.ref_logps

The values of single tokens, and the most probable ids in place of each, can be stored
beside them, from the same run.

They are computed as in training: packed attention, the head without logits, the same
precision. For any number of ranks, batches are as ``PackedDataLoader(…)`` makes them on
one rank in file order, so the values depend neither on ranks nor on resuming.
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
from pathlib import PurePosixPath
from typing import Any, Literal, NamedTuple, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from packstore.config import BatchConfig, fingerprint
from packstore.errors import (
    ConfigError,
    DatasetExistsError,
    DatasetNotFoundError,
    FormatError,
    PackstoreError,
    sentence,
)
from packstore.format.arrays import Int64, TopK
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.commit import next_version, require_exclusive
from packstore.io.manifest.side_manifest import (
    MAX_TOP,
    PART_FOLDER,
    PER_SEQUENCE,
    REF_LOGPS,
    REF_TOKEN_LOGPS,
    REF_TOP_K,
    SIDE,
)
from packstore.io.side.side import Side, SideWriter, open_side
from packstore.io.store.location import Location
from packstore.io.store.operations import remove_all, remove_empty
from packstore.progress import Progress
from packstore.registry import choice
from packstore.torch.batch.batch import PackedBatch, collate
from packstore.torch.batch.transfer import (
    CpuCopy,
    delay_by_one,
    inference_batching,
    to_device,
)
from packstore.torch.data.dataset import check_keys
from packstore.torch.data.position import Position
from packstore.torch.data.steps import StepCutter
from packstore.torch.data.stream import StoredPacks
from packstore.torch.logprobs.head import PackedPolicy, logps_and_top_k
from packstore.torch.logprobs.logprobs import sum_logps
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


TopDtype = Literal["float16", "uint8"]
"""How the log-probs of the most probable ids are stored."""


class Outputs(NamedTuple):
    """The values to compute beside the log-prob of each sequence.

    Attributes:
        per_token: the log-prob of each supervised token.
        top_k: number of most probable ids of each supervised token; None: none.
        top_k_dtype: dtype of their stored log-probs.
    """

    per_token: bool
    top_k: int | None
    top_k_dtype: TopDtype

    @property
    def columns(self) -> dict[str, str]:
        """The columns of the side dataset, name to type."""
        columns = {REF_LOGPS: PER_SEQUENCE}
        if self.per_token:
            columns[REF_TOKEN_LOGPS] = "token<float32>"
        if self.top_k is not None:
            columns[REF_TOP_K] = f"token<top{self.top_k},{self.top_k_dtype}>"
        return columns


class Values(NamedTuple):
    """Log-probs of some examples, in nats.

    Attributes:
        example_ids: `[E]`.
        num_responses: `[E]`, sequences of each example.
        num_targets: `[E]`, supervised tokens of each example.
        logps: `[S]`, log-prob of each sequence.
        token_logps: `[n]`, log-prob of each supervised token; or None.
        top_ids: `[n, k]`, the most probable ids in place of each; or None.
        top_logps: `[n, k]`, their log-probs; or None.
    """

    example_ids: npt.NDArray[Any]
    num_responses: npt.NDArray[Any]
    num_targets: npt.NDArray[Any]
    logps: npt.NDArray[Any]
    token_logps: npt.NDArray[Any] | None = None
    top_ids: npt.NDArray[Any] | None = None
    top_logps: npt.NDArray[Any] | None = None

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that are not None, by name."""
        fields = self._asdict()
        return {name: array for name, array in fields.items() if array is not None}

    @property
    def columns(self) -> dict[str, npt.NDArray[Any] | TopK]:
        """The values of the columns of the side dataset, by name."""
        columns: dict[str, npt.NDArray[Any] | TopK] = {REF_LOGPS: self.logps}
        if self.token_logps is not None:
            columns[REF_TOKEN_LOGPS] = self.token_logps
        if self.top_ids is not None:
            columns[REF_TOP_K] = TopK(self.top_ids, self.top_logps)
        return columns


class _Task(NamedTuple):
    """A batch to compute: its part of the dataset, and its packs in file order."""

    part: int
    packs: Int64


class _Running(NamedTuple):
    """A batch that the device computes: log-probs are on their way to the CPU.

    `copies` are fields of :class:`Values`, by name.
    """

    task: _Task
    batch: PackedBatch
    copies: dict[str, CpuCopy]


def write_ref_logps(
    model: nn.Module,
    dataset: Dataset,
    url: str,
    *,
    mixed_precision: Precision = "auto",
    head: str = "auto",
    max_keys: int | None = None,
    per_token: bool = False,
    top_k: int | None = None,
    top_k_dtype: TopDtype = "float16",
    overwrite: bool = False,
    storage_options: dict[str, Any] | None = None,
    progress: Progress | None = None,
    **batching: Any,
) -> Side:
    """Run a model over every pack once, and write the log-prob of each sequence.

    Log-probs are in nats, float32: the column `ref_logps`.

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
        max_keys: maximum keys of a pack, as in
            :class:`~packstore.torch.PackedDataset`.
        per_token: also write the log-prob of each supervised token, float32: the column
            `ref_token_logps`, which :class:`~packstore.torch.PolicyLoss` takes.
        top_k: also write so many ids, the most probable in place of each supervised
            token, and their log-probs: the column `ref_top_k`, which
            :class:`~packstore.torch.DistillLoss` takes.
        top_k_dtype: how these log-probs are stored: ``float16``, or ``uint8`` with a
            scale for each example.
        overwrite: replace an existing side dataset.
        storage_options: options of the fsspec filesystem of `url`.
        progress: called as packs finish on this rank.
        batching: `packs_per_batch` or `tokens_per_batch`; default: 1 pack, on a CUDA
            device the tokens of 4.

    Returns:
        The side dataset; join it with ``PackedDataset(…, side=[…])``.

    Raises:
        DatasetExistsError: another side dataset exists, and `overwrite` is False. A
            side dataset of the same model, data and settings is returned as it is.
        CompatibilityError: the model's vocabulary does not hold the token ids.
        ConfigError: `top_k` is not from 1 to 1024, or above the model's vocabulary.
        FormatError: the model returns log-probs that are not finite.
        StorageError: no space, no permission, or the store refuses.
        UnsupportedFormatError: a pack of the dataset has more than `max_keys`.
    """
    outputs = Outputs(per_token, top_k, top_k_dtype)
    check_outputs(outputs)
    check_keys(dataset, max_keys)
    check_model(dataset, model)
    policy = PackedPolicy(model, backend=head, per_token=True)
    autocast = choose_autocast(mixed_precision, model)
    device = next(model.parameters()).device
    settings: Any = inference_batching(batching, device, dataset.manifest.pack_size)
    config = BatchConfig.of(**settings)
    location = Location(url, storage_options or {})

    def prepare() -> tuple[Provenance, list[int] | None]:
        """Return the provenance, and the result of :func:`_remaining_parts`."""
        require_exclusive(location)
        with autocast():
            provenance = describe_reference(model, dataset)
        provenance["packs_per_batch"] = config.packs_per_batch
        provenance["tokens_per_batch"] = config.tokens_per_batch
        run = _Run(dataset, provenance, outputs.columns)
        return provenance, _remaining_parts(location, run, config, overwrite)

    provenance, remaining_parts = run_on_rank_zero(prepare)
    if remaining_parts is None:
        log.info(
            "%s: already there, of the same model, data and settings", location.display
        )
        return open_side(url, storage_options)

    run = _Run(dataset, provenance, outputs.columns)
    parts = _Parts(location, run)
    own_parts = _share_of_rank(remaining_parts)
    computed = _compute_parts(
        policy, outputs, dataset, config, autocast, own_parts, progress
    )
    for part, values in computed:
        parts.put(part, values)
    if is_distributed():
        dist.barrier()

    def commit() -> None:
        _commit(parts, run, overwrite=overwrite)

    run_on_rank_zero(commit)
    return open_side(url, storage_options)


class _Run(NamedTuple):
    """The inputs that decide the values of a side dataset."""

    dataset: Dataset
    provenance: Provenance
    columns: dict[str, str]


def check_outputs(outputs: Outputs) -> None:
    """Raise ConfigError if `top_k` is out of range, or its dtype unknown."""
    choice("top_k_dtype", outputs.top_k_dtype, get_args(TopDtype))
    k = outputs.top_k
    if k is not None and not 1 <= k <= MAX_TOP:
        rule = f"must be from 1 to {MAX_TOP}"
        raise ConfigError(sentence("top_k", rule=rule, found=str(k)))


def _remaining_parts(
    location: Location, run: _Run, config: BatchConfig, overwrite: bool
) -> list[int] | None:
    """Return the parts that earlier runs have not finished; None if the side dataset is
    committed.

    Raises:
        DatasetExistsError: another side dataset exists, and `overwrite` is False.
    """
    if not overwrite and _is_committed(location, run):
        return None
    next_version(location, overwrite, SIDE)  # raises if one exists
    all_parts = {task.part for task in _tasks(run.dataset, config)}
    finished = {part for part, _ in _Parts(location, run).read()}
    return sorted(all_parts - finished)


def _is_committed(location: Location, run: _Run) -> bool:
    """Return True if a run like this one has committed the side dataset."""
    try:
        manifest = open_side(location.url, location.storage_options).manifest
    except DatasetNotFoundError:
        return False
    return (
        manifest.fingerprint == run.dataset.manifest.fingerprint
        and manifest.provenance == run.provenance
        and manifest.columns == run.columns
    )


def _share_of_rank(parts: list[int]) -> list[int]:
    if not is_distributed():
        return parts
    return parts[dist.get_rank() :: dist.get_world_size()]


def _commit(parts: _Parts, run: _Run, *, overwrite: bool) -> None:
    """Commit the finished parts as a side dataset, and remove them."""
    with SideWriter(
        parts.location.url,
        run.dataset,
        run.columns,
        provenance=run.provenance,
        overwrite=overwrite,
        storage_options=dict(parts.location.storage_options),
    ) as writer:
        for _, values in parts.read():
            writer.write(
                values.example_ids,
                values.columns,
                values.num_responses,
                values.num_targets,
            )
    parts.remove()


def _tasks(dataset: Dataset, config: BatchConfig) -> Iterator[_Task]:
    """Yield the batches of a loader on one rank, so that ranks change no value."""
    stream = StoredPacks(dataset, shuffle=False)
    num_parts = min(PARTS, len(stream))
    for step in StepCutter(stream, Position(), config, world_size=1):
        for start, stop in pairwise(step.edges):
            part = start * num_parts // len(stream)
            yield _Task(part, np.arange(start, stop))


@torch.no_grad()
def _compute_parts(
    policy: PackedPolicy,
    outputs: Outputs,
    dataset: Dataset,
    config: BatchConfig,
    autocast: Callable[[], AbstractContextManager[Any]],
    parts: Sequence[int],
    progress: Progress | None,
) -> Iterator[tuple[int, Values]]:
    """Yield number and values of some parts, in order."""
    selected = set(parts)
    tasks = (task for task in _tasks(dataset, config) if task.part in selected)
    with evaluating(policy.model):
        running = _start_batches(policy, outputs, dataset, tasks, autocast)
        # The device computes the next batch while the host handles one.
        for part, batches in groupby(delay_by_one(running), key=_part_of):
            values = []
            for running_batch in batches:
                values.append(_wait_for_values(running_batch))
                if progress is not None:
                    num_done = int(running_batch.task.packs[-1]) + 1
                    progress("reference", num_done, len(dataset), "packs")
            yield part, _concatenate(values)


def _part_of(running: _Running) -> int:
    return running.task.part


def _concatenate(values: Sequence[Values]) -> Values:
    arrays_of_parts = [part.arrays for part in values]
    arrays = {
        name: np.concatenate([arrays[name] for arrays in arrays_of_parts])
        for name in arrays_of_parts[0]
    }
    return Values(**arrays)


def _start_batches(
    policy: PackedPolicy,
    outputs: Outputs,
    dataset: Dataset,
    tasks: Iterator[_Task],
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Iterator[_Running]:
    """Yield each batch once its computation has started."""
    stream = StoredPacks(dataset, shuffle=False)
    device = next(policy.parameters()).device
    tasks, tasks_ahead = tee(tasks)
    packs_of_tasks = stream.read(packs for _, packs in tasks_ahead)
    for task, packs in zip(tasks, packs_of_tasks, strict=True):
        batch = collate(packs, stream.kind)
        with autocast():
            check_ids(batch, policy.model)
            values = _compute_values(policy, to_device(batch, device), outputs)
        copies = {name: CpuCopy(tensor) for name, tensor in values.items()}
        yield _Running(task, batch, copies)


def _compute_values(
    policy: PackedPolicy, batch: PackedBatch, outputs: Outputs
) -> dict[str, Tensor]:
    """Return log-probs and ids as fields of :class:`Values`, by name."""
    values = {}
    if outputs.top_k is None:
        token_logps = policy(batch)
    else:
        token_logps, top = logps_and_top_k(
            policy.model, batch, outputs.top_k, backend=policy.settings["backend"]
        )
        values["top_ids"] = top.ids
        values["top_logps"] = top.logps
    values["logps"] = sum_logps(batch, token_logps).float()
    if outputs.per_token:
        values["token_logps"] = token_logps.float()
    return values


def _wait_for_values(running: _Running) -> Values:
    """Return the log-probs of a batch.

    Raises:
        FormatError: a log-prob is not finite.
    """
    batch = running.batch
    arrays = {name: copy.wait().numpy() for name, copy in running.copies.items()}
    values = Values(
        example_ids=batch.example_ids.numpy(),
        num_responses=batch.num_responses.numpy(),
        num_targets=batch.num_targets.numpy(),
        **arrays,
    )
    # The log-probs of tokens are finite where their sum is: none is above 0.
    is_finite = np.isfinite(values.logps)
    if not is_finite.all():
        example = np.repeat(values.example_ids, values.num_responses)[~is_finite][0]
        raise FormatError(
            sentence(
                f"example {example}",
                rule="the model must give finite log-probs",
                found="NaN or infinity",
            )
        )
    return values


class _Parts:
    """Finished parts: files named by number and hash.

    The name of their folder is a hash of the model, data, settings and columns.
    """

    def __init__(self, location: Location, run: _Run) -> None:
        source = run.dataset.manifest.fingerprint
        name = fingerprint([source, run.provenance, run.columns])[:16]
        self.location = location
        self.folder = f"{PART_FOLDER}{name}"

    def put(self, part: int, values: Values) -> None:
        """Write a finished part, atomically."""
        file = io.BytesIO()
        np.savez(file, **values.arrays)  # type: ignore[arg-type]
        sha256 = hashlib.sha256(file.getbuffer()).hexdigest()
        path = f"{self.folder}/{part:05d}-{sha256}.npz"
        # A file of this name has the same bytes.
        with contextlib.suppress(DatasetExistsError):
            self.location.create_bytes(path, file.getvalue())

    def read(self) -> Iterator[tuple[int, Values]]:
        """Yield number and values of each part, in order; remove damaged parts."""
        for path in self._paths():
            part, sha256 = PurePosixPath(path).stem.split("-")
            data = self.location.read_bytes(path)
            if hashlib.sha256(data).hexdigest() != sha256:
                self.location.remove(path)
                continue
            with np.load(io.BytesIO(data)) as arrays:
                yield int(part), Values(**arrays)

    def remove(self) -> None:
        """Remove the parts, after their values were committed."""
        remove_all(self.location, self._paths())
        remove_empty(self.location, self.folder)

    def _paths(self) -> list[str]:
        pattern = re.compile(r"[0-9]{5}-[0-9a-f]{64}\.npz")
        names = [entry.name for entry in self.location.files(self.folder)]
        return [f"{self.folder}/{name}" for name in names if pattern.fullmatch(name)]


def run_on_rank_zero(function: Callable[[], T]) -> T:
    """Run a function on rank 0; return its result, or raise its error, on all ranks.

    A collective call if torch.distributed runs.
    """
    if not is_distributed():
        return function()

    outcome: list[Any] = [None, None]  # result, error
    error_here: Exception | None = None
    if dist.get_rank() == 0:
        try:
            outcome[0] = function()
        except Exception as error:
            # Any error, such as no memory: the other ranks would wait for ever.
            error_here = error
            outcome[1] = error
            if not isinstance(error, PackstoreError):
                outcome[1] = PackstoreError(f"rank 0 ended with {error!r}.")
    dist.broadcast_object_list(outcome)

    if error_here is not None:
        raise error_here
    result, error_on_rank_zero = outcome
    if error_on_rank_zero is not None:
        raise error_on_rank_zero
    value: T = result
    return value
