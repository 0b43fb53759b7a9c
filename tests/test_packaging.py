"""Files of a release. ``tests/try_release.py`` installs and tries it; that takes
minutes.
"""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import yaml
from children import run_python

from packstore.cli import build_parser

ROOT = Path(__file__).parents[1]
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = CONFIG["project"]
SCRIPT = runpy.run_path(str(ROOT / "tests" / "try_release.py"))


def test_the_license_is_the_one_that_is_declared() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License\n                           Version 2.0" in text
    assert "END OF TERMS AND CONDITIONS" in text
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert PROJECT["license"] == citation["license"] == "Apache-2.0"
    assert PROJECT["license-files"] == ["LICENSE"]


def test_the_address_of_the_project_has_one_home() -> None:
    """Other files name it by a placeholder until it is there, and then by itself."""
    placeholder = "git+" + "ADDRESS"
    pages = {
        name
        for name in SCRIPT["sources"]()
        if (ROOT / name).suffix in (".md", ".toml", ".cff", ".yml", ".py", ".ipynb")
        and placeholder in (ROOT / name).read_text(encoding="utf-8")
    } - {"pyproject.toml"}
    address = PROJECT.get("urls", {}).get("Source")
    assert pages <= ({"README.md", "docs/install.md"} if address is None else set())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation.get("repository-code", address) == address


def test_the_wheel_holds_pages_and_example_configs() -> None:
    package = ROOT / "packstore"
    patterns = CONFIG["tool"]["setuptools"]["package-data"]["packstore"]
    held = {path for pattern in patterns for path in package.glob(pattern)}
    files = {p for p in package.rglob("*.*") if p.parent.name != "__pycache__"}
    used = {p for p in files if p.suffix not in (".py", ".md")}
    assert held == used
    assert package / "cli" / "examples" / "dpo.yaml" in held


def test_the_smoke_test_has_a_part_for_every_extra() -> None:
    parts = set(runpy.run_path(str(ROOT / "tests" / "support" / "smoke.py"))["PARTS"])
    assert (
        parts
        == {"core", "lean"}
        | set(PROJECT["optional-dependencies"]) - SCRIPT["NOT_TRIED"]
    )


def test_the_oldest_python_is_the_one_of_the_classifiers() -> None:
    classifiers = [c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c]
    assert PROJECT["requires-python"] == f">={classifiers[0]}"
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    *older, newest = classifiers
    assert f"under Python {', '.join(older)} and {newest}." in page


def test_make_floors_takes_the_oldest_torch_and_transformers() -> None:
    """torch first, from an index of CPU builds: PyPI's are CUDA builds of gigabytes."""
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nfloors:\n")[2]
    first, second = [line for line in recipe.splitlines() if "uv pip install" in line]
    oldest = SCRIPT["floors"]("torch") + SCRIPT["floors"]("train")
    torch = next(name for name in oldest if name.startswith("torch=="))
    assert "--index-url" in first
    assert first.endswith(f" {torch}.0")
    assert "-r .venv-floors/floors.txt" in second
    assert "try_release.py --floors torch train s3 gcs azure |" in recipe
    extras = ["torch", "train", "s3", "gcs", "azure"]
    command = [ROOT / "tests" / "try_release.py", "--floors", *extras]
    printed = set(run_python(*command).stdout.split())
    assert {torch, "transformers==5.6", "numpy==2.2", "s3fs==2024.12"} <= printed
    assert f"--oldest --extra train --torch {torch.removeprefix('torch==')}.0" in recipe


def test_the_table_of_trainers_has_a_row_for_each_that_is_tried() -> None:
    page = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")
    table = page.partition("<!-- beside -->")[2].partition("<!-- /beside -->")[0]
    rows = re.findall(r"^\| ([\w-]+) [\w.]+ \| (.+) \|$", table, re.MULTILINE)
    assert [name for name, _ in rows] == list(SCRIPT["BESIDE"])
    for _, cells in rows:
        assert re.fullmatch(r"(yes|no: [^|]+)( \| (yes|no: [^|]+)){2}", cells)


def test_an_upper_bound_has_its_reason_beside_it() -> None:
    """A bound without one only keeps packstore from resolving beside other packages."""
    lines = (ROOT / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    bounds = [
        n for n, line in enumerate(lines) if re.search(r'"[\w.\[\]-]+>=[\w.]+,<', line)
    ]
    assert bounds
    for n in bounds:
        limit = re.search(r",(<[\w.]+)", lines[n])
        assert limit is not None
        assert f"{limit[1]}: " in lines[n - 1] + lines[n], lines[n]


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", "train"])
def test_the_oldest_releases_are_enough_alone(extra: str, tmp_path: Path) -> None:
    """Packs, loads, verifies, scans and trains with the lower bounds, and nothing else.

    The environment of the tests would hide a need for pandas, as `datasets` installs
    it. Only torch is not its lower bound but the release of the Makefile: PyPI's older
    ones are CUDA builds of gigabytes. `make floors` also takes the oldest torch.
    """
    if not (ROOT / ".git").exists():
        pytest.skip("needs a checkout of git")
    asked = (
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        tmp_path,
        "packaging",
    )
    if run_python(*asked).returncode:
        pytest.skip("no package registry is reachable: the lower bounds are NOT tried")
    copy_tracked_files(tmp_path / "tree")
    with tempfile.TemporaryDirectory() as work:  # not tmp_path, as pytest keeps those
        source = tmp_path / "tree"
        print(SCRIPT["attempt"](Path(work), sys.executable, source, extra, oldest=True))


def copy_tracked_files(folder: Path) -> list[str]:
    """Copy the files of a release into a folder; return their names."""
    names = [name for name in SCRIPT["sources"]() if (ROOT / name).exists()]
    for name in names:
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, place)
    return names


@pytest.mark.slow
def test_the_sdist_holds_what_git_tracks(tmp_path: Path) -> None:
    try:
        too_old = int(version("setuptools").partition(".")[0]) < 77
    except PackageNotFoundError:
        too_old = True
    if too_old or not (ROOT / ".git").exists():
        pytest.skip("setuptools 77 or newer, and a checkout of git")
    tracked = copy_tracked_files(tmp_path / "tree")
    code = (
        f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    )
    done = run_python("-W", "ignore", "-c", code, cwd=tmp_path / "tree")
    assert done.returncode == 0, done.stderr
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert set(tracked) <= held


def test_make_demo_says_size_and_time_before_it_begins(tmp_path: Path) -> None:
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    command = ["make", "-n", "demo", f"VENV={tmp_path / 'none'}"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, encoding="utf-8", check=True
    )
    told, demo = (
        done.stdout.index("3 GB with a CPU build"),
        done.stdout.index("less than a minute"),
    )
    assert told < done.stdout.index("pip --disable-pip-version-check install")
    assert demo < done.stdout.index("examples/demo.py")


@pytest.mark.slow
def test_the_demo_ends_with_commands_that_work(tmp_path: Path) -> None:
    done = run_python(ROOT / "examples" / "demo.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert len(done.stdout.splitlines()) < 50
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (num_pairs,) = re.findall(r"packs (\d+) pairs", readme)
    assert f"{num_pairs} pairs are now" in done.stdout
    commands = re.findall(r"^  \S+/packstore (.*)$", done.stdout, re.M)
    assert [command.split()[0] for command in commands] == ["view", "stats", "train"]
    view, *finite_commands = commands
    build_parser().parse_args(view.split())
    for command in finite_commands:
        again = run_python("-m", "packstore", *command.split(), cwd=tmp_path)
        assert again.returncode == 0, again.stderr
    assert (tmp_path / "demo" / "run" / "model.safetensors").exists()
