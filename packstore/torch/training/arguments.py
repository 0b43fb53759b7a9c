"""The closed tables of transformers' TrainingArguments: what packs do not go with, and
why.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, fields
from inspect import signature
from typing import Any

from transformers import Trainer, TrainingArguments

from packstore.config.settings import check_class, check_names
from packstore.config.training import TrainConfig
from packstore.errors import ConfigError, PackstoreError, quote, sentence
from packstore.secrets import client_cause, client_text


def further_names() -> list[str]:
    """Return the fields of TrainingArguments that are no fields of TrainConfig."""
    names = [field.name for field in fields(TrainingArguments) if field.init]
    return [name for name in names if name not in TrainConfig.names()]


def check_setting_names(names: Iterable[str]) -> None:
    """Raise for a name that neither TrainConfig nor TrainingArguments has."""
    known_names = [*TrainConfig.names(), *further_names()]
    check_names(names, known_names, TrainConfig.LISTED_BY)


Refusals = Mapping[str, tuple[tuple[Any, ...], str]]
"""Setting -> values that are taken, and what to do for another."""

ROWS = "predict(dataset).predictions is a table with a row for each example"

REFUSED: Refusals = {
    "eval_accumulation_steps": ((None,), ROWS),
    "eval_do_concat_batches": ((True,), ROWS),
    "eval_use_gather_object": ((False,), ROWS),
    "batch_eval_metrics": ((False,), ROWS),
    "include_for_metrics": (([],), ROWS),
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
"""Refused by every trainer on packs."""

OF_PACKS: Refusals = {
    **REFUSED,
    "auto_find_batch_size": ((False,), "A forward call holds packs_per_batch packs"),
    "per_device_eval_batch_size": ((8,), "Give packs_per_batch"),
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
"""Refused where packed datasets are trained on; all other settings are honoured."""

OTHERS = {
    "data_collator": "Packs are collated by the loader",
    "compute_loss_func": "Give the function as loss",
    "compute_metrics": ROWS,
    "preprocess_logits_for_metrics": ROWS,
    "model_init": "Give a model; a search makes a trainer for each trial",
}
"""Arguments of the Trainer that are refused, and what to do."""


def check_arguments(
    args: Any, refused: Refusals, others: Mapping[str, Any] | None = None
) -> None:
    """Refuses settings, and arguments of the Trainer, that packs do not go with."""
    for name, value in (others or {}).items():
        if name in OTHERS and value is not None:
            where, found = f"argument {name}", type(value).__name__
            raise ConfigError(
                sentence(where, "it must be left out", found, OTHERS[name])
            )
    plugin = getattr(args, "deepspeed_plugin", None)  # also of Accelerate's config
    if plugin is not None and plugin.zero_stage == 3:
        rule, remedy = "its ZeRO stage must be 0, 1 or 2", "FSDP2 shards weights, too"
        raise ConfigError(sentence("setting deepspeed", rule, "3", remedy))
    config = getattr(args, "accelerator_config", None)
    for name in ("dispatch_batches", "split_batches"):
        if getattr(config, name, None):
            rule = "a packed batch is whole, and cannot be cut up for other ranks"
            raise ConfigError(
                sentence(f"setting accelerator_config: {name}", rule, "True")
            )
    if "lomo" in str(getattr(args, "optim", "")).lower():
        rule = "it must step after all batches of a step"
        raise ConfigError(
            sentence("setting optim", rule, str(args.optim), "Take another")
        )
    for name, (taken, remedy) in refused.items():
        value = getattr(args, name, taken[0])
        if value not in taken:
            rule = f"it must be {taken[0]!r} with packs"
            raise ConfigError(sentence(f"setting {name}", rule, repr(value), remedy))


def check_own(trainer: type, args: Any, others: Mapping[str, Any]) -> None:
    """Refuses what is no TrainingArguments, what TRL's add to them, and unknown
    arguments.
    """
    check_class(
        "argument args", args, TrainingArguments, "Give the dataset as train_dataset"
    )
    plain = {field.name for field in fields(TrainingArguments)}
    for field in fields(args) if type(args).__module__.startswith("trl.") else ():
        default = (
            field.default
            if field.default_factory is MISSING
            else field.default_factory()
        )
        value = getattr(args, field.name)
        if field.name not in plain and value not in (default, [default], None):
            where, rule = f"setting {field.name}", "it must be one of TrainingArguments"
            remedy = "Give it as loss or loss_parameters, or take PackedDPOTrainer"
            raise ConfigError(
                sentence(where, rule, f"{value!r} in {type(args).__name__}", remedy)
            )
    known = {
        *signature(Trainer.__init__).parameters,
        *signature(trainer).parameters,
    } - {"others"}
    check_names(others, known, "docs/training.md", "argument")
    given = others.get("optimizers", ())
    check_class("argument optimizers", given, Sequence, "Give (optimizer, scheduler)")
    tokenizer = others.get("processing_class")
    if tokenizer is not None and not hasattr(tokenizer, "save_pretrained"):
        where, rule = (
            "argument processing_class",
            "it must be a tokenizer, which is saved",
        )
        remedy = "AutoTokenizer.from_pretrained loads one"
        raise ConfigError(sentence(where, rule, quote(tokenizer), remedy))


def examples_of_step(args: Any, given: int | None) -> int:
    """Returns the examples of a step over all ranks, and makes a step one batch of the
    Trainer.

    As unpacked, a step has ``per_device_train_batch_size *
    gradient_accumulation_steps`` examples a rank; or the number that is `given`.
    """
    own = args.per_device_train_batch_size * args.gradient_accumulation_steps
    if given is not None and (args.per_device_train_batch_size, own) != (8, 8):
        rule = (
            "per_device_train_batch_size and gradient_accumulation_steps must then "
            "be left out"
        )
        raise ConfigError(sentence(f"examples_per_step={given}", rule, f"{own} a rank"))
    accumulated = (
        getattr(args.accelerator_config, "gradient_accumulation_kwargs", None) or {}
    )
    if accumulated.get("num_steps", 1) != 1:
        where, rule = (
            "setting accelerator_config: num_steps",
            "a step must be one batch",
        )
        found, remedy = (
            str(accumulated["num_steps"]),
            "Give gradient_accumulation_steps",
        )
        raise ConfigError(sentence(where, rule, found, remedy))
    args.gradient_accumulation_steps = 1  # of `args`, which are the trainer's own copy
    return own * args.world_size if given is None else given


class HiddenToken(str):
    """A token that is used as any text, and pickled as None: ``training_args.bin`` is
    uploaded.
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
    """Return a copy of the settings of a trainer that is made, without tokens where it
    is saved.

    A mapping, as TRL's `model_init_kwargs`, has served its purpose, and loses them.
    """
    hidden = copy.copy(args)
    for name, value in vars(args).items():
        if name in TOKENS and isinstance(value, str):
            setattr(hidden, name, HiddenToken(value))
        elif isinstance(value, dict) and TOKENS & value.keys():
            setattr(hidden, name, {key: value[key] for key in value.keys() - TOKENS})
    return hidden


@contextmanager
def named_settings(
    where: str = "settings", rule: str = "transformers must take them"
) -> Iterator[None]:
    """Names the settings in what transformers, or PEFT, says of them."""
    try:
        yield
    except PackstoreError:
        raise
    except (ValueError, TypeError, ImportError, KeyError) as error:
        found = quote(client_text(*error.args[:1]), 300)
        raise ConfigError(sentence(where, rule, found)) from client_cause(error)
