"""Builds the sdist and the wheel, installs the wheel in clean environments, and tries
it there.

    python tests/try_release.py                        the core dependencies alone
    python tests/try_release.py --extra s3 --extra ray  also these extras, each in an environment
    python tests/try_release.py --extra all            also every extra that is tried
    python tests/try_release.py --python python3.13    with another interpreter (repeatable)
    python tests/try_release.py --oldest               with the oldest releases in pyproject.toml,
                                                       but torch by --torch and
                                                       --torch-index
    python tests/try_release.py --floors torch train   prints them, with these extras
    python tests/try_release.py --beside uv            beside which trainers and servers it resolves

``tests/support/smoke.py`` is what runs there. Packages come from the index that pip
uses here. ``flash`` needs a GPU and its compiler, so ``all`` leaves it out; ``docs`` and
``dev`` are for work on packstore itself, and `make test` installs them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
SMOKE = ROOT / "tests" / "support" / "smoke.py"
TORCH = "2.13.0"
"""Release of torch, installed first, as the Makefile does: a CPU build is taken if
there is one.
"""
NEEDS_TORCH = frozenset({"torch", "train"})
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
    "project"
]
NOT_TRIED = frozenset({"flash", "docs", "dev"})
SHOWN = (
    "numpy",
    "pyarrow",
    "polars",
    "numba",
    "tokenizers",
    "torch",
    "transformers",
    "peft",
)
"""Packages that an attempt prints with their releases."""
MADE = frozenset({"PKG-INFO", "setup.cfg"})
BESIDE = (
    *("trl", "axolotl", "llamafactory", "ms-swift", "openrlhf", "unsloth", "verl"),
    *("torchtune", "vllm", "sglang"),
)
"""Trainers and servers of docs/support.md's table."""
NOT_IN_SDIST = (".ci/", ".gitignore")
"""What is of use in the repository alone."""


def run(*command: str | Path, folder: Path = ROOT) -> str:
    """Output of a command, which must succeed."""
    clean = {
        k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")
    }
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=clean,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        sys.exit(f"packaging: {' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def environment(folder: Path, python: str, *groups: list[str]) -> Path:
    """Makes a virtual environment, installs each group of packages; returns its
    interpreter.
    """
    run(python, "-m", "venv", folder)
    inside = folder / "bin" / "python"
    for packages in filter(None, groups):
        run(inside, "-m", "pip", "install", "--quiet", *packages)
    return inside


def floors(extra: str) -> list[str]:
    """Return the oldest release of each dependency that pyproject.toml names for this
    extra.
    """
    optional = PROJECT["optional-dependencies"].get(extra, [])
    nested = [
        name.removeprefix("packstore[").rstrip("]")
        for name in optional
        if _is_nested(name)
    ]
    required = list(PROJECT["dependencies"])
    for name in nested:
        required += PROJECT["optional-dependencies"][name]
    required += [name for name in optional if not _is_nested(name)]
    lower_bounds = [name.partition(",")[0] for name in required]
    return [name.replace(">=", "==") for name in lower_bounds]


def _is_nested(requirement: str) -> bool:
    """Return True for another extra of packstore."""
    return requirement.startswith("packstore[")


def sources() -> list[str]:
    """Files that git tracks and a source distribution must hold."""
    tracked = run("git", "ls-files").splitlines()
    return [name for name in tracked if not name.startswith(NOT_IN_SDIST)]


def build(work: Path, python: str) -> Path:
    """Builds the sdist of what is here, and the wheel from that sdist; returns the
    wheel.
    """
    inside = environment(work / "build", python, ["build"])
    run(inside, "-m", "build", "--outdir", work / "dist", ROOT)
    (sdist,), (wheel,) = (work / "dist").glob("*.tar.gz"), (work / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        held = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    tracked = set(sources())
    made = {
        name for name in held if name in MADE or name.startswith("packstore.egg-info/")
    }
    code = {name for name in names if not name.startswith("packstore-")}
    for what, wrong in (
        ("sdist lacks", tracked - held),
        ("sdist holds, and git does not track", held - tracked - made),
        (
            "wheel lacks",
            {name for name in tracked if name.startswith("packstore/")} - code,
        ),
        ("wheel holds, and git does not track", code - tracked),
    ):
        if wrong:
            sys.exit(f"packaging: the {what}, {len(wrong)} files: {sorted(wrong)[:9]}")
    if not any(name.endswith("licenses/LICENSE") for name in names):
        sys.exit("packaging: the wheel has no LICENSE")
    for path, count in ((sdist, len(held)), (wheel, len(names))):
        print(f"{path.name}: {count} files, {path.stat().st_size:,} bytes", flush=True)
    return wheel


def attempt(
    work: Path,
    python: str,
    source: Path,
    extra: str = "",
    *,
    oldest: bool = False,
    torch: Sequence[str] = (f"torch=={TORCH}",),
) -> str:
    """Install packstore with one extra, or none, and run its parts of the smoke test.

    Args:
        work: an empty folder, or one of other attempts.
        python: interpreter that makes the environment.
        source: the wheel, or the folder of a checkout.
        extra: name of an extra.
        oldest: install the oldest releases in pyproject.toml, except for torch.
        torch: arguments of pip that install torch, before everything else.

    Returns:
        The interpreter, the releases, and the report of each part.
    """
    first = list(torch) if extra in NEEDS_TORCH else []
    target = [f"{source}[{extra}]" if extra else str(source)]
    if oldest:
        # Before packstore itself, as pip tries combinations for minutes if it may
        # choose.
        target += [name for name in floors(extra) if not name.startswith("torch==")]
    inside = environment(work / f"with-{extra or 'core'}", python, first, target)
    run(inside, "-m", "pip", "check")
    installed = releases(inside)
    if oldest and "pandas" in installed:
        # pyarrow imports it where it can, so that a need for it would not be seen.
        sys.exit(
            f"packaging: packstore[{extra}] installs pandas, which hides a need for it"
        )
    empty = work / f"empty-{extra or 'core'}"
    empty.mkdir()
    parts = ["core", *([extra] if extra else [])]
    printed = run(inside, "-I", SMOKE, *parts, folder=empty)
    age = "the oldest releases" if oldest else "the newest releases"
    named = [f"{name} {installed[name]}" for name in SHOWN if name in installed]
    lines = [
        f"{run(inside, '--version').strip()}, packstore[{extra}], {age}: "
        f"{', '.join(named)}"
    ]
    lines += [line for line in printed.splitlines() if line.startswith("  ")]
    return "\n".join(lines)


def releases(python: Path) -> dict[str, str]:
    """Return the packages of an environment, name -> release."""
    listed = json.loads(run(python, "-m", "pip", "list", "--format", "json"))
    return {entry["name"]: entry["version"] for entry in listed}


def resolve(uv: str, work: Path, *wanted: str) -> dict[str, str] | None:
    """Releases that uv chooses for these requirements on Linux; None where there are
    none.
    """
    listed = work / "requirements.in"
    listed.write_text("\n".join(wanted), encoding="utf-8")
    options = "--no-annotate --no-header --python-version 3.12 --python-platform linux"
    command = [uv, "pip", "compile", "--quiet", *options.split(), str(listed)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    lines = [line.partition("==") for line in done.stdout.splitlines()]
    return (
        {name: release for name, _, release in lines} if done.returncode == 0 else None
    )


def beside(uv: str, work: Path) -> None:
    """Prints, as Markdown, what resolves beside the newest release of each trainer and
    server.
    """
    print("| | `packstore` | `packstore[train]` |")
    print("|---|---|---|")
    for name in BESIDE:
        release = (resolve(uv, work, name) or {}).get(name, "none")
        wanted = (f"packstore{extra} @ {ROOT.as_uri()}" for extra in ("", "[train]"))
        found = [resolve(uv, work, f"{name}=={release}", package) for package in wanted]
        print(
            "|",
            " | ".join([f"{name} {release}", *("yes" if f else "no" for f in found)]),
            "|",
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--extra", action="append", default=[], metavar="NAME")
    parser.add_argument("--python", action="append", default=[], metavar="PATH")
    parser.add_argument("--oldest", action="store_true")
    parser.add_argument(
        "--torch", default=TORCH, metavar="RELEASE", help="installed first"
    )
    parser.add_argument("--torch-index", metavar="URL", help="index that has it")
    parser.add_argument(
        "--floors", nargs="+", metavar="EXTRA", help="print their oldest releases"
    )
    parser.add_argument(
        "--beside", metavar="UV", help="path of uv, whose resolver is asked"
    )
    args = parser.parse_args()
    if args.beside:
        with tempfile.TemporaryDirectory() as folder:
            beside(args.beside, Path(folder))
        return
    if args.floors:
        named = dict.fromkeys(name for extra in args.floors for name in floors(extra))
        print(*(name.partition(";")[0] for name in named))  # a word each, for make
        return
    known = [name for name in PROJECT["optional-dependencies"] if name not in NOT_TRIED]
    extras = known if args.extra == ["all"] else args.extra
    if unknown := set(extras) - set(known):
        parser.error(
            f"no extra {', '.join(sorted(unknown))}; choose from {', '.join(known)}"
        )
    torch = [f"torch=={args.torch}"]
    if args.torch_index:
        torch += ["--index-url", args.torch_index]
    for python in args.python or [sys.executable]:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            wheel = build(work, python)
            for extra in ("", *extras):
                options = {"oldest": args.oldest, "torch": torch}
                print(attempt(work, python, wheel, extra, **options), flush=True)
    print("packaging: all passed")


if __name__ == "__main__":
    main()
