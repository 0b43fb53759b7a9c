"""Stored values of single tokens are those that the model computes online."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from packstore import Dataset
from packstore.cli import main
from packstore.errors import ConfigError, DatasetExistsError
from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    PackedDataLoader,
    PackedDataset,
    open_side,
    packed_logps,
    packed_top_k,
    use_packed_attention,
    write_ref_logps,
)

COLUMNS = {
    "ref_logps": "list<float32>",
    "ref_token_logps": "token<float32>",
    "ref_top_k": "token<top5,uint8>",
}


def dataset_of(
    kit: SimpleNamespace,
    folder: Path,
    kind: str = "preference",
    layout: str = "shared_prefix",
) -> Dataset:
    packs = kit.packed(random_examples(12, kind=kind, seed=1), [3, 1, 4, 2, 2], layout)
    dataset: Dataset = kit.write(str(folder / "data"), packs, kind, layout)
    return dataset


def float32_model(kit: SimpleNamespace) -> Any:
    return use_packed_attention(kit.tiny_model(dtype=torch.float32))


def largest_steps(batch: PackedBatch, logps: Tensor) -> Tensor:
    """The distance of neighbouring 8-bit values of each token, `[n, 1]`."""
    segments = batch.targets.segments
    examples = batch.segment_examples[segments]
    lowest = torch.zeros(batch.num_examples)
    lowest = lowest.scatter_reduce(0, examples, logps[:, -1], "amin")
    return (-lowest[examples] / 255)[:, None]


@pytest.mark.parametrize(
    ("kind", "layout", "dtype", "batching"),
    [
        ("preference", "shared_prefix", "float16", {}),
        ("scored", "shared_prefix", "uint8", {"packs_per_batch": 2}),
        ("sft", "concat", "uint8", {"tokens_per_batch": 200}),
    ],
)
def test_stored_values_are_those_online(
    kit: SimpleNamespace,
    tmp_path: Path,
    kind: str,
    layout: str,
    dtype: Any,
    batching: dict[str, int],
) -> None:
    """The top k to the rounding of its storage, the others to the bit."""
    dataset = dataset_of(kit, tmp_path, kind, layout)
    model = float32_model(kit)
    side = write_ref_logps(
        model,
        dataset,
        str(tmp_path / "ref"),
        per_token=True,
        top_k=5,
        top_k_dtype=dtype,
        **batching,
    )
    assert side.manifest.columns == {**COLUMNS, "ref_top_k": f"token<top5,{dtype}>"}
    data = PackedDataset(dataset, shuffle=False, side=side)
    for batch in PackedDataLoader(data, **batching):
        with torch.no_grad():
            assert torch.equal(packed_logps(model, batch), batch.ref_logps)
            logps = packed_logps(model, batch, per_token=True)
        stored_logps = batch.token_columns["ref_token_logps"]
        assert torch.equal(stored_logps, logps)
        sums = torch.zeros(batch.num_segments, dtype=torch.float64)
        sums = sums.index_add(0, batch.targets.segments, stored_logps.double())
        assert torch.equal(sums.float(), batch.ref_logps)

        stored, top = batch.token_columns["ref_top_k"], packed_top_k(model, batch, 5)
        assert torch.equal(stored.ids, top.ids)
        if dtype == "float16":
            assert torch.equal(stored.logps, top.logps.half())
        else:
            error = (stored.logps - top.logps).abs()
            assert (error <= 0.501 * largest_steps(batch, top.logps)).all()


def test_a_run_with_other_columns_is_another(
    kit: SimpleNamespace, tmp_path: Path
) -> None:
    """It takes no values of an unfinished run with other columns, nor of a finished."""
    dataset, model = dataset_of(kit, tmp_path), float32_model(kit)
    url = str(tmp_path / "ref")
    packs_done: list[int] = []

    def stop_after_two(_: str, done: int, *__: Any) -> None:
        packs_done.append(done)
        if len(packs_done) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_ref_logps(model, dataset, url, top_k=2, progress=stop_after_two)
    packs_done[:] = [0, 0, 0]
    write_ref_logps(model, dataset, url, top_k=3, progress=stop_after_two)
    assert len(packs_done) == 3 + len(dataset)
    assert write_ref_logps(model, dataset, url, top_k=3).version == 1
    for settings in ({"top_k": 2}, {"top_k": 3, "per_token": True}, {}):
        with pytest.raises(DatasetExistsError):
            write_ref_logps(model, dataset, url, **settings)


@pytest.mark.parametrize(
    ("settings", "mentioned"),
    [
        ({"top_k": 0}, "1 to 1024"),
        ({"top_k": 1025}, "1 to 1024"),
        ({"top_k": 51}, "1 to 50"),
        ({"top_k": 2, "top_k_dtype": "int8"}, "top_k_dtype"),
    ],
)
def test_refusals(
    kit: SimpleNamespace, tmp_path: Path, settings: dict[str, Any], mentioned: str
) -> None:
    dataset, model = dataset_of(kit, tmp_path), float32_model(kit)
    with pytest.raises(ConfigError, match=mentioned):
        write_ref_logps(model, dataset, str(tmp_path / "ref"), **settings)


def test_the_command(kit: SimpleNamespace, tmp_path: Path) -> None:
    dataset, model = dataset_of(kit, tmp_path), kit.tiny_model(dtype=torch.float32)
    model.save_pretrained(tmp_path / "model")
    url = str(tmp_path / "ref")
    command = ["ref-logps", dataset.url, url, "--model", str(tmp_path / "model")]
    command += ["--use-cpu", "--per-token", "--top-k", "5", "--top-k-dtype", "uint8"]
    assert main([*command, "--max-keys", "1"]) != 0
    assert main(command) == 0
    assert open_side(url).manifest.columns == COLUMNS
