"""Runs a reader of the format over the conformance kit, whatever language it is written
in.

::

    python -m packstore.conformance [--kit FOLDER] COMMAND...

The command is run once for each case, with the folder of a dataset and those of its
side datasets as further arguments. It checks and reads all of it, and prints one JSON
object:

- ``{"packs": [...]}``: for each pack an object with its logical columns, the known
  carried ones and all derived values, and under ``side`` the joined columns, of its
  examples or sequences. Numbers that are not finite are the texts ``NaN``,
  ``Infinity``, ``-Infinity``.
- ``{"refused": "NAME"}``: the broken rule, a name of section 6 of
  ``schemas/format.md``, or ``""``.

The exit status is 0 if every answer is right, 1 if one is wrong, 2 if nothing could be
run.
"""

from __future__ import annotations

import argparse
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

OK, UNSUPPORTED, WRONG = "ok", "left out", "WRONG"
"""Verdicts: right; refused as ``unsupported``, as the case allows; anything else."""

Case = Mapping[str, Any]


def load(kit: Path) -> list[Case]:
    """Returns the cases of a kit; raises IntegrityError if a file is not as it was
    released.
    """
    cases: list[Case] = json.loads((kit / "kit.json").read_text(encoding="utf-8"))[
        "cases"
    ]
    for case in cases:
        if digest(kit, case) != case["sha256"]:
            rule = (
                f"the files of case {case['name']} must have the sha256 that "
                "kit.json tells"
            )
            raise IntegrityError(
                sentence(str(kit), rule, "others", "Copy the kit again, as binary")
            )
    return cases


def digest(kit: Path, case: Case) -> str:
    """Returns the sha256 of lines ``<sha256>  <path>``, sorted, one for each file of a
    case.
    """
    places = [
        kit / place
        for place in (*_folders(case), case.get("expected", case["dataset"]))
    ]
    files = {p for place in places for p in (place, *place.rglob("*")) if p.is_file()}
    texts = {
        p.relative_to(kit).as_posix(): hashlib.sha256(p.read_bytes()) for p in files
    }
    lines = (f"{texts[path].hexdigest()}  {path}\n" for path in sorted(texts))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def judge(kit: Path, case: Case, answer: Any) -> tuple[str, str]:
    """Returns the verdict on the answer of a reader, and what is wrong with it."""
    if not isinstance(answer, dict) or not answer.keys() & {"packs", "refused"}:
        return (
            WRONG,
            f"must print an object with packs or refused; found {quote(answer)}",
        )
    if "refused" in answer:
        name = answer["refused"]
        if name and name not in case["refuse"]:
            return WRONG, f"refused as {quote(name)}; must be {_wanted(case)}"
        if "expected" not in case:
            return OK, ""
        rule = f"refused; must be {_wanted(case)}"
        return (UNSUPPORTED, "") if name == "unsupported" else (WRONG, rule)
    if "expected" not in case:
        return WRONG, f"read; must be {_wanted(case)}"
    packs = json.loads((kit / case["expected"]).read_text(encoding="utf-8"))["packs"]
    return (
        (WRONG, wrong) if (wrong := _difference(packs, answer["packs"])) else (OK, "")
    )


def _wanted(case: Case) -> str:
    names = f"refused as {' or '.join(case['refuse'])}" if case["refuse"] else ""
    return " or ".join(["read"] * ("expected" in case) + [names] * bool(names))


def _difference(expected: Sequence[Case], packs: Any) -> str:
    if not isinstance(packs, list) or len(packs) != len(expected):
        return f"must have {len(expected)} packs; found {quote(packs)}"
    for number, (good, pack) in enumerate(zip(expected, packs, strict=True)):
        if good != pack:
            names = [n for n in sorted({*good, *pack}) if good.get(n) != pack.get(n)]
            values = (
                f"must be {quote(good.get(names[0]))}; found "
                f"{quote(pack.get(names[0]))}"
            )
            return f"pack {number}, {names[0]} {values}"
    return ""


def _folders(case: Case) -> list[str]:
    return [case["dataset"], *case["sides"]]


def ask(command: Iterable[str], kit: Path, case: Case) -> Any:
    """Runs a reader on a case; returns its answer, or a text that says why there is
    none.
    """
    paths = [str(kit / folder) for folder in _folders(case)]
    try:
        done = subprocess.run(
            [*command, *paths], capture_output=True, timeout=TIMEOUT, check=False
        )
        return (
            json.loads(done.stdout)
            if done.returncode == 0
            else done.stderr.decode()[-300:]
        )
    except (subprocess.TimeoutExpired, ValueError) as error:
        return f"no JSON: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a line for each case, and the number of each verdict; returns the exit
    status.
    """
    about, usage = (__doc__ or "").split("\n")[0], "%(prog)s [--kit FOLDER] COMMAND..."
    parser = argparse.ArgumentParser("python -m packstore.conformance", usage, about)
    parser.add_argument("--kit", type=Path, default=KIT, help=f"by default {KIT}")
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, help="the reader, and its arguments"
    )
    options = parser.parse_args(arguments)
    if not options.command:
        parser.error("name the command of a reader")
    counts = Counter[str]()
    try:
        cases = load(options.kit)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            answers = pool.map(
                lambda case: ask(options.command, options.kit, case), cases
            )
            for case, answer in zip(cases, answers, strict=True):
                verdict, why = judge(options.kit, case, answer)
                counts[verdict] += 1
                print(f"{verdict:8}  {case['name']:32}  {why or _wanted(case)}")
    except (OSError, IntegrityError) as error:  # no kit, or no such command
        print(f"packstore.conformance: {error}", file=sys.stderr)
        return 2
    print(
        ", ".join(f"{counts[v]} {v}" for v in (OK, UNSUPPORTED, WRONG)),
        f"of {len(cases)} cases",
    )
    return 1 if counts[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
