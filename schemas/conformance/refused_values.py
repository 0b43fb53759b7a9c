"""Datasets of good packs whose counts, ids, pack index or side data a reader must
refuse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from accepted import REF, parts_case, ref, rows_of, with_side
from case import Case, Files, Row
from forged import sealed
from refused_files import Change, at, bad, cast, resealed
from writer import index_table, lists, put_index


def refused_values() -> Iterator[Case]:
    """All of them."""
    yield from counts()
    yield from ids()
    yield from indexes()
    yield from sides()


def counts() -> Iterator[Case]:
    """Counts and statistics that are not those of the packs."""

    def moved(name: str) -> Change:
        def change(manifest: Row) -> None:
            column = manifest["shards"][0]["row_groups"][name]
            column[0], column[1] = column[0] + 1, column[1] - 1

        return change

    groups = [[1, 2]]
    for name in ("rows", "examples", "tokens"):
        yield bad(
            f"counts-{name}",
            f"{name} of two row groups",
            "counts",
            shards=groups,
            manifest=moved(name),
        )

    def sums(name: str) -> Change:
        def change(manifest: Row) -> None:
            manifest["shards"][0][name] -= 1
            manifest["totals"][name] -= 1

        return change

    paths: dict[str, tuple[str, str, Any]] = {
        "longest": ("the longest segment", "shards/0/row_groups/longest", [5]),
        "logical": ("the sum of all lengths", "totals/logical_tokens", 1),
        "fill-rate": ("the fill rate", "statistics/fill_rate", 0.5),
        "mean": (
            "the mean of examples of a pack",
            "statistics/examples_per_pack/mean",
            2.001,
        ),
        "longest-sequence": ("the longest sequence", "statistics/longest_sequence", 95),
        "segments": ("the most segments", "statistics/most_segments", 4),
        "keys": ("the most keys of a pack", "statistics/most_keys", 95),
        "targets": ("the most targets of a pack", "statistics/most_targets", 95),
        "shortest": ("the tokens of the shortest pack", "statistics/shortest_pack", 1),
        "min": (
            "the fewest examples of a pack",
            "statistics/examples_per_pack/min",
            0,
        ),
        "max": (
            "the most examples of a pack",
            "statistics/examples_per_pack/max",
            9,
        ),
        "histogram": (
            "the histogram of lengths",
            "statistics/length_histogram",
            {"2": 6},
        ),
    }
    for name, (about, path, value) in paths.items():
        yield bad(f"counts-{name}", about, "counts", manifest=at(path, value))
    yield bad(
        "counts-supervised",
        "the supervised tokens",
        "counts",
        manifest=sums("supervised_tokens"),
    )

    def one_group(manifest: Row) -> None:
        groups = manifest["shards"][0]["row_groups"]
        for n in ("rows", "examples", "tokens"):
            groups[n] = [sum(groups[n])]
        groups["longest"], groups["crc32"] = (
            [max(groups["longest"])],
            groups["crc32"][:8],
        )

    yield bad(
        "counts-groups",
        "one row group, where there are two",
        "counts",
        "bytes",
        shards=groups,
        manifest=one_group,
    )
    scored = {"rows": rows_of("scored"), "kind": "scored"}
    yield bad(
        "counts-sequences",
        "the sequences",
        "counts",
        manifest=sums("sequences"),
        **scored,
    )


def ids() -> Iterator[Case]:
    """Ids of examples, and of a token."""

    def first(i: int) -> list[Row]:
        rows = rows_of()
        return [{**rows[0], "example_ids": [i, *rows[0]["example_ids"][1:]]}, *rows[1:]]

    large = rows_of()
    large[0]["input_ids"][0] = 2**31 - 1
    yield bad(
        "id-too-large",
        "a token id of 2^31 - 1, without a vocabulary",
        "ids-range",
        rows=large,
    )
    name = "example-ids"
    yield bad("ids-negative", "an example id that is negative", name, rows=first(-5))
    about = "an example id that is negative, with a base that makes up for it"
    yield bad("ids-negative-base", about, name, rows=first(-5), bases=[9])
    high = {"bases": [2**63 - 3]}
    yield bad("ids-overflow", "an example id of 64 bits with its base", name, **high)
    yield bad("ids-repeated", "an example id that is there twice", name, rows=first(4))
    about = "example ids of two shards that agree with their bases"
    yield bad(
        "ids-bases", about, name, rows=first(4), shards=[[1], [2]], bases=[2**41, 2**41]
    )


def indexes() -> Iterator[Case]:
    """Pack indexes."""
    name, table = "pack-index", index_table(rows_of())

    def indexed(made: pa.Table, change: Change = lambda out: None, **how: Any) -> Row:
        out: Files = {}
        return {
            "manifest": lambda m: put_index(
                m, out, made, how.pop("groups", [3]), **how
            ),
            "files": lambda f: (f.update(out), change(f)),
        }

    def other(column: str, change: int) -> pa.Table:
        i = table.schema.get_field_index(column)
        values = table[column].to_pylist()
        values[0], values[1] = values[0] + change, values[1] - change
        return table.set_column(
            i, table.field(i), pa.array(values, table.field(i).type)
        )

    def damaged(out: Files) -> None:
        (path,) = (p for p in out if p.endswith(".index"))
        out[path] = out[path][:10] + b"x" + out[path][11:]

    def missing(out: Files) -> None:
        (path,) = (p for p in out if p.endswith(".index"))
        del out[path]

    lost = table.drop_columns(["squares"])
    yield bad(
        "index-missing",
        "a pack index that is missing",
        name,
        "bytes",
        **indexed(table, missing),
    )
    yield bad(
        "index-hash",
        "a pack index with another byte",
        name,
        "bytes",
        **indexed(table, damaged),
    )
    yield bad("index-column", "a pack index without squares", name, **indexed(lost))
    yield bad(
        "index-rows",
        "a row group for each pack",
        name,
        **indexed(table, groups=[1, 1, 1]),
    )
    about = "row groups of two shards that have other packs"
    moved = {**indexed(table, groups=[2, 1]), "shards": [[1], [2]]}
    yield bad("index-rows-moved", about, name, **moved)
    more = pa.concat_tables([table, table.slice(0, 1)])
    about = "a row group more than there are shards"
    yield bad("index-more", about, name, **indexed(more, groups=[3, 1]))
    yield bad(
        "index-dictionary",
        "a dictionary in the index",
        name,
        **indexed(table, use_dictionary=True),
    )
    yield bad(
        "index-gzip",
        "an index compressed with gzip",
        name,
        **indexed(table, compression="gzip"),
    )
    for column, change in (("tokens", 1), ("examples", -1), ("squares", 1)):
        about = f"{column} that are those of no pack"
        yield bad(f"index-{column}", about, name, **indexed(other(column, change)))
    few = table.append_column("best_tokens", pa.array([2, 1, 3], pa.int64()))
    yield bad(
        "index-some-counts",
        "a column of counts without the others",
        name,
        **indexed(few),
    )
    names = ("best_tokens", "pairs_best_vs_rest", "pairs_all", "pairs_adjacent")
    counts: dict[str, tuple[str, list[int | None]]] = {
        "counts": ("counts that no pack can have", [99, 99, 99]),
        "wrong-counts": ("counts of other packs", [1, 1, 1]),
        "some-nulls": ("counts of one pack", [4, None, None]),
    }
    for case, (about, values) in counts.items():
        made = table
        for column in names:
            zeros = [None if v is None else 0 for v in values]
            cells = values if column == "best_tokens" else zeros
            made = made.append_column(column, pa.array(cells, pa.int64()))
        yield bad(f"index-{case}", about, name, **indexed(made))


SIDE_TWINS = b'"kind"', b'"kind": "sft", "k\\u0069nd"'
"""A member of the manifest of a side dataset, and two that have its name."""


def without_shards(out: Files) -> None:
    """Removes the shards of a side dataset."""
    for path in [path for path in out if path.startswith("data/")]:
        del out[path]


def sides() -> Iterator[Case]:
    """Side datasets that cannot be joined to a dataset of another case."""
    refusal: Row = {"expect": None, "refuse": ("side",), "files": {}}

    def no(
        name: str, about: str, rows: list[Row], columns: Row = REF, **how: Any
    ) -> Case:
        case = with_side(f"side-{name}", about, rows, columns, lambda r: {}, **how)
        return dataclasses.replace(case, **refusal, dataset="side-more")

    good = ref(rows_of("preference"))
    one = lambda **more: [{**good[0], **more}, *good[1:]]  # noqa: E731
    first = lambda i: lambda m: m["shards"][0].update(i)  # noqa: E731
    yield no("kind", "of another kind", good, manifest=at("kind", "scored"))
    yield no("lineage", "of another lineage", good, manifest=at("lineage", "0" * 64))
    yield no("lacks", "lacks an example", good[1:])
    yield no("lacks-many", "another id for an example", one(example_ids=99))
    yield no("repeated", "an id that is there twice", [*good, good[0]])
    yield no("values", "too few values for an example", one(ref_logps=[-1.0]))
    yield no("nan", "a value that is NaN", one(ref_logps=[-1.0, float("nan")]))
    yield no("rows", "another number of rows", good, manifest=first({"rows": 7}))
    yield no(
        "hash", "another hash of a shard", good, manifest=first({"sha256": "0" * 64})
    )
    yield no("gzip", "compressed with gzip", good, how={"compression": "gzip"})
    yield no(
        "dictionary", "encoded by a dictionary", good, how={"use_dictionary": True}
    )
    yield no(
        "type",
        "ref_logps of one value for each example",
        [{**v, "ref_logps": 0.5} for v in good],
        {"ref_logps": "float32"},
    )
    double = cast("ref_logps", lists(pa.float64()))
    yield no("schema", "values of 64 bits", good, table=double)
    later = dataclasses.replace(
        no(
            "version",
            "a later version of side data",
            good,
            manifest=at("side_version", 2),
        ),
        refuse=("unsupported",),
    )
    yield later
    yield no("missing", "a shard is missing", good, files=without_shards)
    names = ("manifest", "side")
    twice = lambda m: m["shards"].append(m["shards"][0])  # noqa: E731
    broken: dict[str, tuple[str, Row]] = {
        "shard-twice": ("a shard that is there twice", {"manifest": twice}),
        "path": (
            "a shard outside the side dataset",
            {"manifest": at("shards/0/path", "../x.parquet")},
        ),
        "no-rows": ("a shard without rows", {"manifest": at("shards/0/rows", 0)}),
        "no-columns": ("no columns", {"manifest": at("columns", {})}),
        "manifest-twice": (
            "two members of one name in its manifest",
            {"seal": lambda m: resealed(sealed(m).replace(*SIDE_TWINS))},
        ),
        "manifest-hash": (
            "a manifest that was changed",
            {"seal": lambda m: sealed(m).replace(b"preference", b"Preference")},
        ),
    }
    for name, (about, how) in broken.items():
        case = no(name, about, good, **how)
        yield dataclasses.replace(case, refuse=names)
    for name, path, value in (
        ("features", "features", ["zigzag"]),
        ("later-kind", "kind", "tree"),
    ):
        case = no(name, f"{path} of a later release", good, manifest=at(path, value))
        yield dataclasses.replace(case, refuse=("unsupported",))
    case = no("lineage-empty", "of another lineage, of no packs", good)
    yield dataclasses.replace(case, dataset="empty")
    for name, about, runs in (
        ("side-gap", "side data of two of three parts", [(0, 1), (2, 3)]),
        ("side-overlap", "side data that covers a part twice", [(0, 3), (1, 2)]),
    ):
        case = parts_case(name, about, runs)
        yield dataclasses.replace(case, **refusal, dataset="side-parts")
