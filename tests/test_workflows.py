"""The workflows of continuous integration call targets of the Makefile, and no more."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONS = {"actions/checkout", "actions/setup-python"}

if not WORKFLOWS:
    pytest.skip("the source distribution has no workflows", allow_module_level=True)


def load(name: str) -> dict[str, Any]:
    """Return a workflow; its key ``on`` is read as True, as YAML 1.1 has it."""
    path = ROOT / ".github" / "workflows" / name
    workflow: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return workflow


def commands(job: dict[str, Any]) -> list[str]:
    """Return the commands of a job, for each combination of its matrix."""
    matrix = job.get("strategy", {}).get("matrix", {})
    runs = [step["run"] for step in job["steps"] if "run" in step]
    lines = []
    for values in itertools.product(*matrix.values()):
        for line in runs:
            for name, value in zip(matrix, values, strict=True):
                line = line.replace(f"${{{{ matrix.{name} }}}}", value)
            lines.append(line)
    return lines


def makefile_targets() -> set[str]:
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][\w-]*):", text, re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_command_is_a_target_of_the_makefile(path: Path) -> None:
    targets = makefile_targets()
    for job in load(path.name)["jobs"].values():
        assert commands(job)
        for line in commands(job):
            command, target = line.split(" ")
            assert command == "make"
            assert target in targets


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_a_commit(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    used = re.findall(r"uses: (\S+)@(\S+)(.*)", text)
    assert {name for name, _, _ in used} == ACTIONS
    for _, commit, comment in used:
        assert re.fullmatch(r"[0-9a-f]{40}", commit)
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment)
    # A name stands for one commit, so that it is raised everywhere or nowhere.
    assert len({(name, commit) for name, commit, _ in used}) == len(ACTIONS)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_jobs_may_read_the_repository_alone(path: Path) -> None:
    workflow = load(path.name)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        expected = {"contents": "read", "id-token": "write"}
        assert job.get("permissions") == (expected if name == "publish" else None)
        assert job["timeout-minutes"]
        checkout = job["steps"][0]
        assert checkout["with"]["persist-credentials"] is False


def test_each_python_of_the_classifiers_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    classifiers = project["project"]["classifiers"]
    expected = [name.rpartition(" ")[2] for name in classifiers if ":: 3." in name]
    matrix = load("tests.yml")["jobs"]["tests"]["strategy"]["matrix"]
    assert matrix["python"] == expected


def test_only_a_tag_publishes() -> None:
    release = load("release.yml")
    assert release[True] == {"push": {"tags": ["v*"]}}
    assert release["jobs"]["publish"]["needs"] == "package"
    for path in WORKFLOWS:
        publishing = [
            name
            for name, job in load(path.name)["jobs"].items()
            if "make publish" in commands(job)
        ]
        assert publishing == (["publish"] if path.name == "release.yml" else [])
