"""Precomputed reference log-probs: those of the model, to the last bit."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from ranks import launch

import packstore
from packstore import Dataset
from packstore import open as open_dataset
from packstore.errors import (
    CompatibilityError,
    DatasetExistsError,
    FormatError,
    UnsupportedFormatError,
)
from packstore.testing import random_examples
from packstore.torch import (
    PackedDataLoader,
    PackedDataset,
    check_reference,
    packed_logps,
    use_packed_attention,
    write_ref_logps,
)

N = 60

pytestmark = [  # PEFT's, with transformers 5.23
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


def record(i: int) -> dict[str, Any]:
    prompt = [1, 2, i % 9, i % 5]
    return {
        "prompt": prompt,
        "chosen": [3 + i % 7] * (1 + i % 7),
        "rejected": [4, i % 50],
    }


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("pairs")
    lines = folder / "pairs.jsonl"
    lines.write_text(
        "".join(json.dumps(record(i)) + "\n" for i in range(N)), encoding="utf-8"
    )
    how = {"row_group_tokens": 200, "shard_tokens": 400}
    return packstore.pack(str(lines), str(folder / "packed"), pack_size=48, **how)


def model_of(kit: SimpleNamespace, dtype: torch.dtype = torch.float32) -> Any:
    return use_packed_attention(kit.tiny_model(dtype=dtype))


def files(folder: str) -> dict[str, bytes]:
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@pytest.mark.parametrize(
    ("kind", "layout", "dtype", "batching"),
    [
        ("preference", "shared_prefix", torch.float32, {}),
        ("preference", "concat", torch.bfloat16, {"packs_per_batch": 3}),
        ("preference", "concat", torch.float32, {"tokens_per_batch": 200}),
        ("sft", "concat", torch.float32, {}),
        ("scored", "shared_prefix", torch.float32, {"packs_per_batch": 2}),
    ],
    ids=str,
)
def test_precomputed_is_online_to_the_last_bit(
    kit: SimpleNamespace,
    tmp_path: Path,
    kind: str,
    layout: str,
    dtype: Any,
    batching: Any,
) -> None:
    packs = kit.packed(random_examples(30, kind=kind, seed=1), [3, 1, 4, 2] * 3, layout)
    dataset, model = (
        kit.write(str(tmp_path / "d"), packs, kind, layout),
        model_of(kit, dtype),
    )
    side = write_ref_logps(model, dataset, str(tmp_path / "ref"), **batching)
    data = PackedDataset(
        dataset, shuffle=not batching, side=side
    )  # one pack is one in any order
    seen = 0
    for batch in PackedDataLoader(data, **batching):
        with torch.no_grad():
            assert torch.equal(packed_logps(model, batch), batch.ref_logps)
        seen += int(batch.weights.sum())
    assert seen == 30
    assert not list((tmp_path / "ref").glob("parts-*"))


class Killed(BaseException):
    """An error that no code catches."""


class Batches:
    """A progress that counts batches; one more than `most` ends the run."""

    def __init__(self, most: int) -> None:
        self.most, self.done = most, 0

    def __call__(self, *_: Any) -> None:
        if self.done == self.most:
            raise Killed
        self.done += 1


@pytest.mark.parametrize("parts", [pytest.param(1024, marks=pytest.mark.slow), 5])
def test_a_killed_run_goes_on(
    kit: SimpleNamespace,
    pairs: Dataset,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parts: int,
) -> None:
    model, out = model_of(kit), str(tmp_path / "ref")
    of_tokens = {"per_token": True, "top_k": 3, "top_k_dtype": "uint8"}
    # So that a part has several batches, for which 1024 parts would need a large
    # dataset.
    monkeypatch.setattr("packstore.torch.reference.reference.PARTS", parts)
    write_ref_logps(model, pairs, str(tmp_path / "whole"), **of_tokens)
    progress = Batches(len(pairs) // 2)
    with pytest.raises(Killed):
        write_ref_logps(model, pairs, out, progress=progress, **of_tokens)
    kept = sorted(Path(out).glob("parts-*/*"))
    assert 0 < len(kept) < min(parts, len(pairs))
    kept[0].write_bytes(kept[0].read_bytes()[:-1])  # damaged: computed again
    counting = Batches(10**9)
    write_ref_logps(model, pairs, out, progress=counting, **of_tokens)
    assert 0 < counting.done < len(pairs)
    assert files(out) == files(str(tmp_path / "whole"))


def on_rank(task: dict[str, Any]) -> int:
    """One of the ranks."""
    from transformers import AutoModelForCausalLM

    model = use_packed_attention(AutoModelForCausalLM.from_pretrained(task["model"]))
    data, progress = open_dataset(task["data"]), task.get("progress")
    settings = {"packs_per_batch": 2, "per_token": True, "top_k": 3}
    return len(write_ref_logps(model, data, task["out"], progress=progress, **settings))


@pytest.mark.slow
def test_two_ranks_give_the_bytes_of_one(
    kit: SimpleNamespace, pairs: Dataset, tmp_path: Path
) -> None:
    """Also where they take over what one rank had finished when it was killed."""
    model = model_of(kit)
    model.save_pretrained(tmp_path / "model")
    task = {
        "model": str(tmp_path / "model"),
        "data": pairs.url,
        "out": str(tmp_path / "two"),
    }
    with pytest.raises(Killed):
        on_rank({**task, "progress": Batches(4)})
    assert len(list(Path(task["out"]).glob("parts-*/*"))) >= 3
    assert launch(__file__, task, 2, tmp_path) == [N, N]
    on_rank({**task, "out": str(tmp_path / "one")})
    assert files(str(tmp_path / "two")) == files(str(tmp_path / "one"))


def test_its_provenance(kit: SimpleNamespace, pairs: Dataset, tmp_path: Path) -> None:
    model = model_of(kit)
    made = write_ref_logps(model, pairs, str(tmp_path / "ref")).manifest.provenance
    assert (made["weight_dtype"], made["attention"]) == ("float32", "sdpa")
    assert (made["adapter"], made["device"], made["packs_per_batch"]) == (
        False,
        "cpu",
        None,
    )
    assert (
        write_ref_logps(model, pairs, str(tmp_path / "ref")).version == 1
    )  # already there
    with pytest.raises(DatasetExistsError):
        write_ref_logps(model, pairs, str(tmp_path / "ref"), packs_per_batch=2)
    assert (
        write_ref_logps(model, pairs, str(tmp_path / "ref"), overwrite=True).version
        == 2
    )


def test_the_hash_is_of_the_model_alone(
    kit: SimpleNamespace, pairs: Dataset, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    def hashes(model: Any) -> list[Any]:
        side = write_ref_logps(model, pairs, str(tmp_path / "ref"), overwrite=True)
        return [
            side.manifest.provenance[f"model{name}_sha256"] for name in ("", "_rounded")
        ]

    peft = pytest.importorskip("peft", reason="LoRA needs peft")
    model = model_of(kit)
    exact, rounded = hashes(model)
    model.save_pretrained(tmp_path / "model")
    for dtype in (torch.bfloat16, torch.float64, torch.float32):
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=dtype)
        of_dtype = hashes(use_packed_attention(again))
        assert of_dtype[1] == rounded
        assert (of_dtype[0] == exact) == (dtype == torch.float32)
    adapted = peft.get_peft_model(
        again, peft.LoraConfig(target_modules=["q_proj", "v_proj"])
    )
    check_reference(str(tmp_path / "ref"), adapted, pairs)  # without its adapter
    with pytest.raises(CompatibilityError, match="model_rounded_sha256"):
        check_reference(str(tmp_path / "ref"), adapted, pairs, adapter=True)
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 5.0}
    assert hashes(model)[0] != exact


def test_what_does_not_fit_is_refused(
    kit: SimpleNamespace,
    pairs: Dataset,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = model_of(kit)
    side = write_ref_logps(model, pairs, str(tmp_path / "ref"))
    with caplog.at_level(logging.WARNING):
        check_reference(side, model, pairs)
    assert not caplog.records
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(CompatibilityError, match="autocast_dtype"),
    ):
        check_reference(side, model, pairs)
    with pytest.raises(CompatibilityError, match="head_dtype"):
        check_reference(side, model_of(kit, torch.float64), pairs)
    with torch.no_grad():
        model.lm_head.weight += 0.1
    with pytest.raises(CompatibilityError, match="model_rounded_sha256"):
        check_reference(side, model, pairs)
    packs = kit.packed(random_examples(8), [4, 4], "concat")
    other = kit.write(str(tmp_path / "other"), packs)
    with pytest.raises(CompatibilityError, match="lineage"):
        PackedDataset(other, side=side)
    model.resize_token_embeddings(49)
    with pytest.raises(CompatibilityError, match="vocab_size"):
        write_ref_logps(model, other, "never")


def test_packs_of_too_many_keys_are_refused(
    kit: SimpleNamespace, pairs: Dataset, tmp_path: Path
) -> None:
    """Before any work is done, as in training."""
    model, url = model_of(kit), tmp_path / "ref"
    most_keys = pairs.manifest.statistics.most_keys
    with pytest.raises(UnsupportedFormatError, match="max_keys"):
        write_ref_logps(model, pairs, str(url), max_keys=most_keys - 1)
    assert not url.exists()
    write_ref_logps(model, pairs, str(url), max_keys=most_keys)


def test_values_that_are_not_finite_are_refused(
    kit: SimpleNamespace, pairs: Dataset, tmp_path: Path
) -> None:
    model = model_of(kit)
    with torch.no_grad():
        model.get_input_embeddings().weight[49] = np.nan
    with pytest.raises(FormatError, match="example 49"):
        write_ref_logps(model, pairs, str(tmp_path / "ref"))


def test_each_module_keeps_its_mode(kit: SimpleNamespace, tmp_path: Path) -> None:
    """A frozen part that is kept in evaluation mode stays there, others stay in
    training mode.
    """
    packs = kit.packed(random_examples(6), [2, 4], "concat")
    dataset = kit.write(str(tmp_path / "ds"), packs)
    model = use_packed_attention(kit.tiny_model()).train()
    next(m for n, m in model.named_modules() if n.endswith("norm")).eval()
    before = {name: module.training for name, module in model.named_modules()}
    write_ref_logps(model, dataset, str(tmp_path / "ref"))
    assert {name: module.training for name, module in model.named_modules()} == before
    assert len(set(before.values())) == 2
