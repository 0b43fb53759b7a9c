"""Names that users type: the code that each stands for, and what an unknown one may
mean.

A plug-in is one small file plus one line in the registry of its folder. Listing the
choices (``--help``) imports nothing.
"""

from __future__ import annotations

import difflib
import importlib
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
            package.
    """

    def __init__(
        self,
        noun: str,
        entries: Mapping[str, str],
        extras: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(entries)
        self.noun, self._extras = noun, extras or {}

    def check(self, name: str) -> str:
        """Returns `name` if it is known."""
        if name in self:
            return name
        choices = (
            f"choose one of: {', '.join(self)}.{meant(str(name).strip().lower(), self)}"
        )
        raise UnknownNameError(f"unknown {self.noun} {name!r}; {choices}")

    def load(self, name: str) -> T:
        """Loads the object registered as `name`."""
        module, _, attribute = self[self.check(name)].partition(":")
        try:
            loaded: Any = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            if name not in self._extras:
                raise
            raise missing_extra(
                f"{self.noun} {name!r}", self._extras[name], error
            ) from error
        return loaded  # type: ignore[no-any-return]


def choice(name: str, value: Any, choices: tuple[Any, ...]) -> Any:
    """Returns the value of a setting; refuses one that is none of the choices."""
    if value not in choices:
        raise ConfigError(
            f"{name} must be one of: {', '.join(map(str, choices))}; found "
            f"{quote(value)}."
        )
    return value


def missing_extra(noun: str, extra: str, error: ImportError) -> MissingExtraError:
    """Returns the error for a missing optional dependency, with the command that
    installs it.
    """
    package = (error.name or str(error)).partition(".")[0]
    return MissingExtraError(
        f"{noun} needs the package {package!r}, which is not installed. "
        f"Run: pip install 'packstore[{extra}]'"
    )


_THEIRS = {
    "examples_per_step packs_per_batch": "batch_size train_batch_size "
    "global_batch_size",
    "packs_per_batch": "micro_batch_size",
    "pack_size": "max_seq_length max_seq_len seq_length seq_len",
    "max_length": "max_prompt_length",
    "learning_rate": "lr peak_lr",
    "lr_scheduler_type": "lr_scheduler scheduler schedule",
    "warmup_steps": "warmup warmup_ratio lr_warmup_steps",
    "num_train_epochs": "epochs num_epochs",
    "max_grad_norm": "clip_grad grad_clip gradient_clip_val",
    "model": "model_name_or_path model_name model_path",
    "reference": "ref_model reference_model",
    "tokenizer": "tokenizer_name tokenizer_path processing_class",
    "train_dataset": "dataset dataset_name data_path",
    "eval_dataset": "validation val_dataset",
    "output_dir": "output",
    "loss": "loss_type",
    "loss_parameters loss_parameter": "beta label_smoothing",
    "bf16 dtype": "mixed_precision torch_dtype",
    "attention": "attn_implementation",
    "peft_config": "lora use_peft lora_r lora_rank",
    "resume_from_checkpoint": "resume",
    "report_to": "tracker trackers",
    "num_workers": "num_proc dataset_num_proc",
    "": "shuffle",
}
ELSEWHERE = {
    name: ours.split() for ours, names in _THEIRS.items() for name in names.split()
}
"""A name in torch, transformers, TRL, Megatron or Lightning -> names of settings and
flags here.
"""

DECIDED = {
    "batch_size": "Batches are cut while training: examples_per_step",
    "shuffle": "The dataset decides: PackedDataset(url, shuffle=…)",
    "early_stopping_patience": "It is a callback, which Python passes: "
    "docs/training.md, Recipes",
}
"""What to say of a name if nothing that it means here is known in this place."""


def meant(name: str, known: Iterable[str], spell: Callable[[str], str] = repr) -> str:
    """Returns a sentence, after a space, on what an unknown name or flag may mean; else
    nothing.
    """
    plain = {_plain(each): each for each in known}
    if (theirs := _plain(name)) in ELSEWHERE:
        near = [plain[ours] for ours in ELSEWHERE[theirs] if ours in plain]
    else:
        near = difflib.get_close_matches(name, list(plain.values()), n=1)
    if near:
        return f" Did you mean {' or '.join(map(spell, near))}?"
    return f" {DECIDED[theirs]}." if theirs in DECIDED else ""


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
