"""TRL's DPOTrainer on packed batches, with its own config and data::

    PackedDPOTrainer("Qwen/Qwen3-0.6B", args=DPOConfig(output_dir="run"), train_dataset=dataset)

Loss, reference, adapters, tokenization, evaluation and checkpoints are those of TRL's settings; the
table of all of them is in ``docs/from-trl.md``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import datasets  # type: ignore[import-untyped]
from torch import Tensor
from trl import DPOConfig, DPOTrainer  # type: ignore[attr-defined]

from packstore.errors import CompatibilityError, ConfigError, display
from packstore.torch.data.dataset import PackedDataset
from packstore.torch.integrations.hf_collator import PackCollator, PackedLoss, reference_logps
from packstore.torch.integrations.hf_trainer import REFUSED as TRAINER_REFUSED
from packstore.torch.integrations.hf_trainer import (
    PackedTrainerMixin,
    Refusals,
    as_packed,
    check_settings,
)
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.models.model import use_packed_attention
from packstore.torch.models.unwrap import adapted

REFUSED: Refusals = {
    "ld_alpha": ((None,), "It needs the log-prob of each token"),
    "pad_to_multiple_of": ((None,), "Rows are packed; packstore.torch.pad_batch pads them"),
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


class PackedDPOTrainer(PackedTrainerMixin, DPOTrainer):  # type: ignore[misc]
    """TRL's DPOTrainer, with its arguments and its config; only the batches are packed.

    Args:
        model: as for TRL's trainer: a name, a folder, or a model, which is prepared for packed
            attention in place.
        ref_model: as for TRL's trainer. Without one a PEFT policy's own base serves, or the model
            is loaded again.
        args: the config. Of its own fields, those of :data:`REFUSED` are refused.
        data_collator: a :class:`~packstore.torch.PackCollator`, to choose a layout; default:
            ``concat``.
        train_dataset: preference data as for TRL's trainer, tokenized by it, with each device batch
            laid end to end; or a packed dataset: a folder, a URL, or a packstore dataset. Then
            device batches count packs.
        eval_dataset: the same, or several by name.
        kwargs: further arguments of TRL's trainer.

    Raises:
        ConfigError: a setting, loss or dataset does not go with packs.
        CompatibilityError: a packed dataset is not of pairs, or holds longer sequences than
            `max_length` of the config.
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
        loss_fn = PreferenceLoss("dpo") if args is None else loss_of(args)
        train_dataset, eval_dataset = as_packed(train_dataset), as_packed(eval_dataset)
        self._packed = train_dataset if isinstance(train_dataset, PackedDataset) else None
        if self._packed is not None:  # TRL takes datasets' classes only, and prepares them below
            train_dataset = datasets.IterableDataset.from_generator(_one_row)
        self._collator = data_collator or PackCollator("preference")
        super().__init__(
            model,
            ref_model,
            args,
            self._collator,
            train_dataset,
            eval_dataset,
            packed_loss=PackedLoss(loss_fn),
            **kwargs,
        )
        for prepared in (self.model, self.ref_model):
            if prepared is not None:
                use_packed_attention(prepared, disable_dropout=self.args.disable_dropout)

    def _check(self, trainer: Any) -> None:
        self._check_data(trainer, type(self).__name__)

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, dataset_name: str
    ) -> Any:
        """Tokenizes what TRL tokenizes; a packed dataset is checked instead."""
        self._collator.max_length = args.max_length
        if dataset_name == "train" and self._packed is not None:
            dataset = self._packed
        dataset = as_packed(dataset)
        if not isinstance(dataset, PackedDataset):
            return super()._prepare_dataset(dataset, processing_class, args, dataset_name)
        check_packed(dataset, args)
        return dataset

    def compute_ref_log_probs(self, model: Any, inputs: Any) -> tuple[Tensor, Tensor]:
        """Returns log-probs of the reference for chosen and rejected sides, `[n]` in nats each."""
        use_packed_attention(model, disable_dropout=self.args.disable_dropout)
        base_of = adapted(self.model) if self.ref_model is None else None
        chosen, rejected = (
            reference_logps(model, inputs["labels"].batch, base_of=base_of).view(-1, 2).unbind(1)
        )
        return chosen, rejected


def _one_row() -> Iterator[dict[str, str]]:
    yield {"prompt": ""}


def loss_of(args: DPOConfig) -> PreferenceLoss:
    """Returns the loss of the config; refuses settings that packs, or this loss, do not go with."""
    check_settings(args, {**TRAINER_REFUSED, **REFUSED})
    terms: dict[str, Any] = {}
    weights = args.loss_weights or [1.0] * len(args.loss_type)
    for loss, weight in zip(args.loss_type, weights, strict=True):
        if loss == "sft":
            raise ConfigError(
                "setting loss_type: 'sft' averages the tokens of a device batch in TRL, so it "
                "would depend on the packing. `packstore train` has sft_weight, over the step."
            )
        parameters = {"beta": args.beta}
        name = NAMES.get(loss, loss)
        if args.f_divergence_type != "reverse_kl":
            if loss != "sigmoid":
                raise ConfigError(
                    f"setting f_divergence_type must be 'reverse_kl' with {loss!r}; found "
                    f"{args.f_divergence_type!r}. It goes with loss_type 'sigmoid'."
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
        raise ConfigError(
            f"setting label_smoothing changes none of {args.loss_type}, in TRL neither; found "
            f"{args.label_smoothing}. Take loss_type 'robust', or cdpo in `packstore train`."
        )
    return PreferenceLoss(terms)


def check_packed(data: PackedDataset, args: DPOConfig) -> None:
    """Refuses a packed dataset that the config would truncate, precompute or not understand."""
    if args.precompute_ref_log_probs:
        raise ConfigError(
            "setting precompute_ref_log_probs must be off with a packed dataset; found True. Write "
            "them once by `packstore ref-logps`, and give PackedDataset(url, side=[…])."
        )
    if data.kind != "preference":
        raise CompatibilityError(
            f"PackedDPOTrainer: the dataset must be of kind preference; found {data.kind!r}."
        )
    for dataset in data.stream.datasets:
        longest = dataset.manifest.statistics.longest_sequence
        if args.max_length is not None and longest > args.max_length:
            raise CompatibilityError(
                f"{display(dataset.url)}: sequences must have at most max_length "
                f"{args.max_length} of DPOConfig; found {longest} tokens. Set max_length=None to "
                "train on whole sequences, or pack with this max_length."
            )
