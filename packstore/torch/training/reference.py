"""Where the log-probs of the reference model come from while a policy is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from packstore.torch.collate import PackedBatch
from packstore.torch.head import PackedPolicy

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
