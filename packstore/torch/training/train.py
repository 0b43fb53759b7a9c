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
import shutil
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packstore.config.training import TrainConfig
from packstore.errors import display
from packstore.torch.training.checkpoint import save_model, whole_folder
from packstore.torch.training.loop import Loop
from packstore.torch.training.setup import Run
from packstore.torch.training.sinks import make_sinks
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
    run = Run(config)
    step = run.start.step if run.start else 0
    with ExitStack() as stack:
        loop = Loop(run, make_sinks(run.accelerator, run.config, step, run.total_steps, stack))
        loop()
        model = _export(run, loop)
    run.accelerator.end_training()
    return TrainResult(
        step=loop.step,
        examples=loop.examples,
        metrics=loop.metrics,
        evaluation=loop.evaluation,
        model=model,
    )


def _export(run: Run, loop: Loop) -> Path:
    """Writes the final model in Hugging Face format, tokenizer files and a card; collective."""
    final = Path(run.config.output, "model")
    with whole_folder(run.accelerator, final) as partial:
        save_model(run.accelerator, run.policy, partial)
        if run.accelerator.is_main_process:
            source = Path(run.config.model)
            for file in (file for pattern in TOKENIZER_FILES for file in source.glob(pattern)):
                if file.is_file():
                    shutil.copy(file, partial / file.name)
            (partial / "README.md").write_text(_model_card(run, loop), encoding="utf-8")
    return final


def _model_card(run: Run, loop: Loop) -> str:
    """The text of the model's ``README.md``: dataset, loss, settings, results."""
    from huggingface_hub import ModelCardData  # comes with transformers

    config, manifest = run.config, run.dataset.manifest
    front = ModelCardData(base_model=config.model, library_name="transformers", tags=["packstore"])
    tokenizer = manifest.provenance.get("tokenizer") or {}
    facts = {
        "starting model": config.model,
        "dataset": display(config.dataset),
        "dataset fingerprint": manifest.fingerprint,
        "examples of the dataset": f"{manifest.totals.examples:,} of kind {manifest.kind}",
        "tokenizer sha256": tokenizer.get("sha256", "not recorded"),
        "loss": str(config.loss),
        "loss parameters": json.dumps(config.loss_parameters, ensure_ascii=False),
        "optimizer steps": f"{loop.step:,} of {loop.examples / loop.step:,.1f} examples on average",
        "packstore": VERSION,
    }
    results = {n: f"{v:.6g}" for n, v in {**loop.metrics, **loop.evaluation}.items()}
    recorded = config.recorded().items()
    settings = "\n".join(f"{n}: {json.dumps(v, ensure_ascii=False)}" for n, v in recorded)
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
