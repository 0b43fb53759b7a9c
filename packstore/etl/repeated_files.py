"""Finds input files with the bytes of an earlier one, such as a link beside its target.

Their records count once for each file. Nothing is left out: only `dedup` drops records.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_MAX_EXAMPLES = 3
"""Files that a message names."""


@dataclass(frozen=True)
class RepeatedFiles:
    """The files that repeat an earlier one.

    Attributes:
        text: their number and their effect, as a clause.
        examples: the first few, each with the file that it repeats.
    """

    text: str
    examples: tuple[str, ...]


def find_repeated_files(sources: Iterable[Mapping[str, Any]]) -> RepeatedFiles | None:
    """Return the files with the bytes of an earlier one; None if there are none.

    Files without records are not compared.

    Args:
        sources: path, bytes, sha256 and records of each input, in the order of the
            input.
    """
    first_paths: dict[str, str] = {}  # sha256 -> the first file with these bytes
    num_files = 0
    num_repeated = 0
    examples: list[str] = []
    for source in sources:
        if not source["records"]:
            continue
        num_files += 1
        path = source["path"]
        sha256 = source["sha256"]
        if sha256 not in first_paths:
            first_paths[sha256] = path
            continue
        num_repeated += 1
        if num_repeated <= _MAX_EXAMPLES:
            examples.append(f"{path} (as {first_paths[sha256]})")
    if not num_repeated:
        return None
    text = (
        f"{num_repeated:,} of {num_files:,} files repeat the bytes of an earlier one; "
        "their records count again, unless dedup=pair (--dedup pair) drops them"
    )
    return RepeatedFiles(text, tuple(examples))
