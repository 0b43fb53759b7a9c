"""Wheels and packed data for a GPU machine without network and without numba.

The machine needs Python 3.12 with torch, transformers, accelerate, peft, pandas,
pyarrow and triton; the rest travels in the ignored folder ``gpu-files``, as wheels and
as a dataset.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from gpu.plan import CALLS, ENDING
from gpu.sizes import Sizes, lengths

WHEELS = (
    "orjson",
    "msgspec>=0.20,<0.23",
    "liger-kernel==0.8.5",
    "cut-cross-entropy==25.1.1",
)
WHEELS += ("trl==1.16.0", "datasets", "dill", "multiprocess")
"""What packstore needs and such a machine lacks, peers of the head, TRL and what it
needs.
"""

PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
LIMIT = 64 << 20
"""Bytes that may travel."""

WHEN = ("", ", at once, while the machine is warm")
"""Of the two calls."""

FOLDER = Path(__file__).parents[2] / "gpu-files"
CALL = """
# at most {timeout} s{when}:
set -o pipefail; end=$(($(date +%s) + {seconds})); export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
(test -e .site/whole || (python3 -m pip install -q --no-index --no-deps --no-compile --upgrade \
--target .site gpu-files/wheels/*.whl && touch .site/whole)) && PYTHONPATH=.site:. \
python3 benchmarks/gpu_session.py --data gpu-files/data --end $end 2>&1 \
| tee ${{OUT:-/tmp}}/gpu-session.log"""


def prepare(sizes: Sizes) -> None:
    """Make the folder, and print what to take along and the two calls for the GPU
    machine.

    Raises:
        SystemExit: the folder is larger than may travel.
    """
    shutil.rmtree(FOLDER, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += [
        "--only-binary=:all:",
        "--python-version",
        "3.12",
        "--implementation",
        "cp",
    ]
    for platform in PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, "-d", str(FOLDER / "wheels"), *WHEELS], check=True)
    write_data(FOLDER / "data", sizes)
    size = sum(f.stat().st_size for f in FOLDER.rglob("*") if f.is_file())
    print(f"{FOLDER.name}: {size / 2**20:.1f} MiB")
    if size > LIMIT:
        raise SystemExit(
            f"{FOLDER} is larger than {LIMIT >> 20} MiB, which is what may travel."
        )
    print(f"Copy the repository, {FOLDER.name} included. There, in its root, run both:")
    for timeout, when in zip(CALLS, WHEN, strict=True):
        print(CALL.format(timeout=timeout, when=when, seconds=timeout - ENDING))


def write_data(folder: Path, sizes: Sizes) -> None:
    """Pack pairs of random ids, as long as those of hh, with shared prefixes."""
    import packstore

    names = ("prompt", "chosen", "rejected")
    rows = lengths("hh", sizes.pairs, sizes.longest["hh"])
    rng = np.random.default_rng(0)
    # As skewed as words are, so that the files compress as real ones do.
    records = (
        {
            name: (rng.zipf(1.2, n) % sizes.vocab).tolist()
            for name, n in zip(names, row, strict=True)
        }
        for row in rows.tolist()
    )
    packstore.pack(
        records,
        str(folder),
        pack_size=sizes.pack_size,
        layout="shared_prefix",
        on={"identical_sides": "keep"},
    )
