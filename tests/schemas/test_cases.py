"""The tables of valid and invalid packs and manifests: this reader judges each as it
must.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from json_patch import patched
from plain_reader import READER

import packstore
import packstore.errors
from packstore.errors import FormatError
from packstore.format import (
    KINDS,
    LAYOUTS,
    RULES,
    Packs,
    check_packs,
    from_arrow,
    pack_schema,
    to_arrow,
)
from packstore.torch import open_side

Case = dict[str, Any]
Load = Callable[[str], Any]
Validator = Callable[[str], Any]


def arrow_schema(case: Case) -> pa.Schema:
    return pack_schema(case["kind"], case["layout"], carry=case.get("carry"))


def to_batch(case: Case) -> pa.RecordBatch:
    schema = arrow_schema(case)
    columns = []
    for field in schema:
        values = [row[field.name] for row in case["rows"]]
        if field.name == "reward":
            with np.errstate(over="ignore"):
                values = [np.array(v, np.float64).astype(np.float32) for v in values]
        columns.append(pa.array(values, type=field.type))
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def check(case: Case) -> Packs:
    packs = from_arrow(to_batch(case), case["kind"])
    check_packs(
        packs,
        layout=case["layout"],
        pack_size=case.get("pack_size"),
        most_keys=case.get("most_keys"),
        vocab_size=case.get("vocab_size"),
    )
    return packs


def test_valid_packs(valid: Case, validator: Validator) -> None:
    packs = check(valid)
    assert to_arrow(packs, arrow_schema(valid)).to_pylist() == valid["rows"]
    for row, derived in zip(valid["rows"], valid["derived"], strict=True):
        validator(f"pack#/$defs/{valid['kind']}").validate(row)
        assert READER["derive"](row) == derived


def test_invalid_packs(invalid: Case) -> None:
    with pytest.raises(FormatError, match=rf"\[{invalid['rule']}\]") as caught:
        check(invalid)
    assert RULES[invalid["rule"]] in str(caught.value) or "elements there" in str(
        caught.value
    )


def test_every_rule_is_broken_by_a_case(load: Load) -> None:
    broken = {case["rule"] for case in load("cases/invalid.json")["cases"]}
    assert broken == set(RULES)


def test_valid_cases_cover_the_format(load: Load) -> None:
    cases = load("cases/valid.json")["cases"]
    assert {(c["kind"], c["layout"]) for c in cases} == {
        (k, v) for k in KINDS for v in LAYOUTS
    }


def test_a_column_is_missing_or_holds_nulls_or_has_another_type(
    load: Load, validator: Validator
) -> None:
    case = load("cases/valid.json")["cases"][0]
    row, batch, document = (
        case["rows"][0],
        to_batch(case),
        validator("pack#/$defs/preference"),
    )
    for at, name in enumerate(batch.schema.names):
        with pytest.raises(FormatError, match=name):
            from_arrow(batch.drop_columns([name]), "preference")
        assert not document.is_valid({k: row[k] for k in row if k != name})
        lists = pa.list_(batch.schema.types[at].value_type)
        for value, type_ in ((None, lists), ([None], lists), (["a"], None)):
            with pytest.raises(FormatError, match=name):
                from_arrow(
                    batch.set_column(at, name, pa.array([value], type_)), "preference"
                )
            assert not document.is_valid({**row, name: value})


def test_counts_of_responses_are_for_kind_scored(
    load: Load, validator: Validator
) -> None:
    row = load("cases/valid.json")["cases"][0]["rows"][0]
    assert not validator("pack#/$defs/scored").is_valid(row)
    assert validator("pack#/$defs/scored").is_valid({**row, "num_responses": [2]})
    assert not validator("pack#/$defs/preference").is_valid(
        {**row, "num_responses": [2]}
    )


Parse = Callable[[str, bytes], bytes]


@pytest.fixture
def parse(tmp_path: Path) -> Parse:
    """Opens the dataset or side dataset with this manifest; returns what would be
    written.
    """

    def read(name: str, data: bytes) -> bytes:
        path = tmp_path / "_packstore" / f"{name}-000001.json"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        opened: Any = (open_side if name == "side" else packstore.open)(str(tmp_path))
        return opened.manifest.to_json()

    return read


def judge_valid(case: Case, name: str, parse: Parse, validator: Validator) -> None:
    document = case["manifest"]
    validator(name).validate(document)
    parsed = parse(name, json.dumps(document).encode())
    written = json.loads(parsed)
    validator(name).validate(written)
    assert (written == document) == (case["name"] != "unknown-optional-fields")
    assert parse(name, parsed) == parsed


def judge_invalid(
    case: Case, name: str, parse: Parse, load: Load, validator: Validator
) -> None:
    cases = load(f"cases/{name}s_valid.json")["cases"]
    document = patched(
        next(c["manifest"] for c in cases if c["name"] == case["base"]), case["patch"]
    )
    with pytest.raises(FormatError) as caught:
        parse(name, json.dumps(document).encode())
    assert type(caught.value) is getattr(packstore.errors, case["error"])
    assert case["tells"] in str(caught.value)
    assert f"{name}-000001.json" in str(caught.value).partition(": ")[0]
    assert validator(name).is_valid(document) != case["schema"]


def test_valid_manifests(
    manifests_valid: Case, parse: Parse, validator: Validator
) -> None:
    judge_valid(manifests_valid, "manifest", parse, validator)


def test_valid_sides(sides_valid: Case, parse: Parse, validator: Validator) -> None:
    judge_valid(sides_valid, "side", parse, validator)


def test_invalid_manifests(
    manifests_invalid: Case, parse: Parse, load: Load, validator: Validator
) -> None:
    judge_invalid(manifests_invalid, "manifest", parse, load, validator)


def test_invalid_sides(
    sides_invalid: Case, parse: Parse, load: Load, validator: Validator
) -> None:
    judge_invalid(sides_invalid, "side", parse, load, validator)


WRONG = (
    None,
    True,
    -1,
    0,
    2**70,
    1.5,
    7,
    "",
    "x",
    "10",
    [],
    [1],
    ["x"],
    {},
    {"a": 1},
    {"0": "x"},
)
"""Values of every JSON type, of which each is of a wrong one for most members."""


def members(value: Any, path: str = "") -> Iterator[str]:
    """JSON Pointers of all members, and of the first entry of each list."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:1])
    for name, inner in inside:
        yield f"{path}/{name}"
        if isinstance(inner, dict | list):
            yield from members(inner, f"{path}/{name}")


@pytest.mark.parametrize("name", ["manifest", "side"])
def test_every_member_of_every_type(
    name: str, parse: Parse, load: Load, validator: Validator, tmp_path: Path
) -> None:
    """packstore and the reader beside the format agree, and refuse all that the schema
    does.
    """
    valid = validator(name)
    check = partial(READER["checked"], tmp_path, name, READER[f"check_{name}"])
    seen, accepted = set[str](), list[Any]()
    for case in load(f"cases/{name}s_valid.json")["cases"]:
        for path in {*members(case["manifest"])} - seen - {"/sha256"}:
            seen.add(path)
            for value in WRONG:
                operation = {"op": "replace", "path": path, "value": value}
                document = patched(case["manifest"], [operation])
                document.pop("sha256", None)
                refused = 0
                with contextlib.suppress(FormatError):
                    refused += 1
                    parse(name, json.dumps(document).encode())
                    refused -= 1
                with contextlib.suppress(READER["Refused"]):
                    refused += 1
                    check()
                    refused -= 1
                # Of members that readers need not know, packstore refuses numbers over
                # 64 bits.
                differ = refused == 1 and value != 2**70
                if differ or (refused < 2 and not valid.is_valid(document)):
                    accepted.append((path, value, refused))
    assert not accepted
    assert len(seen) > {"manifest": 60, "side": 12}[name]
