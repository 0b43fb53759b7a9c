"""TRL's DPOTrainer on packed batches, with its own config and data::

    PackedDPOTrainer("Qwen/Qwen3-0.6B", args=DPOConfig(output_dir="run"),
    train_dataset=dataset)

Loss, reference, adapters, tokenization, evaluation and checkpoints are those of TRL's
settings; the table of all of them is in ``docs/from-trl.md``.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import datasets  # type: ignore[import-untyped]
import torch
from torch import Tensor
from trl import DPOConfig, DPOTrainer  # type: ignore[attr-defined]

from packstore.config.settings import check_class
from packstore.errors import (
    CompatibilityError,
    ConfigError,
    UnknownNameError,
    display,
    quote,
    sentence,
)
from packstore.registry import meant
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.data.in_memory import PackCollator
from packstore.torch.logprobs.head import PackedPolicy
from packstore.torch.logprobs.logprobs import segment_logps
from packstore.torch.losses.formulas import LOSSES
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.losses.terms import UNSUPPORTED_LOSSES
from packstore.torch.models.load import check_found
from packstore.torch.models.model import use_packed_attention
from packstore.torch.models.replaced import release, restore_forward
from packstore.torch.models.unwrap import adapted, as_reference, evaluating, unwrapped
from packstore.torch.training.arguments import (
    OF_PACKS,
    Refusals,
    check_arguments,
    examples_of_step,
)
from packstore.torch.training.arguments import REFUSED as REFUSED_BY_ALL
from packstore.torch.training.data import datasets_of, is_packed
from packstore.torch.training.trainer_steps import (
    PackedSteps,
    release_copy,
    take_batches,
)

REFUSED: Refusals = {
    "ld_alpha": ((None,), "It needs the log-prob of each token"),
    "pad_to_multiple_of": (
        (None,),
        "Rows are packed; packstore.torch.pad_batch pads them",
    ),
    "truncation_mode": (("keep_start",), "TRL withdraws keep_end, too"),
    "use_weighting": ((False,), "WPO needs the distribution of each token"),
}
"""Settings of DPOConfig that packs do not go with; all others are honoured."""

NAMES = {"sigmoid": "dpo", "sigmoid_norm": "dpo_norm"}
"""TRL's names of losses -> names here, where they differ."""

SMOOTHED = {"robust", "exo_pair"}
"""Losses of TRL that `label_smoothing` changes."""

DIVERGENCES = {
    "forward_kl": "fdpo_forward_kl",
    "js_divergence": "fdpo_js",
    "alpha_divergence": "fdpo_alpha",
}
"""Values of `f_divergence_type` -> losses in the place of `sigmoid`."""


class PackedDPOTrainer(PackedSteps, DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer, with its arguments and its config; only the batches are packed.

    Args:
        model: as for TRL's trainer: a name, a folder, or a model, which is prepared for
            packed attention in place.
        ref_model: as for TRL's trainer. Without one a PEFT policy's own base serves, or
            the model is loaded again.
        args: the config. Of its own fields, those of :data:`REFUSED` are refused.
        data_collator: a :class:`~packstore.torch.PackCollator`, to choose a layout;
            default: ``concat``.
        train_dataset: preference data as for TRL's trainer, tokenized by it, with each
            device batch laid end to end; or a packed dataset: a folder, a URL, or a
            packstore dataset. An optimizer step then has as many pairs as the config
            says, in any packs.
        eval_dataset: the same, or several by name.
        kwargs: further arguments of TRL's trainer.

    Raises:
        ConfigError: a setting, loss or dataset does not go with packs.
        CompatibilityError: a packed dataset has no pairs, or holds longer sequences
            than `max_length` of the config.
    """

    def __init__(
        self,
        model: Any,
        ref_model: Any = None,
        args: DPOConfig | None = None,
        data_collator: PackCollator | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        **kwargs: Any,
    ) -> None:
        config = DPOConfig("dpo") if args is None else args
        remedy = "PackedTrainer takes TrainingArguments"
        check_class("argument args", config, DPOConfig, remedy)
        for name in (model, ref_model):
            if isinstance(name, str):
                check_found(name)
            release_copy(name)
        self.loss_fn = loss_of(config)
        train, held_out = self._opened(train_dataset), self._all_opened(eval_dataset)
        if is_packed(train):
            args = copy.copy(config)
            check_arguments(args, OF_PACKS)
            self.examples_per_step = examples_of_step(args, None)
            # TRL takes datasets' classes only, and asks for columns.
            train_dataset = datasets.Dataset.from_list([{"prompt": ""}])
        self._packed = train
        self._collator = data_collator or PackCollator("preference")
        check_class(
            "argument data_collator", self._collator, PackCollator, "Leave it out"
        )
        check_arguments(None, {}, kwargs)
        super().__init__(
            model, ref_model, args, self._collator, train_dataset, held_out, **kwargs
        )
        # Accelerate's first rank would cut up batches for all ranks.
        self.accelerator.dataloader_config.dispatch_batches = False
        dropout = self.args.disable_dropout
        take_off_fused_head(unwrapped(self.model))
        use_packed_attention(self.model, disable_dropout=dropout)
        self._reference_policy: Any = None
        if self.ref_model is not None:
            # Its parts then run under autocast, in place of the whole that Accelerate
            # prepared.
            inner = self.accelerator.unwrap_model(self.ref_model)
            release(inner)
            take_off_fused_head(inner)
            own, given = (
                self.accelerator.unwrap_model(self.model).dtype,
                config.model_init_kwargs,
            )
            if ref_model is None and "dtype" in (given or ()) and inner.dtype != own:
                rule, remedy = (
                    f"dtype must be the model's own, {own}",
                    "Leave it out, or cast it",
                )
                raise ConfigError(
                    sentence(
                        "setting model_init_kwargs", rule, str(inner.dtype), remedy
                    )
                )
            use_packed_attention(inner, disable_dropout=dropout)
            if not (
                self.is_fsdp_enabled or self.is_deepspeed_enabled
            ):  # whose heads are not whole
                self._reference_policy = PackedPolicy(inner).eval()
        self._check_model(self.model, [*datasets_of(train, held_out)])
        if is_packed(train):
            self.train_dataset = train
        take_batches(self.model)
        self._prepare_run()

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, dataset_name: str
    ) -> Any:
        """Tokenizes what TRL tokenizes; a packed dataset is checked instead."""
        self._collator.max_length = args.max_length
        if dataset_name == "train" and is_packed(self._packed):
            check_packed(self._packed, args)
            return dataset
        if is_packed(dataset := self._opened(dataset)):
            check_packed(dataset, args)
            return dataset
        return super()._prepare_dataset(dataset, processing_class, args, dataset_name)

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> tuple[Tensor, Tensor]:
        """Returns log-probs of the reference for chosen and rejected sides, `[n]` in
        nats each.
        """
        use_packed_attention(model, disable_dropout=self.args.disable_dropout)
        base_of = adapted(self.model) if self.ref_model is None else None
        context = evaluating(model) if base_of is None else as_reference(model, base_of)
        with torch.no_grad(), context:
            chosen, rejected = self._from_logits(model, inputs).view(-1, 2).unbind(1)
        return chosen, rejected

    def _online_reference(self, model: Any, batch: PackedBatch) -> Tensor | None:
        if self.ref_model is None:
            return super()._online_reference(model, batch)
        if self._reference_policy is None:
            with evaluating(self.ref_model):
                return self._from_logits(self.ref_model, batch)
        with self.accelerator.autocast():
            logps: Tensor = self._reference_policy(batch)
        return logps

    def _from_logits(self, model: Any, batch: PackedBatch) -> Tensor:
        with self.accelerator.autocast():
            return segment_logps(batch, logits=model(**batch.model_inputs()).logits)


def take_off_fused_head(model: Any) -> None:
    """Give a model the forward call again that TRL has replaced, to compute its losses
    there.

    Packs need none of it, and in a deep copy of the model it would run the original's
    weights.
    """
    function: Any = getattr(vars(model).get("forward"), "__func__", None)
    code = getattr(function, "__code__", None)
    if code is not None and code.co_name == "_fused_forward":
        restore_forward(
            model, inspect.getclosurevars(function).nonlocals["original_forward"]
        )


def loss_of(args: DPOConfig) -> PreferenceLoss:
    """Returns the loss of the config; refuses settings that packs, or this loss, do not
    go with.
    """
    check_arguments(args, {**REFUSED_BY_ALL, **REFUSED})
    terms: dict[str, Any] = {}
    weights = args.loss_weights or [1.0] * len(args.loss_type)
    for loss, weight in zip(args.loss_type, weights, strict=True):
        if loss == "sft":
            rule = "it must not depend on the packing"
            found = "'sft', which averages the tokens of a device batch in TRL"
            remedy = "`packstore train` has sft_weight, over the step"
            raise ConfigError(sentence("setting loss_type", rule, found, remedy))
        parameters = {"beta": args.beta}
        name = NAMES.get(loss, loss)
        if name not in {*LOSSES, *UNSUPPORTED_LOSSES}:
            near = meant(loss, [*NAMES, *LOSSES])
            raise UnknownNameError(
                f"setting loss_type: unknown loss {quote(loss)}.{near}"
            )
        if args.f_divergence_type != "reverse_kl":
            if loss != "sigmoid":
                rule, found = (
                    f"it must be 'reverse_kl' with {loss!r}",
                    repr(args.f_divergence_type),
                )
                remedy = "It goes with loss_type 'sigmoid'"
                raise ConfigError(
                    sentence("setting f_divergence_type", rule, found, remedy)
                )
            name = DIVERGENCES.get(args.f_divergence_type, args.f_divergence_type)
            if name == "fdpo_alpha":
                parameters["alpha"] = args.f_alpha_divergence_coef
        if loss in SMOOTHED:
            parameters["label_smoothing"] = args.label_smoothing
        if loss == "discopop":
            parameters["tau"] = args.discopop_tau
        before = terms.get(name, {"weight": 0.0})["weight"]
        terms[name] = {**parameters, "weight": before + weight}
    if args.label_smoothing and SMOOTHED.isdisjoint(args.loss_type):
        rule = (
            f"it must be 0: label_smoothing changes none of {args.loss_type}, in "
            "TRL neither"
        )
        remedy = "Take loss_type 'robust', or cdpo in `packstore train`"
        found = str(args.label_smoothing)
        raise ConfigError(sentence("setting label_smoothing", rule, found, remedy))
    return PreferenceLoss(terms)


def check_packed(data: Any, args: DPOConfig) -> None:
    """Refuses a packed dataset that the config would truncate, precompute or not
    understand.
    """
    if args.precompute_ref_log_probs:
        rule = "it must be off with a packed dataset"
        remedy = (
            "Write them once by `packstore ref-logps`, and give "
            "PackedDataset(url, side=[…])"
        )
        raise ConfigError(
            sentence("setting precompute_ref_log_probs", rule, "True", remedy)
        )
    for dataset in datasets_of(data):
        longest = dataset.manifest.statistics.longest_sequence
        if args.max_length is not None and longest > args.max_length:
            rule = (
                f"sequences must have at most max_length {args.max_length} of DPOConfig"
            )
            remedy = (
                "Set max_length=None to train on whole sequences, or pack with "
                "this max_length"
            )
            found = f"{longest} tokens"
            raise CompatibilityError(
                sentence(display(dataset.url), rule, found, remedy)
            )
