"""``where`` and ``select``: each record alone, whatever its block; and errors with their place."""

from __future__ import annotations

import json
import math
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest

from packstore.config import PackConfig
from packstore.errors import ConfigError
from packstore.tokenizer import Query

Record = dict[str, Any]

# What one block would decide for all its records: integers beside floats and null, missing fields,
# parts of objects, text of numbers, integers that a float cannot hold, lists.
RECORDS: list[Any] = [
    {
        **({} if i % 5 == 0 else {"gap": [1, 1.0, 2.5, None, 3, math.nan, "2"][i % 7]}),
        **({} if i % 4 == 0 else {"lang": ["en", "de", None][i % 3]}),
        "meta": [{"score": i}, {"score": i + 0.5}, {}, None, {"score": None}, "text"][i % 6],
        "big": 2**53 + i % 2,
        "tags": [["a", "b"], [], None, ["c"]][i % 4],
        "n": i,
    }
    for i in range(420)
] + ["no record", None, {"n": 2**70}]


def config(where: str | None = None, **select: str) -> PackConfig:
    return PackConfig(where=where, select=select)


def passing(where: str, records: list[Any] = RECORDS, **settings: Any) -> list[Any]:
    made, refused = Query(PackConfig(where=where, **settings))(records)
    return [record for i, record in enumerate(made) if i not in refused]


def number(value: Any) -> float | None:
    known = isinstance(value, int | float) and not math.isnan(value)
    return value if known else None


CONDITIONS: dict[str, Callable[[Record], bool]] = {
    "gap > 1 AND lang = 'en'": lambda r: (number(r.get("gap")) or 0) > 1 and r.get("lang") == "en",
    "meta.score >= 200.5": lambda r: (
        isinstance(r.get("meta"), dict) and (r["meta"].get("score") or 0) >= 200.5
    ),
    "big = 9007199254740993": lambda r: r.get("big") == 2**53 + 1,
    "LENGTH(lang) = 2": lambda r: r.get("lang") is not None,
    "lang IS NULL": lambda r: r.get("lang") is None,
    "NOT lang = 'en'": lambda r: r.get("lang") == "de",
    "COALESCE(lang, 'en') = 'en'": lambda r: r.get("lang") in (None, "en"),
    "ARRAY_CONTAINS(tags, 'a') AND n % 2 = 0": lambda r: "a" in (r.get("tags") or []),
    "ARRAY_LENGTH(tags) > 0 OR lang LIKE 'd%'": lambda r: (
        bool(r.get("tags")) or r.get("lang") == "de"
    ),
    "CAST(gap AS VARCHAR) = '1'": lambda r: r.get("gap") == 1 and type(r["gap"]) is int,
    "n / 2 = 1.5": lambda r: r["n"] == 3,
    "TRUE": lambda r: True,
}


@pytest.mark.parametrize("where", CONDITIONS)
def test_a_record_passes_by_itself(where: str) -> None:
    """The same records in one block, in blocks of other sizes and orders, and one by one."""
    fields = [r for r in RECORDS if isinstance(r, dict) and r["n"] < 1000]
    # A number and a text cannot be compared: such a record is refused, as any of a wrong type.
    unfit = where.startswith("gap >")
    wanted = [r for r in fields if CONDITIONS[where](r) and not (unfit and r.get("gap") == "2")]
    assert wanted
    assert str(passing(where, fields)) == str(wanted)
    query = pickle.loads(pickle.dumps(Query(config(where))))
    draw = random.Random(0)
    shuffled = draw.sample(RECORDS, len(RECORDS))
    found = []
    while shuffled:
        size = draw.choice([1, 2, 3, 50])
        made, refused = query(shuffled[:size])
        found += [r for i, r in enumerate(made) if i not in refused and r in fields]
        del shuffled[:size]
    assert sorted(r["n"] for r in found) == [r["n"] for r in wanted]


def test_reasons_of_refusals() -> None:
    records = [{"a": 1}, {"a": 0}, {"a": None}, {}, {"a": "1"}, {"a": math.nan}, {"a": 2**64}]
    _, refused = Query(config("a > 0"))(records)
    assert {i: (r.reason, r.detail.partition(":")[0]) for i, r in refused.items()} == {
        1: ("filtered", "where is false"),
        2: ("filtered", "where is null"),
        3: ("filtered", "where is null"),
        4: ("wrong_type", "setting where, 'a > 0'"),
        5: ("filtered", "where is null"),
        6: ("wrong_type", "setting where, 'a > 0'"),
    }
    texts = [{"a": "\ud800"}, {"a": "x"}]
    _, refused = Query(config("a <> 'x'"))(texts)
    assert {i: r.reason for i, r in refused.items()} == {0: "invalid_unicode", 1: "filtered"}
    assert passing("a <> 'x'", texts, invalid_unicode="replace") == texts[:1]


def test_one_value_that_does_not_convert_refuses_its_record_only() -> None:
    records = [{"a": str(i) if i % 10 else "?"} for i in range(95)]
    _, refused = Query(config("CAST(a AS INT) >= 0"))(records)
    assert sorted(refused) == list(range(0, 95, 10))
    assert {r.reason for r in refused.values()} == {"wrong_type"}
    assert len(passing("TRY_CAST(a AS INT) IS NULL", records)) == 10


def test_new_fields_see_the_old_ones_and_records_that_pass() -> None:
    records = [{"a": "x", "b": "1"}, {"a": "y", "b": "?"}, {"a": None, "b": "3"}, "text"]
    query = Query(
        PackConfig(
            where="a <> 'y' OR a IS NULL",
            select={"a": "a || b", "b": "a", "n": "CAST(b AS INT)", "day": "DATE('2024-01-02')"},
        )
    )
    made, refused = query(records)
    assert [made[0], made[2], made[3]] == [
        {"a": "x1", "b": "x", "n": 1, "day": "2024-01-02"},
        {"a": None, "b": None, "n": 3, "day": "2024-01-02"},
        "text",
    ]
    assert list(refused) == [1]
    assert records[0] == {"a": "x", "b": "1"}
    json.dumps(made)


ERRORS = {
    "a >": "it must be one SQL expression; found an incomplete one at its end.",
    "a > 1 andd b = 2": "found Expected: end of statement, found: b at character 12.",
    "a > 1 andd": "it must not rename its result; found 'andd' at character 7.",
    "a > AVG(a)": "of one record, which two runs compute alike; found 'AVG' at character 5.",
    "RANK() OVER (ORDER BY a) = 1": "found 'RANK' at character 1.",
    "a IN (SELECT a FROM self)": "found 'SELECT' at character 7.",
    "day = CURRENT_DATE": "found 'CURRENT_DATE' at character 7.",
    "a > 1 -- comment": "it must have no comment; found at character 7 ('-- comment').",
    "a; b": "must be one SQL expression; found",
    "*": "must be one SQL expression; found an incomplete one at its end.",
    "": "must be one SQL expression; found",
    "NOPE(a)": "found 'NOPE' at character 1.",
}  # fmt: skip


@pytest.mark.parametrize("where", ERRORS)
def test_errors_name_expression_and_place(where: str) -> None:
    with pytest.raises(ConfigError) as error:
        Query(config(where))
    assert str(error.value).startswith(f"setting where, {where!r}: ")
    assert ERRORS[where] in str(error.value)
    with pytest.raises(ConfigError, match=r"^setting select, new, "):
        Query(config(new=where))
    assert "\n" not in str(error.value)


def test_names_in_quotes_and_parts() -> None:
    records = [{"a b": 1, "x.y": 2, "x": {"y": 3, "ä": 4}, "it's": 5, "select": 6}]
    for where in ('"a b" = 1', "x.y = 3", '"x.y" = 2', "x.ä = 4", '"it\'s" = 5', '"select" = 6'):
        assert passing(where, records) == records, where
    assert passing("x.y = 2", [{"x.y": 2}])  # a table that is named by paths
    assert passing("t = 'a.b or c(' AND t <> 'it''s'", [{"t": "a.b or c("}])
    query = Query(config("a.b > 1 AND c IS NULL"))
    assert query.absent([{"a": {"b": None}, "c": 1}]) == []
    assert query.absent([{"a": {}}, {"a": None}, 3]) == ["a.b", "c"]


def test_a_field_cannot_be_mapped_and_made() -> None:
    with pytest.raises(ConfigError, match="must not make a field that is mapped; found 'prompt'"):
        Query(PackConfig(select={"prompt": "a"}, fields={"prompt": "b"}))
