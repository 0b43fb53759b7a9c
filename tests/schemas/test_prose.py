"""The pages of the format and the JSON Schemas say what ``schema.py`` and ``rules.py``
of packstore/format, and the limits of packstore/io, do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pyarrow as pa
import pytest
from forests import places_of

from packstore import config
from packstore.format import (
    IGNORE_INDEX,
    RULES,
    SOURCE_SHIFT,
    Packs,
    check_packs,
    schema,
)
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
from packstore.io.manifest.side_manifest import MAX_TOP, SideManifest, side_type
from packstore.io.shards.parquet import MAX_GROUP_BYTES, MAX_VALUES
from packstore.io.side import SHARD_ROWS, TOKEN_RULES
from packstore.io.side.side import GROUP_BYTES, SHARD_BYTES
from packstore.io.side.tokens import (
    check_stored_lists,
    from_gaps,
    list_counts,
    top_k_of,
)

Load = Callable[[str], Any]
Annex = Callable[[str], str]
Row = dict[str, Any]

SCHEMAS = Path(__file__).parents[2] / "schemas"


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


def full_type(short: str) -> str:
    """Return the Arrow type of a column by the short form in the core."""
    element = short.removeprefix("list<").removesuffix(">")
    return f"list<element: {element} not null> not null"


def written(rows: list[list[str]]) -> dict[str, str]:
    return {code(row[0]): code(row[1]) for row in rows}


@pytest.mark.parametrize("kind", schema.KINDS)
@pytest.mark.parametrize("layout", schema.LAYOUTS)
def test_columns(prose: str, load: Load, kind: str, layout: str) -> None:
    table, _ = tables(section(prose, "Columns"))
    in_prose = {name: full_type(type_) for name, type_ in written(table).items()}
    properties = load("pack.schema.json")["properties"]
    in_json = {name: p["x-arrow-type"] for name, p in properties.items()}
    for columns in (in_prose, in_json):
        if kind != "scored":
            del columns["num_responses"]
        if layout != "shared_prefix":
            del columns["parent_distances"]
    real = {f.name: described(f) for f in schema.pack_schema(kind, layout)}
    assert list(in_prose.items()) == list(real.items())
    assert list(in_json.items()) == list(real.items())


def test_every_column_is_reserved(load: Load) -> None:
    manifest = load("manifest.schema.json")["properties"]["carry"]["propertyNames"]
    assert list(load("pack.schema.json")["properties"]) == list(schema.COLUMNS)
    assert manifest["not"]["enum"] == list(schema.COLUMNS)


def test_carried_types(prose: str, annex: Annex, load: Load) -> None:
    table, _ = tables(section(annex("a-shard-files"), "Schema"))
    real = {
        name: described(
            schema.pack_schema("sft", "concat", carry={"c": name}).field("c")
        )
        for name in schema.CARRY_TYPES
    }
    assert written(table) == real
    assert load("pack.schema.json")["additionalProperties"]["x-arrow-types"] == real
    assert all(f"`{name}`" in section(prose, "Columns") for name in real)


def test_rules(prose: str) -> None:
    (table,) = tables(section(prose, "Rules"))
    assert written(table) == RULES


def test_kinds_layouts_versions_and_features(
    prose: str, annex: Annex, load: Load
) -> None:
    _, kinds = tables(section(prose, "Columns"))
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
    growth = annex("f-growth")
    rules = section(growth, "Versions and features")
    assert ("This version knows none." in rules) == (schema.FEATURES == ())
    (log,) = tables(section(growth, "Change log"))
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


def test_metadata_of_a_shard(annex: Annex) -> None:
    _, table = tables(section(annex("a-shard-files"), "Schema"))
    metadata = schema.pack_schema("preference", "concat").metadata
    assert written(table).keys() == {key.decode() for key in metadata}
    assert metadata[b"packstore.format_version"].decode() == str(schema.FORMAT_VERSION)


def test_names_and_constants(prose: str) -> None:
    assert f"├── {FOLDER}/" in prose
    assert f"└── {DATA}/" in prose
    assert manifest_path(1).rpartition("/")[2] in prose
    (pattern,) = re.findall(r"`(manifest-\(.+?\.json)`", prose)
    for number in (1, 999_999, 1_000_000):
        name = manifest_path(number).rpartition("/")[2]
        match = re.fullmatch(pattern, name)
        assert match
        assert int(match[1]) == number
    assert not re.fullmatch(pattern, "manifest-0000001.json")
    assert f"(n << {SOURCE_SHIFT}) + m" in prose
    assert f"{IGNORE_INDEX} elsewhere" in prose


def test_limits_of_files(annex: Annex) -> None:
    shards = annex("a-shard-files")
    group = f"at most {MAX_GROUP_BYTES >> 20} MiB (2^29 bytes), stored and decompressed"
    assert group in shards
    assert f"at most 2^{MAX_VALUES.bit_length() - 1} values" in shards
    assert (MAX_FOOTER_BYTES, GROUP_FOOTER_BYTES) == (2**24, 2**16)
    assert "at most 2^24 + 2^16 * (number of row groups) bytes" in shards
    defaults = config.WriteConfig()
    assert f"about {defaults.row_group_tokens:,} tokens" in shards
    assert f"about {defaults.shard_tokens:,} tokens" in shards

    writing = annex("b-writing")
    assert f"at most {MAX_MANIFEST_BYTES >> 20} MiB" in writing
    assert f"within {TOLERANCE:g} of the exact value".replace("e-06", "e-6") in writing


def test_fields_of_the_manifest(annex: Annex, load: Load) -> None:
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
    in_prose = list(tables(section(annex("b-writing"), "The manifest")))
    assert [[code(row[0]) for row in table] for table in in_prose] == [
        list(s["properties"]) for s in schemas
    ]
    for table, one in zip(in_prose, schemas, strict=True):
        needed = [code(row[0]) for row in table if not row[2].startswith("optional")]
        assert needed == one["required"]


def test_fields_for_readers_are_fields(prose: str, load: Load) -> None:
    (table,) = tables(section(prose, "The manifest, for readers"))
    manifest = load("manifest.schema.json")
    places = [code(row[0]) for row in table]
    assert len(places) == 11
    for place in places:
        part = manifest
        for name in place.split("."):
            part = part["properties"][name.removesuffix("[]")]
            if name.endswith("[]"):
                part = manifest["$defs"]["shard"]


def test_manifests_are_written_as_the_schema_says(load: Load) -> None:
    properties = load("manifest.schema.json")["properties"]
    for case in load("cases/manifests_valid.json")["cases"]:
        data = Manifest.from_json(json.dumps(case["manifest"]).encode()).to_json()
        written = list(json.loads(data))
        assert written == [name for name in properties if name in written]


def test_the_pack_index(annex: Annex, load: Load) -> None:
    fields, columns, counts = tables(section(annex("d-pack-index"), "The pack index"))
    index = load("manifest.schema.json")["properties"]["pack_index"]
    assert list(written(fields)) == list(index["properties"]) == index["required"]
    for table, is_nullable in ((columns, False), (counts, True)):
        in_prose = {name: code(type_) for name, type_ in written(table).items()}
        fields_of_kind = [f for f in pack_index.SCHEMA if f.nullable == is_nullable]
        assert in_prose == {field.name: str(field.type) for field in fields_of_kind}


def test_side_datasets(annex: Annex, load: Load) -> None:
    prose = annex("e-side-data")
    fields, types = tables(section(prose, "Side datasets"))
    document = load("side.schema.json")
    assert [code(row[0]) for row in fields] == list(document["properties"])
    assert document["required"] == [n for n in document["properties"] if n != "sha256"]
    columns = document["properties"]["columns"]
    for table in (written(types), columns["additionalProperties"]["x-arrow-types"]):
        assert list(table)[: len(SIDE_TYPES)] == list(SIDE_TYPES)
        real = {name: str(side_type(name.replace("K", "16"))) for name in table}
        assert {name: code(type_) for name, type_ in table.items()} == real
    assert list(written(types)) == list(
        columns["additionalProperties"]["x-arrow-types"]
    )
    assert columns["propertyNames"]["not"]["enum"] == list(schema.COLUMNS)
    assert document["properties"]["side_version"]["const"] == SIDE_VERSION
    assert f"`packstore.side_version` with the\ntext `{SIDE_VERSION}`" in prose
    assert f"{SHARD_ROWS:,} rows" in prose
    assert f"{SHARD_BYTES >> 20} MiB of values" in prose
    assert f"row groups of about {GROUP_BYTES >> 20} MiB" in prose
    assert f"{manifest_path(1, SIDE)}".rpartition("/")[2] in prose


def test_types_of_tokens(annex: Annex) -> None:
    """The names in the table are all; K has no zeros in front, and a limit."""
    prose = annex("e-side-data")
    _, types = tables(section(prose, "Side datasets"))
    templates = [name for name in written(types) if name.startswith("token<")]
    for k in ("0", "1", "02", str(MAX_TOP), str(MAX_TOP + 1)):
        is_number = 1 <= int(k) <= MAX_TOP and not k.startswith("0")
        for dtype in ("float16", "float32", "uint8"):
            is_listed = f"token<topK,{dtype}>" in templates
            is_known = side_type(f"token<top{k},{dtype}>") is not None
            assert is_known == (is_listed and is_number)
    for dtype in ("float16", "float32", "float64", "uint8", "int32"):
        is_known = side_type(f"token<{dtype}>") is not None
        assert is_known == (f"token<{dtype}>" in templates)
    assert f"from 1 to {MAX_TOP}" in prose


def test_rules_of_values_of_tokens(annex: Annex) -> None:
    (table,) = tables(section(annex("e-side-data"), "Values of tokens"))
    assert written(table) == TOKEN_RULES


def value_of(text: str) -> float:
    """Return the value of a number, or of one times a number or a sum in brackets."""
    number, _, total = text.partition(" * ")
    terms = re.findall(r"\d+", total) or ["1"]
    return float(number) * sum(map(int, terms))


def test_example_of_values_of_tokens(prose: str, annex: Annex, tmp_path: Path) -> None:
    """The row passes the rules beside the pair of the format, and means the table."""
    pair, packs, _ = example_of(prose, "Example: a pair", "preference")
    text = section(annex("e-side-data"), "Example: values of tokens")
    (block,) = re.findall(r"```json\n(.+?)```", text, re.S)
    row = json.loads(block)
    (table,) = tables(text)
    head = re.findall(r"^\| label .*", text, re.M)[0]
    columns = dict(re.findall(r"`(\w+)`: `(token<.+?>)`", head))
    assert list(row) == ["example_ids", *columns]
    assert [row["example_ids"]] == pair["example_ids"]

    fields = {"kind": "preference", "lineage": "a" * 64, "fingerprint": "b" * 64}
    manifest = SideManifest(
        **fields, columns=columns, provenance={}, package_version="", shards=()
    )
    batch = pa.RecordBatch.from_pylist([row], manifest.schema)
    for name, type_name in columns.items():
        check_stored_lists(batch, name, type_name, "", distinct=True)
    assert list_counts(batch.column("old_logps")).tolist() == packs.num_targets.tolist()

    labels = [label for label in pair["labels"] if label != IGNORE_INDEX]
    assert [int(cells[0].strip("| ")) for cells in table] == labels
    assert [float(cells[2]) for cells in table] == row["old_logps"]
    for column, cell in (("teacher", 3), ("coarse", 4)):
        entries = [entry for cells in table for entry in cells[cell].split(", ")]
        pairs = [entry.strip("| ").split(": ") for entry in entries]
        assert [int(token_id) for token_id, _ in pairs] == row[column]["ids"]
        stored = top_k_of(batch.column(column), 2).logps
        if "scale" in row[column]:
            stored = from_gaps(stored, np.float32(row[column]["scale"]))
        assert [value_of(logp) for _, logp in pairs] == stored.ravel().tolist()


def test_what_made_reference_log_probs(annex: Annex) -> None:
    pytest.importorskip("torch", reason="a model makes them")
    from packstore.torch.reference import REMEDIES

    (members,) = tables(section(annex("e-side-data"), "Origin of `ref_logps`"))
    assert {code(row[0]) for row in members} == {"model", *REMEDIES}


def test_every_annex_says_who_needs_it(prose: str) -> None:
    paths = sorted(SCHEMAS.glob("annex-*.md"))
    assert [code(cell) for cell in re.findall(r"\]\((annex-[a-z-]+\.md)\)", prose)] == [
        path.name for path in paths
    ]
    for path in paths:
        title, _, text = path.read_text(encoding="utf-8").partition("\n\n")
        assert title.startswith(f"# Annex {path.name[len('annex-')].upper()}: ")
        assert text.startswith("Needed by: ")


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


def example_of(prose: str, title: str, kind: str) -> tuple[Row, Packs, list[str]]:
    """Return the stored row of an example, as packs too, and its drawings."""
    text = section(prose, title)
    (block,) = re.findall(r"```json\n(.+?)```", text, re.S)
    row = json.loads(block)
    columns = schema.pack_schema(kind, "shared_prefix")
    assert list(row) == columns.names
    arrays = [pa.array([row[field.name]], field.type) for field in columns]
    batch = pa.RecordBatch.from_arrays(arrays, schema=columns)
    packs = schema.from_arrow(batch, kind)
    check_packs(packs, layout="shared_prefix")
    return row, packs, re.findall(r"```\n(.+?)```", text, re.S)


def drawn(drawing: str, name: str) -> list[int]:
    """Return the numbers of a line of a drawing; a dot is -100."""
    (line,) = re.findall(rf"^{name} +([-\d. ]+)$", drawing, re.M)
    return [-100 if value == "." else int(value) for value in line.split()]


@pytest.mark.parametrize(
    ("title", "kind"), [("Example: a pair", "preference"), ("Example: a tree", "sft")]
)
def test_examples_are_drawn_as_they_are_stored(
    prose: str, title: str, kind: str
) -> None:
    row, packs, drawings = example_of(prose, title, kind)
    assert drawn(drawings[-1], "input_ids") == row["input_ids"]
    assert drawn(drawings[-1], "labels") == row["labels"]
    positions = drawn(drawings[-1], "position_ids")
    for sequence in places_of(packs):
        assert [positions[place] for place in sequence] == [*range(len(sequence))]


def test_the_pair_is_the_same_in_both_layouts(prose: str) -> None:
    row, packs, (whole, _) = example_of(prose, "Example: a pair", "preference")
    sequences = [[row["input_ids"][i] for i in keys] for keys in places_of(packs)]
    assert drawn(whole, "input_ids") == [i for ids in sequences for i in ids]
    lengths = [len(ids) for ids in sequences]
    assert drawn(whole, "position_ids") == [i for n in lengths for i in range(n)]
    rebuilt = []
    for i, offset in enumerate(packs.segment_offsets.tolist()):
        segment = slice(*row["seq_boundaries"][i : i + 2])
        rebuilt += [-100] * offset + row["labels"][segment]
    assert drawn(whole, "labels") == rebuilt


def test_the_sequences_of_the_tree_are_those_that_it_stores(prose: str) -> None:
    row, packs, (drawing,) = example_of(prose, "Example: a tree", "sft")
    keys = places_of(packs)
    lines = re.findall(r"^sequence (\d)   ([\d ]+?)(?: {2,}(.+))?$", drawing, re.M)
    assert len(lines) == len(keys)
    for number, ids, origin in lines:
        i = int(number)
        assert [int(n) for n in ids.split()] == [
            row["input_ids"][key] for key in keys[i]
        ]
        distance = row["parent_distances"][i]
        offset = packs.segment_offsets[i]
        expected = f"parent {i - distance}, leaves out {offset}" if distance else ""
        assert origin == expected
    assert f"`keys[2]` is {' '.join(map(str, keys[2]))}." in prose


def test_derived_names(prose: str, load: Load) -> None:
    (table,) = tables(section(prose, "What is derived"))
    (first, *_) = load("cases/valid.json")["cases"]
    assert list(written(table)) == list(first["derived"][0])
