"""A data collator and a loss function for transformers' Trainer, and for TRL's on top of it.

The model is unchanged, so that the Trainer saves it as usual;
:mod:`packstore.torch.integrations.hf_trainer` puts both into a trainer.
`per_device_train_batch_size` then counts packs; for records of token ids it counts examples, which
the collator lays end to end. The Trainer's item count becomes the divisor of the loss, over
accumulation and ranks. The mixin asks the model for the logits of supervised tokens only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from packstore.config import PackConfig
from packstore.errors import CompatibilityError, ConfigError, sentence
from packstore.format.arrays import Packs
from packstore.format.schema import require_kind
from packstore.torch.batch.batch import PackedBatch, collate
from packstore.torch.data.in_memory import in_one_pack
from packstore.torch.logprobs.logprobs import segment_logps
from packstore.torch.losses.divisor import StepDivisor
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.metrics import Metrics, all_reduce_sums
from packstore.torch.models.routers import (
    RouterSettings,
    carry,
    router_losses,
    router_settings,
)
from packstore.torch.models.unwrap import adapted, as_reference, evaluating

LOGITS_TO_KEEP = "logits_to_keep"
"""Argument of most models of transformers: the rows whose logits are computed."""


class PackedLabels:
    """A batch in the place of the Trainer's labels: counts what `loss_fn` does, or examples."""

    def __init__(
        self, batch: PackedBatch, loss_fn: PreferenceLoss | None = None, count: int | None = None
    ) -> None:
        self.batch, self.loss_fn, self._count = batch, loss_fn, count
        if loss_fn is not None and count is None:  # here, where the batch is on the CPU
            self._count = int(loss_fn.count(batch).count)

    def __getitem__(self, key: Any) -> Self:
        """Returns itself: the Trainer's slice drops a first token, which the items here lack."""
        return self

    def ne(self, ignored: int) -> Tensor:
        """Returns True for each item that the loss counts; by default each example of weight 1."""
        weights = self.batch.weights
        if self._count is None:
            return weights > 0
        return torch.ones(self._count, dtype=torch.bool, device=weights.device)

    def detach(self) -> Self:
        """Returns itself."""
        return self

    def to(self, device: Any, **_: Any) -> PackedLabels:
        """Returns the labels with the batch on `device`."""
        return PackedLabels(self.batch.to(device), self.loss_fn, self._count)


class PackedInputs(dict[str, Any]):
    """Keyword arguments of the model's forward call, and ``labels``."""

    @classmethod
    def of(cls, labels: PackedLabels) -> PackedInputs:
        """Makes the inputs of a batch."""
        return cls(**labels.batch.model_inputs(), labels=labels)

    def to(self, device: Any, **_: Any) -> PackedInputs:
        """Returns the inputs on `device`."""
        return PackedInputs.of(self["labels"].to(device))


class PackCollator:
    """Lays packs, or records of token ids, end to end as one batch.

    Args:
        kind: ``preference``, ``sft`` or ``scored``.
        config: for records, `layout`, `fields` and `carry`; their shapes are those of
            :func:`~packstore.torch.pack_in_memory`. Limits on number and length do not apply.
        loss_fn: the loss; required if it divides by something other than examples: tokens (`sft`),
            scored pairs, or packs.
        max_length: most tokens of a prompt with one side, of records of pairs: ends are cut off,
            as by TRL's ``truncation_mode="keep_start"``; default: none.

    Raises:
        UnknownNameError: `kind` is none of those.
    """

    def __init__(
        self,
        kind: str = "preference",
        config: PackConfig | None = None,
        *,
        loss_fn: PreferenceLoss | None = None,
        max_length: int | None = None,
    ) -> None:
        require_kind(kind)
        self.kind, self.config, self.loss_fn = kind, config or PackConfig(), loss_fn
        self.max_length = max_length

    def __call__(self, items: Sequence[Packs | Mapping[str, Any]]) -> PackedInputs:
        """Collates these items into one batch."""
        if not items:
            raise ConfigError("a batch must hold at least one item; found none.")
        packs: Sequence[Any] = items
        if not all(isinstance(item, Packs) for item in items):
            records = items if self.max_length is None else [*map(self._truncated, items)]
            packs = [in_one_pack(records, self.kind, self.config)]
        return PackedInputs.of(PackedLabels(collate(packs, self.kind), self.loss_fn))

    def _truncated(self, record: Any) -> dict[str, Any]:
        kept = max(0, (self.max_length or 0) - len(record["prompt_ids"]))
        sides = {name: record[name][:kept] for name in ("chosen_ids", "rejected_ids")}
        return {**record, **sides}


class PackedLoss:
    """The Trainer's ``compute_loss_func``: a sum over pairs, divided by the pairs of the step.

    Policy and reference are computed alike: from the logits of the model's forward call, in the
    precision that Accelerate runs the policy in.

    Args:
        loss_fn: the loss.
        reference: a frozen model on the device of the policy; default: the batch's ``ref_logps``,
            else a PEFT policy's own base (or its adapter named ``ref``).

    Attributes:
        metrics: training metrics; ``metrics.means()`` covers the time since the last call, over
            all ranks.
        held_out: the same for evaluation.
        policy: the trainer's model, which :class:`~packstore.torch.PackedTrainerMixin` sets.
        routers: settings of the load-balancing loss of its experts; None: there is none.

    Raises:
        ConfigError: the loss divides by two different counts, and the Trainer counts one.
    """

    def __init__(self, loss_fn: PreferenceLoss, reference: nn.Module | None = None) -> None:
        where = "transformers' Trainer"
        rule = "all must be divided by the number of pairs, which is all that it counts"
        if loss_fn.sft_weight and loss_fn.sft_average == "token":
            found = "a mean over tokens, of the SFT term"
            remedy = "Use sft_average='sequence_mean' or 'sequence_sum', or a loop of your own"
            raise ConfigError(sentence(where, rule, found, remedy))
        if loss_fn.weight_field is not None:
            found = f"weight_field={loss_fn.weight_field!r}"
            raise ConfigError(sentence(where, rule, found, "Use packstore train, or your own loop"))
        if loss_fn.scores:
            rule, remedy = "it must take log-probs", "Use packstore train, or your own loop"
            raise ConfigError(sentence(f"{where}, {loss_fn!r}", rule, "scores", remedy))
        self.loss_fn, self.reference = loss_fn, reference
        self.metrics, self.held_out = Metrics(), Metrics()
        self._tokens: Tensor | float = 0.0  # trained on, here, since they were last added
        self._total_tokens = 0.0
        self.policy: Any = None
        self.routers: RouterSettings | None = None

    def bind(self, policy: nn.Module, reference: nn.Module | None) -> None:
        """Takes the trainer's models: its reference model too, if there is none yet.

        Raises:
            CompatibilityError: weights that are trained are part of the reference.
        """
        self.policy, self.routers = policy, router_settings(policy)
        self.reference = self.reference or reference
        trained = {id(p) for p in policy.parameters() if p.requires_grad}
        if self.reference and any(id(p) in trained for p in self.reference.parameters()):
            raise CompatibilityError(
                "PackedLoss: the reference must stay as it is while the policy is trained; found a "
                "reference that shares weights with the policy. Give a copy; or none, for a PEFT "
                "policy: its own base then serves."
            )

    def __call__(
        self,
        outputs: Any,
        labels: PackedLabels,
        num_items_in_batch: Tensor | float | None = None,
    ) -> Tensor:
        """Returns the loss divided by `num_items_in_batch`; None: by the batch's own count."""
        if not self.loss_fn.by_example(labels.batch) and labels.loss_fn is not self.loss_fn:
            raise ConfigError(
                f"PackedLoss: the collator must count what {self.loss_fn!r} divides by; found "
                "examples or those of another loss. Make it "
                f"PackCollator({labels.batch.kind!r}, loss_fn=loss_fn), of the same loss."
            )
        logits = outputs["logits"]
        batch = labels.batch.to(logits.device)
        if num_items_in_batch is None:
            divisor = self.loss_fn.count(batch).above_zero()
        else:
            count: Any = num_items_in_batch  # a tensor stays one: nobody waits for its value
            divisor = StepDivisor(count, count if self.loss_fn.sft_weight else None)
        ref_logps = None
        if self.loss_fn.reference:
            keep = logits.shape[-2] != batch.num_tokens
            if self.reference is not None:
                ref_logps = reference_logps(self.reference, batch, keep=keep)
            elif batch.ref_logps is None and (peft_model := adapted(self.policy)) is not None:
                ref_logps = reference_logps(self.policy, batch, base_of=peft_model, keep=keep)
        logps = segment_logps(batch, logits=logits)
        if self.routers is not None and torch.is_grad_enabled():
            losses = router_losses(batch, outputs.get("router_logits"), self.routers)
            logps = carry(logps, losses, self.routers.model)
        out = self.loss_fn(logps, batch, ref_logps, divisor=divisor)
        (self.metrics if torch.is_grad_enabled() else self.held_out).add(out.metrics)
        if torch.is_grad_enabled():
            self._tokens = self._tokens + batch.lengths.sum()
        return out.loss

    def trained(self) -> dict[str, float]:
        """Returns the means of the metrics since the last call, and `num_tokens`, all trained on.

        A collective call. The tokens are those of the sequences, each with its prompt, as TRL
        counts them.
        """
        if not (means := self.metrics.means()):  # the last record after one of all steps
            return means
        self._total_tokens += all_reduce_sums([self._tokens])[0]
        self._tokens = 0.0
        return means | {"num_tokens": self._total_tokens}


def reference_logps(
    model: nn.Module, batch: PackedBatch, *, base_of: Any | None = None, keep: bool = True
) -> Tensor:
    """Log-probs `[S]` of a model or its base; with `keep` it makes logits of targets only."""
    kept = {LOGITS_TO_KEEP: batch.targets.rows} if keep else {}
    base = evaluating(model) if base_of is None else as_reference(model, base_of)
    with torch.no_grad(), base, _policy_precision(batch.targets.ids.device):
        return segment_logps(batch, logits=model(**batch.model_inputs(), **kept).logits)


def _policy_precision(device: torch.device) -> AbstractContextManager[Any]:
    """The autocast that Accelerate puts around the forward call of a prepared model."""
    accelerate: Any = sys.modules.get("accelerate.state")
    if accelerate is None or not accelerate.is_initialized():
        return nullcontext()
    precision = accelerate.AcceleratorState().mixed_precision
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
