"""Checkpoints as folders: which are whole, which is the newest, which are removed.

A checkpoint is ``checkpoint-<step>`` in the output folder. The file :data:`POSITION` in
it is the mark of packstore's trainers: nothing without it is removed. It is written
first, to mark the checkpoint as unfinished, and again last, with sizes and hashes of
the other files. A checkpoint is whole if all of these files are as they were written.
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
"""File in a checkpoint: the position in the data, and sizes and hashes of its files."""

STATE = "trainer_state.json"
"""File in a checkpoint: the Trainer's own state, which the Trainer writes last."""

REMOVED = ".removed"
"""Suffix of a checkpoint's name while its files are removed."""

SMALL_FILE = 2**20
"""Files of at most so many bytes are hashed; larger ones are checked by size alone."""


def begin_checkpoint(folder: Path) -> None:
    """Mark a folder as an unfinished checkpoint, even if it holds a whole one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE).unlink(missing_ok=True)
    (folder / POSITION).write_text(json.dumps({"complete": False}), encoding="utf-8")


def finish_checkpoint(folder: Path, content: dict[str, Any]) -> None:
    """Write `content` with sizes and hashes of all other files; it is the last file."""
    content = {**content, "files": _sizes(folder), "hashes": _hashes(folder)}
    text = json.dumps({**content, "sha256": _hash_of_values(content)})
    (folder / POSITION).write_text(text, encoding="utf-8")


def read_content(checkpoint: Path) -> dict[str, Any]:
    """Return the content of :data:`POSITION`, checked against the checkpoint's files.

    Without this check a run could resume from part of a checkpoint: the Trainer goes on
    silently without a file that it does not find, such as the optimizer's state.

    Raises:
        FormatError: the checkpoint is not whole.
    """
    try:
        text = (checkpoint / POSITION).read_text(encoding="utf-8")
        content: dict[str, Any] = json.loads(text)
        problem = _find_problem(checkpoint, content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{POSITION}: {type(error).__name__}: {error}"
        raise _not_whole(checkpoint, problem) from error
    if problem is not None:
        raise _not_whole(checkpoint, problem)
    return content


def _find_problem(checkpoint: Path, content: dict[str, Any]) -> str | None:
    """Return a description of the damage, or None; remove ``sha256`` from `content`."""
    if content.get("complete") is False:
        return "one that was still being written"

    if content.pop("sha256") != _hash_of_values(content):
        return f"{POSITION} with other bytes than its hash says"

    # Entries that were written, and that the files of today do not have.
    damaged_sizes = dict(content["files"].items() - _sizes(checkpoint).items())
    if damaged_sizes:
        name = min(damaged_sizes)
        return f"{name} without its {damaged_sizes[name]:,} bytes"

    damaged_hashes = dict(content["hashes"].items() - _hashes(checkpoint).items())
    if damaged_hashes:
        return f"{min(damaged_hashes)} with other bytes than its hash says"
    return None


def read_position(checkpoint: Path) -> dict[str, Any]:
    """Return the position in packed data, with the description of its run.

    Raises:
        FormatError: the checkpoint is not whole, or belongs to a run on other data.
    """
    content = read_content(checkpoint)
    if content.get("loader") is None:
        raise _not_whole(checkpoint, "no position in packed data")
    return content


def read_state(checkpoint: Path) -> TrainerState:
    """Return the Trainer's own state.

    Raises:
        FormatError: the file is missing, or a value has another type than the Trainer
            writes.
    """
    defaults = vars(TrainerState())
    try:
        state = TrainerState.load_from_json(str(checkpoint / STATE))
        damaged_names = [
            name
            for name, value in vars(state).items()
            if not _is_like(value, defaults[name])
        ]
    except (OSError, ValueError, TypeError, AttributeError) as error:
        problem = f"{STATE}: {type(error).__name__}: {error}"
        raise _not_whole(checkpoint, problem) from error
    if damaged_names:
        name = damaged_names[0]
        value = getattr(state, name)
        raise _not_whole(checkpoint, f"{STATE} with {name} {value!r}")
    return state


def read_step(checkpoint: Path) -> int:
    """Return the number of trained steps, from the Trainer's state."""
    return int(read_state(checkpoint).global_step)


def problem_of(checkpoint: Path) -> str | None:
    """Return why a checkpoint is not whole, or None if it is."""
    try:
        read_content(checkpoint)
        read_state(checkpoint)
    except FormatError as error:
        return str(error)
    return None


def newest_checkpoint(folder: str) -> str | None:
    """Return the newest checkpoint that a run can resume from, or None.

    A warning names each newer folder that is passed over: it is damaged, has only a
    model, or was renamed to another step.
    """
    for number, path in reversed(_numbered(Path(folder))):
        try:
            content = read_content(path)
            step = read_step(path)
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


def has_mark(checkpoint: Path) -> bool:
    """Return True for a checkpoint that a trainer of packstore made in this place."""
    return (checkpoint / POSITION).is_file() and not checkpoint.is_symlink()


def remove_torn_checkpoints(
    folder: Path, *, resumed: Path | None, limit: int | None
) -> None:
    """Remove, at the start of a run, packstore's checkpoints that are not whole.

    Every run removes checkpoints that a kill interrupted. Others may lack files because
    their owner removed some: only a run that resumes, and has a `limit`, removes them.

    Args:
        folder: output folder of the run.
        resumed: the checkpoint that the run resumes from.
        limit: `save_total_limit`; without it, a run never removes whole checkpoints.
    """
    for path in _folders(folder):
        if re.fullmatch(f"checkpoint-[0-9]+{re.escape(REMOVED)}", path.name):
            shutil.rmtree(path, ignore_errors=True)

    removes_incomplete = resumed is not None and bool(limit)
    for _, path in _numbered(folder):
        if not has_mark(path) or _is_same(path, resumed):
            continue
        problem = problem_of(path)
        if problem is None:
            continue
        if removes_incomplete or _is_interrupted(path):
            logger.warning("removed: %s", problem)
            remove_checkpoint(path)


def rotate_checkpoints(
    folder: Path, *, limit: int | None, newest: int | None, best: str | None
) -> None:
    """Remove packstore's oldest whole checkpoints, by their steps, beyond `limit`.

    Args:
        folder: output folder of the run.
        limit: `save_total_limit`; None or 0 keeps all.
        newest: step of the checkpoint written last, which is kept; None: it may go.
            Checkpoints of later steps belong to an earlier run, and go first.
        best: path of the best checkpoint, which is kept.
    """
    if not limit:
        return
    whole_checkpoints = [
        (number, path)
        for number, path in _numbered(folder)
        if has_mark(path) and problem_of(path) is None and read_step(path) == number
    ]

    of_earlier_run = []
    of_this_run = []
    for number, path in whole_checkpoints:
        if _is_same(path, best) or number == newest:
            continue
        if newest is not None and number > newest:
            of_earlier_run.append(path)
        else:
            of_this_run.append(path)

    surplus = max(len(whole_checkpoints) - limit, 0)
    for path in (of_earlier_run + of_this_run)[:surplus]:
        remove_checkpoint(path)


def remove_checkpoint(path: Path) -> None:
    """Rename and then remove a checkpoint, so that a kill leaves no part of it under
    its name.
    """
    renamed = path.with_name(path.name + REMOVED)
    try:
        if renamed.exists():
            shutil.rmtree(renamed)
        path.rename(renamed)
        shutil.rmtree(renamed)
    except OSError as error:
        # No reason to end a training run.
        logger.warning("%s could not be removed: %s", path, error)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    """Return the checkpoints of a folder as (step in the name, path), in order."""
    numbered = []
    for path in _folders(folder):
        match = re.fullmatch("checkpoint-([0-9]+)", path.name)
        if match is not None:
            numbered.append((int(match[1]), path))
    return sorted(numbered)


def _folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if path.is_dir()]


def _is_interrupted(checkpoint: Path) -> bool:
    """Return True if a kill interrupted the writing or removal of a checkpoint."""
    try:
        content = json.loads((checkpoint / POSITION).read_text(encoding="utf-8"))
        json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return True
    return isinstance(content, dict) and content.get("complete") is False


def _is_same(path: Path, other_path: Path | str | None) -> bool:
    if other_path is None:
        return False
    return os.path.realpath(path) == os.path.realpath(other_path)


def _is_like(value: Any, default: Any) -> bool:
    """Return True if `value` has the type of `default`; None stands for any type."""
    if default is None:
        return True
    if isinstance(default, bool):
        return isinstance(value, bool)
    if isinstance(default, int):
        return isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(default, list):
        is_list = isinstance(value, list)
        return is_list and all(isinstance(record, dict) for record in value)
    return isinstance(value, type(default))


def _not_whole(checkpoint: Path, problem: str) -> FormatError:
    return FormatError(
        sentence(
            where=f"checkpoint {checkpoint}",
            rule="it must be whole, as packstore wrote it",
            found=problem,
            remedy="Resume from an earlier checkpoint",
        )
    )


def _files(checkpoint: Path) -> Iterator[tuple[str, Path]]:
    """Yield name and path of the files that are complete when the position is written.

    Text files are left out: while transformers saves because of SIGTERM, it puts one
    into the folder as a mark, and removes it afterwards.
    """
    for path in checkpoint.rglob("*"):
        name = path.relative_to(checkpoint).as_posix()
        if path.is_file() and path.suffix != ".txt" and name not in (POSITION, STATE):
            yield name, path


def _sizes(checkpoint: Path) -> dict[str, int]:
    return {name: path.stat().st_size for name, path in _files(checkpoint)}


def _hashes(checkpoint: Path) -> dict[str, str]:
    hashes = {}
    for name, path in _files(checkpoint):
        if path.stat().st_size <= SMALL_FILE:
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return hashes


def _hash_of_values(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
