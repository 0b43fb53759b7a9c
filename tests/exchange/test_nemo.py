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
from agent_turns import agent_turns
from exchange_datasets import pairs
from places import Files

from packstore import Dataset, export
from packstore.cli import main
from packstore.errors import DatasetExistsError, StorageError

Pack = Callable[..., Dataset]


def load(path: Path) -> list[dict[str, Any]]:
    """As NeMo-Aligner reads it."""
    return list(np.load(path, allow_pickle=True))


def cut(rows: list[dict[str, Any]]) -> list[list[Any]]:
    """Inputs, targets and reward of each sequence, as `DPOPackedDataset` cuts them."""
    sequences = []
    for item in rows:
        bounds = item["seq_boundaries"]
        assert len(item["reward"]) == len(item["lengths"]) == len(bounds) - 1
        for start, stop, length, reward in zip(
            bounds, bounds[1:], item["lengths"], item["reward"], strict=False
        ):
            assert length == stop - start
            inputs = item["input_ids"][start : stop - 1]
            targets = item["labels"][start + 1 : stop]
            sequences.append([inputs, targets, np.float32(reward)])
    return sequences


def expected_sequences(records: list[dict[str, Any]]) -> list[list[Any]]:
    """As `cut` returns the records: chosen, then rejected."""
    sequences = []
    for record in records:
        for side in ("chosen", "rejected"):
            ids = record["prompt"] + record[side]
            labels = [-100] * len(record["prompt"]) + record[side]
            reward = np.float32(record[f"{side}_reward"])
            sequences.append([ids[:-1], labels[1:], reward])
    return sequences


def as_pairs(sequences: list[list[Any]]) -> list[list[Any]]:
    """Both sequences of each pair, sorted by their content."""
    return sorted(
        chosen + rejected
        for chosen, rejected in zip(sequences[::2], sequences[1::2], strict=True)
    )


@pytest.mark.parametrize(("n", "pack_size"), [(1, 300), (60, 300), (2001, 40)])
def test_inputs_and_targets_as_its_reader_cuts_them(
    tmp_path: Path, packed: Pack, n: int, pack_size: int
) -> None:
    """Also of more rows than a batch of a pickle."""
    records = pairs(n)
    dataset = packed(records, layout="concat", pack_size=pack_size)
    exported = export("nemo", dataset, tmp_path / "x.npy")
    rows = load(tmp_path / "x.npy")
    assert cut(rows) == expected_sequences(records)
    assert len(rows) == len(dataset) == exported.facts["packs"]
    assert exported.facts["longest pack"] == max(len(row["input_ids"]) for row in rows)


@pytest.mark.parametrize(("n", "pack_size"), [(1, 300), (60, 300), (3000, 60)])
def test_rows_are_planned_anew_where_prompts_are_stored_once(
    tmp_path: Path, packed: Pack, n: int, pack_size: int
) -> None:
    """Whole pairs, in rows of at most the pack size, or of one pair that is longer."""
    records = pairs(n, prompt_tokens=30)
    dataset = packed(records, layout="shared_prefix", pack_size=pack_size)
    exported = export("nemo", dataset, tmp_path / "x.npy")
    rows = load(tmp_path / "x.npy")
    assert as_pairs(cut(rows)) == as_pairs(expected_sequences(records))

    lengths = [len(row["input_ids"]) for row in rows]
    for row, length in zip(rows, lengths, strict=True):
        assert length <= pack_size or len(row["lengths"]) == 2
    assert exported.facts["packs"] == len(rows)
    assert exported.facts["longest pack"] == max(lengths)
    assert exported.facts["model.encoder_seq_length"] == max(lengths)
    assert exported.facts["model.data.data_impl"] == "packed_jsonl"
    assert exported.facts["pairs"] == n

    export("nemo", dataset, tmp_path / "again.npy")
    assert (tmp_path / "again.npy").read_bytes() == (tmp_path / "x.npy").read_bytes()


def test_pairs_share_tokens_over_a_pack(tmp_path: Path, packed: Pack) -> None:
    """Turns of agents, with two answers each."""
    records = []
    for turn in agent_turns():
        num_prompt_tokens = turn["labels"].count(-100)
        records.append(
            {
                "prompt": turn["input_ids"][:num_prompt_tokens],
                "chosen": turn["input_ids"][num_prompt_tokens:],
                "rejected": [7, 8, 7],
                "chosen_reward": 1.0,
                "rejected_reward": 0.0,
            }
        )
    dataset = packed(records, share_prefixes="pack")
    totals = dataset.manifest.totals
    assert 3 * totals.tokens < totals.logical_tokens
    export("nemo", dataset, tmp_path / "x.npy")
    rows = load(tmp_path / "x.npy")
    assert as_pairs(cut(rows)) == as_pairs(expected_sequences(records))
    for row in rows:
        assert len(row["input_ids"]) <= 300 or len(row["lengths"]) == 2


def test_planned_rows_are_full(tmp_path: Path, packed: Pack) -> None:
    records = pairs(900, prompt_tokens=30)
    dataset = packed(records, layout="shared_prefix", pack_size=1500)
    export("nemo", dataset, tmp_path / "x.npy")
    lengths = [len(row["input_ids"]) for row in load(tmp_path / "x.npy")]
    assert sum(lengths) > 0.95 * 1500 * len(lengths)


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
