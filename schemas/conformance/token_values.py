"""Side datasets with values of supervised tokens: some that a reader must join to a
dataset, and some that it must refuse, each for one reason.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from accepted import LINEAGES, combined, combined_rows, good, rows_of, whole
from case import Case, Files, Row
from golden import IGNORE_INDEX
from writer import SIDE_TYPES, lists, side

Change = Callable[[Row], Row]

COLUMNS = {
    "old_logps": "token<float32>",
    "half": "token<float16>",
    "teacher": "token<top2,float16>",
    "coarse": "token<top3,uint8>",
}
K_OF_BYTES = 3
"""Ids of a token in the column of 8 bits."""

SCALE = float(np.float32(0.1))
"""A scale that makes products which float32 has to round."""


def accepted() -> Iterator[Case]:
    """Values that a reader must join."""
    yield from both_layouts()
    yield from forms()
    yield from folders()


def refused() -> Iterator[Case]:
    """Values that a reader must refuse."""
    yield from wrong_counts()
    yield from wrong_values()
    yield from wrong_columns()
    yield from wrong_folders()


# Values


def target_counts(pack: Row) -> list[int]:
    """Returns the number of supervised tokens of each example of a pack of pairs."""
    edges = pack["seq_boundaries"][::2]
    return [
        sum(label != IGNORE_INDEX for label in pack["labels"][start:end])
        for start, end in itertools.pairwise(edges)
    ]


def token_row(example_id: int, num_targets: int) -> Row:
    """Returns a row of :data:`COLUMNS`; each value tells its example and its token."""
    tokens = range(num_targets)
    first = example_id % 64
    pairs = [(t, t + 40 + first) for t in tokens]
    gaps_of_tokens = [(t, 7, 248 - first) for t in tokens]
    return {
        "example_ids": example_id,
        "old_logps": [float(np.float32(-first - t / 10)) for t in tokens],
        "half": [-first - t / 8 for t in tokens],
        "teacher": {
            "ids": [i for pair in pairs for i in reversed(pair)],
            "logps": [x for t in tokens for x in (-t / 8, -first - t / 4)],
        },
        "coarse": {
            "ids": [i for t in tokens for i in (t + 2, t, t + 1)],
            "logps": [gap for gaps in gaps_of_tokens for gap in gaps],
            "scale": SCALE,
        },
    }


def token_rows(packs: list[Row], base: int = 0) -> list[Row]:
    """Returns the rows for packs of pairs; ids less `base`."""
    return [
        token_row(example_id - base, n)
        for pack in packs
        for example_id, n in zip(pack["example_ids"], target_counts(pack), strict=True)
    ]


def joined(rows: list[Row]) -> Row:
    """Returns the columns of these rows, end to end, as a reader prints them."""
    columns: Row = {}
    for name in rows[0].keys() - {"example_ids"}:
        values = [row[name] for row in rows]
        if isinstance(values[0], dict):
            logps = [x for value in values for x in log_probs(value)]
            ids = [i for value in values for i in value["ids"]]
            columns[name] = {"ids": ids, "logps": logps}
        else:
            columns[name] = [x for value in values for x in value]
    return {name: columns[name] for name in rows[0] if name in columns}


def log_probs(value: Row) -> list[float]:
    """Returns the log-probabilities of a row, those of 8 bits as float32."""
    if "scale" not in value:
        return list(value["logps"])
    gaps = np.array(value["logps"], np.float32).reshape(-1, K_OF_BYTES)
    products = -np.float32(value["scale"]) * np.cumsum(gaps, axis=1)
    return [float(x) for x in products.ravel()]


# Values that a reader must join


def of_pairs(name: str, about: str, layout: str = "concat") -> Case:
    """A dataset of pairs."""
    lineage = lambda m: m["provenance"].update(lineage=LINEAGES[0])  # noqa: E731
    rows = rows_of("preference", layout)
    return good(name, about, rows, kind="preference", layout=layout, manifest=lineage)


def put_side(case: Case, rows: list[Row]) -> Case:
    """Says that the joined values of a case are those of `rows`, in order of packs."""
    remaining = iter(rows)
    for pack in case.expect or []:
        own = list(itertools.islice(remaining, len(pack["example_ids"])))
        pack["side"] = joined(own)
    return case


def both_layouts() -> Iterator[Case]:
    """One side dataset, and the two layouts of its dataset."""
    for layout in ("concat", "shared_prefix"):
        about = f"values of tokens, joined to layout {layout}"
        case = of_pairs(f"tokens-{layout}", about, layout)
        rows = token_rows(rows_of("preference", layout))
        yield put_side(case, rows).beside("tokens", of(rows))


def of(rows: list[Row], columns: Row = COLUMNS, **how: Any) -> Files:
    """A side dataset of the dataset of pairs."""
    return side(rows, columns, "preference", LINEAGES[0], **how)


def extreme_row(row: Row) -> Row:
    """Returns a row of as many tokens with values that are just allowed."""
    n = len(row["half"])
    tied = [float(np.float16(-0.1))] * 2
    return {
        "example_ids": row["example_ids"],
        "old_logps": [float(np.finfo(np.float32).min), 3.5, *[0.0] * n][:n],
        "half": [-65504.0, -(2.0**-24), *[65504.0] * n][:n],
        "teacher": {"ids": [2**31 - 1, 0] * n, "logps": tied * n},
        "coarse": {
            "ids": [9, 8, 7] * n,
            "logps": [0, 255, 255] * n,
            "scale": 2.0**-126,
        },
        "best": {"ids": [n] * n, "logps": [0.0] * n},
    }


def forms() -> Iterator[Case]:
    """Types, encodings and orders of rows."""
    rows = token_rows(rows_of("preference"))

    extremes = [extreme_row(row) for row in rows]
    columns = COLUMNS | {"best": "token<top1,float16>"}
    case = of_pairs("tokens-extremes", "ties, k = 1, and the ends of ranges")
    files = of(extremes, columns)
    yield put_side(case, extremes).beside("tokens-extremes", files)

    names = ["old_logps", "half", "teacher.ids", "teacher.logps", "coarse.ids"]
    encoding = {f"{name}.list.element": "BYTE_STREAM_SPLIT" for name in names}
    encoding["coarse.logps.list.element"] = "DELTA_BINARY_PACKED"
    encoding["coarse.scale"] = "BYTE_STREAM_SPLIT"
    how = {"column_encoding": encoding, "data_page_version": "2.0"}
    case = of_pairs(
        "tokens-encoded", "rows of more examples, in another order, encoded"
    )
    stored = [token_row(2**62, 5), *reversed(rows)]
    yield put_side(case, rows).beside("tokens-encoded", of(stored, how=how))

    later: dict[str, tuple[str, pa.DataType]] = {
        "none": ("token<top0,float16>", SIDE_TYPES["token<top2,float16>"]),
        "zero": ("token<top02,float16>", SIDE_TYPES["token<top2,float16>"]),
        "many": ("token<top1025,uint8>", SIDE_TYPES["token<top3,uint8>"]),
        "wide": ("token<top2,float32>", lists(pa.float32())),
        "bytes": ("token<uint8>", lists(pa.uint8())),
        "double": ("token<float64>", lists(pa.float64())),
    }
    wide = [
        row
        | {"none": row["teacher"], "zero": row["teacher"], "many": row["coarse"]}
        | {"wide": [0.5], "bytes": [1, 2], "double": [], "_x": row["teacher"]}
        for row in rows
    ]
    columns = {**later, "_x": "token<top2,float16>", **COLUMNS}
    case = of_pairs("tokens-later", "types of tokens that are not known")
    yield put_side(case, rows).beside("tokens-later", of(wide, columns))


def of_parts(name: str, about: str) -> Case:
    """A dataset of three parts of one source each, with values of tokens."""
    packs = combined_rows()
    stored = [{**r, "example_ids": list(range(len(r["example_ids"])))} for r in packs]
    bases = [part << 40 for part in range(3)]
    how = {"kind": "preference", "shards": [[1]] * 3, "bases": bases}
    case = good(name, about, stored, **how, manifest=combined)
    for part, pack in enumerate(case.expect or []):
        pack["side"] = joined(token_rows([pack], part << 40))
    return dataclasses.replace(case, refuse=NO_FOLDERS)


def folder(runs: dict[str, tuple[int, int]], columns: Row = COLUMNS) -> Files:
    """A folder of side datasets: name of a subfolder -> the run of parts inside."""
    files: Files = {}
    packs = combined_rows()
    for name, (first, end) in runs.items():
        # Ids count from the start of the run, values from that of each part.
        rows = [
            row | {"example_ids": row["example_ids"] + (part - first << 40)}
            for part in range(first, end)
            for row in token_rows([packs[part]], part << 40)
        ]
        made = side(rows, columns, "preference", whole(first, end))
        files |= {f"{name}/{path}": data for path, data in made.items()}
    return files


NO_FOLDERS = ("unsupported", "side")
"""Readers may leave out folders with values of parts."""

PARTS = {whole(part, part + 1): (part, part + 1) for part in range(3)}
"""Name of the subfolder of a part -> the part."""


def folders() -> Iterator[Case]:
    """Values of parts."""
    about = "a folder with values of each part, and of another dataset"
    files = folder({**PARTS, "9" * 64: (0, 2)})
    yield of_parts("tokens-parts", about).beside("tokens-parts", files)

    about = "a folder with values of a part, and of two"
    files = folder({whole(first, end): (first, end) for first, end in [(0, 1), (1, 3)]})
    yield of_parts("tokens-runs", about).beside("tokens-runs", files)

    about = "a folder with values of all parts together, and of two of them"
    files = folder({whole(0, 3): (0, 3), **dict(list(PARTS.items())[:2])})
    yield of_parts("tokens-whole", about).beside("tokens-whole", files)

    rows = token_rows(rows_of("preference"))
    files = {f"{LINEAGES[0]}/{path}": data for path, data in of(rows).items()}
    case = of_pairs("tokens-folder", "a folder with values of the dataset")
    case = dataclasses.replace(case, refuse=NO_FOLDERS)
    yield put_side(case, rows).beside("tokens-folder", files)


# Values that a reader must refuse


def bad(
    name: str, about: str, rule: str, change: Change | None = None, **how: Any
) -> Case:
    """The dataset of `tokens-concat` beside rows of which the second is changed."""
    rows = token_rows(rows_of("preference"))
    if change is not None:
        rows[1] = rows[1] | change(rows[1])
    name = f"tokens-{name}"
    case = Case(name, about, dataset="tokens-concat", refuse=(rule,))
    return case.beside(name, of(rows, how.pop("columns", COLUMNS), **how))


def top(column: str, **members: Callable[[Any], Any]) -> Change:
    """Returns the change of members of a value of the top k."""

    def change(row: Row) -> Row:
        value = dict(row[column])
        for name, member in members.items():
            value[name] = member(value[name])
        return {column: value}

    return change


def first(*values: Any) -> Callable[[list[Any]], list[Any]]:
    """Returns the change of a list that replaces its first elements."""
    return lambda elements: [*values, *elements[len(values) :]]


def longer(elements: list[Any]) -> list[Any]:
    """Returns a list with an element more, which its rules allow."""
    return [*elements, elements[-1]]


def wrong_counts() -> Iterator[Case]:
    """Rows of another number of values."""
    rule = "token-count"
    few = lambda row: {"old_logps": row["old_logps"][1:]}  # noqa: E731
    many = lambda row: {"half": longer(row["half"])}  # noqa: E731
    yield bad("few", "a number too few", rule, few)
    yield bad("many", "a number too many", rule, many)
    two = lambda elements: elements[2:]  # noqa: E731
    three = lambda elements: elements[3:]  # noqa: E731
    yield bad("top-few", "a token too few", rule, top("teacher", ids=two, logps=two))
    change = top("coarse", ids=three, logps=three)
    yield bad("top-few-bytes", "a token too few, of 8 bits", rule, change)

    def spread(value: Row, k: int) -> Row:
        """Returns the value of as many tokens with another k."""
        n = len(value["ids"]) // 2
        return {"ids": list(range(k * n)), "logps": [-1.0] * (k * n)}

    for k in (1, 3):
        about = f"k = {k} in a shard, and 2 in the manifest"
        change = lambda row, k=k: {"teacher": spread(row["teacher"], k)}  # noqa: E731
        yield bad(f"top-{k}", about, rule, change)
    one = lambda elements: elements[:-1]  # noqa: E731
    change = top("teacher", ids=one, logps=one)
    yield bad("top-part", "lists that are no multiple of k", rule, change)
    about = "an id more than log-probabilities"
    yield bad("top-ids-longer", about, rule, top("teacher", logps=one))
    about = "a log-probability more than ids"
    yield bad("top-logps-longer", about, rule, top("coarse", logps=longer))


def wrong_values() -> Iterator[Case]:
    """Values that break a rule."""
    nan, infinity = math.nan, math.inf
    rule = "token-finite"
    change = lambda row: {"old_logps": first(nan)(row["old_logps"])}  # noqa: E731
    yield bad("nan", "a number that is NaN", rule, change)
    change = lambda row: {"half": first(-infinity)(row["half"])}  # noqa: E731
    yield bad("infinite", "a number that is infinite", rule, change)
    for name, logp in (("top-nan", nan), ("top-infinite", -infinity)):
        about = f"a log-probability that is {logp}"
        yield bad(name, about, rule, top("teacher", logps=first(0.0, logp)))

    about = "a negative id"
    yield bad("top-negative", about, "top-ids", top("coarse", ids=first(-1)))
    about = "an id that a token has twice"
    change = top("teacher", ids=first(5, 5))
    yield bad("top-repeated", about, "top-distinct", change)
    change = top("coarse", ids=first(5, 6, 5))
    yield bad("top-repeated-far", f"{about}, not side by side", "top-distinct", change)
    about = "a log-probability above 0"
    change = top("teacher", logps=first(0.5, 0.0))
    yield bad("top-positive", about, "top-sign", change)
    about = "log-probabilities that rise"
    change = top("teacher", logps=first(-1.0, -0.5))
    yield bad("top-rising", about, "top-order", change)
    for name, scale in (
        ("zero", 0.0),
        ("negative", -0.5),
        ("nan", nan),
        ("infinite", infinity),
    ):
        change = top("coarse", scale=lambda _, scale=scale: scale)
        yield bad(f"scale-{name}", f"a scale that is {scale}", "top-scale", change)
    about = "a scale with which a log-probability leaves the range of float32"
    change = top("coarse", logps=first(0, 0, 2), scale=lambda _: 2.0**127)
    yield bad("scale-large", about, "token-finite", change)


def with_type(column: str, type_: pa.DataType) -> Callable[[pa.Table], pa.Table]:
    """Returns the change of a table that stores a column with another type."""

    def change(table: pa.Table) -> pa.Table:
        at = table.schema.get_field_index(column)
        values = table.column(column).to_pylist()
        field = pa.field(column, type_, nullable=False)
        return table.set_column(at, field, pa.array(values, type_))

    return change


def wrong_columns() -> Iterator[Case]:
    """Columns of another type than the manifest says, and another lineage."""
    members = {field.name: field for field in SIDE_TYPES["token<top3,uint8>"]}
    ids, logps, scale = members.values()
    nullable = pa.field("scale", pa.float32())
    wide = pa.field("ids", lists(pa.int64()), nullable=False)
    signed = pa.field("logps", lists(pa.int16()), nullable=False)
    double = pa.field("scale", pa.float64(), nullable=False)
    types: dict[str, tuple[str, str, pa.DataType]] = {
        "width": ("numbers of 32 bits", "half", lists(pa.float32())),
        "half-width": ("numbers of 16 bits", "old_logps", lists(pa.float16())),
        "member": ("no scale", "coarse", pa.struct([ids, logps])),
        "members": (
            "another order of members",
            "coarse",
            pa.struct([logps, ids, scale]),
        ),
        "nullable": (
            "a scale that may be null",
            "coarse",
            pa.struct([ids, logps, nullable]),
        ),
        "ids-64": ("ids of 64 bits", "coarse", pa.struct([wide, logps, scale])),
        "signed": (
            "signed log-probabilities",
            "coarse",
            pa.struct([ids, signed, scale]),
        ),
        "scale-64": ("a scale of 64 bits", "coarse", pa.struct([ids, logps, double])),
    }
    for name, (about, column, type_) in types.items():
        change = with_type(column, type_)
        yield bad(f"type-{name}", about, "side", table=change)
    about = "values of tokens, of another lineage"
    lineage = lambda m: m.update(lineage="0" * 64)  # noqa: E731
    yield bad("lineage", about, "side", manifest=lineage)


def wrong_folders() -> Iterator[Case]:
    """Folders that do not have the values of each part."""
    refusal: Row = {"dataset": "tokens-parts", "refuse": ("side",), "expect": None}

    def no(name: str, about: str, *folders: Files) -> Case:
        case = dataclasses.replace(of_parts(name, about), **refusal, files={})
        for number, files in enumerate(folders):
            case.beside(f"{name}-{number}" if number else name, files)
        return case

    two = dict(list(PARTS.items())[:2])
    yield no("tokens-parts-lacking", "a folder that lacks a part", folder(two))
    others = folder({"9" * 64: (0, 1)})
    yield no("tokens-parts-others", "a folder of other lineages", others)
    (last,) = PARTS.keys() - two.keys()
    narrow = folder({last: PARTS[last]}, COLUMNS | {"old_logps": "token<float16>"})
    about = "parts that store a column with different types"
    yield no("tokens-parts-types", about, folder(two), narrow)
