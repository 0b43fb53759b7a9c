"""format.md and the JSON Schemas say what ``schema.py`` and ``rules.py`` of
packstore/format do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pyarrow as pa
import pytest

from packstore import config
from packstore.format import IGNORE_INDEX, RULES, SOURCE_SHIFT, schema
from packstore.io.dataset import TOLERANCE, pack_index
from packstore.io.manifest import (
    DATA,
    FILE_FORMATS,
    FOLDER,
    GROUP_FOOTER_BYTES,
    MAX_FOOTER_BYTES,
    MAX_MANIFEST_BYTES,
    SIDE,
    SIDE_TYPES,
    SIDE_VERSION,
    Manifest,
    manifest_path,
)
from packstore.io.shards.parquet import MAX_GROUP_BYTES, MAX_VALUES
from packstore.io.side import SHARD_ROWS

Load = Callable[[str], Any]


def tables(text: str) -> Iterator[list[list[str]]]:
    """The rows of each table, without its head."""
    for block in re.findall(r"(?:^\|.*\n)+", text, re.M):
        rows = [
            [cell.strip() for cell in line.strip("|").split(" | ")]
            for line in block.splitlines()
        ]
        yield rows[2:]


def section(prose: str, title: str) -> str:
    """The text under the heading that ends with `title`, up to the next heading."""
    parts = re.split(r"^#+ (?:\d+\. )?(.+)\n", prose, flags=re.M)
    return parts[parts.index(title) + 1]


def code(cell: str) -> str:
    return cell.strip("`| ")


def described(field: pa.Field) -> str:
    return f"{field.type}{'' if field.nullable else ' not null'}"


def written(rows: list[list[str]]) -> dict[str, str]:
    return {code(row[0]): code(row[1]) for row in rows}


@pytest.mark.parametrize("kind", schema.KINDS)
def test_columns(prose: str, load: Load, kind: str) -> None:
    (table,) = tables(section(prose, "Columns"))
    in_prose = written(table)
    properties = load("pack.schema.json")["properties"]
    in_json = {name: p["x-arrow-type"] for name, p in properties.items()}
    if kind != "scored":
        del in_prose["num_responses"], in_json["num_responses"]
    arrow = schema.pack_schema(kind, "concat")
    real = {field.name: described(field) for field in arrow}
    assert list(in_prose.items()) == list(real.items())
    assert list(in_json.items()) == list(real.items())


def test_every_column_is_reserved(load: Load) -> None:
    manifest = load("manifest.schema.json")["properties"]["carry"]["propertyNames"]
    assert list(load("pack.schema.json")["properties"]) == list(schema.COLUMNS)
    assert manifest["not"]["enum"] == list(schema.COLUMNS)


def test_carried_types(prose: str, load: Load) -> None:
    (table,) = tables(section(prose, "Carried columns"))
    real = {
        name: described(
            schema.pack_schema("sft", "concat", carry={"c": name}).field("c")
        )
        for name in schema.CARRY_TYPES
    }
    assert written(table) == real
    assert load("pack.schema.json")["additionalProperties"]["x-arrow-types"] == real


def test_rules(prose: str) -> None:
    (table,) = tables(section(prose, "Rules"))
    assert written(table) == RULES


def test_kinds_layouts_versions_and_features(prose: str, load: Load) -> None:
    (kinds,) = tables(section(prose, "Kinds"))
    real = {
        kind: "num_responses" if k is None else str(k)
        for kind, k in schema.KINDS.items()
    }
    assert written(kinds) == real
    layouts = re.findall(r"^\*\*`(\w+)`\*\*", section(prose, "Layouts"), re.M)
    assert layouts == list(schema.LAYOUTS)
    assert prose.startswith(
        f"# The packstore format, version {schema.FORMAT_VERSION}\n"
    )
    rules = section(prose, "Versions and features")
    assert ("This version knows none." in rules) == (schema.FEATURES == ())
    (log,) = tables(section(prose, "Change log"))
    assert [int(row[0].strip("| ")) for row in log] == list(
        range(1, schema.FORMAT_VERSION + 1)
    )

    pack, manifest = (
        load("pack.schema.json"),
        load("manifest.schema.json")["properties"],
    )
    assert pack["x-kinds"] == schema.KINDS
    assert set(pack["$defs"]) == set(manifest["kind"]["enum"]) == set(schema.KINDS)
    assert pack["x-layouts"] == manifest["layout"]["enum"] == list(schema.LAYOUTS)
    assert pack["x-features"] == list(schema.FEATURES)
    assert manifest["features"]["maxItems"] == len(schema.FEATURES)
    assert (
        pack["x-format-version"]
        == manifest["format_version"]["const"]
        == schema.FORMAT_VERSION
    )
    assert manifest["file_format"]["enum"] == list(FILE_FORMATS)


def test_metadata_of_a_shard(prose: str) -> None:
    (table,) = tables(section(prose, "The schema of a shard"))
    metadata = schema.pack_schema("preference", "concat").metadata
    assert written(table).keys() == {key.decode() for key in metadata}
    assert metadata[b"packstore.format_version"].decode() == str(schema.FORMAT_VERSION)


def test_constants(prose: str) -> None:
    assert f"`{manifest_path(1)}`"[:-12] in prose
    assert f"├── {FOLDER}/" in prose
    assert f"└── {DATA}/" in prose
    assert f"at most {MAX_MANIFEST_BYTES >> 20} MiB" in prose
    assert (
        f"at most {MAX_GROUP_BYTES >> 20} MiB (2^29 bytes), stored and decompressed"
        in prose
    )
    assert f"at most 2^{MAX_VALUES.bit_length() - 1} values" in prose
    part, more = MAX_FOOTER_BYTES >> 20, GROUP_FOOTER_BYTES >> 10
    assert (
        f"at most {part} MiB (2^24) and {more} KiB (2^16) for each row group" in prose
    )
    assert f"within {TOLERANCE:g} of the exact value".replace("e-06", "e-6") in prose
    assert f"(n << {SOURCE_SHIFT}) + m" in prose
    assert f"{IGNORE_INDEX} elsewhere" in prose
    defaults = config.WriteConfig()
    assert f"about {defaults.row_group_tokens:,} tokens" in prose
    assert f"about {defaults.shard_tokens:,} tokens" in prose


def test_fields_of_the_manifest(prose: str, load: Load) -> None:
    """The tables of the prose, the JSON Schema, and what is really written name the
    same fields.
    """
    manifest = load("manifest.schema.json")
    fields = manifest["properties"]
    shard = manifest["$defs"]["shard"]
    schemas = [
        manifest,
        *(fields[name] for name in ("totals", "statistics", "records", "provenance")),
        shard,
        shard["properties"]["row_groups"],
    ]
    in_prose = list(tables(section(prose, "The manifest")))
    assert [[code(row[0]) for row in table] for table in in_prose] == [
        list(s["properties"]) for s in schemas
    ]
    for table, one in zip(in_prose, schemas, strict=True):
        needed = [code(row[0]) for row in table if not row[2].startswith("optional")]
        assert needed == one["required"]


def test_manifests_are_written_as_the_schema_says(load: Load) -> None:
    properties = load("manifest.schema.json")["properties"]
    for case in load("cases/manifests_valid.json")["cases"]:
        data = Manifest.from_json(json.dumps(case["manifest"]).encode()).to_json()
        written = list(json.loads(data))
        assert written == [name for name in properties if name in written]


def test_the_pack_index(prose: str, load: Load) -> None:
    fields, columns, counts = tables(section(prose, "The pack index"))
    index = load("manifest.schema.json")["properties"]["pack_index"]
    assert list(written(fields)) == list(index["properties"]) == index["required"]
    real = {field.name: str(field.type) for field in pack_index.SCHEMA}
    both = {**written(columns), **written(counts)}
    assert {name: code(type_) for name, type_ in both.items()} == real


def test_side_datasets(prose: str, load: Load) -> None:
    fields, types, _ = tables(section(prose, "Side datasets"))
    document = load("side.schema.json")
    assert [code(row[0]) for row in fields] == list(document["properties"])
    assert document["required"] == [n for n in document["properties"] if n != "sha256"]
    real = {name: str(type_) for name, type_ in SIDE_TYPES.items()}
    assert {name: code(type_) for name, type_ in written(types).items()} == real
    columns = document["properties"]["columns"]
    assert columns["propertyNames"]["not"]["enum"] == list(schema.COLUMNS)
    assert document["properties"]["side_version"]["const"] == SIDE_VERSION
    assert f"`packstore.side_version` with the\ntext `{SIDE_VERSION}`" in prose
    assert f"{SHARD_ROWS:,} rows" in prose
    assert f"{manifest_path(1, SIDE)}".rpartition("/")[2] in prose


def test_what_made_reference_log_probs(prose: str) -> None:
    pytest.importorskip("torch", reason="a model makes them")
    from packstore.torch.reference import REMEDIES

    *_, members = tables(section(prose, "Side datasets"))
    assert {code(row[0]) for row in members} == {"model", *REMEDIES}


@pytest.mark.parametrize("name", ["pack", "manifest", "side"])
def test_json_schemas_are_valid_and_refer_to_what_is_there(
    name: str, load: Load
) -> None:
    document = load(f"{name}.schema.json")
    jsonschema.Draft202012Validator.check_schema(document)
    for reference in re.findall(r'"\$ref": "([^"]+)"', json.dumps(document)):
        owner, _, place = reference.partition("#")
        target = load("manifest.schema.json") if owner else document
        for part in place.split("/")[1:]:
            target = target[part]


def test_the_worked_example_is_a_case(prose: str, load: Load) -> None:
    blocks = re.findall(r"```json\n(.+?)```", section(prose, "A worked example"), re.S)
    cases = {case["name"]: case for case in load("cases/valid.json")["cases"]}
    for block, layout in zip(blocks, ("concat", "shared-prefix"), strict=True):
        case = cases[f"worked-example-{layout}"]
        assert [json.loads(block)] == case["rows"]
        drawn = (
            rf"position_ids +{' +'.join(map(str, case['derived'][0]['position_ids']))} "
        )
        assert re.search(drawn, prose)
    keys = cases["worked-example-shared-prefix"]["derived"][0]["kv_index"][5:]
    assert f"kv_index {' '.join(map(str, keys))})" in prose


def test_derived_names(prose: str, load: Load) -> None:
    (table,) = tables(section(prose, "What is derived"))
    (first, *_) = load("cases/valid.json")["cases"]
    assert list(written(table)) == list(first["derived"][0])
