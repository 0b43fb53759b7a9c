"""Takes the pictures of pages in ``docs/screenshots``, with Chromium, of the project's
own sample.

python docs/screenshots.py [FOLDER]        # needs chromium and the extra train
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
DEMO = HERE.parent / "examples" / "demo.py"
SIZES = {"view": "1180,800", "stats": "1180,1120"}
"""Picture -> width and height of the window."""

COMMANDS = """\
pack demo/train.jsonl prefs --tokenizer demo/tokenizer --chat-template chatml --pack-size 512 \
--carry source
show prefs --pack 1 --count 3 --html view.html
stats prefs --by source --html stats.html
"""


def write_pages() -> None:
    """Writes the pages into the current folder."""
    demo = runpy.run_path(str(DEMO))
    from packstore.cli import main

    Path("demo").mkdir()
    train, _ = demo["split_sample"]()
    demo["train_tokenizer"](train)
    for line in COMMANDS.splitlines():
        if main(line.split()):
            raise SystemExit(f"packstore {line} failed")


def take(page: Path, picture: Path, size: str) -> None:
    """Takes a picture of the first screen of a page."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("needs chromium: apt-get install chromium")
    flags = (
        "--headless --no-sandbox --disable-gpu --hide-scrollbars "
        "--virtual-time-budget=4000"
    )
    words = [
        *flags.split(),
        f"--window-size={size}",
        f"--screenshot={picture}",
        page.as_uri(),
    ]
    subprocess.run([chromium, *words], check=True, stderr=subprocess.DEVNULL)


def write_all(folder: Path) -> None:
    """Writes every picture to `folder`."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        write_pages()
        for name, size in SIZES.items():
            take(Path(f"{name}.html").absolute(), folder / f"{name}.png", size)


if __name__ == "__main__":
    write_all(Path(sys.argv[1] if sys.argv[1:] else HERE / "screenshots").absolute())
