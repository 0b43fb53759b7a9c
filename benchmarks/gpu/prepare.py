"""Fetches wheels and packs data for a GPU machine without network and without numba.

The machine needs Python 3.12 with torch, transformers, accelerate, peft, pyarrow and triton;
the rest travels as wheels in DIR/wheels, and the datasets in DIR/data.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from gpu.sizes import Sizes, lengths

WHEELS = (
    "orjson",
    "msgspec>=0.20,<0.23",
    "liger-kernel==0.8.5",
    "trl==1.16.0",
    *("datasets", "dill", "multiprocess", "pandas", "python-dateutil", "six", "xxhash"),
    "cut-cross-entropy==25.1.1",
)
"""What packstore needs and such a machine lacks, peers of the head, and what TRL's imports."""

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LIMIT = 64 << 20
"""Bytes that may travel."""

COMMAND = """\
On the GPU machine, in the root of the repository with {folder} in it, for N = 0, 1, 2:

  python3 -m pip install -q --no-index --no-deps --no-compile --target .site {folder}/wheels/*.whl \
&& PYTHONPATH=.site:. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 python3 benchmarks/gpu_session.py \
--stage N --data {folder}/data --out ${{OUT:-gpu-results}}"""


def prepare(folder: Path, sizes: Sizes) -> None:
    """Makes the folder, and prints the command for the GPU machine.

    Args:
        folder: destination; wheels and data that are there are replaced.
        sizes: decide the lengths, the vocabulary and the number of pairs.

    Raises:
        SystemExit: the folder is larger than may travel.
    """
    fetch(folder / "wheels")
    write_data(folder / "data", sizes)
    size = sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    print(f"{folder}: {size / 2**20:.1f} MiB")
    if size > LIMIT:
        raise SystemExit(f"{folder} is larger than {LIMIT >> 20} MiB, which is what may travel.")
    print(COMMAND.format(folder=folder))


def fetch(folder: Path) -> None:
    """Downloads the wheels for Python 3.12 on Linux."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder)]
    command += ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp"]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, *WHEELS], check=True)


def write_data(folder: Path, sizes: Sizes) -> None:
    """Packs pairs of random ids, of each length profile, with shared prefixes."""
    import packstore

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    vocab = min(config["vocab_size"] for _, config in sizes.models.values())
    names = ("prompt", "chosen", "rejected")
    for profile, pairs in sizes.pairs.items():
        rows = lengths(profile, pairs, sizes.longest[profile])
        rng = np.random.default_rng(0)
        # As skewed as words are, so that the files compress as real ones do.
        records = (
            {name: (rng.zipf(1.2, n) % vocab).tolist() for name, n in zip(names, row, strict=True)}
            for row in rows.tolist()
        )
        packstore.pack(
            records,
            str(folder / f"{profile}-shared_prefix"),
            pack_size=sizes.pack_size,
            layout="shared_prefix",
            on={"identical_sides": "keep"},
        )
    about = {"vocab_size": vocab, "pairs": sizes.pairs, "pack_size": sizes.pack_size}
    (folder / "about.json").write_text(json.dumps(about) + "\n", encoding="utf-8")
