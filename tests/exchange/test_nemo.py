"""NeMo-Aligner's packed file: the same packs, in the same order, as its own reader loads them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packstore import export
from packstore.cli import main
from packstore.errors import CompatibilityError, DatasetExistsError, InputError, PackstoreError


def load(path: Path) -> list[dict[str, Any]]:
    """As NeMo-Aligner reads it."""
    return list(np.load(path, allow_pickle=True))


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("pairs", [1, 31, 999, 2001])
def test_rows_are_the_packs(tmp_path: Path, kit: SimpleNamespace, layout: str, pairs: int) -> None:
    dataset = kit.dataset(pairs, layout=layout, per_pack=1 if pairs > 31 else 3)
    whole = kit.rows(kit.dataset(pairs, per_pack=1 if pairs > 31 else 3))
    exported = export("nemo", dataset, tmp_path / "x.npy")
    assert load(tmp_path / "x.npy") == whole
    assert exported.facts["longest pack"] == max(len(r["input_ids"]) for r in whole)


def test_inputs_and_targets_as_its_reader_cuts_them(tmp_path: Path, kit: SimpleNamespace) -> None:
    """As `DPOPackedDataset.global_collate_fn` does."""
    dataset = kit.dataset(12)
    export("nemo", dataset, tmp_path / "x.npy")
    examples, s = kit.examples(dataset), 0
    for item in load(tmp_path / "x.npy"):
        bounds = item["seq_boundaries"]
        assert len(item["reward"]) == len(item["lengths"]) == len(bounds) - 1
        for start, stop, length in zip(bounds, bounds[1:], item["lengths"], strict=False):
            part = slice(*examples.sequence_offsets[s : s + 2])
            ids, on = examples.input_ids[part], examples.supervised[part]
            assert item["input_ids"][start : stop - 1] == ids[:-1].tolist()
            assert item["labels"][start + 1 : stop] == np.where(on, ids, -100)[1:].tolist()
            assert length == len(ids)
            s += 1
    assert s == examples.num_sequences


def test_an_existing_file_is_replaced_only_if_asked(
    tmp_path: Path, kit: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, out = kit.dataset(), tmp_path / "x.npy"
    out.write_text("mine")
    with pytest.raises(DatasetExistsError, match=r"x.npy: must not exist yet; found a file"):
        export("nemo", dataset, out)
    assert out.read_text(encoding="utf-8") == "mine"
    export("nemo", dataset, out, overwrite=True)
    assert load(out) == kit.rows(dataset)
    assert main(["export", "nemo", dataset.url, str(tmp_path)]) == 1
    assert "found a folder. Name a file." in capsys.readouterr().err


def test_a_failed_export_leaves_nothing(
    tmp_path: Path, kit: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset, folder = kit.dataset(), tmp_path / "out"
    folder.mkdir()
    read = type(dataset).read_packs

    def fail(self: Any, group: int) -> Any:
        if group:
            raise InputError("no more.")
        return read(self, group)

    monkeypatch.setattr(type(dataset), "read_packs", fail)
    with pytest.raises(InputError):
        export("nemo", dataset, folder / "x.npy")
    assert kit.left(folder) == []


def test_other_kinds_are_refused(tmp_path: Path, kit: SimpleNamespace) -> None:
    for kind in ("sft", "ranked"):
        with pytest.raises(CompatibilityError, match=rf"of kind preference; found kind {kind}"):
            export("nemo", kit.dataset(5, kind=kind), tmp_path / "x.npy")
    assert not (tmp_path / "x.npy").exists()


def test_on_another_store(kit: SimpleNamespace) -> None:
    dataset = kit.dataset()
    exported = export("nemo", dataset, "memory://exchange/x.npy")
    assert exported.files == ["memory://exchange/x.npy"]
    with pytest.raises(PackstoreError, match="must not exist yet"):
        export("nemo", dataset, "memory://exchange/x.npy")
