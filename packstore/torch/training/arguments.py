"""Settings of transformers' TrainingArguments: their names, and the values that a
trainer on packs refuses, each with a remedy.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, Field, fields
from inspect import signature
from typing import Any

from transformers import Trainer, TrainingArguments

from packstore.config.settings import check_class, check_names
from packstore.config.training import TrainConfig
from packstore.errors import ConfigError, PackstoreError, quote, sentence
from packstore.secrets import client_cause, client_text

Refusals = Mapping[str, tuple[tuple[Any, ...], str]]
"""Setting -> the values that are allowed, the default first; and the remedy for any
other value.
"""

TABLE_OF_PREDICTIONS = (
    "predict(dataset).predictions is a table with a row for each example"
)

REFUSED: Refusals = {
    "eval_accumulation_steps": ((None,), TABLE_OF_PREDICTIONS),
    "eval_do_concat_batches": ((True,), TABLE_OF_PREDICTIONS),
    "eval_use_gather_object": ((False,), TABLE_OF_PREDICTIONS),
    "batch_eval_metrics": ((False,), TABLE_OF_PREDICTIONS),
    "include_for_metrics": (([],), TABLE_OF_PREDICTIONS),
    "include_num_input_tokens_seen": (("no",), "Records have num_tokens"),
    "average_tokens_across_devices": (
        (True,),
        "The loss divides by the examples of all ranks",
    ),
    "label_smoothing_factor": (
        (0, 0.0),
        "Label smoothing is part of the loss: take cdpo",
    ),
    "neftune_noise_alpha": (
        (None,),
        "Its noise would depend on the length of the packed row",
    ),
    "parallelism_config": (
        (None,),
        "Split rows by packstore.torch.parallel in your own loop",
    ),
    "fp16": ((False,), "Log-probs of a packed row need bf16"),
    "fp16_full_eval": ((False,), "Leave it out"),
    "bf16_full_eval": ((False,), "Use bf16, which is autocast"),
    "torch_compile": (
        (False,),
        "compile='layers' of PackedTrainer compiles its layers",
    ),
}
"""Settings that every trainer on packs restricts."""

REFUSED_WITH_DATASETS: Refusals = {
    **REFUSED,
    "auto_find_batch_size": ((False,), "A forward call holds packs_per_batch packs"),
    "per_device_eval_batch_size": (
        (8,),
        "Leave it out; packs_per_batch is the size of a forward call",
    ),
    "label_names": ((None, ["labels"]), "Packs have no columns of labels"),
    "length_column_name": (("length",), "Packs have no such column"),
    "dataloader_in_order": ((True,), "The order is always kept"),
    "ignore_data_skip": (
        (False,),
        "The position in the data is restored, and nothing skipped",
    ),
    "train_sampling_strategy": (("random",), "PackedDataset(shuffle=…) orders packs"),
    "dataloader_drop_last": ((False,), "No example is left out"),
}
"""Settings that are restricted with a packed dataset; all others are honoured."""

DEFAULT_BATCH_SIZE = 8
"""transformers' default of `per_device_train_batch_size`."""

REFUSED_ARGUMENTS = {
    "data_collator": "Packs are collated by the loader",
    "compute_loss_func": "Give the function as loss",
    "compute_metrics": TABLE_OF_PREDICTIONS,
    "preprocess_logits_for_metrics": TABLE_OF_PREDICTIONS,
    "model_init": "Give a model; a search makes a trainer for each trial",
}
"""Arguments of the Trainer that are refused -> remedy."""


def further_names() -> list[str]:
    """Return the fields of TrainingArguments that TrainConfig does not have."""
    names = [field.name for field in fields(TrainingArguments) if field.init]
    return [name for name in names if name not in TrainConfig.names()]


def check_setting_names(names: Iterable[str]) -> None:
    """Raise for a name that neither TrainConfig nor TrainingArguments has."""
    known_names = [*TrainConfig.names(), *further_names()]
    check_names(names, known_names, TrainConfig.LISTED_BY)


def check_settings(args: Any, refusals: Refusals) -> None:
    """Raise for values of TrainingArguments that packs do not go with."""
    _check_accelerate(args)
    optimizer = getattr(args, "optim", "")
    optimizer = str(getattr(optimizer, "value", optimizer))  # an enum, or its name
    # Both change weights in the backward pass of each batch.
    if "lomo" in optimizer or optimizer.endswith("layerwise"):
        raise ConfigError(
            sentence(
                where="setting optim",
                rule="the optimizer must step after all batches of a step",
                found=optimizer,
                remedy="Choose another",
            )
        )
    for name, (allowed_values, remedy) in refusals.items():
        default = allowed_values[0]
        value = getattr(args, name, default)
        if value not in allowed_values:
            raise ConfigError(
                sentence(
                    where=f"setting {name}",
                    rule=f"it must be {default!r} with packs",
                    found=repr(value),
                    remedy=remedy,
                )
            )


def _check_accelerate(args: Any) -> None:
    """Raise for settings of Accelerate and DeepSpeed that packs do not go with."""
    # It is also set where DeepSpeed comes from Accelerate's config.
    plugin = getattr(args, "deepspeed_plugin", None)
    if plugin is not None and plugin.zero_stage == 3:
        raise ConfigError(
            sentence(
                where="setting deepspeed",
                rule="its ZeRO stage must be 0, 1 or 2",
                found="3",
                remedy="FSDP2 shards weights, too",
            )
        )
    config = getattr(args, "accelerator_config", None)
    for name in ("dispatch_batches", "split_batches"):
        if getattr(config, name, None):
            raise ConfigError(
                sentence(
                    where=f"setting accelerator_config: {name}",
                    rule="a packed batch cannot be split over ranks",
                    found="True",
                )
            )


def check_trainer_arguments(arguments: Mapping[str, Any]) -> None:
    """Raise for arguments of the Trainer that packs do not go with."""
    for name, remedy in REFUSED_ARGUMENTS.items():
        value = arguments.get(name)
        if value is not None:
            raise ConfigError(
                sentence(
                    where=f"argument {name}",
                    rule="it must be left out",
                    found=type(value).__name__,
                    remedy=remedy,
                )
            )


def check_packed_trainer_arguments(
    trainer: type, args: Any, arguments: Mapping[str, Any]
) -> None:
    """Raise for settings and arguments that PackedTrainer does not have.

    Args:
        trainer: the class.
        args: the settings, which must be TrainingArguments.
        arguments: further arguments, which are passed on to the Trainer.
    """
    remedy = "Give the dataset as train_dataset"
    check_class("argument args", args, TrainingArguments, remedy)
    if type(args).__module__.startswith("trl."):
        _check_no_trl_settings(args)

    trainer_names = signature(Trainer.__init__).parameters
    names = {*trainer_names, *signature(trainer).parameters}
    names.discard("trainer_arguments")  # the catch-all of PackedTrainer's signature
    check_names(arguments, names, "docs/training.md", "argument")

    optimizers = arguments.get("optimizers", ())
    remedy = "Give (optimizer, scheduler)"
    check_class("argument optimizers", optimizers, Sequence, remedy)

    tokenizer = arguments.get("processing_class")
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        raise ConfigError(
            sentence(
                where="argument processing_class",
                rule="it must be a tokenizer, to be saved with the model",
                found=quote(tokenizer),
                remedy="AutoTokenizer.from_pretrained loads one",
            )
        )


def _check_no_trl_settings(args: Any) -> None:
    """Raise for a setting of TRL's config that only TRL's trainer would read."""
    names = {field.name for field in fields(TrainingArguments)}
    for field in fields(args):
        if field.name in names:
            continue
        value = getattr(args, field.name)
        default = _default_of(field)
        # TRL's config makes a list of one loss type.
        if value not in (default, [default], None):
            raise ConfigError(
                sentence(
                    where=f"setting {field.name}",
                    rule="it must be a field of TrainingArguments",
                    found=f"{value!r} in {type(args).__name__}",
                    remedy="Give it as loss or loss_parameters, or use "
                    "PackedDPOTrainer",
                )
            )


def _default_of(field: Field[Any]) -> Any:
    if field.default_factory is MISSING:
        return field.default
    return field.default_factory()


def set_step_size(args: Any, examples_per_step: int | None) -> int:
    """Set the Trainer to take one batch per step; return the examples of a step.

    Without `examples_per_step`, a step has as many examples as unpacked:
    ``per_device_train_batch_size * gradient_accumulation_steps`` on each rank.

    Args:
        args: the trainer's own copy of the settings, which is changed.
        examples_per_step: examples of a step, over all ranks.

    Returns:
        Examples of a step, over all ranks.
    """
    batch_size = args.per_device_train_batch_size
    examples_per_rank = batch_size * args.gradient_accumulation_steps
    has_default_size = (
        batch_size == DEFAULT_BATCH_SIZE and args.gradient_accumulation_steps == 1
    )
    if examples_per_step is not None and not has_default_size:
        raise ConfigError(
            sentence(
                where=f"examples_per_step={examples_per_step}",
                rule="per_device_train_batch_size and gradient_accumulation_steps must "
                "then be left out",
                found=f"{examples_per_rank} a rank",
            )
        )

    config = args.accelerator_config
    accumulation = getattr(config, "gradient_accumulation_kwargs", None) or {}
    if accumulation.get("num_steps", 1) != 1:
        raise ConfigError(
            sentence(
                where="setting accelerator_config: num_steps",
                rule="a step must be one batch",
                found=str(accumulation["num_steps"]),
                remedy="Give gradient_accumulation_steps",
            )
        )

    args.gradient_accumulation_steps = 1
    if examples_per_step is None:
        return int(examples_per_rank * args.world_size)
    return examples_per_step


class HiddenToken(str):
    """A token (password) that is pickled as None, and otherwise is a usual string.

    transformers pickles the settings to ``training_args.bin``, and uploads this file.
    """

    __slots__ = ()

    def __reduce__(self) -> Any:
        return type(None), ()

    def __copy__(self) -> HiddenToken:
        return self

    def __deepcopy__(self, _: Any) -> HiddenToken:
        return self


TOKENS = {"hub_token", "token", "use_auth_token"}
"""Names of settings that hold a token."""


def hide_tokens(args: Any) -> Any:
    """Return a copy of a trainer's settings that is saved without tokens.

    Tokens in mappings, such as TRL's `model_init_kwargs`, are removed: the model is
    loaded by now.
    """
    hidden = copy.copy(args)
    for name, value in vars(args).items():
        if name in TOKENS and isinstance(value, str):
            setattr(hidden, name, HiddenToken(value))
        elif isinstance(value, dict) and TOKENS & value.keys():
            without_tokens = {key: value[key] for key in value.keys() - TOKENS}
            setattr(hidden, name, without_tokens)
    return hidden


@contextmanager
def naming_settings(
    where: str = "settings", rule: str = "transformers must take them"
) -> Iterator[None]:
    """Re-raise errors of transformers or PEFT as ConfigError, naming the settings."""
    try:
        yield
    except PackstoreError:
        raise
    except (ValueError, TypeError, ImportError, KeyError) as error:
        message = quote(client_text(*error.args[:1]), 300)
        raise ConfigError(
            sentence(where=where, rule=rule, found=message)
        ) from client_cause(error)
