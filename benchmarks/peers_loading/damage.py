"""Flips one bit of the stored files at a time, reads everything, and says what became of it.

Every trial runs in a forked process, as a decoder may crash or hang on damaged bytes.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from peers_loading.base import SEED, Reader, Source

PATIENCE = 20.0
"""Seconds until a trial counts as hanging; an undisturbed one takes less than one."""

NOT_PACKS = (".json", ".index")
"""Suffixes of files beside those that hold packs."""


def trials(
    reader: Reader, folder: Path, source: Source, scratch: Path, count: int
) -> dict[str, Any]:
    """Outcomes of `count` single-bit flips, by name.

    ``raised``: an exception reached the loop. ``silent``: a wrong pack was given out. ``short``:
    packs are missing, without an exception. ``hang``, ``crash``: as they say. ``unread``: every
    pack was right, as nothing reads that bit.
    """
    truth = {reader.identify(sample) for sample in source}
    rng = np.random.default_rng(SEED)
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    files = [path for path in files if path.suffix not in NOT_PACKS]
    sizes = np.array([path.stat().st_size for path in files])
    outcomes, examples = Counter[str](), dict[str, str]()
    undamaged = _trial(reader, folder, scratch, truth)
    if undamaged[0] != "unread":
        raise RuntimeError(f"undamaged files must read well; found {undamaged}")
    for _ in range(count):
        number = int(rng.choice(len(files), p=sizes / sizes.sum()))
        place, bit = int(rng.integers(sizes[number])), int(rng.integers(8))
        _flip(files[number], place, bit)
        outcome, detail = _trial(reader, folder, scratch, truth)
        _flip(files[number], place, bit)
        outcomes[outcome] += 1
        examples.setdefault(outcome, f"{files[number].name}, byte {place}: {detail}"[:300])
    return {"trials": count, "outcomes": dict(outcomes), "examples": examples}


def _flip(path: Path, place: int, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << bit]))


def _trial(reader: Reader, folder: Path, scratch: Path, truth: set[int]) -> tuple[str, str]:
    """Outcome and detail of one reading, in a process of its own."""
    inner = scratch / "trial"
    inner.mkdir()
    receive, send = os.pipe()
    pid = os.fork()
    if not pid:
        os.setsid()  # so that whatever it starts ends with it
        os.write(send, json.dumps(_outcome(reader, folder, inner, truth)).encode())
        os._exit(0)
    os.close(send)
    ready = select.select([receive], [], [], PATIENCE)[0]
    text = os.read(receive, 4096) if ready else b""
    os.close(receive)
    if not ready:
        os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    shutil.rmtree(inner, ignore_errors=True)
    if text:
        outcome, detail = json.loads(text)
        return outcome, detail
    return ("crash", f"signal {os.WTERMSIG(status)}") if ready else ("hang", "")


def _outcome(reader: Reader, folder: Path, scratch: Path, truth: set[int]) -> tuple[str, str]:
    found: list[int] = []
    wrong = ""
    try:
        for batch in reader.open(folder, scratch):
            try:
                found += reader.fingerprints(batch)
            except (ValueError, IndexError, RuntimeError) as error:  # not even of a pack's shape
                wrong = str(error)
    except BaseException as error:
        return "raised", f"{type(error).__name__}: {error}"[:200]
    if wrong or set(found) - truth:
        return "silent", wrong or "values that were never written"
    if len(found) < len(truth):
        return "short", f"{len(found)} of {len(truth)} packs"
    return "unread", ""
