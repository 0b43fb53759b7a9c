"""Names that users type: the code behind each name, and suggestions for unknown names.

A plug-in is one small file plus one line in the registry of its folder. Listing the
choices (``--help``) imports nothing.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Generic, TypeVar

from packstore.errors import ConfigError, MissingExtraError, UnknownNameError, quote

T = TypeVar("T")


class Registry(dict[str, str], Generic[T]):
    """A mapping from a name to ``"module:attribute"``, loaded on first use.

    Args:
        noun: noun for the names in error messages (``"strategy"``).
        entries: name -> ``"module:attribute"``.
        extras: name -> the extra of packstore that installs the required third-party
            package; empty: packstore itself does, unless the install is lean.
    """

    def __init__(
        self,
        noun: str,
        entries: Mapping[str, str],
        extras: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(entries)
        self.noun = noun
        self._extras = extras or {}

    def check(self, name: str) -> str:
        """Return `name`; raise UnknownNameError if it is not registered."""
        if name in self:
            return name
        hint = suggest(str(name).strip().lower(), self)
        raise UnknownNameError(
            f"unknown {self.noun} {name!r}; choose one of: {', '.join(self)}.{hint}"
        )

    def load(self, name: str) -> T:
        """Import the object registered as `name`.

        Raises:
            UnknownNameError: it is not registered.
            MissingExtraError: it needs a package that is not installed.
        """
        module, _, attribute = self[self.check(name)].partition(":")
        try:
            entry: T = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            if name not in self._extras:
                raise
            noun = f"{self.noun} {name!r}"
            raise missing_extra(noun, self._extras[name], error) from error
        return entry


def choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Return the value of a setting; raise ConfigError if it is none of the choices."""
    if value not in choices:
        allowed = ", ".join(str(allowed_value) for allowed_value in choices)
        raise ConfigError(f"{name} must be one of: {allowed}; found {quote(value)}.")
    return value


def missing_extra(noun: str, extra: str, error: ImportError) -> MissingExtraError:
    """Return the error for a missing package, with the command that installs it.

    Args:
        noun: the part of packstore that needs the package.
        extra: the extra that installs it; empty for a dependency of packstore itself,
            which only a lean install lacks (docs/install.md).
        error: the failed import.
    """
    package = (error.name or str(error)).partition(".")[0]
    requirement = f"'packstore[{extra}]'" if extra else "packstore"
    return MissingExtraError(
        f"{noun} needs the package {package!r}, which is not installed. "
        f"Run: pip install {requirement}"
    )


LEFT_OUT_OF_LEAN = frozenset(
    {"fastokens", "jinja2", "numba", "polars", "rich", "tokenizers", "yaml"}
)
"""Modules of the dependencies of packstore itself that a lean install leaves out."""


def require_package(name: str, noun: str) -> None:
    """Raise MissingExtraError if a dependency of packstore itself is not installed.

    Called before the import of a package that a lean install leaves out.

    Args:
        name: the top-level module.
        noun: the part of packstore that needs it.
    """
    if importlib.util.find_spec(name) is None:
        raise missing_extra(noun, "", ImportError(name=name))


NAMES_HERE: Mapping[str, tuple[str, ...]] = {  # see :func:`suggest`
    "batch_size": ("examples_per_step", "packs_per_batch"),
    "train_batch_size": ("examples_per_step", "packs_per_batch"),
    "global_batch_size": ("examples_per_step", "packs_per_batch"),
    "micro_batch_size": ("per_device_train_batch_size", "examples_per_step"),
    "max_seq_length": ("pack_size",),
    "max_seq_len": ("pack_size",),
    "seq_length": ("pack_size",),
    "seq_len": ("pack_size",),
    "max_prompt_length": ("max_length",),
    "lr": ("learning_rate",),
    "peak_lr": ("learning_rate",),
    "lr_scheduler": ("lr_scheduler_type",),
    "scheduler": ("lr_scheduler_type",),
    "schedule": ("lr_scheduler_type",),
    "warmup": ("warmup_steps",),
    "warmup_ratio": ("warmup_steps",),
    "lr_warmup_steps": ("warmup_steps",),
    "epochs": ("num_train_epochs",),
    "num_epochs": ("num_train_epochs",),
    "optimizer": ("optim",),
    "evals_per_epoch": ("eval_steps",),
    "saves_per_epoch": ("save_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "clip_grad": ("max_grad_norm",),
    "grad_clip": ("max_grad_norm",),
    "gradient_clip_val": ("max_grad_norm",),
    "model_name_or_path": ("model",),
    "model_name": ("model",),
    "model_path": ("model",),
    "base_model": ("model",),
    "ref_model_name_or_path": ("reference",),
    "ref_model": ("reference",),
    "reference_model": ("reference",),
    "tokenizer_name": ("tokenizer",),
    "tokenizer_path": ("tokenizer",),
    "processing_class": ("tokenizer",),
    "dataset": ("train_dataset",),
    "dataset_name": ("train_dataset",),
    "datasets": ("train_dataset",),
    "data_path": ("train_dataset",),
    "validation": ("eval_dataset",),
    "val_dataset": ("eval_dataset",),
    "output": ("output_dir",),
    "loss_type": ("loss",),
    "stage": ("loss",),
    "rl": ("loss",),
    "rlhf_type": ("loss",),
    "pref_loss": ("loss",),
    "beta": ("loss_parameters", "loss_parameter"),
    "pref_beta": ("loss_parameters", "loss_parameter"),
    "rl_beta": ("loss_parameters", "loss_parameter"),
    "pref_ftx": ("loss_parameters", "loss_parameter"),
    "rpo_alpha": ("loss_parameters", "loss_parameter"),
    "simpo_gamma": ("loss_parameters", "loss_parameter"),
    "label_smoothing": ("loss_parameters", "loss_parameter"),
    "mixed_precision": ("bf16", "dtype"),
    "torch_dtype": ("bf16", "dtype"),
    "attn_implementation": ("attention",),
    "attn_impl": ("attention",),
    "flash_attn": ("attention",),
    "flash_attention": ("attention",),
    "lora": ("peft_config",),
    "use_peft": ("peft_config",),
    "adapter": ("peft_config",),
    "finetuning_type": ("peft_config",),
    "train_type": ("peft_config",),
    "tuner_type": ("peft_config",),
    "target_modules": ("peft_config",),
    "lora_r": ("peft_config",),
    "lora_rank": ("peft_config",),
    "lora_alpha": ("peft_config",),
    "use_dora": ("peft_config",),
    "use_rslora": ("peft_config",),
    "lora_dropout": ("peft_config",),
    "lora_target": ("peft_config",),
    "lora_target_modules": ("peft_config",),
    "lora_target_linear": ("peft_config",),
    "resume": ("resume_from_checkpoint",),
    "plot_loss": ("report_to",),
    "tracker": ("report_to",),
    "trackers": ("report_to",),
    "num_proc": ("num_workers",),
    "dataset_num_proc": ("num_workers",),
    "shuffle": (),
}
"""A name in torch, transformers, TRL, Megatron, Lightning, LLaMA-Factory, axolotl or
ms-swift -> its names in packstore.

The first one that is valid in the place of a mistake is suggested. ``()``: only
:data:`ADVICE` has an answer.
"""

_DECIDED_BY_PACKING = "Packing decides it"
_SPLIT_BY_PACKING = "`packstore pack --validation-fraction` holds out a part"

ADVICE: Mapping[str, str] = {
    "batch_size": "Batches are cut while training: examples_per_step",
    "shuffle": "The dataset decides: PackedDataset(url, shuffle=…)",
    "max_length": _DECIDED_BY_PACKING + ": max_length",
    "max_seq_length": _DECIDED_BY_PACKING + ": pack_size",
    "cutoff_len": _DECIDED_BY_PACKING + ": max_length",
    "sequence_len": _DECIDED_BY_PACKING + ": max_length",
    "template": _DECIDED_BY_PACKING + ": chat_template",
    "chat_template": _DECIDED_BY_PACKING + ": chat_template",
    "tokenizer": _DECIDED_BY_PACKING + ": tokenizer",
    "packing": "Datasets are always packed",
    "neat_packing": "Datasets are always packed",
    "sample_packing": "Datasets are always packed",
    "dataset_prepared_path": "The packed dataset is the prepared one",
    "val_size": _SPLIT_BY_PACKING,
    "val_set_size": _SPLIT_BY_PACKING,
    "split_dataset_ratio": _SPLIT_BY_PACKING,
    "overwrite_output_dir": "A run continues its newest checkpoint",
    "dataset_dir": "Datasets are given by their paths",
    "max_samples": "Leave records out before packing",
    "dpo_label_smoothing": "It is label_smoothing of loss cdpo",
    "early_stopping_patience": "It is a callback, which Python passes: "
    "docs/training.md, Recipes",
}
"""A name -> advice, where no setting or flag in place of it is valid."""


def suggest(
    name: str, valid_names: Iterable[str], spell: Callable[[str], str] = repr
) -> str:
    """Return a suggestion for an unknown name or flag, after a space; else "".

    Args:
        name: the unknown name.
        valid_names: names or flags that are valid in its place.
        spell: spells a valid name in the suggestion.
    """
    normalized = _normalize(name)
    originals = {_normalize(valid_name): valid_name for valid_name in valid_names}
    suggestions = []
    if normalized in NAMES_HERE:
        suggestions = [
            originals[setting]
            for setting in NAMES_HERE[normalized]
            if setting in originals
        ]
    elif normalized not in ADVICE:
        suggestions = difflib.get_close_matches(name, list(originals.values()), n=1)

    if suggestions:
        names = " or ".join(spell(suggestion) for suggestion in suggestions)
        return f" Did you mean {names}?"
    if normalized in ADVICE:
        return f" {ADVICE[normalized]}."
    return ""


def _normalize(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
