"""``make release``: what it refuses, and what a release leaves."""

from __future__ import annotations

import datetime
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from children import run_python

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / ".ci" / "release.py"
CHANGED_FILES = ("CHANGELOG.md", "CITATION.cff", "packstore/version.py")

if not SCRIPT.exists():
    pytest.skip("the source distribution cannot be released", allow_module_level=True)

IDENTITY = {
    f"GIT_{who}_{what}": "tests@localhost"
    for who in ("AUTHOR", "COMMITTER")
    for what in ("NAME", "EMAIL")
}


def git(folder: Path, *command: str) -> str:
    done = subprocess.run(
        ["git", *command],
        cwd=folder,
        env=os.environ | IDENTITY,
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    return done.stdout


def release(
    folder: Path, *arguments: str, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the script of the repository in `folder`."""
    script = folder / ".ci" / "release.py"
    return run_python(script, *arguments, env=IDENTITY | (env or {}))


def make_repository(folder: Path, names: list[str]) -> Path:
    """Copy files of this tree into a repository with one commit."""
    for name in names:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, place)
    git(folder, "init", "--quiet", "--initial-branch", "main")
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Change")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with what is read before anything is built."""
    names = [".ci/release.py", "tests/try_release.py", "pyproject.toml", *CHANGED_FILES]
    (tmp_path / ".gitignore").write_text("__pycache__\n", encoding="utf-8")
    return make_repository(tmp_path, names)


def refusal(
    repository: Path, *arguments: str, env: dict[str, str] | None = None
) -> str:
    """Return why the script refuses; check that it leaves everything as it was."""
    before = git(repository, "status", "--porcelain"), git(repository, "show-ref")
    done = release(repository, *arguments, env=env)
    assert done.returncode == 1
    after = git(repository, "status", "--porcelain"), git(repository, "show-ref")
    assert after == before
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("version", ["", "0.2", "v0.2.0", "0.2.0rc1"])
def test_a_version_is_three_numbers(version: str, repository: Path) -> None:
    assert "VERSION" in refusal(repository, version)


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md"])
def test_a_dirty_tree_is_refused(name: str, repository: Path) -> None:
    (repository / name).write_text("Changed.\n", encoding="utf-8")
    assert name in refusal(repository, "0.2.0")


@pytest.mark.parametrize("version", ["0.2.0", "0.1.9", "0.0.10"])
def test_a_tagged_or_older_version_is_refused(version: str, repository: Path) -> None:
    git(repository, "tag", "v0.2.0")
    git(repository, "tag", "v0.1.10")
    assert "v0.2.0" in refusal(repository, version)


@pytest.mark.parametrize(
    "section",
    [
        "",
        "## [Unreleased]\n\n### Added\n",
        "## [Unreleased]\n\n## [0.1.0] - 2026-12-01\n\n- Pack.\n",
        "## [Unreleased]\n\n- Load.\n\n## [0.2.0] - 2026-12-01\n\n- Pack.\n",
    ],
)
def test_a_changelog_without_changes_is_refused(section: str, repository: Path) -> None:
    path = repository / "CHANGELOG.md"
    path.write_text(f"# Changelog\n\n{section}", encoding="utf-8")
    commit(repository)
    assert "CHANGELOG.md" in refusal(repository, "0.2.0")


def test_only_a_tagged_commit_is_published(repository: Path) -> None:
    assert "no tag v" in refusal(repository, "--publish")


@pytest.mark.slow
def test_a_release_that_fails_changes_nothing(repository: Path) -> None:
    """The tools of the build cannot be installed."""
    no_index = {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": "",
        "PIP_CONFIG_FILE": os.devnull,
    }
    assert "failed" in refusal(repository, "9.0.0", env=no_index)
    assert not (repository / "dist").exists()


def test_the_changelog_has_the_form_that_a_release_needs() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    first, *released = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert first == "[Unreleased]"
    versions = []
    for heading in released:
        match = re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", heading)
        assert match, heading
        versions.append(tuple(map(int, match.groups()[:3])))
        datetime.date.fromisoformat(match[4])
    assert versions == sorted(set(versions), reverse=True)
    groups = set(re.findall(r"^### (.*)$", text, re.MULTILINE))
    known = "Added Changed Deprecated Removed Fixed Security Format"
    assert groups <= set(known.split())


@pytest.mark.slow
def test_a_release_in_a_fresh_clone(tmp_path: Path) -> None:
    """Builds, tries, uploads to an index on this machine, commits and tags."""
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout of git")
    download = ("-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path)
    if run_python(*download, "packaging").returncode:
        pytest.skip("no package registry is reachable: a release is NOT tried")
    names = [
        name for name in git(ROOT, "ls-files").splitlines() if (ROOT / name).exists()
    ]
    origin = make_repository(tmp_path / "origin", names)
    git(tmp_path, "clone", "--quiet", str(origin), "clone")
    clone = tmp_path / "clone"

    command = ["make", "--silent", "release", f"PYTHON={sys.executable}"]
    done = subprocess.run(
        command,
        cwd=clone,
        env=os.environ | IDENTITY | {"VERSION": "9.0.0"},
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("git push origin HEAD v9.0.0\n")

    assert git(clone, "status", "--porcelain") == ""
    assert git(clone, "tag", "--points-at", "HEAD").split() == ["v9.0.0"]
    changed = git(clone, "diff", "--name-only", "HEAD~").split()
    assert sorted(changed) == sorted(CHANGED_FILES)
    today = datetime.datetime.now(datetime.UTC).date()
    changelog = (clone / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [Unreleased]\n\n## [9.0.0] - {today}\n" in changelog
    citation = yaml.safe_load((clone / "CITATION.cff").read_text(encoding="utf-8"))
    assert str(citation["version"]) == "9.0.0"
    assert sorted(file.name for file in (clone / "dist").iterdir()) == [
        "packstore-9.0.0-py3-none-any.whl",
        "packstore-9.0.0.tar.gz",
    ]
    assert "v9.0.0" in refusal(clone, "9.0.0")
