"""The ``README.md`` of a trained model: dataset, loss, settings, results."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from packstore.errors import display
from packstore.torch.training.data import datasets_of
from packstore.version import VERSION


def model_card(trainer: Any, **front: Any) -> str:
    """Returns the text; `front`: further fields of its YAML head."""
    args, state = trainer.args, trainer.state
    dataset = next(datasets_of(trainer.train_dataset))  # of a mix the first
    manifest = dataset.manifest
    started = trainer.accelerator.unwrap_model(trainer.model).config._name_or_path
    tags = ["packstore", *(front.pop("tags", None) or ())]
    known = {"base_model": started or None, "library_name": "transformers", "tags": tags}
    head = ModelCardData(**{name: value for name, value in {**front, **known}.items() if value})
    facts = {
        "dataset": display(dataset.url),
        "dataset fingerprint": manifest.fingerprint,
        "examples of the dataset": f"{manifest.totals.examples:,} of kind {manifest.kind}",
        "tokenizer sha256": (manifest.provenance.get("tokenizer") or {}).get("sha256", "unknown"),
        "loss": repr(trainer.loss_fn),
        "optimizer steps": f"{state.global_step:,} of at most {trainer.examples_per_step} examples",
        "packstore": VERSION,
    }
    last = {n: v for record in state.log_history for n, v in record.items() if n != "step"}
    results = {name: f"{value:.6g}" for name, value in last.items()}
    settings = json.dumps(args.to_sanitized_dict(), indent=1, default=str)
    tables = _table("what", facts), _table("metric", results)
    return (
        f"---\n{head.to_yaml()}\n---\n# {Path(args.output_dir).name}\n\nTrained with packstore's "
        f"PackedTrainer on packed data.\n\n{tables[0]}\n\n## Results\n\n{tables[1]}\n\n"
        f"## Settings\n\n```json\n{settings}\n```\n"
    )


def _table(head: str, rows: Mapping[str, object]) -> str:
    lines = [f"| {head} | value |", "|---|---|"]
    return "\n".join(lines + [f"| {name} | {value} |" for name, value in rows.items()])
