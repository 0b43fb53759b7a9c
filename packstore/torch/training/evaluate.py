"""Metrics of a model on a whole dataset, each example once, also by groups.

::

    figures = evaluate(
        model, packstore.open("held-out-8k"), loss="dpo", reference=ref, by="source"
    )
    figures["metrics"]["rewards/accuracies"], figures["by"]["forum"]["loss"]

``by="file"`` groups by input file, and works without carried columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from packstore.errors import CompatibilityError, ConfigError, display, sentence
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.side_manifest import REF_LOGPS
from packstore.io.side.parts import open_sides
from packstore.io.side.side import Side
from packstore.progress import Progress
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.transfer import inference_batching, to_device
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.logprobs.head import PackedPolicy
from packstore.torch.losses.dataset_metrics import (
    EvaluatedLoss,
    ExampleRows,
    Figures,
    GroupedMetrics,
)
from packstore.torch.losses.named import make_loss
from packstore.torch.losses.step_loss import StepLoss
from packstore.torch.models.compatibility import check_ids, check_model
from packstore.torch.models.unwrap import evaluating, is_reward_model
from packstore.torch.reference.provenance import (
    Precision,
    check_arithmetic,
    choose_autocast,
)
from packstore.torch.training.data import side_types

logger = logging.getLogger("packstore")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Dataset,
    *,
    loss: EvaluatedLoss | str = "dpo",
    reference: nn.Module | None = None,
    side: Side | str | PathLike[str] | Sequence[Side | str | PathLike[str]] = (),
    by: str | None = None,
    rows: bool = False,
    mixed_precision: Precision = "auto",
    head: str = "auto",
    max_keys: int | None = None,
    progress: Progress | None = None,
    **batching: Any,
) -> Figures:
    """Compute the metrics of `model` on `dataset`, exactly for any packing and ranks.

    A collective call if torch.distributed runs: the ranks share the packs.

    Args:
        model: a model from :func:`~packstore.torch.models.load.load_model`, a full copy
            on every rank.
        dataset: a packed dataset; with fewer packs than ranks, some ranks run only
            fillers.
        loss: the loss, or its name.
        reference: the reference model, on the device of `model`.
        side: side datasets to join, such as precomputed ``ref_logps``, or the top k of
            a teacher.
        by: a carried or joined column of texts, integers or booleans; or ``file``, the
            input file of each example.
        rows: also return a pyarrow table with a row for each example: log-probs, loss,
            margins, carried columns; see
            :class:`~packstore.torch.losses.dataset_metrics.ExampleRows`.
        mixed_precision: for both models: ``bf16`` runs under bfloat16 autocast,
            ``none`` keeps the autocast that is active around this call, if any;
            ``auto``: see
            :func:`~packstore.torch.reference.provenance.choose_precision`.
        head: `backend` of :func:`~packstore.torch.segment_logps`.
        max_keys: maximum keys of a pack, as in
            :class:`~packstore.torch.PackedDataset`.
        progress: called with stage, done, total and unit after each batch of this rank.
        batching: `packs_per_batch` or `tokens_per_batch`; default: 1 pack, on a CUDA
            device the tokens of 4.

    Raises:
        ConfigError: the loss needs a reference and there is none, or `by` is no column.
        CompatibilityError: model, side dataset or loss do not belong to the dataset.
        UnknownNameError: `loss` is unknown.
        UnsupportedFormatError: a pack of the dataset has more than `max_keys`.
    """
    loss_fn: Any = make_loss(loss, {})
    check_evaluated("argument loss", loss_fn)
    check_kind(loss_fn, model)
    warn_about_unused(loss_fn, None if reference is None else "reference")
    models = [model]
    if reference is not None and loss_fn.reference:
        models.append(reference)
    for checked_model in models:
        check_model(dataset, checked_model)
    loss_fn.check_data(dataset)

    sources = [side] if isinstance(side, Side | str | PathLike) else side
    sides = open_sides(sources, dataset.manifest, dataset.location.storage_options)
    data = PackedDataset(dataset, shuffle=False, side=sides, max_keys=max_keys)
    loss_fn.check_side(side_types(data.stream) or {}, dataset.url)
    device = next(model.parameters()).device
    pack_size = dataset.manifest.pack_size
    batch_settings: Any = inference_batching(batching, device, pack_size)
    pin_memory = device.type == "cuda"
    loader = PackedDataLoader(data, pin_memory=pin_memory, **batch_settings)
    batches = loader if progress is None else _report_batches(loader, progress)

    settings = {"backend": head, **loss_fn.head_settings}
    policies = [PackedPolicy(prepared, **settings) for prepared in models]
    reference_policy = policies[1] if len(policies) > 1 else None
    with choose_autocast(mixed_precision, model)(), evaluating(*models):
        for side_data in sides:
            has_reference = REF_LOGPS in side_data.manifest.columns
            if loss_fn.reference and has_reference and reference_policy is None:
                check_arithmetic(side_data, model)
        return evaluate_batches(
            policy=policies[0],
            batches=batches,
            loss_fn=loss_fn,
            reference=reference_policy,
            device=device,
            dataset=dataset,
            by=by,
            rows=rows,
        )


def warn_about_unused(loss_fn: StepLoss, *references: str | None) -> None:
    """Warn if the loss has no reference, but names of references are given."""
    names = [display(name) for name in references if name]
    if names and not loss_fn.reference:
        logger.warning("the loss has no reference; not used: %s", ", ".join(names))


def check_evaluated(where: str, loss_fn: StepLoss) -> None:
    """Raise for a loss without metrics of an evaluation, such as a PolicyLoss."""
    if not isinstance(loss_fn, EvaluatedLoss):
        raise ConfigError(
            sentence(
                where=where,
                rule="the loss must be a PreferenceLoss or DistillLoss",
                found=repr(loss_fn),
                remedy="Leave it out",
            )
        )


def _report_batches(
    loader: PackedDataLoader, progress: Progress
) -> Iterator[PackedBatch]:
    num_batches = len(loader)
    for number, batch in enumerate(loader, start=1):
        yield batch
        progress("evaluate", number, num_batches, "batches")


def check_kind(loss_fn: StepLoss, model: Any) -> None:
    """Raise if the loss compares scores and the model is no reward model, or the
    reverse.
    """
    is_reward = is_reward_model(model)
    if loss_fn.scores == is_reward:
        return
    required = "a reward model" if loss_fn.scores else "a causal LM"
    actual = "a reward model" if is_reward else "a causal LM"
    raise CompatibilityError(
        sentence(
            where=repr(loss_fn),
            rule=f"it is for {required}",
            found=actual,
            remedy="Use bradley_terry for reward models",
        )
    )


@torch.no_grad()
def evaluate_batches(
    policy: nn.Module,
    batches: Iterable[PackedBatch],
    loss_fn: EvaluatedLoss,
    reference: Callable[[PackedBatch], Tensor | None] | None,
    device: torch.device,
    dataset: Dataset | None = None,
    *,
    by: str | None = None,
    rows: bool = False,
) -> Figures:
    """Compute metrics of batches, at least one on each rank; a collective call.

    Args:
        policy: returns the log-probs of a batch that the loss takes, in nats.
        batches: the batches of this rank.
        loss_fn: the loss.
        reference: returns the reference's log-probs `[S]`; None: batches have them, or
            the loss needs none.
        device: device of the model.
        dataset: the dataset of the batches, for its columns; None: they come from
            elsewhere.
        by: column that groups the metrics.
        rows: also return a table of examples.
    """
    grouped = GroupedMetrics(loss_fn, dataset, by)
    examples = None
    if rows and dataset is not None:
        examples = ExampleRows(loss_fn, dataset.manifest.carried)
    model = policy.model if isinstance(policy, PackedPolicy) else policy
    with evaluating(policy):
        for batch in batches:
            check_ids(batch, model)
            placed = to_device(batch, device)
            logps = policy(placed)
            ref_logps = None if reference is None else reference(placed)
            grouped.add(logps, placed, ref_logps, on_cpu=batch)
            if examples is not None:
                examples.add(logps, placed, ref_logps, on_cpu=batch)
    figures = grouped.figures(device)
    if examples is not None:
        figures["rows"] = examples.table()
    return figures
