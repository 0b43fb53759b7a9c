"""transformers' Trainer on packs.

::

    args = TrainingArguments("run", num_train_epochs=1, learning_rate=1e-6)
    PackedTrainer("Qwen3-0.6B", args, "prefs-8k", loss="dpo",
    examples_per_step=64).train()

Settings, callbacks, trackers, hub, checkpoints and the best model are the Trainer's.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, snapshot_download
from peft import LoraConfig, PeftConfig, get_peft_model
from torch import Tensor
from transformers import TrainingArguments, set_seed

from packstore.config.settings import check_class, check_names
from packstore.config.training import TrainModelConfig
from packstore.errors import (
    CompatibilityError,
    ConfigError,
    display,
    markdown_text,
    sentence,
)
from packstore.io.side.side import open_side
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.logprobs.head import PackedPolicy
from packstore.torch.losses.loss import PreferenceLoss
from packstore.torch.losses.policy import PolicyLoss
from packstore.torch.losses.step_loss import StepLoss
from packstore.torch.models.compiled import compile_as_asked, compile_layers
from packstore.torch.models.load import is_adapter, load_model
from packstore.torch.models.model import use_packed_attention
from packstore.torch.models.probe import probe_model
from packstore.torch.models.unwrap import REF_ADAPTER, adapted, unwrapped
from packstore.torch.reference.provenance import check_arithmetic, check_reference
from packstore.torch.reference.reference import run_on_rank_zero
from packstore.torch.training.arguments import (
    OF_PACKS,
    check_arguments,
    check_own,
    examples_of_step,
    named_settings,
)
from packstore.torch.training.checkpoint_files import read_position
from packstore.torch.training.data import datasets_of, has_ref_logps, is_packed
from packstore.torch.training.evaluate import tell_unused
from packstore.torch.training.trainer_steps import (
    PackedSteps,
    check_evaluated,
    release_copy,
    take_batches,
)
from packstore.version import VERSION

TOKENIZER_FILES = (
    *(
        "tokenizer*",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab*",
        "merges.txt",
    ),
    *("chat_template*", "*.model"),
)


class PackedTrainer(PackedSteps):
    """transformers' Trainer, trained on packs.

    Args:
        model: a folder or hub name of a causal LM, of a reward model for a loss of
            scores, or of a LoRA adapter; or such a model, which is prepared in place.
        args: the settings; :mod:`packstore.torch.training.arguments` has those that are
            refused.
        train_dataset: a packed dataset, its folder or URL; or a PackedDataset, or a mix
            of them.
        eval_dataset: the same, or several by name. Each example counts once, over all
            ranks.
        loss: as of :class:`~packstore.torch.PreferenceLoss`; or a loss made by it, or a
            :class:`~packstore.torch.PolicyLoss`.
        loss_parameters: keywords of PreferenceLoss.
        reference: a model, or the folder or hub name of one; default: the policy
            without its adapter, else a frozen copy of it.
        ref_logps, eval_ref_logps: side datasets in its place, of training and
            evaluation.
        examples_per_step: mean examples of an optimizer step, over all ranks; default:
            as unpacked, ``per_device_train_batch_size * gradient_accumulation_steps *
            ranks``.
        packs_per_batch: packs of one forward call; default: 1.
        peft_config: of an adapter to be trained in place of the weights, of PEFT; or
            members of its LoraConfig, by default with all linear layers.
        dtype, attention: as of `load_model`; a `dtype` beside a model that is made is
            refused.
        head: backend of log-probs, as of :func:`~packstore.torch.segment_logps`.
        compile: ``layers``, ``none``; ``auto``: layers on CUDA devices with Triton.
        storage_options: of fsspec, for datasets.
        others: arguments of the Trainer.

    Raises:
        ConfigError: a setting of `args` does not go with packs.
        CompatibilityError: model, data, loss and reference do not belong together.
    """

    def __init__(
        self,
        model: Any,
        args: TrainingArguments | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        *,
        loss: Any = "dpo",
        loss_parameters: Mapping[str, Any] | None = None,
        reference: Any = None,
        ref_logps: str | Sequence[str] | None = (),
        eval_ref_logps: str | Sequence[str] | None = (),
        examples_per_step: int | None = None,
        packs_per_batch: int | None = None,
        peft_config: Any = None,
        dtype: Any = None,
        attention: str = "auto",
        head: str = "auto",
        compile: str = "auto",
        storage_options: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        **others: Any,
    ) -> None:
        args = copy.copy(args or TrainingArguments("tmp_trainer"))
        check_own(PackedTrainer, args, others)
        check_arguments(args, OF_PACKS, others)
        given = TrainModelConfig.checked(
            examples_per_step=examples_per_step,
            packs_per_batch=packs_per_batch,
            loss_parameters=loss_parameters or {},
            ref_logps=ref_logps or (),
            eval_ref_logps=eval_ref_logps or (),
            storage_options=storage_options or {},
        )
        check_class(
            "argument callbacks", callbacks or (), Sequence, "Give a list of them"
        )
        self.examples_per_step = examples_of_step(args, examples_per_step)
        self.packs_per_batch = packs_per_batch
        self.loss_fn: Any = _make_loss(loss, given["loss_parameters"])
        self._options = dict(given["storage_options"]) or None
        train, held_out = self._opened(train_dataset), self._all_opened(eval_dataset)
        if held_out is not None:
            check_evaluated("argument eval_dataset", self.loss_fn)
        self._sides = {"train": given["ref_logps"], "eval": given["eval_ref_logps"]}
        tell_unused(
            self.loss_fn, _name_of(reference), *itertools.chain(*self._sides.values())
        )
        needs = self.loss_fn.reference
        stored = all(
            data is None or self._sides[part] or has_ref_logps(data)
            for part, data in (("train", train), ("eval", held_out))
        )
        set_seed(args.seed)  # a new head is drawn
        load = partial(load_model, dtype=_dtype_of(model, dtype), attention=attention)
        model = self._load_policy(
            model, load, needs and not stored and reference is None
        )
        self._check_model(model, list(datasets_of(train, held_out)))
        if isinstance(reference, str | os.PathLike):
            reference = load(reference) if needs else None
        elif reference is not None:
            check_apart(use_packed_attention(reference, attention), model)
        elif needs and not (peft_config or adapted(model) or stored):
            reference = copy.deepcopy(model)
        if peft_config is not None:
            model = self._with_adapter(model, peft_config)
        self._head_settings = {"backend": head}
        if isinstance(self.loss_fn, PolicyLoss):
            self._head_settings = {"backend": head, "per_token": True}
        take_batches(model, **self._head_settings)
        others |= {"callbacks": list(callbacks or ()), "eval_dataset": held_out}
        super().__init__(model, args, **others)
        self.train_dataset = train
        self._reference: Any = reference if needs else None
        self._prepare_run()
        accelerator = self.accelerator
        with accelerator.autocast():
            probe_model(self.model)
        self._compiled = compile_as_asked(
            compile, self.model, accelerator.device, accelerator.autocast
        )
        if self._compiled and self._reference is not None:
            compile_layers(self._reference)

    def _opened(self, data: Any) -> Any:
        """Returns a packed dataset in the place of its folder or URL; refuses other
        data.
        """
        opened = super()._opened(data)
        if opened is not None and not is_packed(opened):
            remedy = "Pack the records: packstore.pack(records, folder, tokenizer)"
            remedy += "; of several datasets, PackedDataset.mix makes one"
            found = type(opened).__name__
            raise ConfigError(
                sentence("dataset", "it must be a packed one", found, remedy)
            )
        return opened

    def _load_policy(self, model: Any, load: partial[Any], as_reference: bool) -> Any:
        """Loads a model, or prepares it; an adapter also `as_reference`, in a frozen
        copy.
        """
        self._source, self._goes_on = None, False
        if not isinstance(model, str | os.PathLike):
            release_copy(model)
            return use_packed_attention(model, load.keywords["attention"])
        self._source, self._goes_on = os.fspath(model), is_adapter(model)
        loaded = load(model, trainable=True, scores=self.loss_fn.scores)
        if self._goes_on and as_reference:
            loaded.load_adapter(self._source, REF_ADAPTER, is_trainable=False)
        return loaded

    def _check_reference(self, checkpoint: Path | None) -> None:
        """Refuses log-probs of another reference; of a run that goes on with its own,
        warns.
        """
        data = {"train": self.train_dataset, "eval": self.eval_dataset}
        given = [
            (url, data[part]) for part, urls in self._sides.items() for url in urls
        ]
        if given and any(dataset is None for _, dataset in given):
            rule, remedy = (
                "it must go with a dataset",
                "Give eval_dataset, or leave it out",
            )
            raise ConfigError(sentence("argument eval_ref_logps", rule, "none", remedy))
        if not given or not self.loss_fn.reference:
            return
        known = checkpoint is not None and (
            read_position(checkpoint)["settings"]["sides"]
            == self._described()["settings"]["sides"]
        )
        device, model, adapter = self.accelerator.device, self.model, self._goes_on
        if self._reference is not None:
            model, adapter = self._reference, adapted(self._reference) is not None

        def check() -> None:
            for url, dataset in given:
                side = open_side(url, self._options)
                with self.accelerator.autocast():
                    if known:
                        check_arithmetic(side, model, device)
                    else:
                        check_reference(
                            side, model, dataset, adapter=adapter, device=device
                        )

        run_on_rank_zero(check)

    def _with_adapter(self, model: Any, peft_config: Any) -> Any:
        """Adds an adapter to a frozen model; untrained, it changes nothing."""
        if self._goes_on or adapted(model):
            rule, remedy = (
                "the model must have no adapter",
                "Leave it out to train it further",
            )
            raise ConfigError(
                sentence("peft_config", rule, str(_name_of(model)), remedy)
            )
        with named_settings("peft_config", "PEFT must be able to add it to the model"):
            if isinstance(peft_config, Mapping):
                known = [field.name for field in fields(LoraConfig)]
                check_names(
                    peft_config, known, "PEFT's LoraConfig", "member of peft_config"
                )
                task = "SEQ_CLS" if self.loss_fn.scores else "CAUSAL_LM"
                usual = {"target_modules": "all-linear", "task_type": task}
                peft_config = LoraConfig(**usual | dict(peft_config))
            check_class(
                "peft_config", peft_config, PeftConfig, "Give members of LoraConfig"
            )
            return get_peft_model(model.requires_grad_(False), peft_config)

    def _online_reference(self, model: Any, batch: PackedBatch) -> Tensor | None:
        if self._reference is None:
            return super()._online_reference(model, batch)
        policy, context = self._placed_reference
        with context():
            logps: Tensor = policy(batch)
        return logps

    @cached_property
    def _placed_reference(
        self,
    ) -> tuple[PackedPolicy, Callable[[], AbstractContextManager[Any]]]:
        """The reference on the device of the run, and what gives it the policy's
        precision.
        """
        accelerator, model = self.accelerator, self._reference
        policy: Any = PackedPolicy(
            model.requires_grad_(False), **self._head_settings
        ).eval()
        if (
            self.is_deepspeed_enabled
        ):  # its engine casts the policy, in place of autocast
            policy = policy.to(next(self.model.parameters()).dtype)
        if not accelerator.is_fsdp2:
            return policy.to(accelerator.device), accelerator.autocast
        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        policy._no_split_modules = (
            model._no_split_modules
        )  # the units that Accelerate shards
        policy = fsdp2_prepare_model(accelerator, policy)
        policy.set_reshard_after_forward(True)  # no backward pass follows
        return policy.to(accelerator.device), nullcontext

    def _described(self) -> dict[str, dict[str, Any]]:
        described = super()._described()
        described["run"]["reference"] = _name_of(self._reference)
        sides = {part: list(map(display, urls)) for part, urls in self._sides.items()}
        compiled = "layers" if self._compiled else "none"
        described["settings"] |= {"sides": sides, "compile": compiled}
        return described

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Saves the model, with the tokenizer files of the folder or hub that it came
        from.
        """
        super()._save(output_dir, state_dict)
        if self.processing_class is not None or self._source is None:
            return
        source = self._source
        if not Path(source).is_dir():
            with suppress(
                Exception
            ):  # of a hub that is out of reach, files at hand still serve
                source = snapshot_download(source, allow_patterns=list(TOKENIZER_FILES))
                self._source = source  # asked once
        for pattern in TOKENIZER_FILES:
            for file in filter(Path.is_file, Path(source).glob(pattern)):
                with suppress(shutil.SameFileError):
                    shutil.copy(
                        file, Path(output_dir or self.args.output_dir, file.name)
                    )

    def create_model_card(self, **given: Any) -> None:
        """Writes the model's ``README.md``: dataset, loss, settings, results."""
        if self.is_world_process_zero():
            text = model_card(self, **given)
            Path(self.args.output_dir, "README.md").write_text(text, encoding="utf-8")


def _make_loss(loss: Any, parameters: Mapping[str, Any]) -> StepLoss:
    """Returns the loss of a name, a mix or a function, or one that is made already."""
    if not isinstance(loss, StepLoss):
        return PreferenceLoss(loss, **parameters)
    if parameters:
        where, rule = (
            "argument loss_parameters",
            "it must be left out beside a loss that is made",
        )
        raise ConfigError(sentence(where, rule, repr(loss), "Make the loss with them"))
    return loss


def _dtype_of(model: Any, dtype: Any) -> Any:
    """Returns the dtype of what is loaded: that of a model that is made, which takes no
    other.
    """
    if dtype is not None and not isinstance(model, str | os.PathLike):
        where, rule = "argument dtype", "it is of a model that is loaded"
        found, remedy = (
            f"{dtype!r} beside {type(model).__name__}",
            "Give model.to(dtype)",
        )
        raise ConfigError(sentence(where, rule, found, remedy))
    return dtype or str(getattr(model, "dtype", "float32")).removeprefix("torch.")


def check_apart(reference: Any, policy: Any) -> None:
    """Refuses a reference that is trained itself."""
    trained = {id(p) for p in policy.parameters() if p.requires_grad}
    if any(id(p) in trained for p in reference.parameters()):
        rule = "it must stay as it is while the policy is trained"
        remedy = "Give a copy, or none: the trainer then makes one"
        found = "weights that are trained"
        raise CompatibilityError(sentence("reference", rule, found, remedy))


def _name_of(model: Any) -> str | None:
    if model is None:
        return None
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    config = getattr(unwrapped(model), "config", None)
    return str(getattr(config, "_name_or_path", "") or type(model).__name__)


def model_card(trainer: Any, **front: Any) -> str:
    """Returns the text; `front`: further fields of its YAML head."""
    args, state = trainer.args, trainer.state
    dataset = next(
        datasets_of(trainer.train_dataset, trainer.eval_dataset)
    )  # of a mix the first
    manifest = dataset.manifest
    started = trainer.accelerator.unwrap_model(trainer.model).config._name_or_path
    tags = ["packstore", *(front.pop("tags", None) or ())]
    known = {
        "base_model": started or None,
        "library_name": "transformers",
        "tags": tags,
    }
    head = ModelCardData(
        **{name: value for name, value in {**front, **known}.items() if value}
    )
    facts = {
        "dataset": display(dataset.url),
        "dataset fingerprint": manifest.fingerprint,
        "examples of the dataset": f"{manifest.totals.examples:,} of kind "
        f"{manifest.kind}",
        "tokenizer sha256": (manifest.provenance.get("tokenizer") or {}).get(
            "sha256", "unknown"
        ),
        "loss": repr(trainer.loss_fn),
        "optimizer steps": f"{state.global_step:,} of about "
        f"{trainer.examples_per_step} examples",
        "packstore": VERSION,
    }
    last = {
        n: v for record in state.log_history for n, v in record.items() if n != "step"
    }
    results = {name: f"{value:.6g}" for name, value in last.items()}
    settings = json.dumps(args.to_sanitized_dict(), indent=1, default=str)
    longest = max((len(ticks) for ticks in re.findall("`+", settings)), default=0)
    fence = "`" * max(3, longest + 1)  # one inside a setting would end the block
    tables = _table("what", facts), _table("metric", results)
    return (
        f"---\n{head.to_yaml()}\n---\n# {markdown_text(Path(args.output_dir).name)}\n\n"
        f"Trained with packstore's PackedTrainer on packed data.\n\n{tables[0]}\n\n"
        f"## Results\n\n{tables[1]}\n\n"
        f"## Settings\n\n{fence}json\n{settings}\n{fence}\n"
    )


def _table(head: str, rows: Mapping[str, object]) -> str:
    lines = [f"| {head} | value |", "|---|---|"]
    for name, value in rows.items():
        lines.append(f"| {markdown_text(name)} | {markdown_text(value)} |")
    return "\n".join(lines)
