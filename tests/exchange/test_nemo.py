"""NeMo-Aligner's packed file, in and out: the same packs, in the same order."""

from __future__ import annotations

import hashlib
import io
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from packstore.cli import main
from packstore.errors import (
    CompatibilityError,
    DatasetExistsError,
    FormatError,
    InputError,
    PackstoreError,
)
from packstore.exchange import export, import_
from packstore.exchange.nemo_packs import KEYS
from packstore.exchange.object_array import numbers, read_rows, reals

FILE = "nemo/dummy_dpo_packed_90.npy"


def load(path: Path) -> list[dict[str, Any]]:
    """As NeMo-Aligner reads it; of our own or the reference file only."""
    return list(np.load(path, allow_pickle=True))


def plain(data: bytes) -> list[dict[str, list[Any]]]:
    """The rows of a file as plain lists."""
    given = read_rows(io.BytesIO(data), "file", KEYS)
    return [
        {k: (reals if k == "reward" else numbers)(v, k).tolist() for k, v in row.items()}
        for row in given
    ]


def saved(rows: list[dict[str, Any]], protocol: int = 3, core: str = "numpy.core") -> bytes:
    """A file as numpy 1 or 2 writes it."""
    array = np.empty(len(rows), object)
    array[:] = rows
    out = io.BytesIO()
    header = {"descr": "|O", "fortran_order": False, "shape": array.shape}
    np.lib.format.write_array_header_1_0(out, header)
    text = pickle.dumps(array, protocol)
    if protocol == 3:
        text = text.replace(b"numpy._core.", core.encode() + b".")
    return out.getvalue() + text


def test_its_own_file_in_and_out(shared_data: Path, tmp_path: Path, kit: SimpleNamespace) -> None:
    source = shared_data / FILE
    dataset = import_("nemo", source, tmp_path / "packs")
    assert kit.rows(dataset) == load(source)
    assert dataset.verify().ok
    manifest = dataset.manifest
    assert (manifest.kind, manifest.layout, manifest.pack_size) == ("preference", "concat", 85)
    sha256 = hashlib.sha256(source.read_bytes()).hexdigest()
    assert manifest.provenance["imported_from"] == {"format": "nemo", "sha256": sha256}
    assert manifest.provenance["sources"][0]["sha256"] == sha256
    export("nemo", dataset, tmp_path / "back.npy")
    assert load(tmp_path / "back.npy") == load(source)
    again = import_("nemo", tmp_path / "back.npy", tmp_path / "again")
    assert again.manifest.shards[0].sha256 == manifest.shards[0].sha256


def test_with_its_tokenizer(shared_data: Path, tmp_path: Path) -> None:
    tokenizer = str(shared_data / "nemo/tokenizer.json")
    out = tmp_path / "packs"
    dataset = import_("nemo", shared_data / FILE, out, tokenizer=tokenizer, pack_size=90)
    assert dataset.manifest.pack_size == 90
    assert dataset.manifest.vocab_size == 128_002
    small = str(shared_data / "tokenizers/small_bpe/tokenizer.json")
    with pytest.raises(FormatError, match=r"npy, row 0: token ids .* \[ids-range\]"):
        import_("nemo", shared_data / FILE, tmp_path / "other", tokenizer=small)
    with pytest.raises(FormatError, match=r"npy, row 0: .* \[pack-size\]"):
        import_("nemo", shared_data / FILE, tmp_path / "other", pack_size=80)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
@pytest.mark.parametrize("seed", range(3))
def test_out_and_in(tmp_path: Path, kit: SimpleNamespace, layout: str, seed: int) -> None:
    dataset = kit.dataset(31, seed, layout=layout)
    whole = kit.dataset(31, seed)
    exported = export("nemo", dataset, tmp_path / "x.npy")
    assert load(tmp_path / "x.npy") == kit.rows(whole)
    assert exported.facts["longest pack"] == max(len(r["input_ids"]) for r in kit.rows(whole))
    back = import_("nemo", tmp_path / "x.npy", tmp_path / "back", pack_size=128)
    assert kit.rows(back) == kit.rows(whole)
    a, b = kit.examples(back), kit.examples(whole)
    for name in ("input_ids", "supervised", "sequence_offsets", "reward", "example_ids"):
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name))


def test_what_its_reader_makes_of_it(tmp_path: Path, kit: SimpleNamespace) -> None:
    """Inputs and targets as `DPOPackedDataset.global_collate_fn` cuts them."""
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


@pytest.mark.parametrize("rows", [1, 999, 1000, 1001, 2001])
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_any_number_of_rows(rows: int, protocol: int, tmp_path: Path) -> None:
    row = {
        "input_ids": [1, 300, 70_000, 2],
        "labels": [-100, 300, -100, 2],
        "reward": [1.0, 0.5],
        "lengths": [2, 2],
        "seq_boundaries": [0, 2, 4],
    }
    copies = [{k: list(v) for k, v in row.items()} for _ in range(rows)]
    for core in ("numpy.core", "numpy._core"):
        assert plain(saved(copies, protocol, core)) == copies
    if protocol == 3:
        (tmp_path / "x.npy").write_bytes(saved(copies))
        dataset = import_("nemo", tmp_path / "x.npy", tmp_path / "packs")
        export("nemo", dataset, tmp_path / "y.npy")
        assert load(tmp_path / "y.npy") == copies
        assert plain((tmp_path / "y.npy").read_bytes()) == copies


def test_numbers_of_any_size(kit: SimpleNamespace) -> None:
    rows = kit.rows(kit.dataset(9))
    rows[0]["input_ids"] = [
        *range(-3, 300),
        *(1 << k for k in range(63)),
        -(1 << 63),
        (1 << 63) - 1,
    ]
    rows[1]["reward"] = [1, 2.5, -3]
    for protocol in (3, 4, 5):
        assert plain(saved(rows, protocol)) == rows


def test_it_stays_out_of_the_way_of_what_is_there(
    tmp_path: Path, kit: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, out = kit.dataset(), tmp_path / "x.npy"
    out.write_text("mine")
    with pytest.raises(DatasetExistsError, match=r"x.npy: must not exist yet; found a file"):
        export("nemo", dataset, out)
    assert out.read_text(encoding="utf-8") == "mine"
    export("nemo", dataset, out, overwrite=True)
    with pytest.raises(DatasetExistsError):
        import_("nemo", out, dataset.url)
    assert main(["export", "nemo", dataset.url, str(tmp_path)]) == 1
    assert "found a folder. Name a file." in capsys.readouterr().err
    assert main(["import", "nemo", str(out), str(tmp_path / "in"), "--pack-size", "200"]) == 0
    assert "7 of 200 tokens" in capsys.readouterr().out
    assert main(["import", "nemo", str(out), str(tmp_path / "in")]) == 1
    assert main(["import", "nemo", str(out), str(tmp_path / "in"), "--overwrite"]) == 0


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
    for format, name in (("nemo", "x.npy"), ("jsonl", "x.jsonl.zst")):
        with pytest.raises(InputError):
            export(format, dataset, folder / name)
        assert kit.left(folder) == []


def test_other_kinds_are_refused(tmp_path: Path, kit: SimpleNamespace) -> None:
    for kind in ("sft", "ranked"):
        dataset = kit.dataset(5, kind=kind)
        with pytest.raises(CompatibilityError, match=rf"kind preference only; found kind {kind}"):
            export("nemo", dataset, tmp_path / "x.npy")
    assert not (tmp_path / "x.npy").exists()


def test_on_another_store(kit: SimpleNamespace) -> None:
    dataset = kit.dataset()
    exported = export("nemo", dataset, "memory://exchange/x.npy")
    assert exported.files == ["memory://exchange/x.npy"]
    back = import_("nemo", "memory://exchange/x.npy", "memory://exchange/packs")
    assert kit.rows(back) == kit.rows(dataset)
    with pytest.raises(PackstoreError):
        export("nemo", dataset, "memory://exchange/x.npy")
