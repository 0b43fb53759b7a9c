"""check_packs, and the checks of values of tokens, beside the reader of examples/, on
packs and rows that were damaged at random.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_reader import READER

from packstore.errors import FormatError
from packstore.format import check_packs, from_arrow, pack_schema
from packstore.io.manifest.side_manifest import side_type, token_type
from packstore.io.side.tokens import check_stored_lists, list_counts

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


TARGETS = 3
"""Supervised tokens of the example whose values are damaged."""

VALUES = {
    "token<float32>": [0.5, -1.25, -2.0],
    "token<float16>": [0.5, -1.25, -2.0],
    "token<top2,float16>": {
        "ids": [5, 0, 1, 2, 2, 1],
        "logps": [-0.5, -1.0, -2.0, -2.0, 0.0, -1.5],
    },
    "token<top2,uint8>": {
        "ids": [5, 0, 1, 2, 2, 1],
        "logps": [4, 255, 0, 0, 7, 1],
        "scale": 0.5,
    },
}
"""Type -> a valid value."""

CHANGES: dict[str, list[Any]] = {
    "ids": [-1, 0, 1, 2, 5, 2**31 - 1, -(2**31)],
    "bytes": [0, 1, 255],
    "numbers": [0.0, -0.0, 0.5, -1.0, -1.5, -65504.0, math.inf, -math.inf, math.nan],
    "scale": [0.0, -0.5, 2.0**-149, 2.0**127, math.inf, math.nan],
}
"""What takes the place of a value."""


@st.composite
def damaged_value(draw: st.DrawFn) -> tuple[str, Any]:
    """A type of tokens, and a valid value with up to three changes."""
    type_name = draw(st.sampled_from(sorted(VALUES)))
    value = copy.deepcopy(VALUES[type_name])
    for _ in range(draw(st.integers(0, 3))):
        member = ""
        if isinstance(value, dict):
            member = draw(st.sampled_from(sorted(value)))
        if member == "scale":
            value["scale"] = draw(st.sampled_from(CHANGES["scale"]))
            continue
        elements = value[member] if isinstance(value, dict) else value
        kind = "ids" if member == "ids" else "numbers"
        if member == "logps" and "uint8" in type_name:
            kind = "bytes"
        place = draw(st.integers(0, len(elements)))
        is_replaced = draw(st.booleans())
        new_elements = draw(st.lists(st.sampled_from(CHANGES[kind]), max_size=2))
        elements[place : place + is_replaced] = new_elements
    return type_name, value


def reader_accepts(type_name: str, value: Any) -> bool:
    """What the reader beside the format says."""
    with contextlib.suppress(READER["Refused"]):
        checked = READER["side_value"](copy.deepcopy(value), type_name)
        READER["check_count"](checked, type_name, 1, TARGETS)
        return True
    return False


def packstore_accepts(type_name: str, value: Any) -> bool:
    """Return False if packstore refuses a row with this value."""
    array = pa.array([value], side_type(type_name))
    batch = pa.record_batch({"example_ids": pa.array([7]), "values": array})
    with contextlib.suppress(FormatError), np.errstate(over="ignore"):
        check_stored_lists(batch, "values", type_name, "", distinct=True)
        k = token_type(type_name).k
        return bool(list_counts(array, k).tolist() == [TARGETS])
    return False


@settings(max_examples=300, deadline=None)
@given(damaged_value())
def test_rules_of_values_of_tokens_are_those_of_the_annex(
    made: tuple[str, Any],
) -> None:
    assert packstore_accepts(*made) == reader_accepts(*made)
