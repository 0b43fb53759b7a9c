"""Folders of checkpoints as files: which are whole, and which is the newest."""

from __future__ import annotations

import hashlib
import json
import logging
from contextlib import suppress
from pathlib import Path
from typing import Any

from packstore.errors import FormatError, quote, sentence

logger = logging.getLogger("packstore")

POSITION = "packstore.json"
"""File of the position in the data, and of the sizes of the files beside it, in a checkpoint."""

STATE = "trainer_state.json"
"""File of the Trainer's own state, which comes last: a checkpoint that has it was whole."""


def newest_checkpoint(folder: str) -> str | None:
    """Returns the newest complete checkpoint, not one that a killed run left half-written."""
    found = []
    for path in Path(folder).glob("checkpoint-*"):
        if path.name.removeprefix("checkpoint-").isdigit():
            with suppress(OSError, ValueError, KeyError):
                if (path / POSITION).is_file():
                    found.append((step_of(path), str(path)))
                    continue
            logger.warning("%s has no whole state of a run, and is passed over", path)
    return max(found)[1] if found else None


def step_of(checkpoint: Path) -> int:
    """Reads the number of steps done from the Trainer's state."""
    text = (checkpoint / STATE).read_text(encoding="utf-8")
    return int(json.loads(text)["global_step"])


def read_position(checkpoint: Path) -> dict[str, Any]:
    """Reads the position in the data, and what run it is of; refuses files that are not whole.

    The Trainer begins anew, in silence, with what it does not find, as the optimizer's state.
    """
    where, rule = f"checkpoint {checkpoint}", "it must be whole, as packstore wrote it"
    try:
        content: dict[str, Any] = json.loads((checkpoint / POSITION).read_text(encoding="utf-8"))
        if content.pop("sha256") != hash_of(content):
            found = f"{POSITION} with other bytes than its hash says"
        elif lost := dict(content["files"].items() - sizes_of(checkpoint).items()):
            found = f"{min(lost)} without its {lost[min(lost)]:,} bytes"
        else:
            return content
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        found = quote(f"{POSITION}: {type(error).__name__}: {error}", 150)
    raise FormatError(sentence(where, rule, found, "Resume from an earlier checkpoint"))


def sizes_of(checkpoint: Path) -> dict[str, int]:
    """Returns the bytes of each file that is written before the position, by its path inside.

    A text may be removed: transformers marks a folder by one while it saves for SIGTERM.
    """
    files = (path for path in checkpoint.rglob("*") if path.is_file() and path.suffix != ".txt")
    sizes = {path.relative_to(checkpoint).as_posix(): path.stat().st_size for path in files}
    return {name: size for name, size in sizes.items() if name not in (POSITION, STATE)}


def hash_of(content: Any) -> str:
    """Return the hash of JSON values, in any order of their names."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
