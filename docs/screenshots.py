"""Takes the pictures of pages in ``docs/screenshots``, with Chromium, of the project's
own sample.

python docs/screenshots.py [FOLDER]        # needs chromium and the extra train
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
DEMO = HERE.parent / "examples" / "demo.py"
SIZES = {"view": "1000,760", "values": "1180,900", "stats": "1180,930"}
"""Picture -> width and height of the window."""

SCALES = {"view": 2}
"""Picture -> pixels of the picture for one of the window, if it is not 1: README's is
shown smaller than it is.
"""

COMMANDS = """\
pack demo/train.jsonl prefs --tokenizer demo/tokenizer --chat-template chatml --pack-size 512 \
--carry source
show prefs --pack 1 --count 3 --html view.html
ref-logps prefs values --model model --per-token --top-k 8 --use-cpu
show prefs --pack 1 --side values --column ref_token_logps --html values.html
stats prefs --by source --html stats.html
"""


COLOURS = 256
"""Colours of a stored picture."""

EPOCHS = 8
"""Epochs of the model whose log-probs are shown."""

TOKEN = 6
"""The supervised token that is pointed at, counted from 0."""


def train_model() -> None:
    """Trains the demo's small model on the chosen responses; saves it as `model`."""
    import torch

    import packstore.torch as pt

    torch.manual_seed(0)
    demo = runpy.run_path(str(DEMO))
    model = demo["tiny_model"](1024)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = pt.PackedDataLoader(pt.PackedDataset("prefs"), packs_per_batch=4)
    for epoch in range(EPOCHS):
        loader.set_epoch(epoch)
        for batch in loader:
            logps = pt.packed_logps(model, batch)
            (-logps[0::2].mean()).backward()
            optimizer.step()
            optimizer.zero_grad()
    model.save_pretrained("model")


def point_at_token(page: Path) -> None:
    """Adds a script that points at a token, and removes the policy against it."""
    script = (
        "<script>addEventListener('load', () => setTimeout(() => document"
        f".querySelectorAll('.tokens .on')[{TOKEN}]"
        ".dispatchEvent(new MouseEvent('mouseover', { bubbles: true })), 300))</script>"
    )
    text = page.read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    page.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")


def write_pages() -> None:
    """Writes the pages into the current folder."""
    demo = runpy.run_path(str(DEMO))
    from packstore.cli import main

    Path("demo").mkdir()
    train, _ = demo["split_sample"]()
    demo["train_tokenizer"](train)
    for line in COMMANDS.splitlines():
        if line.startswith("ref-logps"):
            train_model()
        if main(line.split()):
            raise SystemExit(f"packstore {line} failed")
    point_at_token(Path("values.html"))


def take(page: Path, picture: Path, size: str, scale: int) -> None:
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
        f"--force-device-scale-factor={scale}",
        f"--screenshot={picture}",
        page.as_uri(),
    ]
    subprocess.run([chromium, *words], check=True, stderr=subprocess.DEVNULL)
    reduce_colours(picture)


def reduce_colours(picture: Path) -> None:
    """Stores a picture with a palette, which makes its file less than half as large.

    Of the methods of Pillow, this one changes colours the least: by 7 of 255 at most.
    """
    from PIL import Image

    image = Image.open(picture).convert("RGB")
    few = image.quantize(
        COLOURS, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE
    )
    few.save(picture, optimize=True)


def write_all(folder: Path) -> None:
    """Writes every picture to `folder`."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        os.chdir(scratch)
        write_pages()
        for name, size in SIZES.items():
            picture = folder / f"{name}.png"
            take(Path(f"{name}.html").absolute(), picture, size, SCALES.get(name, 1))


if __name__ == "__main__":
    write_all(Path(sys.argv[1] if sys.argv[1:] else HERE / "screenshots").absolute())
