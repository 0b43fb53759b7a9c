"""Links, paths, folders and registries in the pages of the project exist."""

from __future__ import annotations

import pkgutil
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
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]
    (layers,) = (
        c["layers"] for c in contracts["contracts"] if c.get("containers") == ["packstore"]
    )
    layer_of = {
        name.strip(): number for number, layer in enumerate(layers) for name in layer.split("|")
    }
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"## Folders\n(.+?)\n## ", page, re.S)
    rows = [line for line in section.splitlines() if line.startswith("| `")]
    names = [n for row in rows for n in re.findall(r"`(\w+)(?:\.py)?`", row.split(" | ")[0])]
    assert sorted(names) == sorted(layer_of)
    assert [layer_of[name] for name in names] == sorted(layer_of.values())


@pytest.mark.parametrize(
    ("walk", "most"), [("One JSONL line to the loss", 40), ("An S3 error to the screen", 9)]
)
def test_a_walk_is_short_and_visits_each_file_once(walk: str, most: int) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"## {walk}\n(.+?)\n## ", page, re.S)
    rows = re.findall(r"^\| (\d+) \| `(packstore/[\w/]+\.py)` \|", section, re.M)
    assert [int(number) for number, _ in rows] == list(range(1, len(rows) + 1))
    assert 0 < len({path for _, path in rows}) == len(rows) <= most


def test_every_registry_is_on_the_map() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    for init in (ROOT / "packstore").rglob("__init__.py"):
        if " = Registry(" in init.read_text(encoding="utf-8"):
            folder = init.parent.relative_to(ROOT)
            assert f"`{folder}/<name>.py`" in page, folder


def renamed() -> list[tuple[str, str]]:
    """Rows of the changelog's table of renamed Python names."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("### Renamed")[2]
    return re.findall(r"^\| `(packstore\.[\w.]+)` \| `(packstore\.[\w.]+)` \|$", text, re.M)


def test_renamed_names_are_where_the_changelog_says() -> None:
    pytest.importorskip("transformers", reason="transformers is in the extra train")
    assert len(renamed()) > 30
    for before, now in renamed():
        assert pkgutil.resolve_name(now) is not None, before
