"""TRL's DPOTrainer on packed batches, with its own config and data.

::

    PackedDPOTrainer(
        "Qwen/Qwen3-0.6B", args=DPOConfig(output_dir="run"), train_dataset=dataset
    )

TRL's settings decide about loss, reference, adapters, tokenization, evaluation and
checkpoints; ``docs/from-trl.md`` has a table of all of them.
"""

from __future__ import annotations

import copy
import inspect
from collections import defaultdict
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
from packstore.registry import suggest
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.data.in_memory import PackCollator
from packstore.torch.logprobs.head import PackedPolicy
from packstore.torch.logprobs.logprobs import segment_logps
from packstore.torch.losses.formulas import LOSSES
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.losses.terms import UNSUPPORTED_LOSSES
from packstore.torch.models.load import require_reachable_hub
from packstore.torch.models.model import use_packed_attention
from packstore.torch.models.replaced import release, restore_forward
from packstore.torch.models.unwrap import (
    as_reference,
    evaluating,
    peft_model_of,
    unwrapped,
)
from packstore.torch.training.arguments import (
    REFUSED,
    REFUSED_WITH_DATASETS,
    Refusals,
    check_settings,
    check_trainer_arguments,
    set_step_size,
)
from packstore.torch.training.data import datasets_of, is_packed
from packstore.torch.training.trainer_steps import (
    PackedSteps,
    release_copy,
    take_batches,
)

REFUSED_OF_TRL: Refusals = {
    "ld_alpha": ((None,), "It needs the log-prob of each token"),
    "pad_to_multiple_of": (
        (None,),
        "Rows are packed; packstore.torch.pad_batch pads them",
    ),
    "truncation_mode": (("keep_start",), "TRL withdraws keep_end, too"),
    "use_weighting": ((False,), "WPO needs the distribution of each token"),
}
"""Settings of DPOConfig that are restricted with packs, besides `REFUSED` and
`REFUSED_WITH_DATASETS`: name -> allowed values, and the remedy for any other value.
"""

LOSS_NAMES = {"sigmoid": "dpo", "sigmoid_norm": "dpo_norm"}
"""TRL's name of a loss -> packstore's name, where they differ."""

SMOOTHED_LOSSES = {"robust", "exo_pair"}
"""Supported losses that `label_smoothing` changes in TRL 1; `sigmoid` ignores it."""

DIVERGENCES = {
    "forward_kl": "fdpo_forward_kl",
    "js_divergence": "fdpo_js",
    "alpha_divergence": "fdpo_alpha",
}
"""Value of `f_divergence_type` -> loss that replaces `sigmoid`."""


class PackedDPOTrainer(PackedSteps, DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer, with its arguments and its config; only the batches are packed.

    Args:
        model: as for TRL's trainer: a name, a folder, or a model, which is prepared for
            packed attention in place.
        ref_model: as for TRL's trainer. Without one, a PEFT policy's own base is the
            reference, or the model is loaded again.
        args: the config; :data:`REFUSED_OF_TRL` and `REFUSED`, with a packed dataset
            also `REFUSED_WITH_DATASETS`, list the fields that are restricted.
        data_collator: a :class:`~packstore.torch.PackCollator`, to choose a layout;
            default: ``shared_prefix``.
        train_dataset: preference data as for TRL's trainer, tokenized by it, with each
            device batch laid end to end; or a packed dataset: a folder, a URL, or a
            packstore dataset. Each optimizer step then takes, on average, as many pairs
            as batch size times accumulation times ranks, however many packs they fill.
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
        for source in (model, ref_model):
            if isinstance(source, str):
                require_reachable_hub(source)
            else:
                # It may be a copy of a model that another trainer had prepared.
                release_copy(source)
        self.loss_fn = loss_of(config)
        train_data = self._open(train_dataset)
        eval_data = self._open_all(eval_dataset)
        trl_config = args  # None: TRL makes its own default
        if is_packed(train_data):
            trl_config = copy.copy(config)
            check_settings(trl_config, REFUSED_WITH_DATASETS)
            self.examples_per_step = set_step_size(trl_config, examples_per_step=None)
            # TRL takes only datasets of Hugging Face, and looks for their columns: it
            # gets one empty record, and the packs replace it below.
            train_dataset = datasets.Dataset.from_list([{"prompt": ""}])
        self._train_data = train_data
        self._collator = data_collator or PackCollator(kind="preference")
        where = "argument data_collator"
        check_class(where, self._collator, PackCollator, "Leave it out")
        check_trainer_arguments(kwargs)

        super().__init__(
            model,
            ref_model,
            trl_config,
            self._collator,
            train_dataset,
            eval_data,
            **kwargs,
        )
        # Else Accelerate's first rank would load and split the batches of all ranks.
        self.accelerator.dataloader_config.dispatch_batches = False
        take_off_fused_head(unwrapped(self.model))
        self._use_packed_attention(self.model)
        self._reference_policy: Any = None
        if self.ref_model is not None:
            # Without `ref_model`, TRL loads the reference, in the dtype of
            # `model_init_kwargs`; `model` may be an object of another dtype.
            init_settings = config.model_init_kwargs or {}
            is_loaded_by_trl = ref_model is None and "dtype" in init_settings
            self._prepare_reference(must_have_model_dtype=is_loaded_by_trl)
        self._check_model(self.model, list(datasets_of(train_data, eval_data)))
        if is_packed(train_data):
            self.train_dataset = train_data
        take_batches(self.model)  # its forward call now takes packed batches
        self._finish_init()

    def _use_packed_attention(self, model: Any) -> None:
        use_packed_attention(model, disable_dropout=self.args.disable_dropout)

    def _prepare_reference(self, *, must_have_model_dtype: bool) -> None:
        """Prepare the reference for packed batches.

        Unless it is sharded, it is wrapped in a PackedPolicy, which makes no logits and
        runs under autocast. The model that Accelerate prepared then does not run.

        Args:
            must_have_model_dtype: raise if its dtype is not the policy's.
        """
        reference = self.accelerator.unwrap_model(self.ref_model)
        release(reference)  # removes Accelerate's wrapper around the forward call
        take_off_fused_head(reference)
        model_dtype = self.accelerator.unwrap_model(self.model).dtype
        if must_have_model_dtype and reference.dtype != model_dtype:
            raise ConfigError(
                sentence(
                    where="setting model_init_kwargs",
                    rule=f"dtype must be the model's own, {model_dtype}",
                    found=str(reference.dtype),
                    remedy="Leave it out, or cast it",
                )
            )
        self._use_packed_attention(reference)
        # A sharded head is complete on no rank.
        if not self.is_fsdp_enabled and not self.is_deepspeed_enabled:
            self._reference_policy = PackedPolicy(reference).eval()

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, dataset_name: str
    ) -> Any:
        """Tokenize records as TRL does; check a packed dataset instead."""
        # Here, not in the constructor: `args` may be the config that TRL makes.
        self._collator.max_length = args.max_length
        if dataset_name == "train" and is_packed(self._train_data):
            check_packed(self._train_data, args)
            return dataset
        dataset = self._open(dataset)  # `evaluate` may be called with a folder
        if is_packed(dataset):
            check_packed(dataset, args)
            return dataset
        return super()._prepare_dataset(dataset, processing_class, args, dataset_name)

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> tuple[Tensor, Tensor]:
        """Return the reference's log-probs of chosen and rejected, `[n]` in nats.

        They are in the order of the records, as TRL adds them as columns. The batch may
        have another order, as the collator moves records.
        """
        self._use_packed_attention(model)
        peft_model = peft_model_of(self.model) if self.ref_model is None else None
        if peft_model is None:
            context = evaluating(model)
        else:
            context = as_reference(model, peft_model)
        with torch.no_grad(), context:
            logps = self._logps_from_logits(model, inputs)
        records = inputs.example_ids.argsort()
        chosen, rejected = logps.view(-1, 2)[records].unbind(dim=1)
        return chosen, rejected

    def _run_reference(self, model: Any, batch: PackedBatch) -> Tensor | None:
        # The caller, `_reference_logps`, has switched gradients off.
        if self.ref_model is None:
            return super()._run_reference(model, batch)
        if self._reference_policy is None:
            with evaluating(self.ref_model):
                return self._logps_from_logits(self.ref_model, batch)
        with self.accelerator.autocast():
            logps: Tensor = self._reference_policy(batch)
        return logps

    def _logps_from_logits(self, model: Any, batch: PackedBatch) -> Tensor:
        """Return log-probs `[S]` of a batch, in nats; the model makes all logits."""
        with self.accelerator.autocast():
            output = model(**batch.model_inputs())
            return segment_logps(batch, logits=output.logits)


def take_off_fused_head(model: Any) -> None:
    """Undo TRL's replacement of the forward call, which computes TRL's losses.

    Packs have no use for it, and in a deep copy of the model it would run the weights
    of the original: it is a closure over that model's call.
    """
    function: Any = getattr(vars(model).get("forward"), "__func__", None)
    code = getattr(function, "__code__", None)
    if code is not None and code.co_name == "_fused_forward":
        variables = inspect.getclosurevars(function).nonlocals
        restore_forward(model, variables["original_forward"])


def loss_of(args: DPOConfig) -> PreferenceLoss:
    """Return the loss of the config; raise for settings that packs do not go with."""
    check_settings(args, {**REFUSED, **REFUSED_OF_TRL})
    _check_label_smoothing(args)
    terms: dict[str, Any] = {}
    total_weights: defaultdict[str, float] = defaultdict(float)
    weights = args.loss_weights or [1.0] * len(args.loss_type)
    for trl_name, weight in zip(args.loss_type, weights, strict=True):
        name = _loss_name(trl_name, args)
        total_weights[name] += weight
        parameters = _loss_parameters(trl_name, name, args)
        terms[name] = {**parameters, "weight": total_weights[name]}
    return PreferenceLoss(terms)


def _loss_name(trl_name: str, args: DPOConfig) -> str:
    """Return packstore's name of one of TRL's losses."""
    if trl_name == "sft":
        raise ConfigError(
            sentence(
                where="setting loss_type",
                rule="it must not depend on the packing",
                found="'sft', which averages the tokens of a device batch in TRL",
                remedy="`packstore train` has sft_weight, over the step",
            )
        )
    name = LOSS_NAMES.get(trl_name, trl_name)
    # PreferenceLoss refuses the unsupported ones, with the reason.
    if name not in LOSSES and name not in UNSUPPORTED_LOSSES:
        hint = suggest(trl_name, [*LOSS_NAMES, *LOSSES])
        raise UnknownNameError(
            f"setting loss_type: unknown loss {quote(trl_name)}.{hint}"
        )
    if args.f_divergence_type == "reverse_kl":
        return name
    if trl_name != "sigmoid":
        raise ConfigError(
            sentence(
                where="setting f_divergence_type",
                rule=f"it must be 'reverse_kl' with {trl_name!r}",
                found=repr(args.f_divergence_type),
                remedy="It goes with loss_type 'sigmoid'",
            )
        )
    return DIVERGENCES.get(args.f_divergence_type, args.f_divergence_type)


def _loss_parameters(trl_name: str, name: str, args: DPOConfig) -> dict[str, Any]:
    """Return the parameters of a loss from TRL's config.

    Args:
        trl_name: TRL's name of the loss.
        name: packstore's name of it.
        args: the config.
    """
    parameters = {"beta": args.beta}
    if name == "fdpo_alpha":
        parameters["alpha"] = args.f_alpha_divergence_coef
    if trl_name in SMOOTHED_LOSSES:
        parameters["label_smoothing"] = args.label_smoothing
    if trl_name == "discopop":
        parameters["tau"] = args.discopop_tau
    return parameters


def _check_label_smoothing(args: DPOConfig) -> None:
    """Raise if no loss of the config has `label_smoothing`, which TRL then ignores."""
    if not args.label_smoothing or not SMOOTHED_LOSSES.isdisjoint(args.loss_type):
        return
    raise ConfigError(
        sentence(
            where="setting label_smoothing",
            rule=f"it must be 0: label_smoothing changes none of {args.loss_type}, in "
            "TRL neither",
            found=str(args.label_smoothing),
            remedy="Take loss_type 'robust', or cdpo in `packstore train`",
        )
    )


def check_packed(data: Any, args: DPOConfig) -> None:
    """Raise if TRL's config would truncate packs, or precompute log-probs of them."""
    if args.precompute_ref_log_probs:
        raise ConfigError(
            sentence(
                where="setting precompute_ref_log_probs",
                rule="it must be off with a packed dataset",
                found="True",
                remedy="Write them once by `packstore ref-logps`, and give "
                "PackedDataset(url, side=[…])",
            )
        )
    if args.max_length is None:
        return
    for dataset in datasets_of(data):
        longest = dataset.manifest.statistics.longest_sequence
        if longest > args.max_length:
            raise CompatibilityError(
                sentence(
                    where=display(dataset.url),
                    rule="sequences must have at most max_length "
                    f"{args.max_length} of DPOConfig",
                    found=f"{longest} tokens",
                    remedy="Set max_length=None to train on whole sequences, or pack "
                    "with this max_length",
                )
            )
