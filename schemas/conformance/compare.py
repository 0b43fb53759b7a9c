"""Run a reader of the format, in any language, over the conformance kit.

::

    python compare.py [--kit FOLDER] [--reader] [--without-sides] [--case NAME]
                      COMMAND...

The command is run once for each case, with the folder of a dataset, and the folders of
its side datasets, as further arguments. It checks and reads everything, and prints one
JSON object: ``{"packs": [...]}`` or ``{"refused": "NAME"}``.
``schemas/annex-g-conformance.md`` says what is in it, and how it is compared.

``--reader`` asks only about the core of the format, ``--without-sides`` leaves out the
cases with side data, and ``--case`` runs one case by name, and shows the reader's
standard error. A reader that fails in each of the first cases is not asked further.

The exit status is 0 if every answer is right, 1 if one is wrong, 2 if nothing could be
run. This program needs Python 3.10 and nothing else.
"""

from __future__ import annotations

import argparse
import ctypes
import difflib
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
from typing import Any, NamedTuple

KIT = Path(__file__).parent / "v1"
"""The kit beside this program."""

TIMEOUT = 120
"""Seconds that a reader may take for a case."""

MAX_FIRST_FAILURES = 5
"""Cases after which a reader that has failed in each of them is not run again."""

OK = "ok"
LEFT_OUT = "left out"
WRONG = "WRONG"
"""Verdicts: right; refused, as the case allows; anything else."""

Case = Mapping[str, Any]
"""An entry of ``kit.json``: folders of a dataset and its side datasets, and the right
answers: a file of expected packs, or names of broken rules, or both.
"""


CORE = "the core (format.md)"
FILES = "manifests and files (annexes A to D)"
SIDES = "side data (annex E)"
"""Parts of the format, each of which a reader can have without those after it."""


class Failure(NamedTuple):
    """A run of a reader that printed no JSON.

    Attributes:
        reason: exit status and last line of standard error, or what is wrong with the
            output.
        stderr: its standard error.
    """

    reason: str
    stderr: str = ""


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
    if isinstance(answer, Failure):
        return WRONG, answer.reason
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


def part_of(case: Case) -> str:
    """Return the part of the format that a case is about."""
    if case["reader"]:
        return CORE
    return SIDES if case["sides"] else FILES


def ask(command: Iterable[str], kit: Path, case: Case) -> Any:
    """Run a reader on a case; return its answer, or a :class:`Failure`."""
    folders = [str(kit / folder) for folder in _folders(case)]
    try:
        process = subprocess.run(
            [*command, *folders], capture_output=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return Failure(f"no answer in {TIMEOUT} seconds")
    stderr = process.stderr.decode(errors="replace")
    if process.returncode != 0:
        lines = stderr.strip().splitlines() or ["no message"]
        last_line = lines[-1]
        return Failure(f"exit status {process.returncode}: {last_line}", stderr)
    try:
        return json.loads(process.stdout)
    except ValueError as error:
        return Failure(f"no JSON: {error}", stderr)


def select(
    cases: Sequence[Case], options: argparse.Namespace, parser: argparse.ArgumentParser
) -> list[Case]:
    """Return the cases that the options ask for."""
    names = [case["name"] for case in cases]
    for name in options.case or ():
        if name not in names:
            similar = ", ".join(difflib.get_close_matches(name, names))
            parser.error(f"no case {name!r}; similar names: {similar or 'none'}")
    if options.case:
        cases = [case for case in cases if case["name"] in options.case]
    if options.reader:
        cases = [case for case in cases if case["reader"]]
    if options.without_sides:
        cases = [case for case in cases if not case["sides"]]
    return list(cases)


def print_totals(
    counts: Mapping[str, Counter[str]], wrong_answers: Counter[str], num_cases: int
) -> None:
    """Print the number of each verdict, by part of the format and in all.

    Args:
        counts: part -> number of each verdict.
        wrong_answers: right answer -> number of wrong ones in its place.
        num_cases: number of all cases.
    """
    print()
    if wrong_answers:
        texts = [f"{answer} ({n})" for answer, n in wrong_answers.most_common()]
        print(f"{WRONG}, by what is right: {', '.join(texts)}")
    for part, verdicts in counts.items():
        print(f"{_numbers(verdicts)} of {verdicts.total()} cases of {part}")
    total = sum(counts.values(), Counter[str]())
    print(f"{_numbers(total)} of {num_cases} cases")


def _numbers(verdicts: Counter[str]) -> str:
    return ", ".join(f"{verdicts[name]} {name}" for name in (OK, LEFT_OUT, WRONG))


def run(
    command: Sequence[str], kit: Path, cases: Sequence[Case], shows_stderr: bool
) -> int:
    """Ask a reader about cases, and print a line for each; return the exit status.

    Args:
        command: the reader.
        kit: folder of the kit.
        cases: the cases.
        shows_stderr: whether to show the standard error of each run that fails.
    """
    counts: dict[str, Counter[str]] = {}
    wrong_answers = Counter[str]()
    failures: list[Failure] = []
    pool = ThreadPoolExecutor(os.cpu_count())
    try:
        answers = pool.map(functools.partial(ask, command, kit), cases)
        for number, (case, answer) in enumerate(zip(cases, answers, strict=True), 1):
            verdict, reason = judge(kit, case, answer)
            right = _right_answers(case)
            counts.setdefault(part_of(case), Counter())[verdict] += 1
            if verdict == WRONG:
                wrong_answers[right] += 1
            print(f"{verdict:8}  {case['name']:32}  {reason or right}")
            if isinstance(answer, Failure):
                failures.append(answer)
                if shows_stderr:
                    print(answer.stderr, file=sys.stderr)
            if number == len(failures) == MAX_FIRST_FAILURES:
                if not shows_stderr:
                    print(failures[0].stderr, file=sys.stderr)
                print(f"stopped: each of the first {number} cases failed")
                return 2
    finally:
        pool.shutdown(cancel_futures=True)
    print_totals(counts, wrong_answers, len(cases))
    return 1 if wrong_answers else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each case, and the number of each verdict; return the exit
    status.
    """
    parser = argparse.ArgumentParser(
        usage="%(prog)s [--kit FOLDER] [--reader] [--without-sides] [--case NAME] "
        "COMMAND...",
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
        "--without-sides", action="store_true", help="no cases with side data (annex E)"
    )
    parser.add_argument(
        "--case",
        action="append",
        metavar="NAME",
        help="only this case, with the reader's standard error; may be repeated",
    )
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the reader, and its arguments"
    )
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("name the command of a reader")

    try:
        cases = select(load(options.kit), options, parser)
        shows_stderr = options.case is not None
        return run(options.command, options.kit, cases, shows_stderr)
    except (OSError, DamagedKit) as error:  # no kit, or no such command
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
