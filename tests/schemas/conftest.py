"""The folder of the specification, and the tables of cases in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import referencing

SCHEMAS = Path(__file__).parents[2] / "schemas"

_TABLES = (
    "valid",
    "invalid",
    "manifests_valid",
    "manifests_invalid",
    "sides_valid",
    "sides_invalid",
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each case of the table that a test's argument names."""
    for table in _TABLES:
        if table in metafunc.fixturenames:
            cases = json.loads(
                (SCHEMAS / "cases" / f"{table}.json").read_text(encoding="utf-8")
            )["cases"]
            names = [case["name"] for case in cases]
            assert len(set(names)) == len(names)
            metafunc.parametrize(table, cases, ids=names)


@pytest.fixture(scope="session")
def schemas() -> Path:
    return SCHEMAS


@pytest.fixture(scope="session")
def prose() -> str:
    """The page that every reader needs."""
    return (SCHEMAS / "format.md").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def annex() -> Callable[[str], str]:
    """The text of an annex, by its letter and name, such as ``b-writing``."""
    return lambda name: (SCHEMAS / f"annex-{name}.md").read_text(encoding="utf-8")


@pytest.fixture(scope="session")
def load() -> Callable[[str], Any]:
    """The content of a JSON file in the folder."""
    return lambda name: json.loads((SCHEMAS / name).read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def validator(load: Callable[[str], Any]) -> Callable[[str], Any]:
    """The validator of ``manifest``, of ``side``, or of ``pack#/$defs/<kind>``."""
    documents = [load(f"{name}.schema.json") for name in ("pack", "manifest", "side")]
    registry = referencing.Registry().with_contents([(d["$id"], d) for d in documents])

    def make(name: str) -> Any:
        reference = {"$ref": f"urn:packstore:format:1:{name}"}
        return jsonschema.Draft202012Validator(reference, registry=registry)

    return make
