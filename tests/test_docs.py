"""Links, paths, folders and registries in the pages of the project exist."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
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


README = (ROOT / "README.md").read_text(encoding="utf-8")


def run_ci(folder: Path, readme: str, failing: str = "") -> tuple[int, list[str]]:
    """Run ``.ci/run`` with a `make` that does nothing, and fails for one target.

    Returns:
        The exit code, and the targets that `make` was called for.
    """
    (folder / ".ci").mkdir()
    (folder / "bin").mkdir()
    shutil.copy(ROOT / ".ci" / "run", folder / ".ci")
    (folder / "README.md").write_text(readme, encoding="utf-8")
    make = folder / "bin" / "make"
    make.write_text(
        f'#!/bin/sh\ncat >/dev/null\necho "$*" >>{folder}/calls\n[ "$*" != "{failing}" ]\n',
        encoding="utf-8",
    )
    make.chmod(0o755)
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    code = subprocess.run(
        ["bash", folder / ".ci" / "run"],
        cwd="/",
        env={"PATH": path},
        capture_output=True,
        check=False,
    ).returncode
    calls = folder / "calls"
    targets = calls.read_text(encoding="utf-8").splitlines() if calls.exists() else []
    return code, targets


def test_continuous_integration_runs_the_first_commands_of_the_readme(
    tmp_path: Path,
) -> None:
    assert run_ci(tmp_path, README) == (0, ["demo", "test"])


def test_continuous_integration_stops_at_the_first_failure(tmp_path: Path) -> None:
    code, targets = run_ci(tmp_path, README, failing="demo")
    assert code
    assert targets == ["demo"]


@pytest.mark.parametrize(
    "block",
    [
        "make test\nmake demo\n",
        "make demo\n",
        "make demo\nmake test\nmake docs\n",
        "make demo && make test\n",
        "pip install '.[train]'\n",
        "",
    ],
    ids=repr,
)
def test_continuous_integration_refuses_other_first_commands(
    tmp_path: Path, block: str
) -> None:
    readme = README.replace("```sh\nmake demo\nmake test\n```", f"```sh\n{block}```")
    assert readme != README
    code, targets = run_ci(tmp_path, readme)
    assert code
    assert targets == []


def test_the_readme_is_short() -> None:
    """At most 450 words, without blocks of code, and links counted."""
    words = re.sub(r"^```.*?^```$", "", README, flags=re.M | re.S).split()
    assert len(words) <= 450


NARROW_PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", NARROW_PAGES, ids=lambda page: page.name)
def test_code_has_80_columns(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for block in re.findall(r"^```.*?^```$", text, re.M | re.S):
        assert max(map(len, block.splitlines())) <= 80, block


def test_the_home_begins_as_the_readme_does() -> None:
    home = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    first_blocks = [
        re.findall(r"^```sh\n.*?^```$", text, re.M | re.S)[:2]
        for text in (README, home)
    ]
    assert first_blocks[0] == first_blocks[1]
    pictures = [re.findall(r"!\[.*?\]\((.*?)\)", text)[0] for text in (README, home)]
    assert pictures[0] == f"docs/{pictures[1]}"


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
