"""Writes the final model of a run: Hugging Face format, tokenizer files, and a card."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from packstore.config.training import TrainConfig
from packstore.io.manifest.manifest import Manifest
from packstore.torch.training.checkpoint import commit, save_model
from packstore.version import VERSION

TOKENIZER_FILES = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("chat_template*", "*.model"),
)


def export_model(accelerator: Any, policy: nn.Module, config: TrainConfig, card: str) -> Path:
    """Writes ``model`` in the output folder; a collective call.

    Args:
        accelerator: the Accelerator.
        policy: the policy, prepared by Accelerate.
        config: settings of the run.
        card: text of the ``README.md``.
    """
    final = Path(config.output, "model")
    partial = final.with_name(".model.partial")
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    try:
        save_model(accelerator, policy, partial)
        if accelerator.is_main_process:
            source = Path(config.model)
            for file in (file for pattern in TOKENIZER_FILES for file in source.glob(pattern)):
                if file.is_file():
                    shutil.copy(file, partial / file.name)
            (partial / "README.md").write_text(card, encoding="utf-8")
            commit(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    accelerator.wait_for_everyone()
    return final


def model_card(
    config: TrainConfig, manifest: Manifest, step: int, results: Mapping[str, float]
) -> str:
    """Returns the model card: dataset, loss, settings, results.

    Args:
        config: settings of the run.
        manifest: manifest of the dataset.
        step: optimizer steps done.
        results: last metrics of training and validation.
    """
    from huggingface_hub import ModelCardData  # comes with transformers

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
        "optimizer steps": f"{step:,} of {config.examples_per_step:,} examples at most",
        "packstore": VERSION,
    }
    settings = "\n".join(f"{n}: {_as_text(v)}" for n, v in config.recorded().items())
    return f"""---
{front.to_yaml()}
---
# {Path(config.output).name}

Trained with `packstore train` on packed data.

{_table(("what", "value"), facts)}

## Results

{_table(("metric", "value"), {n: f"{v:.6g}" for n, v in results.items()})}

## Settings

```yaml
{settings}
```
"""


def _table(head: tuple[str, str], rows: Mapping[str, object]) -> str:
    lines = [f"| {head[0]} | {head[1]} |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows.items()])


def _as_text(value: object) -> str:
    """Formats a value as JSON, which is valid YAML."""
    return json.dumps(value, ensure_ascii=False)
