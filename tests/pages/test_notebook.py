"""What shows itself in a notebook, and the notebook of the examples."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from children import run_python
from small_jobs import SETTINGS, pack

import packstore

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = Path(__file__).parents[2] / "docs" / "notebook.py"


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


def outputs_of(notebook: Path) -> list[list[dict[str, Any]]]:
    """Return the outputs of each cell with code."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    return [cell["outputs"] for cell in cells if cell["cell_type"] == "code"]


def texts_of(output: dict[str, Any]) -> dict[str, str]:
    """Return the texts of an output by their type; of a picture, only its type."""
    if output["output_type"] == "stream":
        return {output["name"]: "".join(output["text"])}
    return {
        mime: "" if mime.startswith("image/") else "".join(content)
        for mime, content in output["data"].items()
    }


def split_numbers(text: str) -> tuple[str, list[float]]:
    """Return a text without its numbers, and these."""
    number = r"\d[\d,]*(?:\.\d+)?"
    numbers = [float(found.replace(",", "")) for found in re.findall(number, text)]
    return re.sub(number + "|(?<= ) +", "", text), numbers


def test_the_notebook_is_stored_with_outputs_of_any_machine() -> None:
    """No paths, no times, no warnings; tables and pictures that a forge shows."""
    texts = [
        texts_of(output)
        for outputs in outputs_of(EXAMPLES / "quickstart.ipynb")
        for output in outputs
    ]
    types = Counter(type_ for text in texts for type_ in text)
    assert types["image/png"] == 2
    assert types["text/html"] == 3
    assert types["stdout"] == 2
    assert types["stderr"] == 0
    for text in texts:
        for content in text.values():
            assert not re.search(r"/(home|root|tmp|usr|work)\b|\bat 0x|it/s", content)


def test_the_plan_of_the_notebook_can_be_compared_with_its_dataset() -> None:
    """It has the tokens that are stored, not those of whole sequences."""
    texts = [
        texts_of(output).get("text/plain", "")
        for outputs in outputs_of(EXAMPLES / "quickstart.ipynb")
        for output in outputs
    ]
    tokens = [
        re.findall(r"\btokens=(\d+)", text)
        for text in texts
        if text.startswith(("Dataset(", "Plan("))
    ]
    assert len(tokens) == 2
    assert tokens[0] == tokens[1]


@pytest.mark.slow
def test_the_outputs_of_the_notebook_are_those_of_a_run(tmp_path: Path) -> None:
    """Numbers may differ by a tenth: training rounds otherwise on other machines."""
    for module in ("nbclient", "ipykernel", "matplotlib", "accelerate"):
        pytest.importorskip(module, reason="the notebook needs it")
    done = run_python(str(SCRIPT), str(tmp_path / "run.ipynb"))
    assert done.returncode == 0, done.stderr[-3000:]

    stored = outputs_of(EXAMPLES / "quickstart.ipynb")
    run = outputs_of(tmp_path / "run.ipynb")
    for stored_outputs, run_outputs in zip(stored, run, strict=True):
        for stored_output, run_output in zip(stored_outputs, run_outputs, strict=True):
            stored_texts = texts_of(stored_output)
            run_texts = texts_of(run_output)
            assert run_texts.keys() == stored_texts.keys()
            for type_, stored_text in stored_texts.items():
                text, numbers = split_numbers(run_texts[type_])
                expected_text, expected_numbers = split_numbers(stored_text)
                assert text == expected_text
                assert numbers == pytest.approx(expected_numbers, rel=0.1, abs=0.1)
