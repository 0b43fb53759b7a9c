"""The short readers in ``examples/readers`` for trainers without packstore: they read
the packs of our loader, and a model gives the same loss on them.
"""

from __future__ import annotations

import ast
import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from random_datasets import KINDS, LAYOUTS, random_dataset
from torch.utils.data import DataLoader

import packstore
from packstore.torch import (
    PackedDataLoader,
    PackedDataset,
    PreferenceLoss,
    packed_logps,
    use_packed_attention,
)

FOLDER = Path(__file__).parents[3] / "examples" / "readers"
SEEDS = [0, pytest.param(1, marks=pytest.mark.slow)]
READERS = ("torch_reader.py", "numpy_reader.py")


@pytest.fixture(scope="module")
def torch_reader() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "torch_reader.py")))


@pytest.fixture(scope="module")
def numpy_reader() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / "numpy_reader.py")))


def batches_in_file_order(dataset: packstore.Dataset) -> list[Any]:
    """Return the packs as our loader gives them, one a batch."""
    loader = PackedDataLoader(
        PackedDataset(dataset, shuffle=False, lanes=1), packs_per_batch=1
    )
    return list(loader)


def tiny_model(kit: SimpleNamespace) -> Any:
    model = kit.tiny_model(dtype=torch.float64)
    return model.eval()


@pytest.mark.parametrize("name", READERS)
def test_they_do_not_import_packstore(name: str) -> None:
    tree = ast.parse((FOLDER / name).read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert not any("packstore" in alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert "packstore" not in (node.module or "")


@pytest.mark.parametrize(
    "changes", [{"features": ["of-a-later-release"]}, {"format_version": 2}], ids=repr
)
def test_a_dataset_of_a_later_release_is_refused(
    torch_reader: Any, numpy_reader: Any, tmp_path: Path, changes: dict[str, Any]
) -> None:
    dataset = random_dataset(tmp_path / "ds", "preference", "concat", n=4, seed=0)
    (path,) = Path(dataset.url, "_packstore").glob("manifest-*.json")
    manifest = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(manifest | changes), encoding="utf-8")
    with pytest.raises(ValueError, match="newer"):
        torch_reader.Pairs(dataset.url)
    with pytest.raises(ValueError, match="newer"):
        next(numpy_reader.read_packs(dataset.url))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_numpy_packs_are_those_of_our_loader(
    numpy_reader: Any, tmp_path: Path, kind: str, layout: str, seed: int
) -> None:
    dataset = random_dataset(tmp_path / "ds", kind, layout, n=40, seed=seed)
    packs = list(numpy_reader.read_packs(dataset.url))
    batches = batches_in_file_order(dataset)
    assert len(packs) == len(batches) > 2
    for pack, batch in zip(packs, batches, strict=True):
        names = ["input_ids", "labels", "position_ids", "segment_ids", "example_ids"]
        names += ["cu_seqlens", "cu_seqlens_k", "lengths"]
        for name in names:
            expected = getattr(batch, name).numpy()
            np.testing.assert_array_equal(pack[name], expected, name)
        np.testing.assert_array_equal(pack["reward"], batch.rewards.numpy())
        if batch.kv_index is not None:
            np.testing.assert_array_equal(pack["kv_index"], batch.kv_index.numpy())
    if layout == "trees":
        assert any((pack["parent_distances"] > 1).any() for pack in packs)


def test_example_ids_are_those_of_grown_and_combined_datasets(
    numpy_reader: Any, tmp_path: Path
) -> None:
    a = random_dataset(tmp_path / "a", "sft", "concat", n=20)
    b = random_dataset(tmp_path / "b", "sft", "concat", n=20, seed=1)
    both = packstore.concat([a.url, b.url], tmp_path / "both")
    packs = numpy_reader.read_packs(both.url)
    ids = np.concatenate([pack["example_ids"] for pack in packs])
    expected = packstore.scan(both).select("example_id").collect().to_series()
    assert ids.tolist() == expected.to_list()
    assert len(set(ids.tolist())) == 40


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_masked_row_has_our_log_probs(
    numpy_reader: Any, kit: SimpleNamespace, tmp_path: Path, kind: str, layout: str
) -> None:
    """An attention of any library that takes a mask sees what ours sees."""
    dataset = random_dataset(tmp_path / "ds", kind, layout, n=15)
    plain = tiny_model(kit)
    ours = use_packed_attention(tiny_model(kit))
    for pack, batch in zip(
        numpy_reader.read_packs(dataset.url),
        batches_in_file_order(dataset),
        strict=True,
    ):
        row = numpy_reader.fixed_shape(pack, size=192)
        assert {array.shape for array in row.values()} == {(192,), (192, 192)}
        logits = plain(
            input_ids=torch.tensor(row["input_ids"])[None],
            position_ids=torch.tensor(row["position_ids"])[None],
            attention_mask=torch.tensor(row["mask"])[None, None],
        ).logits[0]
        targets = torch.tensor(row["targets"])
        is_target = targets != -100
        segments = torch.tensor(row["segment_ids"])[is_target]
        log_probs = logits.log_softmax(-1)[is_target, targets[is_target]]
        sums = log_probs.new_zeros(len(pack["lengths"]))
        sums = sums.index_add(0, segments, log_probs)
        torch.testing.assert_close(sums, packed_logps(ours, batch))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", SEEDS)
def test_torch_pairs_are_the_examples(
    torch_reader: Any, tmp_path: Path, layout: str, seed: int
) -> None:
    dataset = random_dataset(tmp_path / "ds", "preference", layout, seed=seed)
    pairs = list(torch_reader.Pairs(dataset.url))
    rows = packstore.scan(dataset, tokens=True).collect().to_dicts()
    assert len(pairs) == len(rows) == 60
    for pair, row in zip(pairs, rows, strict=True):
        for side, sequence in enumerate(pair):
            assert sequence["input_ids"].tolist() == row["input_ids"][side]
            assert sequence["labels"].tolist() == row["labels"][side]
            assert sequence["reward"] == row["rewards"][side]

    # Over workers, every pair is read once.
    loader = DataLoader(torch_reader.Pairs(dataset.url), batch_size=None, num_workers=2)
    ids = [chosen["input_ids"].tolist() for chosen, _ in loader]
    assert sorted(ids) == sorted(row["input_ids"][0] for row in rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_training_step_is_ours(
    torch_reader: Any, kit: SimpleNamespace, tmp_path: Path, layout: str
) -> None:
    """DPO on all pairs: loss and gradients, one sequence a pass, and packed."""
    dataset = random_dataset(tmp_path / "ds", "preference", layout, n=24)
    plain = tiny_model(kit)
    losses = []
    for chosen, rejected in torch_reader.Pairs(dataset.url):
        margin = torch_reader.log_prob(plain, chosen) - torch_reader.log_prob(
            plain, rejected
        )
        losses.append(-torch.nn.functional.logsigmoid(0.1 * margin))
    loss = torch.stack(losses).mean()
    loss.backward()

    ours = use_packed_attention(tiny_model(kit))
    loss_fn = PreferenceLoss("dpo", beta=0.1)
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches_in_file_order(dataset):
        no_reference = torch.zeros(len(batch.lengths), dtype=torch.float64)
        output = loss_fn(packed_logps(ours, batch), batch, ref_logps=no_reference)
        total = total + output.loss_sum
    (total / 24).backward()

    torch.testing.assert_close(total / 24, loss)
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def test_torch_pairs_of_another_kind_are_refused(
    torch_reader: Any, tmp_path: Path
) -> None:
    dataset = random_dataset(tmp_path / "ds", "sft", "concat", n=5)
    with pytest.raises(ValueError, match="sft"):
        torch_reader.Pairs(dataset.url)
