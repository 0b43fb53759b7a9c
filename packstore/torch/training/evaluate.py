"""Metrics of a model over a whole dataset, each example once, optionally grouped by a
column.

::

    figures = evaluate(model, packstore.open("held-out-8k"), loss="dpo", reference=ref,
    by="source") figures["metrics"]["rewards/accuracies"],
    figures["by"]["forum"]["loss"]

``by="file"`` groups by input file, and works without carried columns.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor, nn

from packstore.config.settings import check_class
from packstore.errors import CompatibilityError, display, sentence
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.side_manifest import REF_LOGPS
from packstore.io.side.side import Side, open_side
from packstore.progress import Progress
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.transfer import inference_batching, to_device
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.data.loader import PackedDataLoader
from packstore.torch.logprobs.head import PackedPolicy
from packstore.torch.losses.dataset_metrics import ExampleRows, Figures, GroupedMetrics
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.losses.step_loss import StepLoss
from packstore.torch.models.compatibility import check_ids, check_model
from packstore.torch.models.unwrap import evaluating, is_reward_model
from packstore.torch.reference.provenance import (
    Precision,
    check_arithmetic,
    choose_autocast,
)

logger = logging.getLogger("packstore")


@torch.no_grad()
def evaluate(
    model: nn.Module,
    dataset: Dataset,
    *,
    loss: PreferenceLoss | str = "dpo",
    reference: nn.Module | None = None,
    side: Side | str | PathLike[str] | Sequence[Side | str | PathLike[str]] = (),
    by: str | None = None,
    rows: bool = False,
    mixed_precision: Precision = "auto",
    head: str = "auto",
    progress: Progress | None = None,
    **batching: Any,
) -> Figures:
    """Computes the metrics of `model` over `dataset`, exactly for any packing, batches
    and ranks.

    A collective call if torch.distributed runs: the ranks share the packs.

    Args:
        model: a model from :func:`~packstore.torch.models.load.load_model`, whole on
            every rank.
        dataset: a packed dataset; with fewer packs than ranks, some ranks run only
            fillers.
        loss: the loss, or its name.
        reference: the reference model, on the device of `model`.
        side: side datasets to join, such as precomputed ``ref_logps``.
        by: a carried or joined column of texts, integers or booleans; or ``file``, by
            the input file that each example came from.
        rows: also return a pyarrow table with a row for each example: log-probs, loss,
            margins, carried columns; see
            :class:`~packstore.torch.losses.dataset_metrics.ExampleRows`.
        mixed_precision: for both models: ``bf16`` runs under bfloat16 autocast,
            ``none`` keeps the autocast that is active around this call, if any;
            ``auto``: see
            :func:`~packstore.torch.reference.provenance.choose_precision`.
        head: `backend` of :func:`~packstore.torch.segment_logps`.
        progress: called with stage, done, total and unit after each batch of this rank.
        batching: `packs_per_batch` or `tokens_per_batch`; default: 1 pack, on a CUDA
            device the tokens of 4.

    Raises:
        ConfigError: the loss needs a reference and there is none, or `by` is no column.
        CompatibilityError: model, side dataset or loss do not belong to the dataset.
        UnknownNameError: `loss` is unknown.
    """
    loss_fn: Any = loss if isinstance(loss, StepLoss) else PreferenceLoss(loss)
    check_class("argument loss", loss_fn, PreferenceLoss)
    check_kind(loss_fn, model)
    tell_unused(loss_fn, None if reference is None else "reference")
    models = (
        [model] if reference is None or not loss_fn.reference else [model, reference]
    )
    for each in models:
        check_model(dataset, each)
    loss_fn.check_data(dataset)
    given = [side] if isinstance(side, Side | str | PathLike) else side
    sides = [s if isinstance(s, Side) else open_side(os.fspath(s)) for s in given]
    data = PackedDataset(dataset, shuffle=False, side=sides)
    device = next(model.parameters()).device
    chosen: Any = inference_batching(batching, device, dataset.manifest.pack_size)
    loader = PackedDataLoader(data, pin_memory=device.type == "cuda", **chosen)
    policies = [PackedPolicy(each, backend=head) for each in models]
    online = policies[1] if len(policies) > 1 else None
    with choose_autocast(mixed_precision, model)(), evaluating(*models):
        for joined in sides:
            if REF_LOGPS in joined.manifest.columns and online is None:
                check_arithmetic(joined, model)
        batches = loader if progress is None else _reported(loader, progress)
        how: Any = {"by": by, "rows": rows}
        return evaluate_batches(
            policies[0], batches, loss_fn, online, device, dataset, **how
        )


def tell_unused(loss_fn: StepLoss, *given: str | None) -> None:
    """Warns of references that are `given` to a loss without one."""
    names = ", ".join(map(display, filter(None, given)))
    if names and not loss_fn.reference:
        logger.warning("the loss has no reference; not used: %s", names)


def _reported(loader: PackedDataLoader, progress: Progress) -> Iterator[PackedBatch]:
    total = len(loader)
    for done, batch in enumerate(loader, 1):
        yield batch
        progress("evaluate", done, total, "batches")


def check_kind(loss_fn: PreferenceLoss, model: Any) -> None:
    """Refuses a causal LM for a loss of scores, and a reward model for one of
    log-probs.
    """
    if loss_fn.scores != is_reward_model(model):
        kinds = ["a causal LM", "a reward model"]
        rule, remedy = (
            f"it is for {kinds[loss_fn.scores]}",
            "Use bradley_terry for reward models",
        )
        found = kinds[not loss_fn.scores]
        raise CompatibilityError(sentence(f"{loss_fn!r}", rule, found, remedy))


@torch.no_grad()
def evaluate_batches(
    policy: nn.Module,
    batches: Iterable[PackedBatch],
    loss_fn: PreferenceLoss,
    reference: Callable[[PackedBatch], Tensor | None] | None,
    device: torch.device,
    dataset: Dataset | None = None,
    *,
    by: str | None = None,
    rows: bool = False,
) -> Figures:
    """Computes metrics of the batches, at least one on each rank, for evaluation;
    collective.

    `dataset` is theirs, if they are packed: it names groups, and the columns of rows.
    """
    grouped = GroupedMetrics(loss_fn, dataset, by)
    examples = None
    if rows and dataset is not None:
        examples = ExampleRows(loss_fn, dataset.manifest.carried)
    with evaluating(policy):
        for batch in batches:
            check_ids(
                batch, policy.model if isinstance(policy, PackedPolicy) else policy
            )
            here = to_device(batch, device)
            logps, ref_logps = policy(here), reference(here) if reference else None
            grouped.add(logps, here, ref_logps, batch)
            if examples is not None:
                examples.add(logps, here, ref_logps, batch)
    figures = grouped.figures(device)
    if examples is not None:
        figures["rows"] = examples.table()
    return figures
