"""Writes the conformance kit of format version 1 beside this file.

    PYTHONPATH=tests/support python schemas/conformance/make.py [FOLDER]    # writes
    FOLDER/v1

``kit.json`` lists the cases: the dataset and the side datasets that a reader gets, and
either the file with what it must decode or the names under which it may refuse.
packstore writes the golden datasets (``golden.py``), and ``writer.py`` all others, by
the pages alone. A file of a released version is never written anew: cases are added.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import golden
import token_values
from accepted import accepted
from case import Case, Files, Row
from compare import digest
from core import is_for_readers
from plain_reader import READER
from refused_files import refused_files
from refused_values import refused_values

HERE = Path(__file__).parent


def goldens(root: Path) -> list[Case]:
    """Writes the golden datasets; returns a case for each, and for each of its side
    datasets.
    """
    golden.make(root)
    cases = []
    for one in golden.goldens():
        packs = [golden.row(one, numbers) for numbers in golden.packs()]
        refuse = ("unsupported",) if one.file_format == "arrow" else ()
        case = Case(
            one.name, "written by packstore", one.kind, one.layout, refuse=refuse
        )
        case = dataclasses.replace(case, expect=packs)
        cases.append(case)
        if one.name in golden.SIDES:
            sides = [golden.side_columns(one, numbers) for numbers in golden.packs()]
            about, name = "with side data, written by packstore", f"{one.name}-side"
            cases.append(with_side(case, name, about, sides).beside(one.name))
        if one.name in golden.TOKEN_SIDES:
            sides = [golden.token_columns(one, numbers) for numbers in golden.packs()]
            about, name = "with values of tokens, by packstore", f"{one.name}-tokens"
            cases.append(with_side(case, name, about, sides).beside(name))
    return cases


def with_side(case: Case, name: str, about: str, sides: list[Row]) -> Case:
    """Returns another case of a dataset, with joined columns of each pack."""
    packs = [
        {**pack, "side": own}
        for pack, own in zip(case.expect or [], sides, strict=True)
    ]
    return Case(name, about, case.kind, case.layout, expect=packs, dataset=case.dataset)


def put(files: Files, folder: Path) -> None:
    """Writes files below `folder`, or none if there are none yet."""
    for path, data in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(data)


def plain(value: Any) -> Any:
    """Returns a JSON value: numbers that are not finite as texts."""
    if isinstance(value, dict):
        return {name: plain(v) for name, v in value.items()}
    if isinstance(value, list):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' * (value < 0)}Infinity"
    return value


def expected(case: Case) -> str:
    """The text of the file with what a dataset decodes to, a line for each pack."""
    packs = [{**pack, **READER["derive"](pack)} for pack in case.expect or []]
    rows = ",\n".join(f"  {json.dumps(plain(pack))}" for pack in packs)
    about = f'"kind": "{case.kind}", "layout": "{case.layout}"'
    return f'{{\n {about},\n "packs": [\n{rows}\n ]\n}}\n'


def entry(root: Path, case: Case) -> Row:
    """Writes what a case needs; returns its entry in ``kit.json``."""
    put(case.files, root / "datasets" / case.dataset)
    for name, files in case.sides.items():
        put(files, root / "sides" / name)
    out: Row = {
        "name": case.name,
        "about": case.about,
        "dataset": f"datasets/{case.dataset}",
    }
    out["sides"] = [f"sides/{name}" for name in case.sides]
    if case.expect is not None:
        out["expected"] = f"expected/{case.name}.json"
        put({out["expected"]: expected(case).encode()}, root)
    out["refuse"] = list(case.refuse)
    out["reader"] = is_for_readers(case)
    return {**out, "sha256": digest(root, out)}


def make(root: Path) -> None:
    """Writes the kit into the folder `root`, which must not hold one."""
    cases = [*goldens(root), *accepted(), *refused_files(), *refused_values()]
    cases += [*token_values.accepted(), *token_values.refused()]
    assert len({case.name for case in cases}) == len(cases)
    lines = ",\n".join(f"  {json.dumps(entry(root, case))}" for case in cases)
    (root / "kit.json").write_text(
        f'{{\n "cases": [\n{lines}\n ]\n}}\n', encoding="utf-8"
    )


if __name__ == "__main__":
    make((Path(sys.argv[1]) if len(sys.argv) > 1 else HERE) / "v1")
