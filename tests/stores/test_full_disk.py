"""A disk that fills up, and folders that may not be written to: named errors, nothing
lost.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rights import closed
from tokenizers import Tokenizer

import packstore
from packstore.errors import StorageError

JOB = """
import sys, packstore
pairs, out, tokenizer, filler = sys.argv[1:]
def pack(seed, **more):
    small = dict(pack_size=256, row_group_tokens=1000, shard_tokens=2000)
    return packstore.pack(pairs, out, tokenizer, seed=seed, **small, **more)
first = pack(0).manifest.fingerprint
with open(filler, "wb", buffering=0) as file:
    try:
        while True:
            file.write(bytes(4096))
    except OSError:
        pass
try:
    pack(1, overwrite=True)
except packstore.PackstoreError as error:
    print(f"{type(error).__name__}: {error}")
now = packstore.open(out)
assert (now.version, now.manifest.fingerprint) == (1, first)
assert now.verify().ok
import os
os.unlink(filler)
again = pack(1, overwrite=True)
assert again.version == 2 and again.verify().ok
print(again.manifest.fingerprint)
"""


def in_a_small_disk(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs a command that sees a disk of 2 MB at `folder`, in a mount namespace of its
    own.
    """
    script = f'mount -t tmpfs -o size=2m none "{folder}" && exec "$@"'
    unshare = [
        "unshare",
        "--mount",
        *(() if os.geteuid() == 0 else ("--map-root-user",)),
    ]
    return subprocess.run(
        [*unshare, "sh", "-c", script, "sh", *command],
        capture_output=True,
        encoding="utf-8",
        timeout=300,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(packstore.__file__).parents[1])},
    )


def test_a_full_disk(tmp_path: Path, pairs: Path, tokenizer: Tokenizer) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if (tried := in_a_small_disk(disk, "true")).returncode:
        pytest.skip(f"no disk can be mounted here: {tried.stderr.strip()}")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    out, filler = str(disk / "ds"), str(disk / "filler")
    names = (str(pairs), out, str(tmp_path / "tokenizer.json"), filler)
    done = in_a_small_disk(disk, sys.executable, "-c", JOB, *names)
    assert done.returncode == 0, done.stdout + done.stderr
    error, fingerprint = done.stdout.splitlines()
    assert error.startswith("StorageError: ")
    assert "no space left" in error
    small = {"pack_size": 256, "row_group_tokens": 1000, "shard_tokens": 2000}
    undisturbed = packstore.pack(str(pairs), tmp_path / "ds", names[2], seed=1, **small)
    assert undisturbed.manifest.fingerprint == fingerprint


def test_a_folder_that_may_not_be_written_to(
    tmp_path: Path, pairs: Path, tokenizer: Tokenizer
) -> None:
    base = tmp_path / "shared"
    packstore.pack(str(pairs), base / "ds", tokenizer, pack_size=256)
    packstore.pack(packstore.open(base / "ds"), base / "same", pack_size=512)
    before = sorted((p.name, p.read_bytes()) for p in base.rglob("*") if p.is_file())
    folders = (base, base / "ds", base / "ds" / "_packstore", base / "ds" / "data")
    denied = "permission denied"
    with closed(0o555, *folders):
        with pytest.raises(StorageError, match=denied):
            packstore.pack(
                packstore.open(base / "ds"), base / "ds", pack_size=512, overwrite=True
            )
        with pytest.raises(StorageError, match=denied):
            packstore.pack(packstore.open(base / "ds"), base / "new", pack_size=512)
    with (
        closed(0o000, *folders),
        pytest.raises(StorageError, match=denied),
    ):
        packstore.open(base / "ds")
    assert before == sorted(
        (p.name, p.read_bytes()) for p in base.rglob("*") if p.is_file()
    )
