"""Links, paths, folders and registries in the pages of the project exist."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for pattern in ("*.md", "docs/*.md", "schemas/*.md", "packstore/**/*.md")
    for page in ROOT.glob(pattern)
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text)
    for link in links:
        assert link.startswith("https://") or (page.parent / link).exists(), link
    folders = "packstore|schemas|tests|docs|examples|benchmarks"
    for path in re.findall(rf"`((?:{folders})/[\w./-]*)`", text):
        if path not in ("benchmarks/", "benchmarks/results/"):
            assert (ROOT / path).exists(), path


def test_folders_are_in_the_order_that_is_checked() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "tool"
    ]["importlinter"]
    (layers,) = (
        c["layers"]
        for c in contracts["contracts"]
        if c.get("containers") == ["packstore"]
    )
    layer_of = {
        name.strip(): number
        for number, layer in enumerate(layers)
        for name in layer.split("|")
    }
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"## Folders\n(.+?)\n## ", page, re.S)
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    names = [
        n for row in rows for n in re.findall(r"`(\w+)(?:\.py)?`", row.split(" | ")[0])
    ]
    assert sorted(names) == sorted(layer_of)
    assert [layer_of[name] for name in names] == sorted(layer_of.values())


def test_decisions_name_functions_that_exist() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"\| `(\w+)`, `(packstore/[\w/]+\.py)` \|", page)
    assert len(named) == page.partition("## Decisions")[2].partition("## What")[
        0
    ].count("? |")
    for name, path in named:
        assert f"def {name}(" in (ROOT / path).read_text(encoding="utf-8"), (name, path)
