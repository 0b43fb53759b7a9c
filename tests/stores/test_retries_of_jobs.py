"""The workflow step of ``examples/``, killed and run again as a scheduler does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from places import Files
from small_jobs import write_jsonl, write_tokenizer
from stores import Store

import packstore

RECORDS = [
    {"prompt": f"Question {i}? ", "chosen": f"Answer {i}.", "rejected": "No."}
    for i in range(20_000)
]
STEP = Path(__file__).parents[2] / "examples" / "retries.sh"


def step(folder: Path, store: Store) -> subprocess.Popen[str]:
    words = []
    for name, value in store.options.items():
        text = (
            value
            if isinstance(value, str)
            else json.dumps(value, separators=(",", ":"))
        )
        words += ["--storage-option", f"{name}={text}"]
    return subprocess.Popen(
        ["bash", str(STEP), "job.yaml", "--num-workers", "1"],
        cwd=folder,
        env={
            **os.environ,
            "PACKSTORE_OPTIONS": " ".join(words),
            "PATH": os.pathsep.join(
                [str(Path(sys.executable).parent), os.environ["PATH"]]
            ),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        start_new_session=True,
    )


def finished(store: Store) -> int:
    """Finished partitions of which the store has a note."""
    return sum(
        "/partitions/" in path for path in Files(store.url, **store.options).names()
    )


@pytest.mark.slow
def test_a_killed_step_goes_on(s3: Store, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "pairs.jsonl", RECORDS)
    write_tokenizer(tmp_path / "t.json")
    job: dict[str, Any] = {
        "source": "pairs.jsonl",
        "out": s3.url,
        "tokenizer": "t.json",
        "pack_size": 64,
        "partitions": 6,
    }
    (tmp_path / "job.yaml").write_text(yaml.safe_dump(job), encoding="utf-8")
    killed = step(tmp_path, s3)
    until = time.monotonic() + 120
    while not finished(s3) and killed.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL
    again = step(tmp_path, s3)
    out, log = again.communicate(timeout=300)
    assert (again.returncode, out) == (0, "1\n"), log
    messages = [
        json.loads(line)["message"]
        for line in log.splitlines()
        if line.startswith('{"time"')
    ]
    assert any(text.startswith("took over ") for text in messages)
    once_more = step(tmp_path, s3)
    assert once_more.communicate(timeout=300)[0] == "1\n"
    dataset = packstore.open(s3.url, storage_options=s3.options)
    assert dataset.version == 1
    assert dataset.manifest.records.packed == len(RECORDS)
