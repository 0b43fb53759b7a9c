"""Trains from packed datasets: preference losses and SFT, on torch, Accelerate and PEFT.

::

    import packstore.torch

    packstore.torch.train(
        model="my-sft-model", dataset="prefs-8k", validation="held-out-8k", output="run",
        loss="dpo", loss_parameters={"beta": 0.1}, examples_per_step=64, learning_rate=1e-6,
    )

On several ranks, start the script with ``accelerate launch`` or ``torchrun``: DDP, or FSDP2 if
Accelerate's config says so. The settings are in ``docs/training.md``.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from packstore.config.training import TrainConfig
from packstore.torch.training.checkpoint import commit, save_model
from packstore.torch.training.loop import Loop
from packstore.torch.training.setup import Run, prepare
from packstore.torch.training.sinks import ConsoleLines, JsonLines, Sink, Trackers
from packstore.version import VERSION

__all__ = ["TrainConfig", "TrainResult", "train"]

TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("chat_template*", "*.model"),
)


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """Result of a training run.

    Attributes:
        step: optimizer steps of the whole run.
        examples: examples trained on.
        metrics: last logged training metrics.
        evaluation: metrics of the last validation, named ``eval/…``; empty without validation.
        model: folder of the final model, or of its adapter.
    """

    step: int
    examples: int
    metrics: dict[str, float]
    evaluation: dict[str, float]
    model: Path


def train(config: TrainConfig | None = None, /, **settings: Any) -> TrainResult:
    """Trains a model from the start or from its newest checkpoint; a collective call.

    Every pair weighs the same in any pack, batch or rank. Writes ``metrics.jsonl``,
    ``checkpoints`` and the final ``model`` in the output folder.

    Args:
        config: the settings; default: their defaults.
        settings: fields of :class:`~packstore.config.training.TrainConfig` that override `config`.

    Raises:
        ConfigError: settings are missing, unknown, out of range or exclude each other.
        CompatibilityError: model, data, loss, tokenizer or checkpoint do not belong together.
        MissingExtraError: transformers, accelerate or peft is not installed.
        DivergedError: loss or gradient is not finite; no model is written.
        PackstoreError: model, dataset or checkpoint is unusable.
    """
    config = TrainConfig.of(config, **settings)
    run = prepare(config)
    sinks = _sinks(run)
    try:
        loop = Loop(run, sinks)
        loop()
        model = _export(run, loop)
    finally:
        for sink in sinks:
            sink.close()
    run.accelerator.end_training()
    return TrainResult(
        step=loop.step,
        examples=loop.examples,
        metrics=loop.metrics,
        evaluation=loop.evaluation,
        model=model,
    )


def _sinks(run: Run) -> list[Sink]:
    """The sinks of this rank's metrics."""
    accelerator, config = run.accelerator, run.config
    if accelerator.log_with:
        flat = {n: str(v) for n, v in config.recorded().items()}
        project = "packstore" if config.trackers else "tensorboard"  # also the name of its folder
        accelerator.init_trackers(os.environ.get("WANDB_PROJECT", project), flat)
    if not accelerator.is_main_process:
        return []
    step, output = run.start.step if run.start else 0, Path(config.output)
    lines = ConsoleLines(step, run.total_steps, Console(stderr=True))
    sinks: list[Sink] = [JsonLines(output / "metrics.jsonl", step), lines]
    if accelerator.log_with:
        sinks.append(Trackers(accelerator))
    return sinks


def _export(run: Run, loop: Loop) -> Path:
    """Writes the final model in Hugging Face format, tokenizer files and a card; collective."""
    final = Path(run.config.output, "model")
    partial = final.with_name(".model.partial")
    if run.accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    try:
        save_model(run.accelerator, run.policy, partial)
        if run.accelerator.is_main_process:
            source = Path(run.config.model)
            for file in (file for pattern in TOKENIZER_FILES for file in source.glob(pattern)):
                if file.is_file():
                    shutil.copy(file, partial / file.name)
            (partial / "README.md").write_text(_model_card(run, loop), encoding="utf-8")
            commit(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    run.accelerator.wait_for_everyone()
    return final


def _model_card(run: Run, loop: Loop) -> str:
    """The text of the model's ``README.md``: dataset, loss, settings, results."""
    from huggingface_hub import ModelCardData  # comes with transformers

    config, manifest = run.config, run.dataset.manifest
    front = ModelCardData(base_model=config.model, library_name="transformers", tags=["packstore"])
    tokenizer = manifest.provenance.get("tokenizer") or {}
    facts = {
        "starting model": config.model,
        "dataset": config.dataset,
        "dataset fingerprint": manifest.fingerprint,
        "examples of the dataset": f"{manifest.totals.examples:,} of kind {manifest.kind}",
        "tokenizer sha256": tokenizer.get("sha256", "not recorded"),
        "loss": str(config.loss),
        "loss parameters": _as_text(config.loss_parameters),
        "optimizer steps": f"{loop.step:,} of {config.examples_per_step:,} examples at most",
        "packstore": VERSION,
    }
    results = {n: f"{v:.6g}" for n, v in {**loop.metrics, **loop.evaluation}.items()}
    settings = "\n".join(f"{n}: {_as_text(v)}" for n, v in config.recorded().items())
    return f"""---
{front.to_yaml()}
---
# {Path(config.output).name}

Trained with `packstore train` on packed data.

{_table("what", facts)}

## Results

{_table("metric", results)}

## Settings

```yaml
{settings}
```
"""


def _table(head: str, rows: Mapping[str, object]) -> str:
    lines = [f"| {head} | value |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows.items()])


def _as_text(value: object) -> str:
    """Formats a value as JSON, which is valid YAML."""
    return json.dumps(value, ensure_ascii=False)
