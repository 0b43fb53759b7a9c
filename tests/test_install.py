"""Installs with some packages only: docs/install.md says what each part needs."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import pytest
from bare_environment import make_bare_environment
from children import run_python

from packstore.registry import LEFT_OUT_OF_LEAN

ROOT = Path(__file__).parents[1]
SCRIPT = runpy.run_path(str(ROOT / "tests" / "try_release.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
SMOKE = ROOT / "tests" / "support" / "smoke.py"
MODULES = {"pyyaml": "yaml"}
"""Package -> its module, where the names differ."""


def test_a_lean_install_loads_and_takes_losses(tmp_path: Path) -> None:
    packages = [*SCRIPT["LEAN_PACKAGES"], "torch"]
    python = make_bare_environment(tmp_path / "environment", packages)
    assert try_part(python, "lean", tmp_path) == "  lean:"


def test_packing_needs_no_torch(tmp_path: Path) -> None:
    packages = [re.match(r"[\w-]+", name)[0] for name in PROJECT["dependencies"]]  # type: ignore[index]
    python = make_bare_environment(tmp_path / "environment", packages)
    code = (
        "import packstore\n"
        "from packstore.errors import MissingExtraError\n"
        "records = [{'prompt': [5], 'chosen': [8], 'rejected': [9]}] * 20\n"
        "packstore.pack(records, 'ds', pack_size=64)\n"
        "print(packstore.scan('ds').collect().height)\n"
        "try:\n"
        "    import packstore.torch\n"
        "except MissingExtraError as error:\n"
        "    print(error)\n"
    )
    done = run_in(python, ["-c", code], tmp_path)
    height, error = done.stdout.splitlines()
    assert height == "20"
    assert "'torch'" in error
    assert "packstore[torch]" in error


def try_part(python: Path, part: str, folder: Path) -> str:
    """Run a part of the smoke test; return the beginning of its report."""
    empty = folder / "empty"
    empty.mkdir()
    done = run_in(python, [SMOKE, part], empty)
    return done.stdout[: len(part) + 3]


def run_in(
    python: Path, arguments: list[str | Path], folder: Path
) -> subprocess.CompletedProcess[str]:
    """Run the interpreter of an environment, which sees no other packages."""
    done = subprocess.run(
        [python, "-I", *arguments],
        cwd=folder,
        env={**os.environ, "TMPDIR": "/tmp"},  # workers of loaders need a short path
        capture_output=True,
        encoding="utf-8",
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def test_a_lean_install_leaves_out_all_other_dependencies() -> None:
    names = {re.match(r"[\w-]+", name)[0] for name in PROJECT["dependencies"]}  # type: ignore[index]
    left_out = names - set(SCRIPT["LEAN_PACKAGES"])
    assert {MODULES.get(name, name) for name in left_out} == LEFT_OUT_OF_LEAN


def test_the_page_installs_the_lean_packages() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    quoted = " ".join(f"'{name}'" for name in SCRIPT["lean_requirements"]())
    assert f"pip install {quoted}\n" in page.replace(" \\\n    ", " ")


def test_errors_name_extras_that_exist() -> None:
    """An extra stands as the second argument of `missing_extra`, or after `packstore`."""
    extras: set[str] = set()
    for file in (ROOT / "packstore").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        extras |= set(re.findall(r"packstore\[([a-z]\w*)\]", text))
        calls = ast.walk(ast.parse(text)) if "missing_extra(" in text else ()
        for call in calls:
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "missing_extra":
                extras |= {
                    node.value
                    for node in ast.walk(call.args[1])
                    if isinstance(node, ast.Constant) and isinstance(node.value, str)
                }
    assert extras - {""}
    assert extras - {""} <= set(PROJECT["optional-dependencies"])


@pytest.mark.slow
def test_a_lean_install_from_the_index(tmp_path: Path) -> None:
    """As `test_a_lean_install_loads_and_takes_losses`, with pip."""
    download = ("-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path)
    if run_python(*download, "packaging").returncode:
        pytest.skip("no package registry is reachable: the lean install is NOT tried")
    with tempfile.TemporaryDirectory() as work:  # not tmp_path, as pytest keeps those
        wheel = SCRIPT["build"](Path(work), sys.executable)
        print(SCRIPT["attempt"](Path(work), sys.executable, wheel, SCRIPT["LEAN"]))
