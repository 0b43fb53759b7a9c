"""check_packs beside the reader of examples/, on packs that were damaged at random."""

from __future__ import annotations

import contextlib
import copy
import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_reader import READER

from packstore.errors import FormatError
from packstore.format import check_packs, from_arrow, pack_schema

Row = dict[str, Any]
CASES = json.loads(
    (Path(__file__).parents[2] / "schemas" / "cases" / "valid.json").read_text(
        encoding="utf-8"
    )
)["cases"]
PLAIN = [case for case in CASES if not case.get("carry")]


def is_valid(row: Row, kind: str, layout: str) -> bool:
    """What the reader beside the format says."""
    manifest = {
        "kind": kind,
        "layout": layout,
        "carry": {},
        "pack_size": 2**31,
        "statistics": {"most_keys": 2**63},
        "provenance": {},
    }
    with contextlib.suppress(READER["Refused"]):
        READER["check_pack"](copy.deepcopy(row), manifest)
        return True
    return False


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Row, str, str]:
    """A row of a valid case with up to three changes."""
    case = draw(st.sampled_from(PLAIN))
    row = copy.deepcopy(draw(st.sampled_from(case["rows"])))
    layout = draw(st.sampled_from(["concat", "shared_prefix"]))
    if layout == "concat":
        row.pop("parent_distances", None)
    else:
        row.setdefault("parent_distances", [0] * len(row["lengths"]))
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(sorted(row)))
        column, limit = row[name], 2**63 if name == "example_ids" else 2**31
        near = st.sampled_from([-100, -1, 0, 1, 2, 3, 4, 5, 6, len(row["input_ids"])])
        value = draw(st.one_of(near, st.sampled_from([-limit, limit - 1, 1 - limit])))
        if name == "reward":
            value = draw(st.sampled_from([0.5, math.inf, -math.inf, math.nan]))
        place = draw(st.integers(0, len(column)))
        how = draw(st.sampled_from(["replace", "insert", "remove"]))
        column[place : place + (how != "insert")] = [] if how == "remove" else [value]
    return row, case["kind"], layout


def judge(row: Row, kind: str, layout: str) -> str:
    """Returns the message of check_packs for the row; empty if it obeys every rule."""
    schema = pack_schema(kind, layout)
    columns = [pa.array([row[f.name]], type=f.type) for f in schema]
    try:
        packs = from_arrow(pa.RecordBatch.from_arrays(columns, schema=schema), kind)
        check_packs(packs, layout=layout)
    except FormatError as error:
        return str(error)
    return ""


@settings(max_examples=300, deadline=None)
@given(damaged())
def test_the_rules_are_those_of_the_prose(made: tuple[Row, str, str]) -> None:
    assert (judge(*made) == "") == is_valid(*made)
