"""What the pages of the project name is there."""

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


def test_folders_of_the_map_are_those_that_are_checked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (layers,) = (
        contract["layers"]
        for contract in project["tool"]["importlinter"]["contracts"]
        if contract.get("containers") == ["packstore"]
    )
    checked = {name.strip() for layer in layers for name in layer.split("|")}
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"## Folders\n(.+?)\n## ", page, re.S)
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    assert {n for row in rows for n in re.findall(r"`(\w+)(?:\.py)?`", row)} == checked


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
