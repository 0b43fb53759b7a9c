"""Folders of checkpoints as files: which are whole, which is the newest, which are
removed.

A checkpoint is ``checkpoint-<step>`` in the output folder. The file :data:`POSITION` in
it is the mark of packstore's trainers, and is there from the first moment on: nothing
without it is removed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import TrainerState

from packstore.errors import FormatError, sentence

logger = logging.getLogger("packstore")

POSITION = "packstore.json"
"""File of the position in the data, and of the files beside it, in a checkpoint."""

STATE = "trainer_state.json"
"""File of the Trainer's own state, which comes last: a checkpoint that has it was
whole.
"""

REMOVED = ".removed"
"""End of the name of a checkpoint while its files are removed."""

SMALL_FILE = 2**20
"""Bytes up to which a file is hashed; the size of others is compared."""


def begin_checkpoint(folder: Path) -> None:
    """Mark a folder as a checkpoint that is not whole yet, also one that was."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE).unlink(missing_ok=True)
    (folder / POSITION).write_text(json.dumps({"complete": False}), encoding="utf-8")


def finish_files(folder: Path, content: dict[str, Any]) -> None:
    """Write `content` with the sizes and hashes of all files; only the state is still
    missing.
    """
    content = {**content, "files": _sizes(folder), "hashes": _hashes(folder)}
    text = json.dumps({**content, "sha256": _hash_of_values(content)})
    (folder / POSITION).write_text(text, encoding="utf-8")


def read_content(checkpoint: Path) -> dict[str, Any]:
    """Return the content of :data:`POSITION`, checked against the files of the
    checkpoint.

    The Trainer begins anew, in silence, with files that it does not find, as the
    optimizer's state.

    Raises:
        FormatError: the checkpoint is not whole.
    """
    try:
        content: dict[str, Any] = json.loads(
            (checkpoint / POSITION).read_text(encoding="utf-8")
        )
        if content.get("complete") is False:
            raise _not_whole(checkpoint, "one that was still being written")
        if content.pop("sha256") != _hash_of_values(content):
            raise _not_whole(
                checkpoint, f"{POSITION} with other bytes than its hash says"
            )
        lost = dict(content["files"].items() - _sizes(checkpoint).items())
        if lost:
            name = min(lost)
            raise _not_whole(checkpoint, f"{name} without its {lost[name]:,} bytes")
        changed = content["hashes"].items() - _hashes(checkpoint).items()
        if changed:
            raise _not_whole(
                checkpoint, f"{min(changed)[0]} with other bytes than its hash says"
            )
    except FormatError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _not_whole(
            checkpoint, f"{POSITION}: {type(error).__name__}: {error}"
        ) from error
    return content


def read_position(checkpoint: Path) -> dict[str, Any]:
    """Return the position in packed data, with the description of its run.

    Raises:
        FormatError: the checkpoint is not whole, or of a run on other data.
    """
    content = read_content(checkpoint)
    if content.get("loader") is None:
        raise _not_whole(checkpoint, "no position in packed data")
    return content


def read_state(checkpoint: Path) -> TrainerState:
    """Return the Trainer's own state.

    Raises:
        FormatError: it is missing, or holds values of other types than the Trainer
            writes.
    """
    try:
        state = TrainerState.load_from_json(str(checkpoint / STATE))
        expected = vars(TrainerState())
        damaged = [
            name
            for name, value in vars(state).items()
            if not _is_like(value, expected[name])
        ]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise _not_whole(
            checkpoint, f"{STATE}: {type(error).__name__}: {error}"
        ) from error
    if damaged:
        raise _not_whole(
            checkpoint, f"{STATE} with {damaged[0]} {getattr(state, damaged[0])!r}"
        )
    return state


def step_of(checkpoint: Path) -> int:
    """Return the number of steps done, from the Trainer's state."""
    return int(read_state(checkpoint).global_step)


def problem_of(checkpoint: Path) -> str | None:
    """Return why a checkpoint is not whole; None: it is."""
    try:
        read_content(checkpoint)
        read_state(checkpoint)
    except FormatError as error:
        return str(error)
    return None


def newest_checkpoint(folder: str) -> str | None:
    """Return the newest checkpoint from which a run can go on, or None; warn of those
    passed over.

    Of a checkpoint that was renamed, the name is not its step.
    """
    for number, path in reversed(_numbered(Path(folder))):
        try:
            content = read_content(path)
            step = step_of(path)
        except FormatError as error:
            logger.warning("passed over: %s", error)
            continue
        if "loader" not in content:
            logger.warning("passed over: %s, which holds the model only", path)
        elif step != number:
            logger.warning("passed over: %s, which is of step %s", path, step)
        else:
            return str(path)
    return None


def is_own(checkpoint: Path) -> bool:
    """Return True for a checkpoint that a trainer of packstore made in this place."""
    return (checkpoint / POSITION).is_file() and not checkpoint.is_symlink()


def remove_torn_checkpoints(
    folder: Path, *, resumed: Path | None, limit: int | None
) -> None:
    """Remove, as a run begins, the checkpoints of packstore that are not whole.

    Without a `limit` of checkpoints, or in a run that begins anew, only what a kill
    interrupted: other checkpoints may lack files that their owner removed.

    Args:
        folder: output folder of the run.
        resumed: the checkpoint from which the run goes on.
        limit: `save_total_limit`, by which a run removes checkpoints at all.
    """
    for path in _folders(folder):
        if re.fullmatch(f"checkpoint-[0-9]+{re.escape(REMOVED)}", path.name):
            shutil.rmtree(path, ignore_errors=True)
    for _, path in _numbered(folder):
        if not is_own(path) or _is_same(path, resumed):
            continue
        problem = problem_of(path)
        if problem is None:
            continue
        if _is_interrupted(path) or (resumed is not None and limit):
            logger.warning("removed: %s", problem)
            remove_checkpoint(path)


def rotate_checkpoints(
    folder: Path, *, limit: int | None, newest: int | None, best: str | None
) -> None:
    """Remove the oldest whole checkpoints of packstore, by their steps, beyond `limit`.

    Args:
        folder: output folder of the run.
        limit: `save_total_limit`; None or 0: all stay.
        newest: step of the checkpoint written last, which stays; None: it need not.
            Those of later steps are of a run before this one, and are the first to go.
        best: path of the best checkpoint, which stays.
    """
    if not limit:
        return
    whole = [
        (number, path)
        for number, path in _numbered(folder)
        if is_own(path) and problem_of(path) is None and step_of(path) == number
    ]
    later = [path for number, path in whole if newest is not None and number > newest]
    earlier = [path for number, path in whole if newest is None or number < newest]
    removable = [path for path in later + earlier if not _is_same(path, best)]
    surplus = max(len(whole) - limit, 0)
    for path in removable[:surplus]:
        remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint in two steps, so that a kill leaves none that lacks some of
    its files.
    """
    doomed = path.with_name(path.name + REMOVED)
    try:
        if doomed.exists():
            shutil.rmtree(doomed)
        path.rename(doomed)
        shutil.rmtree(doomed)
    except OSError as error:  # the run is worth more than the space
        logger.warning("%s could not be removed: %s", path, error)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints of a folder with the steps in their names, in the order of
    these.
    """
    matches = (
        (re.fullmatch("checkpoint-([0-9]+)", path.name), path)
        for path in _folders(folder)
    )
    return sorted((int(match[1]), path) for match, path in matches if match is not None)


def _folders(folder: Path) -> Iterator[Path]:
    if folder.is_dir():
        yield from (path for path in folder.iterdir() if path.is_dir())


def _is_interrupted(checkpoint: Path) -> bool:
    """Return True for a checkpoint that was not finished; each file is written before
    the state.
    """
    try:
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return False


def _is_same(path: Path, other: Path | str | None) -> bool:
    return other is not None and os.path.realpath(path) == os.path.realpath(other)


def _is_like(value: Any, default: Any) -> bool:
    """Return True for a value of the type of a default; a default of None takes any."""
    if default is None:
        return True
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, list):
        return isinstance(value, list) and all(
            isinstance(record, dict) for record in value
        )
    return isinstance(value, type(default))


def _not_whole(checkpoint: Path, found: str) -> FormatError:
    rule = "it must be whole, as packstore wrote it"
    remedy = "Resume from an earlier checkpoint"
    return FormatError(sentence(f"checkpoint {checkpoint}", rule, found, remedy))


def _files(checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """Yield the files that are written before the position, by their paths inside.

    A text may be removed: transformers marks a folder by one while it saves for
        SIGTERM.
    """
    for path in checkpoint.rglob("*"):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and path.suffix != ".txt" and name not in (POSITION, STATE):
            yield name, path


def _sizes(checkpoint: Path) -> dict[str, int]:
    return {name: path.stat().st_size for name, path in _files(checkpoint)}


def _hashes(checkpoint: Path) -> dict[str, str]:
    small = [
        item for item in _files(checkpoint) if item[1].stat().st_size <= SMALL_FILE
    ]
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in small}


def _hash_of_values(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
