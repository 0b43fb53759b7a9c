"""Forms: every example has exactly its form, and becomes what stands beside it.

A line of ``forms/*.jsonl`` holds the name of a form and an example, a record.
``shows``: its sequences in the template below, with learned text in «»; ``rewards``:
their rewards; ``drops``: the reason why it is left out instead. An example of a form
that cannot be read has none of these.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from children import run_python

import packstore
from packstore.errors import RecordError
from packstore.tokenizer.records.forms import load, match_forms
from tests.tokenizer.conftest import TEMPLATE

FAMILIES = sorted((Path(__file__).parent / "forms").glob("*.jsonl"))


def read_lines(family: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in family.read_text(encoding="utf-8").splitlines()
    ]


LINES = [
    pytest.param(line, id=f"{family.stem}-{number}-{line['form']}")
    for family in FAMILIES
    for number, line in enumerate(read_lines(family), start=1)
]


@pytest.mark.parametrize("line", LINES)
def test_an_example_has_exactly_its_form(line: dict[str, Any]) -> None:
    matches = match_forms(line["example"])
    assert [match.form.name for match in matches] == [line["form"]]


@pytest.mark.parametrize("line", LINES)
def test_an_example_becomes_what_it_shows(
    line: dict[str, Any], pack, byte_level
) -> None:
    tokenizer = byte_level(template=TEMPLATE)
    form = load()[line["form"]]
    if form.refusal:
        with pytest.raises(RecordError, match=form.name):
            pack(tokenizer, line["example"], on={"wrong_type": "error"})
        return

    packed = pack(tokenizer, line["example"], on={"missing_field": "drop"})
    if "drops" in line:
        assert packed.dropped == {line["drops"]: 1}
        return
    assert not packed.dropped
    assert packed.marked == line["shows"]
    if "rewards" in line:
        (rewards,) = packstore.scan(packed.dataset, tokens=True).collect()["rewards"]
        assert rewards.to_list() == line["rewards"]


def test_every_structure_has_an_example() -> None:
    shown = {
        match.structure
        for line in LINES
        for match in match_forms(line.values[0]["example"])
    }
    missing = [
        f"{form.name}: {', '.join(structure.required)}"
        for form in load().values()
        for structure in form.structures
        if structure not in shown
    ]
    assert not missing


def test_every_form_says_what_it_reads() -> None:
    for form in load().values():
        assert form.refusal or form.summary.endswith(".")
        assert all(structure.kind or form.refusal for structure in form.structures)


def test_a_form_that_no_record_has_is_named(byte_level, pack) -> None:
    record = {"prompt": "q", "chosen": "x", "rejected": "y"}
    with pytest.raises(RecordError, match=r"alpaca_eval.* instruction"):
        pack(byte_level(template=TEMPLATE), record, form="alpaca_eval", kind="auto")


README = (
    Path(packstore.__file__).parent / "tokenizer" / "records" / "forms" / "README.md"
)


def test_the_form_of_the_readme_reads_the_example_beside_it() -> None:
    """In another process, as a form is registered for good."""
    text = README.read_text(encoding="utf-8")
    (function,) = re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)
    (line,) = re.findall(r"^```json\n(.*?)^```$", text, re.M | re.S)
    imports = "from packstore.tokenizer.records.forms.verdicts import *\n"
    checks = (
        "from packstore.tokenizer.records.forms import match_forms\n"
        f"line = {json.loads(line)!r}\n"
        "(match,) = match_forms(line['example'])\n"
        "assert match.form.name == line['form']\n"
        "reading = match.read(line['example'])\n"
        "assert (reading.chosen, reading.rejected, reading.system) == ('x', 'y', 'p')\n"
    )
    done = run_python("-c", imports + function + checks)
    assert done.returncode == 0, done.stderr
