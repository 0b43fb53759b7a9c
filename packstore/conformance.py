"""Run a reader of the format, in any language, over the conformance kit.

::

    python -m packstore.conformance [--kit FOLDER] COMMAND...

The command is run once for each case, with the folder of a dataset, and the folders of
its side datasets, as further arguments. It checks and reads everything, and prints one
JSON object:

- ``{"packs": [...]}``: for each pack an object with its logical columns, the known
  carried ones and all derived values, and under ``side`` the joined columns, of its
  examples or sequences. Numbers that are not finite are the texts ``NaN``,
  ``Infinity``, ``-Infinity``.
- ``{"refused": "NAME"}``: the broken rule, or another name of
  ``schemas/annex-g-conformance.md``, or ``""``.

The exit status is 0 if every answer is right, 1 if one is wrong, 2 if nothing could be
run.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from packstore.errors import IntegrityError, quote, sentence

KIT = Path("schemas", "conformance", "v1")
"""The kit of a checkout, from its root."""

TIMEOUT = 120
"""Seconds that a reader may take for a case."""

OK = "ok"
UNSUPPORTED = "left out"
WRONG = "WRONG"
"""Verdicts: right; refused as ``unsupported``, as the case allows; anything else."""

Case = Mapping[str, Any]
"""An entry of ``kit.json``: folders of a dataset and its side datasets, and the right
answers: a file of expected packs, or names of broken rules, or both.
"""


def load(kit: Path) -> list[Case]:
    """Return the cases of a kit.

    Raises:
        IntegrityError: a file is not as it was released.
    """
    text = (kit / "kit.json").read_text(encoding="utf-8")
    cases: list[Case] = json.loads(text)["cases"]
    for case in cases:
        if digest(kit, case) != case["sha256"]:
            raise IntegrityError(
                sentence(
                    str(kit),
                    rule=f"the files of case {case['name']} must have the sha256 in "
                    "kit.json",
                    found="others",
                    remedy="Copy the kit again, as binary",
                )
            )
    return cases


def digest(kit: Path, case: Case) -> str:
    """Return the sha256 of lines ``<sha256>  <path>``, sorted, one for each file of a
    case.
    """
    paths = set[Path]()
    for name in (*_folders(case), case.get("expected", case["dataset"])):
        place = kit / name
        paths |= {path for path in (place, *place.rglob("*")) if path.is_file()}

    hashes = {
        path.relative_to(kit).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }
    lines = "".join(f"{hashes[name]}  {name}\n" for name in sorted(hashes))
    return hashlib.sha256(lines.encode()).hexdigest()


def judge(kit: Path, case: Case, answer: Any) -> tuple[str, str]:
    """Return the verdict on the answer of a reader, and the reason if it is wrong."""
    if not isinstance(answer, dict) or not answer.keys() & {"packs", "refused"}:
        reason = f"must print an object with packs or refused; found {quote(answer)}"
        return WRONG, reason
    if "refused" in answer:
        return _judge_refusal(case, answer["refused"])
    if "expected" not in case:
        return WRONG, f"read; must be {_right_answers(case)}"
    text = (kit / case["expected"]).read_text(encoding="utf-8")
    difference = _find_difference(json.loads(text)["packs"], answer["packs"])
    return (WRONG, difference) if difference else (OK, "")


def _judge_refusal(case: Case, name: Any) -> tuple[str, str]:
    if name and name not in case["refuse"]:
        return WRONG, f"refused as {quote(name)}; must be {_right_answers(case)}"
    if "expected" not in case:
        return OK, ""
    if name == "unsupported":
        return UNSUPPORTED, ""
    return WRONG, f"refused; must be {_right_answers(case)}"


def _right_answers(case: Case) -> str:
    answers = []
    if "expected" in case:
        answers.append("read")
    if case["refuse"]:
        answers.append(f"refused as {' or '.join(case['refuse'])}")
    return " or ".join(answers)


def _find_difference(expected: Sequence[Case], packs: Any) -> str:
    """Return the first difference between packs, in words, else ""."""
    if not isinstance(packs, list) or len(packs) != len(expected):
        return f"must have {len(expected)} packs; found {quote(packs)}"
    for number, (expected_pack, pack) in enumerate(zip(expected, packs, strict=True)):
        for name in sorted({*expected_pack, *pack}):
            expected_value = expected_pack.get(name)
            value = pack.get(name)
            if value != expected_value:
                return (
                    f"pack {number}, {name} must be {quote(expected_value)}; found "
                    f"{quote(value)}"
                )
    return ""


def _folders(case: Case) -> list[str]:
    return [case["dataset"], *case["sides"]]


def ask(command: Iterable[str], kit: Path, case: Case) -> Any:
    """Run a reader on a case; return its answer, or the reason why there is none."""
    folders = [str(kit / folder) for folder in _folders(case)]
    try:
        process = subprocess.run(
            [*command, *folders], capture_output=True, timeout=TIMEOUT, check=False
        )
        if process.returncode != 0:
            return process.stderr.decode()[-300:]
        return json.loads(process.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        return f"no JSON: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each case, and the number of each verdict; return the exit
    status.
    """
    parser = argparse.ArgumentParser(
        prog="python -m packstore.conformance",
        usage="%(prog)s [--kit FOLDER] COMMAND...",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument(
        "--kit", type=Path, default=KIT, help=f"folder of the kit (default: {KIT})"
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the reader, and its arguments"
    )
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("name the command of a reader")

    counts = Counter[str]()
    try:
        cases = load(options.kit)
        ask_reader = functools.partial(ask, options.command, options.kit)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for case, answer in zip(cases, pool.map(ask_reader, cases), strict=True):
                verdict, reason = judge(options.kit, case, answer)
                counts[verdict] += 1
                print(
                    f"{verdict:8}  {case['name']:32}  {reason or _right_answers(case)}"
                )
    except (OSError, IntegrityError) as error:  # no kit, or no such command
        print(f"packstore.conformance: {error}", file=sys.stderr)
        return 2
    summary = ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in (OK, UNSUPPORTED, WRONG)
    )
    print(f"{summary} of {len(cases)} cases")
    return 1 if counts[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
