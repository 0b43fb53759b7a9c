"""What tests use of npm; ``make test-all`` runs this, which installs it beside their
Python.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

AZURITE, READERS = Path(sys.prefix, "azurite"), Path(sys.prefix, "readers")
READER = Path(__file__).parents[2] / "examples" / "readers" / "package.json"


def install(folder: Path, packages: dict[str, str], without: str) -> None:
    """Installs packages, name to version; Azurite takes a minute and 360 MB."""
    command = ["npm", "install", "--no-audit", "--no-fund", "--loglevel=error"]
    command += ["--fetch-retries=1", "--fetch-timeout=60000", "--prefix", str(folder)]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        command += [f"{name}@{version}" for name, version in packages.items()]
        subprocess.run(command, capture_output=True, timeout=300, check=True)
    except (OSError, subprocess.SubprocessError) as reason:
        print(
            f"{without} will be skipped: npm cannot install {', '.join(packages)}: "
            f"{reason}"
        )


if __name__ == "__main__":
    if not (AZURITE / "node_modules").exists():
        install(AZURITE, {"azurite": "3.37.0"}, "tests on Azure")
    dependencies = json.loads(READER.read_text(encoding="utf-8"))["dependencies"]
    install(READERS, dependencies, "the reader in JavaScript")
