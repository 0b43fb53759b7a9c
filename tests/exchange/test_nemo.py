"""NeMo-Aligner's packed file: the same packs, in the same order, as its own reader
loads them.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from exchange_datasets import pairs
from places import Files

from packstore import Dataset, export
from packstore.cli import main
from packstore.errors import DatasetExistsError, StorageError

Pack = Callable[..., Dataset]


def load(path: Path) -> list[dict[str, Any]]:
    """As NeMo-Aligner reads it."""
    return list(np.load(path, allow_pickle=True))


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize(("n", "pack_size"), [(1, 300), (60, 300), (2001, 40)])
def test_inputs_and_targets_as_its_reader_cuts_them(
    tmp_path: Path, packed: Pack, layout: str, n: int, pack_size: int
) -> None:
    """As `DPOPackedDataset.global_collate_fn` does: also of more rows than a batch of a
    pickle.
    """
    records = pairs(n)
    dataset = packed(records, layout=layout, pack_size=pack_size)
    exported = export("nemo", dataset, tmp_path / "x.npy")
    rows, sequences = load(tmp_path / "x.npy"), []
    for item in rows:
        bounds = item["seq_boundaries"]
        assert len(item["reward"]) == len(item["lengths"]) == len(bounds) - 1
        for start, stop, length, reward in zip(
            bounds, bounds[1:], item["lengths"], item["reward"], strict=False
        ):
            inputs, targets = (
                item["input_ids"][start : stop - 1],
                item["labels"][start + 1 : stop],
            )
            assert length == stop - start
            sequences.append((inputs, targets, np.float32(reward)))
    expected = []
    for record in records:
        for side in ("chosen", "rejected"):
            ids = record["prompt"] + record[side]
            labels = [-100] * len(record["prompt"]) + record[side]
            expected.append(
                (ids[:-1], labels[1:], np.float32(record[f"{side}_reward"]))
            )
    assert sequences == expected
    assert len(rows) == len(dataset)
    assert exported.facts["longest pack"] == max(len(row["input_ids"]) for row in rows)


def test_an_existing_file_is_replaced_only_if_asked(
    tmp_path: Path, packed: Pack, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, out = packed(pairs(9)), tmp_path / "x.npy"
    out.write_text("mine", encoding="utf-8")
    with pytest.raises(DatasetExistsError, match=r"x\.npy"):
        export("nemo", dataset, out)
    assert out.read_text(encoding="utf-8") == "mine"
    export("nemo", dataset, out, overwrite=True)
    assert len(load(out)) == len(dataset)
    assert main(["export", "nemo", dataset.url, str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().err
    exported = export("nemo", dataset, "memory://exchange/x.npy", overwrite=True)
    assert exported.files == ["memory://exchange/x.npy"]
    with pytest.raises(DatasetExistsError, match=r"x\.npy"):
        export("nemo", dataset, "memory://exchange/x.npy")


def test_a_failed_export_leaves_nothing(tmp_path: Path, packed: Pack) -> None:
    dataset, folder = packed(pairs(90)), tmp_path / "out"
    assert len(dataset.row_groups) > 1
    folder.mkdir()

    def fail(stage: str, done: int, total: int | None, unit: str) -> None:
        raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller"):
        export("nemo", dataset, folder / "x.npy", progress=fail)
    assert sorted(Files(str(folder)).names()) == []


def test_a_file_is_synced_before_it_appears(
    tmp_path: Path, packed: Pack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some disks tell only then that they are full."""

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    dataset, folder = packed(pairs(9)), tmp_path / "out"
    folder.mkdir()
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(StorageError, match="no space left"):
        export("nemo", dataset, folder / "x.npy")
    assert sorted(Files(str(folder)).names()) == []
