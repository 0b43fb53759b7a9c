"""What shows itself in a notebook, and the notebook of the examples."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from children import run_python
from small_jobs import SETTINGS, pack

import packstore

EXAMPLES = Path(__file__).parents[2] / "examples"
RUN = """
import nbclient, nbformat
notebook = nbformat.read("quickstart.ipynb", 4)
nbclient.NotebookClient(notebook, timeout=900).execute()
for cell in notebook.cells:
    for output in cell.get("outputs", ()):
        print(*output.get("data", {}), str(output.get("data", {}).get("text/html"))[:60])
"""


def widths(html: str) -> list[float]:
    return [float(width) for width in re.findall(r"width:([0-9.]+)%", html)]


def test_a_dataset_shows_its_counts_and_its_first_pack(tmp_path: Path) -> None:
    ds = pack(tmp_path / "<prefs>")
    html, first = ds._repr_html_(), ds.read_packs(0).row(0)
    assert "&lt;prefs&gt;" in html
    assert "<prefs>" not in html
    assert "60 read, 60 packed" in html
    assert ">60</td>" in html
    filled = 100 * len(first.signed_ids) / SETTINGS["pack_size"]
    assert sum(widths(html)) == pytest.approx(filled, abs=0.1)
    assert len(widths(html)) == len(first.example_ids)
    assert not widths(ds.manifest._repr_html_())


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_tokens_of_examples_are_those_of_their_segments(
    tmp_path: Path, layout: str
) -> None:
    packs = pack(tmp_path / "prefs", layout=layout).read_packs(0)
    for i in range(len(packs)):
        row = packs.row(i)
        segments = np.diff(row.seq_boundaries).reshape(-1, 2).sum(1)
        assert row.example_tokens.tolist() == segments.tolist()
    rows = [packs.row(i).example_tokens for i in range(len(packs))]
    assert packs.example_tokens.tolist() == np.concatenate(rows).tolist()


def test_a_dataset_without_its_store_shows_its_counts(tmp_path: Path) -> None:
    ds = pack(tmp_path / "prefs")
    shutil.rmtree(tmp_path / "prefs" / "data")
    assert ">60</td>" in ds._repr_html_()
    assert not widths(ds._repr_html_())


def test_a_plan_shows_its_first_pack() -> None:
    plan = packstore.plan([600, 300, 100], pack_size=1000, shuffle=False)
    assert sorted(widths(plan._repr_html_())) == [10, 30, 60]
    assert "Plan" in packstore.plan([], pack_size=10)._repr_html_()


def test_a_batch_shows_its_examples(tmp_path: Path) -> None:
    pt = pytest.importorskip("packstore.torch", reason="batches are torch's")
    ds = pack(tmp_path / "prefs")
    batch = next(iter(pt.PackedDataLoader(pt.PackedDataset(ds.url), packs_per_batch=2)))
    html = batch._repr_html_()
    assert len(widths(html)) == batch.num_examples
    assert sum(widths(html)) == pytest.approx(100, abs=0.1)


def test_the_notebook_is_committed_without_output() -> None:
    notebook = json.loads((EXAMPLES / "quickstart.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    for module in ("nbclient", "ipykernel", "matplotlib", "accelerate"):
        pytest.importorskip(module, reason="the notebook needs it")
    shutil.copy(EXAMPLES / "quickstart.ipynb", tmp_path)
    shutil.copytree(EXAMPLES / "sample", tmp_path / "sample")
    done = run_python("-c", RUN, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("image/png") == 2
    for shown in ("Dataset", "Plan", "PackedBatch"):
        assert f"<div><b>{shown}" in done.stdout
