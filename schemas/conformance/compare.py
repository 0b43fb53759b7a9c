"""Run a reader of the format, in any language, over the conformance kit.

::

    python compare.py [--kit FOLDER] [--reader] COMMAND...

The command is run once for each case, with the folder of a dataset, and the folders of
its side datasets, as further arguments. It checks and reads everything, and prints one
JSON object: ``{"packs": [...]}`` or ``{"refused": "NAME"}``.
``schemas/annex-g-conformance.md`` says what is in it, and how it is compared.

The exit status is 0 if every answer is right, 1 if one is wrong, 2 if nothing could be
run. This program needs Python 3.10 and nothing else.
"""

from __future__ import annotations

import argparse
import ctypes
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

KIT = Path(__file__).parent / "v1"
"""The kit beside this program."""

TIMEOUT = 120
"""Seconds that a reader may take for a case."""

OK = "ok"
LEFT_OUT = "left out"
WRONG = "WRONG"
"""Verdicts: right; refused, as the case allows; anything else."""

Case = Mapping[str, Any]
"""An entry of ``kit.json``: folders of a dataset and its side datasets, and the right
answers: a file of expected packs, or names of broken rules, or both.
"""


class DamagedKit(Exception):
    """A file of the kit is not as it was released."""


def load(kit: Path) -> list[Case]:
    """Return the cases of a kit.

    Raises:
        DamagedKit: a file is not as it was released.
    """
    text = (kit / "kit.json").read_text(encoding="utf-8")
    cases: list[Case] = json.loads(text)["cases"]
    for case in cases:
        if digest(kit, case) != case["sha256"]:
            raise DamagedKit(
                f"{kit}: the files of case {case['name']} must have the sha256 in "
                "kit.json; found others. Copy the kit again, as binary."
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
        reason = f"must print an object with packs or refused; found {_short(answer)}"
        return WRONG, reason
    if "refused" in answer:
        return _judge_refusal(case, answer["refused"])
    if "expected" not in case:
        return WRONG, f"read; must be {_right_answers(case)}"
    text = (kit / case["expected"]).read_text(encoding="utf-8")
    difference = _find_difference(json.loads(text)["packs"], answer["packs"])
    return (WRONG, difference) if difference else (OK, "")


def _judge_refusal(case: Case, name: Any) -> tuple[str, str]:
    if "expected" in case:
        # A reader may leave this out, if it says so by a name.
        if name in case["refuse"]:
            return LEFT_OUT, ""
    elif name == "" or name in case["refuse"]:
        return OK, ""
    return WRONG, f"refused as {_short(name)}; must be {_right_answers(case)}"


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
        return f"must have {len(expected)} packs; found {_short(packs)}"
    for number, (expected_pack, pack) in enumerate(zip(expected, packs, strict=True)):
        if not isinstance(pack, dict):
            return f"pack {number} must be an object; found {_short(pack)}"
        for name in sorted({*expected_pack, *pack}):
            expected_value = expected_pack.get(name)
            value = pack.get(name)
            if not is_same(expected_value, value):
                return (
                    f"pack {number}, {name} must be {_short(expected_value)}; found "
                    f"{_short(value)}"
                )
    return ""


def is_same(expected: Any, value: Any) -> bool:
    """Return True if two JSON values are the same for the kit.

    Integers and texts are compared exactly. A number that float32 holds may be printed
    with as few digits as float32 needs.
    """
    if isinstance(expected, dict) and isinstance(value, dict):
        names_are_same = expected.keys() == value.keys()
        return names_are_same and all(is_same(expected[n], value[n]) for n in expected)
    if isinstance(expected, list) and isinstance(value, list):
        pairs = zip(expected, value, strict=False)
        return len(expected) == len(value) and all(is_same(a, b) for a, b in pairs)
    if isinstance(expected, bool) or isinstance(value, bool):
        return expected is value
    if isinstance(expected, float) and isinstance(value, float):
        is_float32 = _as_float32(expected) == expected
        return expected == value or (is_float32 and _as_float32(value) == expected)
    return bool(expected == value)


def _as_float32(number: float) -> float:
    return ctypes.c_float(number).value


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 200 else f"{text[:200]}…"


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
            return process.stderr.decode(errors="replace")[-300:]
        return json.loads(process.stdout)
    except (subprocess.TimeoutExpired, ValueError) as error:
        return f"no JSON: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each case, and the number of each verdict; return the exit
    status.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--kit FOLDER] [--reader] COMMAND...",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument(
        "--kit", type=Path, default=KIT, help="folder of the kit (default: %(default)s)"
    )
    parser.add_argument(
        "--reader",
        action="store_true",
        help="only cases that the core of the format decides, without its annexes",
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
        if options.reader:
            cases = [case for case in cases if case["reader"]]
        ask_reader = functools.partial(ask, options.command, options.kit)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for case, answer in zip(cases, pool.map(ask_reader, cases), strict=True):
                verdict, reason = judge(options.kit, case, answer)
                counts[verdict] += 1
                print(
                    f"{verdict:8}  {case['name']:32}  {reason or _right_answers(case)}"
                )
    except (OSError, DamagedKit) as error:  # no kit, or no such command
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    summary = ", ".join(
        f"{counts[verdict]} {verdict}" for verdict in (OK, LEFT_OUT, WRONG)
    )
    print(f"{summary} of {len(cases)} cases")
    return 1 if counts[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
