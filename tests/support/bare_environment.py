"""A virtual environment of links to some packages of the current one.

It holds nothing else, is there in a second, and needs no package index.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make_bare_environment(folder: Path, packages: Iterable[str]) -> Path:
    """Make an environment with packstore, `packages` and their dependencies.

    Returns:
        Its interpreter.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin" / "python"
    paths = {"base": str(folder), "platbase": str(folder)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", paths))
    for installed in _with_dependencies(packages):
        for entry in _top_level_entries(installed):
            link = site_packages / entry.name
            if not link.exists():
                link.symlink_to(entry)
    (site_packages / "packstore").symlink_to(ROOT / "packstore")
    return python


def _with_dependencies(packages: Iterable[str]) -> list[Distribution]:
    """Return the distributions, and all that they need here, without extras."""
    waiting = list(packages)
    installed: dict[str, Distribution] = {}
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in installed:
            continue
        try:
            installed[name] = distribution(name)
        except PackageNotFoundError:
            continue  # a dependency of other systems
        for requirement in installed[name].requires or []:
            if "extra ==" not in requirement:
                waiting.append(re.match(r"[\w.-]+", requirement)[0])  # type: ignore[index]
    return list(installed.values())


def _top_level_entries(installed: Distribution) -> set[Path]:
    """Return the files and folders of a distribution in site-packages."""
    names = {file.parts[0] for file in installed.files or []}
    return {
        Path(str(installed.locate_file(name))) for name in names - {"..", "__pycache__"}
    }
