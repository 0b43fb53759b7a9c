"""transformers' Trainer on packs.

::

    args = TrainingArguments("run", num_train_epochs=1, learning_rate=1e-6)
    trainer = PackedTrainer(
        "Qwen3-0.6B", args, "prefs-8k", loss="dpo", examples_per_step=64
    )
    trainer.train()

Settings, callbacks, trackers, hub, checkpoints and the best model are the Trainer's.
"""

from __future__ import annotations

import copy
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

from packstore.config.settings import check_class, check_names, fingerprint
from packstore.config.training import TrainModelConfig
from packstore.errors import (
    CompatibilityError,
    ConfigError,
    display,
    markdown_text,
    sentence,
)
from packstore.io.side.parts import open_sides
from packstore.io.side.side import open_side
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.logprobs.head import PackedPolicy
from packstore.torch.losses.named import make_loss
from packstore.torch.models.compiled import compile_if_requested, compile_layers
from packstore.torch.models.load import (
    ignoring_deprecations_of_peft,
    is_adapter,
    load_model,
)
from packstore.torch.models.model import use_packed_attention
from packstore.torch.models.probe import probe_model
from packstore.torch.models.unwrap import REF_ADAPTER, peft_model_of, unwrapped
from packstore.torch.reference.provenance import check_arithmetic, check_reference
from packstore.torch.reference.reference import run_on_rank_zero
from packstore.torch.training.arguments import (
    REFUSED_WITH_DATASETS,
    check_packed_trainer_arguments,
    check_settings,
    check_trainer_arguments,
    naming_settings,
    set_step_size,
)
from packstore.torch.training.attention_choice import (
    attention_of_checkpoint,
    choose_attention,
    set_attention_backend,
)
from packstore.torch.training.checkpoint_files import read_position
from packstore.torch.training.data import datasets_of, has_column, is_packed
from packstore.torch.training.evaluate import check_evaluated, warn_about_unused
from packstore.torch.training.graphs import check_graphed_loss
from packstore.torch.training.trainer_steps import (
    PackedSteps,
    release_copy,
    take_batches,
)
from packstore.version import VERSION

TOKENIZER_FILES = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "chat_template*",
    "*.model",
)
"""Patterns of the tokenizer's files in a model's folder."""


class PackedTrainer(PackedSteps):
    """transformers' Trainer, on packed datasets.

    Args:
        model: a folder or hub name of a causal LM, of a reward model for a loss of
            scores, or of a LoRA adapter; or a loaded model, which is prepared in place.
        args: the settings; :mod:`packstore.torch.training.arguments` lists those that
            are refused.
        train_dataset: a packed dataset, its folder or URL; or a PackedDataset, or a mix
            of them.
        eval_dataset: the same, or several by name. Each example counts once, over all
            ranks.
        loss: ``distill``; a name or mix as for
            :class:`~packstore.torch.PreferenceLoss`; or an instance of it, of
            :class:`~packstore.torch.PolicyLoss` or
            :class:`~packstore.torch.DistillLoss`.
        loss_parameters: keywords of PreferenceLoss, or of DistillLoss.
        reference: a model, or the folder or hub name of one; default: the policy
            without its adapter, else a frozen copy of it.
        ref_logps: side datasets with the reference's log-probs for `train_dataset`.
        eval_ref_logps: side datasets with the reference's log-probs for `eval_dataset`.
        side: further side datasets to join to `train_dataset`, such as the top k of a
            teacher.
        eval_side: the same for `eval_dataset`.
        examples_per_step: mean examples of an optimizer step, over all ranks; default:
            as unpacked, ``per_device_train_batch_size * gradient_accumulation_steps *
            ranks``.
        packs_per_batch: packs of one forward call; default: 1.
        peft_config: a config of PEFT, or members of its LoraConfig, by default with all
            linear layers. The adapter is trained in place of the weights.
        dtype: dtype of a model that is loaded, as for `load_model`; it is refused with
            a loaded model.
        attention: backend of packed attention, as for `load_model`; ``auto``: the
            faster one, see :mod:`packstore.torch.training.attention_choice`.
        head: backend of log-probs, as for :func:`~packstore.torch.segment_logps`.
        compile: ``layers``, ``none``; ``auto``: layers on CUDA devices with Triton.
        cuda_graphs: pad the batches of training to one size, and replay them as a CUDA
            graph, see :class:`~packstore.torch.GraphedStep`; on one rank.
        storage_options: options of fsspec, for datasets.
        callbacks: callbacks of transformers' Trainer.
        trainer_arguments: further arguments of transformers' Trainer.

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
        side: str | Sequence[str] | None = (),
        eval_side: str | Sequence[str] | None = (),
        examples_per_step: int | None = None,
        packs_per_batch: int | None = None,
        peft_config: Any = None,
        dtype: Any = None,
        attention: str = "auto",
        head: str = "auto",
        compile: str = "auto",
        cuda_graphs: bool = False,
        storage_options: Mapping[str, Any] | None = None,
        callbacks: Sequence[Any] | None = None,
        **trainer_arguments: Any,
    ) -> None:
        args = copy.copy(args or TrainingArguments("tmp_trainer"))
        check_packed_trainer_arguments(PackedTrainer, args, trainer_arguments)
        check_trainer_arguments(trainer_arguments)
        check_settings(args, REFUSED_WITH_DATASETS)
        remedy = "Give a list of them"
        check_class("argument callbacks", callbacks or (), Sequence, remedy)
        settings = TrainModelConfig.validate(
            examples_per_step=examples_per_step,
            packs_per_batch=packs_per_batch,
            cuda_graphs=cuda_graphs,
            loss_parameters=loss_parameters or {},
            ref_logps=ref_logps or (),
            eval_ref_logps=eval_ref_logps or (),
            side=side or (),
            eval_side=eval_side or (),
            storage_options=storage_options or {},
        )

        # The data and its loss.
        self.examples_per_step = set_step_size(args, examples_per_step)
        self.packs_per_batch = packs_per_batch
        self.loss_fn: Any = make_loss(loss, settings["loss_parameters"])
        self._storage_options = dict(settings["storage_options"]) or None
        self._side_urls = {
            "train": settings["ref_logps"],
            "eval": settings["eval_ref_logps"],
        }
        self._joined_urls = {"train": settings["side"], "eval": settings["eval_side"]}
        train_data = self._open(train_dataset)
        eval_data = self._open_all(eval_dataset)
        if eval_data is not None:
            check_evaluated("argument eval_dataset", self.loss_fn)
        self._check_side_columns(train_data, "train")
        self._check_side_columns(eval_data, "eval")
        warn_about_unused(
            self.loss_fn,
            _name_of(reference),
            *self._side_urls["train"],
            *self._side_urls["eval"],
        )

        # The models.
        set_seed(args.seed)  # a new head is drawn
        load = partial(load_model, dtype=_dtype_of(model, dtype), attention=attention)
        needs_reference = (
            self.loss_fn.reference
            and reference is None
            and not self._has_stored_reference(train_data, eval_data)
        )
        model = self._load_policy(model, load, with_reference=needs_reference)
        self._check_model(model, list(datasets_of(train_data, eval_data)))
        self._reference: Any = None
        if reference is not None:
            self._reference = self._load_reference(reference, model, load)
        elif needs_reference and not peft_config and not peft_model_of(model):
            self._reference = copy.deepcopy(model)
        if peft_config is not None:
            model = self._add_adapter(model, peft_config)
        self._prepare_forward(model, head)
        self._attention = attention
        self._is_attention_automatic = attention == "auto"

        super().__init__(
            model,
            args,
            callbacks=list(callbacks or ()),
            eval_dataset=eval_data,
            **trainer_arguments,
        )
        self.train_dataset = train_data
        self._uses_graphs = cuda_graphs
        if cuda_graphs:
            self._check_graphs()
        self._finish_init()
        if self._is_attention_automatic:
            self._set_attention(self._choose_attention())
        self._probe_and_compile(compile)

    def _prepare_forward(self, model: Any, head: str) -> None:
        """Let the model take packed batches, and return log-probs for the loss."""
        self._head_settings = {"backend": head, **self.loss_fn.head_settings}
        take_batches(model, **self._head_settings)

    def _choose_attention(self) -> str:
        """Return the faster backend of attention; a collective call."""
        args = self.args
        urls = []
        if self.loss_fn.reference:
            urls = [*self._side_urls["train"], *self._side_urls["eval"]]
        with self.accelerator.autocast():
            return choose_attention(
                self.model,
                self.accelerator.device,
                next(datasets_of(self.train_dataset, self.eval_dataset), None),
                sides=(open_side(url, self._storage_options) for url in urls),
                batching={"packs_per_batch": self.packs_per_batch},
                seed=args.seed if args.data_seed is None else args.data_seed,
            )

    def _set_attention(self, backend: str) -> None:
        """Set the backend of the policy and of its reference."""
        if backend == self._attention:
            return
        self._attention = backend
        set_attention_backend(self.model, backend)
        if self._reference is not None:
            set_attention_backend(self._reference, backend)

    def _resume_attention(self, checkpoint: Path) -> None:
        if self._is_attention_automatic:
            old_attention = attention_of_checkpoint(read_position(checkpoint))
            if old_attention != "auto":
                self._set_attention(old_attention)

    def _probe_and_compile(self, compile: str) -> None:
        """Raise if segments of a row see each other; compile policy and reference."""
        accelerator = self.accelerator
        with accelerator.autocast():
            probe_model(self.model)
        self._has_compiled_layers = compile_if_requested(
            compile, self.model, accelerator.device, accelerator.autocast
        )
        if self._has_compiled_layers and self._reference is not None:
            compile_layers(self._reference)

    def _check_graphs(self) -> None:
        """Raise if steps cannot be replayed as CUDA graphs."""
        accelerator = self.accelerator
        if accelerator.num_processes > 1 or self._is_sharded():
            raise ConfigError(
                sentence(
                    where="setting cuda_graphs",
                    rule="there must be one rank, without FSDP and DeepSpeed",
                    found=f"{accelerator.distributed_type.value}, "
                    f"{accelerator.num_processes} ranks",
                    remedy="Leave it out",
                )
            )
        if type(self).compute_loss is not PackedSteps.compute_loss:
            raise ConfigError(
                sentence(
                    where="setting cuda_graphs",
                    rule="compute_loss must not be overridden, as a replay calls no "
                    "Python",
                    found=type(self).__name__,
                    remedy="Leave it out, or give a function as loss",
                )
            )
        for dataset in datasets_of(self.train_dataset):
            check_graphed_loss(self.loss_fn, dataset.manifest.kind)
        self._make_graph(accelerator.device)  # raises without CUDA

    # Data.

    def _open(self, data: Any) -> Any:
        """Open a packed dataset by its folder or URL; raise for other data."""
        data = super()._open(data)
        if data is not None and not is_packed(data):
            raise ConfigError(
                sentence(
                    where="dataset",
                    rule="it must be packed",
                    found=type(data).__name__,
                    remedy="Pack the records: packstore.pack(records, folder, "
                    "tokenizer); of several datasets, PackedDataset.mix makes one",
                )
            )
        return data

    def _has_stored_reference(self, train_data: Any, eval_data: Any) -> bool:
        """Return True if log-probs of the reference are stored for all data."""
        column = self.loss_fn.ref_column
        for part, data in (("train", train_data), ("eval", eval_data)):
            if data is None or self._side_urls[part] or has_column(data, column):
                continue
            return False
        return True

    # The policy and its reference.

    def _load_policy(
        self, model: Any, load: partial[Any], *, with_reference: bool
    ) -> Any:
        """Load the model, or prepare a loaded one.

        With `with_reference`, an adapter that is trained further gets a frozen copy of
        itself as its reference.
        """
        self._source: str | None = None
        self._is_trained_adapter = False
        if not isinstance(model, str | os.PathLike):
            release_copy(model)
            return use_packed_attention(model, load.keywords["attention"])
        self._source = os.fspath(model)
        self._is_trained_adapter = is_adapter(model)
        policy = load(model, trainable=True, scores=self.loss_fn.scores)
        if self._is_trained_adapter and with_reference:
            policy.load_adapter(self._source, REF_ADAPTER, is_trainable=False)
        return policy

    def _load_reference(self, reference: Any, policy: Any, load: partial[Any]) -> Any:
        """Load the reference, or prepare a loaded one; None if the loss needs none."""
        if isinstance(reference, str | os.PathLike):
            return load(reference) if self.loss_fn.reference else None
        use_packed_attention(reference, load.keywords["attention"])
        check_apart(reference, policy)
        return reference if self.loss_fn.reference else None

    def _add_adapter(self, model: Any, peft_config: Any) -> Any:
        """Freeze the model and add an adapter; untrained, it changes no output."""
        if self._is_trained_adapter or peft_model_of(model):
            raise ConfigError(
                sentence(
                    where="peft_config",
                    rule="the model must have no adapter",
                    found=str(_name_of(model)),
                    remedy="Leave it out to train it further",
                )
            )
        with naming_settings("peft_config", "PEFT must be able to add it to the model"):
            if isinstance(peft_config, Mapping):
                peft_config = self._make_lora_config(peft_config)
            remedy = "Give members of LoraConfig"
            check_class("peft_config", peft_config, PeftConfig, remedy)
            with ignoring_deprecations_of_peft():
                return get_peft_model(model.requires_grad_(False), peft_config)

    def _make_lora_config(self, members: Mapping[str, Any]) -> LoraConfig:
        names = [field.name for field in fields(LoraConfig)]
        check_names(members, names, "PEFT's LoraConfig", "member of peft_config")
        defaults = {
            "target_modules": "all-linear",
            "task_type": "SEQ_CLS" if self.loss_fn.scores else "CAUSAL_LM",
        }
        return LoraConfig(**{**defaults, **members})

    def _check_reference(self, checkpoint: Path | None) -> None:
        """Raise if stored log-probs belong to another reference; a collective call.

        A run that resumes with the same side datasets has trained the model since, so
        that only the arithmetic is compared.
        """
        datasets = {"train": self.train_dataset, "eval": self.eval_dataset}
        urls_and_datasets = [
            (url, datasets[part])
            for part, urls in self._side_urls.items()
            for url in urls
        ]
        for _, dataset in urls_and_datasets:
            if dataset is None:
                raise ConfigError(
                    sentence(
                        where="argument eval_ref_logps",
                        rule="it needs a dataset",
                        found="none",
                        remedy="Give eval_dataset, or leave it out",
                    )
                )
        if not urls_and_datasets or not self.loss_fn.reference:
            return

        has_same_sides = False
        if checkpoint is not None:
            old_settings = read_position(checkpoint)["settings"]
            new_settings = self._describe_run()["settings"]
            has_same_sides = old_settings["sides"] == new_settings["sides"]

        def check() -> None:
            for url, dataset in urls_and_datasets:
                with self.accelerator.autocast():
                    self._check_side(url, dataset, arithmetic_only=has_same_sides)

        run_on_rank_zero(check)

    def _check_side(self, url: str, dataset: Any, *, arithmetic_only: bool) -> None:
        """Raise if a side dataset's log-probs are not of this run's reference."""
        side = open_side(url, self._storage_options)
        device = self.accelerator.device
        model = self.model
        adapter = self._is_trained_adapter
        if self._reference is not None:
            model = self._reference
            adapter = peft_model_of(self._reference) is not None
        if arithmetic_only:
            check_arithmetic(side, model, device)
        else:
            check_reference(side, model, dataset, adapter=adapter, device=device)

    def _run_reference(self, model: Any, batch: PackedBatch) -> Tensor | None:
        if self._reference is None:
            return super()._run_reference(model, batch)
        reference, autocast = self._placed_reference
        with autocast():
            logps: Tensor = reference(batch)
        return logps

    @cached_property
    def _placed_reference(
        self,
    ) -> tuple[PackedPolicy, Callable[[], AbstractContextManager[Any]]]:
        """The reference on the device of the run, and its autocast context."""
        accelerator = self.accelerator
        model = self._reference.requires_grad_(False)
        reference: Any = PackedPolicy(model, **self._head_settings).eval()
        if self.is_deepspeed_enabled:
            # Its engine casts the policy, in place of autocast.
            reference = reference.to(next(self.model.parameters()).dtype)
        if not accelerator.is_fsdp2:
            return reference.to(accelerator.device), accelerator.autocast

        from accelerate.utils.fsdp_utils import fsdp2_prepare_model

        # Accelerate looks up here which modules it shards as units.
        reference._no_split_modules = model._no_split_modules
        reference = fsdp2_prepare_model(accelerator, reference)
        reference.set_reshard_after_forward(True)  # no backward pass follows
        return reference.to(accelerator.device), nullcontext

    # What is written.

    def _describe_run(self) -> dict[str, dict[str, Any]]:
        description = super()._describe_run()
        description["run"]["reference"] = _name_of(self._reference)
        description["run"]["side data"] = self._side_origin
        description["settings"]["sides"] = {
            part: [display(url) for url in urls]
            for part, urls in self._side_urls.items()
        }
        compiled_part = "layers" if self._has_compiled_layers else "none"
        description["settings"]["compile"] = compiled_part
        description["settings"]["attention"] = self._attention
        return description

    @cached_property
    def _side_origin(self) -> str:
        """A hash of columns and provenance of the side datasets given as `side`.

        It is equal where the same values were written to another folder.
        """
        urls = self._joined_urls["train"]
        if not urls:
            return "none"
        data = self.train_dataset.manifest
        hashes = set()
        for side in open_sides(urls, data, self._storage_options):
            manifest = side.manifest
            origin = [dict(manifest.columns), dict(manifest.provenance)]
            hashes.add(fingerprint(origin))
        return fingerprint(sorted(hashes))[:16]

    def save_model(
        self, output_dir: str | None = None, _internal_call: bool = False
    ) -> None:
        """Write the model with the tokenizer files of its folder or hub repository."""
        super().save_model(output_dir, _internal_call)
        if self.args.should_save and self.processing_class is None:
            self._copy_tokenizer(Path(output_dir or self.args.output_dir))

    def _copy_tokenizer(self, folder: Path) -> None:
        """Copy the tokenizer files that are beside the model that was loaded."""
        if self._source is None:
            return
        if not Path(self._source).is_dir():
            # An unreachable hub must not keep a trained model from being saved.
            with suppress(Exception):
                patterns = list(TOKENIZER_FILES)
                cached = snapshot_download(self._source, allow_patterns=patterns)
                self._source = cached  # the hub is asked once
        for pattern in TOKENIZER_FILES:
            for file in Path(self._source).glob(pattern):
                if file.is_file():
                    with suppress(shutil.SameFileError):
                        shutil.copy(file, folder / file.name)

    def create_model_card(self, **fields: Any) -> None:
        """Write the model's ``README.md``: dataset, loss, settings and results.

        Args:
            fields: further fields of its YAML head.
        """
        if self.is_world_process_zero():
            text = model_card(self, **fields)
            Path(self.args.output_dir, "README.md").write_text(text, encoding="utf-8")


def _dtype_of(model: Any, dtype: Any) -> Any:
    """Return the dtype to load models in; default: the dtype of a loaded policy.

    Raises:
        ConfigError: `dtype` is given, and the policy is loaded already.
    """
    if dtype is None:
        return str(getattr(model, "dtype", "float32")).removeprefix("torch.")
    if not isinstance(model, str | os.PathLike):
        raise ConfigError(
            sentence(
                where="argument dtype",
                rule="it must be left out with a loaded model",
                found=f"{dtype!r} with {type(model).__name__}",
                remedy="Give model.to(dtype)",
            )
        )
    return dtype


def check_apart(reference: Any, policy: Any) -> None:
    """Raise if the reference shares weights with the policy that are trained."""
    trained = {id(p) for p in policy.parameters() if p.requires_grad}
    if any(id(p) in trained for p in reference.parameters()):
        raise CompatibilityError(
            sentence(
                where="reference",
                rule="its weights must not change while the policy is trained",
                found="weights of the policy",
                remedy="Give a copy, or leave it out: the trainer makes one",
            )
        )


def _name_of(model: Any) -> str | None:
    """Return the folder or hub name of a model, else its class; None for None."""
    if model is None:
        return None
    if isinstance(model, str | os.PathLike):
        return os.fspath(model)
    config = getattr(unwrapped(model), "config", None)
    return str(getattr(config, "_name_or_path", "") or type(model).__name__)


# The model card.


def model_card(trainer: Any, **fields: Any) -> str:
    """Return the text of a model card.

    Args:
        trainer: the trainer of the model.
        fields: further fields of the YAML head.
    """
    head = _card_head(trainer, fields)
    title = markdown_text(Path(trainer.args.output_dir).name)
    facts = _table("what", _card_facts(trainer))
    results = _table("metric", _card_results(trainer))

    settings = json.dumps(trainer.args.to_sanitized_dict(), indent=1, default=str)
    # A fence inside a setting would end the block.
    fences = [len(ticks) for ticks in re.findall("`+", settings)]
    fence = "`" * max([3, *(length + 1 for length in fences)])
    return (
        f"---\n{head.to_yaml()}\n---\n# {title}\n\n"
        f"Trained with packstore's PackedTrainer on packed data.\n\n{facts}\n\n"
        f"## Results\n\n{results}\n\n"
        f"## Settings\n\n{fence}json\n{settings}\n{fence}\n"
    )


def _card_head(trainer: Any, fields: Mapping[str, Any]) -> ModelCardData:
    model = trainer.accelerator.unwrap_model(trainer.model)
    head = {
        **fields,
        "base_model": model.config._name_or_path,
        "library_name": "transformers",
        "tags": ["packstore", *(fields.get("tags") or ())],
    }
    return ModelCardData(**{name: value for name, value in head.items() if value})


def _card_facts(trainer: Any) -> dict[str, str]:
    # The first dataset of a mix.
    dataset = next(datasets_of(trainer.train_dataset, trainer.eval_dataset))
    manifest = dataset.manifest
    tokenizer = manifest.provenance.get("tokenizer") or {}
    return {
        "dataset": display(dataset.url),
        "dataset fingerprint": manifest.fingerprint,
        "examples of the dataset": f"{manifest.totals.examples:,} of kind "
        f"{manifest.kind}",
        "tokenizer sha256": tokenizer.get("sha256", "unknown"),
        "loss": repr(trainer.loss_fn),
        "optimizer steps": f"{trainer.state.global_step:,} of about "
        f"{trainer.examples_per_step} examples",
        "packstore": VERSION,
    }


def _card_results(trainer: Any) -> dict[str, str]:
    """Return the last value of each metric, and the examples of the whole run."""
    num_examples = 0.0
    results = {}
    for record in trainer.state.log_history:
        num_examples += record.get("examples", 0)
        for name, value in record.items():
            if name != "step":
                results[name] = f"{value:.6g}"
    if "examples" in results:
        results["examples"] = f"{num_examples:.0f}"
    return results


def _table(title: str, rows: Mapping[str, object]) -> str:
    """Return a Markdown table of two columns, `title` and ``value``."""
    lines = [f"| {title} | value |", "|---|---|"]
    for name, value in rows.items():
        lines.append(f"| {markdown_text(name)} | {markdown_text(value)} |")
    return "\n".join(lines)
