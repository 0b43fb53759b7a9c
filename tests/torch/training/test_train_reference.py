"""Training on precomputed log-probs: those of its own reference, to the last bit, or
refused.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from places import edit_manifest
from train_runs import records
from transformers import AutoModelForCausalLM

import packstore
from packstore import open as open_dataset
from packstore.errors import CompatibilityError
from packstore.torch import (
    SideWriter,
    open_side,
    train,
    use_packed_attention,
    write_ref_logps,
)


def precompute(model: str, dataset: str, side: str) -> str:
    """Writes the log-probs of a model or adapter."""
    loaded = use_packed_attention(AutoModelForCausalLM.from_pretrained(model))
    write_ref_logps(loaded, open_dataset(dataset), side)
    return side


@pytest.fixture(scope="module")
def made(
    kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Settings of a short run in float32, with the log-probs of its own
    starting model.
    """
    folder = tmp_path_factory.mktemp("reference")
    run = kit.short_run(folder, "shared_prefix")
    side = precompute(run["model"], run["train_dataset"], str(folder / "ref"))
    more = {
        "eval_dataset": run["train_dataset"],
        "ref_logps": side,
        "eval_ref_logps": side,
    }
    return {**run, **more, "learning_rate": 1e-2, "logging_steps": 1}


def another_side(made: dict[str, Any], url: Path, **changes: Any) -> str:
    """The same values, said to be made with something else."""
    side = open_side(made["ref_logps"])
    dataset = open_dataset(made["train_dataset"])
    told = {**side.manifest.provenance, **changes}
    columns = {"ref_logps": "list<float32>"}
    with SideWriter(str(url), dataset, columns, provenance=told) as writer:
        for batch in side.iter_batches():
            ids, values = (column.to_pylist() for column in batch.columns)
            logps = np.concatenate([np.float32(v) for v in values])
            writer.write(
                np.array(ids), {"ref_logps": logps}, np.full(len(ids), 2, np.int32)
            )
    return str(url)


def test_precomputed_equals_online_to_the_last_bit(
    made: dict[str, Any], tmp_path: Path
) -> None:
    train(**made, output_dir=str(tmp_path / "precomputed"))
    without = {k: v for k, v in made.items() if "ref_logps" not in k}
    train(**without, output_dir=str(tmp_path / "online"))
    for metric in ("loss", "eval_loss"):
        found, expected = (
            [record[metric] for record in records(tmp_path / name, metric)]
            for name in ("precomputed", "online")
        )
        assert found == expected
        assert len(found) >= 3 or metric != "loss"
        assert np.ptp(found) > 1e-3 or metric != "loss"


@pytest.mark.parametrize(
    ("which", "name", "value"),
    [
        ("ref_logps", "chat_template_sha256", "0" * 64),
        ("eval_ref_logps", "head_dtype", "float64"),
        ("ref_logps", "device", "cuda sm_90"),
    ],
    ids=lambda x: x[:16],
)
def test_other_provenance_is_refused(
    made: dict[str, Any], tmp_path: Path, which: str, name: str, value: str
) -> None:
    url = another_side(made, tmp_path / "side", **{name: value})
    with pytest.raises(
        CompatibilityError, match=f"its {name} must be that of the training"
    ):
        train(**{**made, which: url, "output_dir": str(tmp_path / "out")})


@pytest.mark.slow
def test_the_reference_is_the_one_that_the_settings_name(
    made: dict[str, Any], kit: SimpleNamespace, tmp_path: Path
) -> None:
    """Another starting model needs `reference_model`, a new adapter does not."""
    other = kit.tiny_model(dtype=torch.float32)
    with torch.no_grad():
        other.lm_head.weight += 0.1
    other.save_pretrained(tmp_path / "other")
    started = {**made, "model": str(tmp_path / "other"), "max_steps": 1}
    with pytest.raises(CompatibilityError, match="model_rounded_sha256"):
        train(**started, output_dir=str(tmp_path / "a"))
    train(**started, reference=made["model"], output_dir=str(tmp_path / "b"))
    lora = {"peft_config": {"r": 4}, "max_steps": 1}
    train(**{**made, **lora}, output_dir=str(tmp_path / "c"))
    adapter = str(tmp_path / "c")
    further = {**made, "model": adapter, "max_steps": 1}
    with pytest.raises(CompatibilityError, match="model_rounded_sha256"):
        train(**further, output_dir=str(tmp_path / "d"))
    adapted = precompute(adapter, made["train_dataset"], str(tmp_path / "adapted"))
    own = dict.fromkeys(("ref_logps", "eval_ref_logps"), adapted)
    train(**{**further, **own}, output_dir=str(tmp_path / "e"))


@pytest.mark.slow
def test_of_each_part_of_a_dataset_that_grew(
    made: dict[str, Any], tmp_path: Path
) -> None:
    """Several side datasets: none may be left out, and each is checked; also if it goes
    on.
    """
    source = {"sources": [{"path": "pairs", "records": 99}]}
    parts = [
        str(shutil.copytree(made["train_dataset"], tmp_path / name)) for name in "ab"
    ]
    for part, told in zip(
        parts, (source, {**source, "lineage": "0" * 64}), strict=True
    ):
        edit_manifest(part, lambda m, told=told: m["provenance"].update(told))
    other, whole = parts[1], packstore.concat(parts, str(tmp_path / "whole")).url
    both = [made["ref_logps"], precompute(made["model"], other, str(tmp_path / "ref"))]
    settings = {
        **made,
        "train_dataset": whole,
        "ref_logps": both,
        "max_steps": 2,
        "save_steps": 1,
    }
    train(**settings, output_dir=str(tmp_path / "stored"))
    online = {**settings, "ref_logps": [], "eval_ref_logps": []}
    train(**online, output_dir=str(tmp_path / "online"))
    found = [
        [r["loss"] for r in records(tmp_path / n, "loss")] for n in ("stored", "online")
    ]
    assert found[0] == found[1]
    assert (
        train(**{**settings, "max_steps": 3}, output_dir=str(tmp_path / "stored")).step
        == 3
    )
    with pytest.raises(CompatibilityError, match="none from source 1 on"):
        train(**{**settings, "ref_logps": both[0]}, output_dir=str(tmp_path / "a"))
    wrong = another_side(made, tmp_path / "wrong", head_dtype="float64")
    for refs in ([wrong, both[1]], [both[1], wrong]):
        with pytest.raises(CompatibilityError, match="its head_dtype must be that"):
            train(**{**settings, "ref_logps": refs}, output_dir=str(tmp_path / "b"))
