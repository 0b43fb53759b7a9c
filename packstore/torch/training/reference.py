"""Where the log-probs of the reference model come from while a policy is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from packstore.io.dataset import Dataset
from packstore.io.side import open_side
from packstore.torch.collate import PackedBatch
from packstore.torch.head import PackedPolicy
from packstore.torch.load import is_adapter, load_model
from packstore.torch.made_with import check_arithmetic, check_reference
from packstore.torch.on_first import on_first
from packstore.train_config import TrainConfig

Reference = Callable[[PackedBatch], Tensor | None]
"""Gives `[S]`, or None: those that the batch carries hold, or the loss needs none."""

REF_ADAPTER = "ref"
"""The name of a frozen adapter that is the reference."""


def of_the_batch(batch: PackedBatch) -> None:
    """The reference of a loss without one, or with precomputed log-probs: nothing is computed."""


class SecondModel:
    """A frozen model beside the policy, whole on every rank.

    Args:
        model: as :func:`packstore.torch.load.load_model` gave it, on the device of the batches.
        autocast: makes the context that the policy computes in: in another precision, the two would
            differ from the first step on.
    """

    def __init__(
        self, model: nn.Module, autocast: Callable[[], AbstractContextManager[Any]] = nullcontext
    ) -> None:
        self.policy, self.autocast = PackedPolicy(model), autocast

    @torch.no_grad()
    def __call__(self, batch: PackedBatch) -> Tensor:
        """The log-probs, `[S]`."""
        with self.autocast():
            logps: Tensor = self.policy(batch)
            return logps


class OwnAdapter:
    """The policy itself without its adapter, or with the frozen one that it started from.

    Args:
        policy: the :class:`~packstore.torch.head.PackedPolicy`, in its wrapper.
        adapted: the PEFT model inside.
    """

    def __init__(self, policy: nn.Module, adapted: Any) -> None:
        self.policy, self.adapted = policy, adapted

    @torch.no_grad()
    def __call__(self, batch: PackedBatch) -> Tensor:
        """The log-probs, `[S]`."""
        training = self.policy.training
        self.policy.eval()
        try:
            with self._as_reference():
                logps: Tensor = self.policy(batch)
                return logps
        finally:
            self.policy.train(training)

    def _as_reference(self) -> AbstractContextManager[None]:
        if REF_ADAPTER in self.adapted.peft_config:
            return _active(self.adapted, REF_ADAPTER)
        off: AbstractContextManager[None] = self.adapted.disable_adapter()
        return off


@contextmanager
def _active(adapted: Any, name: str) -> Iterator[None]:
    before = adapted.active_adapter
    adapted.set_adapter(name, inference_mode=True)
    try:
        yield
    finally:
        adapted.set_adapter(before)


def check_precomputed(
    config: TrainConfig,
    policy: Any,
    before: Mapping[str, Any] | None,
    sides: Sequence[tuple[str | None, Dataset | None]],
    accelerator: Any,
) -> None:
    """Refuses precomputed log-probs that are not those of the reference; a collective call.

    Compares the whole when a run begins, and again where the settings name others since; of a run
    that goes on with the same ones it only logs that it computes in other arithmetic than they did.

    Args:
        config: of the run.
        policy: the model, as it is loaded; at the beginning it is the reference, unless the
            settings name one.
        before: the settings of the checkpoint that the run goes on from, or None.
        sides: URLs of side datasets, and the datasets that they belong to.
        accelerator: Accelerate's: the autocast and the device of the run.

    Raises:
        CompatibilityError: see :func:`~packstore.torch.made_with.check_reference`.
    """
    names = ("ref_logps", "validation_ref_logps")
    known = before is not None and all(before.get(n) == getattr(config, n) for n in names)
    device = accelerator.device

    def check() -> None:
        reference, path = policy, config.reference_model or config.model
        if not known and (config.reference_model is not None or before is not None):
            reference = load_model(path, dtype=config.dtype, attention=config.attention)
        for url, dataset in sides:
            if url is None or dataset is None:
                continue
            side = open_side(url, dict(config.storage_options) or None)
            with accelerator.autocast():
                if known:
                    check_arithmetic(side, reference, device)
                else:
                    exact = config.ref_logps_check == "exact"
                    own = {"adapter": is_adapter(path), "device": device, "exact": exact}
                    check_reference(side, reference, dataset, **own)

    if any(url is not None for url, _ in sides):
        on_first(check)
