"""check_packs beside a plain reading of format.md, on packs that were damaged at random."""

from __future__ import annotations

import copy
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore.errors import FormatError
from packstore.format.rules import check_packs
from packstore.format.schema import KINDS, from_arrow, pack_schema

Row = dict[str, Any]
CASES = json.loads(
    (Path(__file__).parents[2] / "schemas" / "cases" / "valid.json").read_text(encoding="utf-8")
)["cases"]
PLAIN = [case for case in CASES if not case.get("carry")]


def broken(row: Row, kind: str, layout: str) -> set[str]:
    """The rules of format.md that the row breaks, until the next ones cannot be asked."""
    ids, lengths, b = row["input_ids"], row["lengths"], row["seq_boundaries"]
    found = set()
    if "label_spans" in row:
        spans = row["label_spans"]
        pairs = list(zip(spans[::2], spans[1::2], strict=False))
        ordered = all(x <= y for x, y in zip([0, *spans], [*spans, len(ids)], strict=True))
        if len(spans) % 2 or not ordered or any(start == end for start, end in pairs):
            found.add("spans-ordered")
        labels = [t if any(s <= i < e for s, e in pairs) else -100 for i, t in enumerate(ids)]
    else:
        labels = row["labels"]
    if len(labels) != len(ids) or len(row["reward"]) != len(lengths):
        found.add("columns-agree")
    if len(b) != len(lengths) + 1:
        found.add("boundaries-count")
    counts = row.get("num_responses", [KINDS[kind]] * len(row["example_ids"]))
    counted = len(counts) == len(row["example_ids"]) and min(counts, default=1) > 0
    if not counted or sum(counts) != len(lengths):
        found.add("responses-count")
    if b and (b[0] != 0 or b[-1] != len(ids) or min(b) < 0 or max(b) > len(ids)):
        found.add("boundaries-span")
    if any(y <= x for x, y in itertools.pairwise(b)):
        found.add("segments-nonempty")
    if not row["example_ids"]:
        found.add("pack-nonempty")
    if any(not 0 <= t < 2**31 - 1 for t in ids):
        found.add("ids-range")
    if any(label not in (-100, t) for label, t in zip(labels, ids, strict=False)):
        found.add("labels-are-ids")
    if found:
        return found
    if not all(math.isfinite(np.float32(r)) for r in row["reward"]):
        found.add("reward-finite")
    segments = [(ids[x:y], labels[x:y]) for x, y in itertools.pairwise(b)]
    if any(on[0] != -100 for _, on in segments):
        found.add("first-unsupervised")
    if any(set(on) == {-100} for _, on in segments):
        found.add("supervised-nonempty")
    if found:
        return found
    offsets = [n - len(tokens) for n, (tokens, _) in zip(lengths, segments, strict=True)]
    if layout == "concat":
        return {"lengths-concat"} if any(offsets) else set()
    return prefix_rules(segments, offsets, counts)


def prefix_rules(
    segments: list[tuple[list[int], list[int]]], offsets: list[int], counts: list[int]
) -> set[str]:
    """Puts each sequence together again, and asks what its offset should have been."""
    found = set()
    at = 0
    for k in counts:
        first, on = segments[at]
        prompt = first[: next(i for i, label in enumerate(on) if label != -100)]
        if offsets[at]:
            found.add("prefix-first-whole")
        for i in range(at + 1, at + k):
            tokens, labels = segments[i]
            own = tokens[: next(j for j, label in enumerate(labels) if label != -100)]
            whole = first[: max(offsets[i], 0)] + own
            shared = 0
            while shared < min(len(prompt), len(whole)) and prompt[shared] == whole[shared]:
                shared += 1
            if offsets[i] != max(shared - 1, 0):
                found.add("prefix-offset")
        at += k
    return found


@st.composite
def damaged(draw: st.DrawFn) -> tuple[Row, str, str]:
    """A row of a valid case with up to three changes."""
    case = draw(st.sampled_from(PLAIN))
    row = copy.deepcopy(draw(st.sampled_from(case["rows"])))
    layout = draw(st.sampled_from(["concat", "shared_prefix"]))
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
    schema = pack_schema(kind, layout, label_spans="label_spans" in row)
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
    verdict, expected = judge(*made), broken(*made)
    assert bool(verdict) == bool(expected)
    assert not verdict or any(f"[{rule}]" in verdict for rule in expected)
