"""Builds the sdist and the wheel, installs the wheel in clean environments, and tries
it there.

    python tests/try_release.py                        the core dependencies alone
    python tests/try_release.py --extra s3 --extra ray  also these extras, each in an environment
    python tests/try_release.py --extra all            also every extra that is tried
    python tests/try_release.py --lean                 also the lean install
    python tests/try_release.py --python python3.13    with another interpreter (repeatable)
    python tests/try_release.py --oldest               with the oldest releases in pyproject.toml,
                                                       but torch by --torch and
                                                       --torch-index
    python tests/try_release.py --floors torch train   prints them, with these extras
    python tests/try_release.py --beside uv            checks wheels for each Python, and writes the
                                                       table of docs/support.md: beside which trainers
                                                       and servers it resolves

``tests/support/smoke.py`` is what runs there. Packages come from the index that pip
uses here. ``flash`` needs a GPU and its compiler, so ``all`` leaves it out; ``docs`` and
``dev`` are for work on packstore itself, and `make test` installs them.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
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
LEAN = "lean"
"""Name of the install of docs/install.md for training images, as an attempt."""
LEAN_PACKAGES = ("fsspec", "msgspec", "numpy", "orjson", "pyarrow")
"""Packages of a lean install, beside torch."""
TORCH = "2.13.0"
"""Release of torch, installed first, as the Makefile does: a CPU build is taken if
there is one.
"""
NEEDS_TORCH = frozenset({"torch", "train", "trl", LEAN})
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
SUPPORT = ROOT / "docs" / "support.md"
BESIDE_PYTHON = "3.12"
MADE = frozenset({"PKG-INFO", "setup.cfg"})
BESIDE = (
    *("trl", "axolotl", "llamafactory", "ms-swift", "openrlhf", "unsloth", "verl"),
    *("torchtune", "megatron-bridge", "nemo-aligner", "vllm", "sglang"),
)
"""Trainers and servers of docs/support.md's table."""
NOT_IN_SDIST = (".ci/", ".github/", ".gitignore")
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
    required = [*PROJECT["dependencies"], *_packages_of(extra)]
    lower_bounds = [name.partition(",")[0] for name in required]
    return [name.replace(">=", "==") for name in lower_bounds]


def _packages_of(extra: str) -> list[str]:
    """Return the requirements of an extra, with those of the extras that it names."""
    required: list[str] = []
    for requirement in PROJECT["optional-dependencies"].get(extra, []):
        nested = re.fullmatch(r"packstore\[([\w,]+)\]", requirement)
        if nested is None:
            required.append(requirement)
            continue
        for name in nested[1].split(","):
            required += _packages_of(name)
    return required


def lean_requirements() -> list[str]:
    """Return the packages of a lean install, with the bounds of pyproject.toml."""
    return [
        requirement
        for requirement in PROJECT["dependencies"]
        if re.match(r"[\w-]+", requirement)[0] in LEAN_PACKAGES  # type: ignore[index]
    ]


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
        extra: name of an extra, or `lean` for the lean install.
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
    groups = [first, target]
    if extra == LEAN:
        groups = [first, lean_requirements(), ["--no-deps", str(source)]]
    inside = environment(work / f"with-{extra or 'core'}", python, *groups)
    if extra != LEAN:
        run(inside, "-m", "pip", "check")
    installed = releases(inside)
    if oldest and "pandas" in installed:
        # pyarrow imports it where it can, so that a need for it would not be seen.
        sys.exit(
            f"packaging: packstore[{extra}] installs pandas, which hides a need for it"
        )
    empty = work / f"empty-{extra or 'core'}"
    empty.mkdir()
    parts = ["core", extra] if extra not in ("", LEAN) else [extra or "core"]
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


def resolve(
    uv: str,
    work: Path,
    requirements: Sequence[str],
    python: str = BESIDE_PYTHON,
    *options: str,
) -> dict[str, str] | None:
    """Return the releases that uv chooses on Linux; None if the requirements conflict."""
    listed = work / "requirements.in"
    listed.write_text("\n".join(requirements), encoding="utf-8")
    command = [uv, "pip", "compile", "--python-version", python, *options]
    command += ["--python-platform", "linux", "--quiet", "--no-annotate", "--no-header"]
    command.append(str(listed))
    done = subprocess.run(command, capture_output=True, encoding="utf-8", check=False)
    if done.returncode:
        return None
    lines = [line.partition("==") for line in done.stdout.splitlines()]
    return {name: release for name, _, release in lines}


def compare(uv: str, work: Path, package: str, requirements: Sequence[str]) -> str:
    """Return `yes` if all requirements resolve beside a package, or those that do not."""
    if resolve(uv, work, [package, *requirements]):
        return "yes"
    conflicts = [
        f"`{requirement.partition(',')[0]}`"
        for requirement in requirements
        if resolve(uv, work, [package, requirement]) is None
    ]
    return f"no: {', '.join(conflicts) or 'only together'}"


def beside(uv: str, work: Path) -> list[str]:
    """Return, as a Markdown table, what resolves beside the newest release of each
    trainer and server.
    """
    installs = {
        "lean": [*lean_requirements(), "torch"],
        "`packstore`": list(PROJECT["dependencies"]),
        "`packstore[train]`": [*PROJECT["dependencies"], *_packages_of("train")],
    }
    lines = [f"| | {' | '.join(installs)} |", "|---" * (1 + len(installs)) + "|"]
    for name in BESIDE:
        release = (resolve(uv, work, [name]) or {}).get(name, "none")
        cells = [f"{name} {release}"]
        for requirements in installs.values():
            cells.append(compare(uv, work, f"{name}=={release}", requirements))
        lines.append(f"| {' | '.join(cells)} |")
        print(lines[-1], flush=True)
    return lines


def require_wheels(uv: str, work: Path) -> None:
    """Exit unless wheels alone satisfy the extra `dev`, for each Python that is named."""
    requirements = [*PROJECT["dependencies"], *_packages_of("dev"), f"torch=={TORCH}"]
    for classifier in PROJECT["classifiers"]:
        if ":: 3." not in classifier:
            continue
        python = classifier.rpartition(" ")[2]
        wheels = resolve(uv, work, requirements, python, "--only-binary", ":all:")
        if wheels is None:
            sys.exit(f"packaging: a dependency has no wheel for Python {python}")
        print(
            f"Python {python}: {len(wheels)} wheels satisfy packstore[dev]", flush=True
        )


def write_table(lines: Sequence[str]) -> None:
    """Replace the table of docs/support.md, and its date."""
    text = SUPPORT.read_text(encoding="utf-8")
    today = datetime.datetime.now(datetime.UTC).date()
    table = "\n".join([f"Resolved on {today}:", "", *lines])
    new = re.sub(
        r"(<!-- beside -->\n).*(<!-- /beside -->)",
        lambda match: f"{match[1]}\n{table}\n\n{match[2]}",
        text,
        flags=re.DOTALL,
    )
    SUPPORT.write_text(new, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--extra", action="append", default=[], metavar="NAME")
    parser.add_argument("--lean", action="store_true", help="try the lean install too")
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
            require_wheels(args.beside, Path(folder))
            write_table(beside(args.beside, Path(folder)))
        return
    if args.floors:
        named = dict.fromkeys(name for extra in args.floors for name in floors(extra))
        print(*(name.partition(";")[0] for name in named))  # a word each, for make
        return
    known = [name for name in PROJECT["optional-dependencies"] if name not in NOT_TRIED]
    extras = list(known if args.extra == ["all"] else args.extra)
    if unknown := set(extras) - set(known):
        parser.error(
            f"no extra {', '.join(sorted(unknown))}; choose from {', '.join(known)}"
        )
    if args.lean:
        extras.append(LEAN)
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
