"""Values of tokens that break a rule: refused by name, on writing and on reading."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from places import edit_manifest, manifest_path
from small_jobs import pack

from packstore import Dataset
from packstore.errors import ConfigError, FormatError, IntegrityError
from packstore.torch import PackedDataset, SideWriter, TopK, open_side

RECORDS = [{"prompt": [1], "response": [2] * n} for n in (3, 2, 4)]
NUM_TARGETS = np.array([3, 2, 4])
NUM_TOKENS = 9
TOKEN = 4  # the last of example 1


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    out = tmp_path_factory.mktemp("rules") / "ds"
    return pack(out, RECORDS, kind="sft", append_eos=False)


def valid_values(type_name: str) -> Any:
    if "top" not in type_name:
        return np.full(NUM_TOKENS, -1.0, np.float32)
    ids = np.tile(np.array([7, 5], np.int32), (NUM_TOKENS, 1))
    logps = np.tile(np.array([-0.5, -2.0], np.float32), (NUM_TOKENS, 1))
    return TopK(ids, logps)


def write(
    url: str,
    dataset: Dataset,
    type_name: str,
    values: Any,
    num_targets: Any = NUM_TARGETS,
) -> str:
    with SideWriter(url, dataset, {"values": type_name}) as writer:
        writer.write(np.arange(3), {"values": values}, None, num_targets)
    return url


def with_value(array: np.ndarray, place: Any, value: Any) -> np.ndarray:
    changed = array.copy()
    changed[place] = value
    return changed


NUMBERS = valid_values("token<float32>")
IDS, LOGPS = valid_values("token<top2,float16>")
WRONG_SHAPES: dict[str, tuple[str, Any, str]] = {
    "one number too few": ("token<float32>", NUMBERS[1:], r"\(9,\).*\(8,\)"),
    "a number in place of k": ("token<top2,float16>", NUMBERS, "TopK"),
    "k in place of a number": ("token<float32>", TopK(IDS, LOGPS), "TopK"),
    "one token too few": (
        "token<top2,uint8>",
        TopK(IDS[1:], LOGPS[1:]),
        r"\(9, 2\).*\(8, 2\)",
    ),
    "another k": ("token<top3,float16>", TopK(IDS, LOGPS), r"\(9, 3\).*\(9, 2\)"),
    "ids and log-probs of different k": (
        "token<top2,float16>",
        TopK(IDS, LOGPS[:, :1]),
        r"log-probs of values.*\(9, 2\).*\(9, 1\)",
    ),
    "ids that are floats": (
        "token<top2,float16>",
        TopK(IDS.astype(np.float32), LOGPS),
        "ids of values must be integers.*float32",
    ),
    "log-probs that are integers": (
        "token<top2,float16>",
        TopK(IDS, IDS),
        "log-probs of values must be floats.*int32",
    ),
}


@pytest.mark.parametrize("case", WRONG_SHAPES)
def test_the_writer_refuses_other_shapes(
    dataset: Dataset, tmp_path: Path, case: str
) -> None:
    type_name, values, message = WRONG_SHAPES[case]
    with pytest.raises(ConfigError, match=f"values.*{message}|{message}"):
        write(str(tmp_path / "side"), dataset, type_name, values)


@pytest.mark.parametrize("name", ["old_logps", "ref_token_logps"])
def test_the_writer_refuses_probabilities_as_log_probs(
    dataset: Dataset, tmp_path: Path, name: str
) -> None:
    numbers = with_value(NUMBERS, TOKEN, 0.25)
    writer = SideWriter(str(tmp_path / "side"), dataset, {name: "token<float32>"})
    match = f"{name}.*example 1.*0.25"
    with pytest.raises(FormatError, match=match), writer:
        writer.write(np.arange(3), {name: numbers}, None, NUM_TARGETS)


TOP_TYPES = ["token<top2,float16>", "token<top2,uint8>"]
ALL_TYPES = ["token<float32>", "token<float16>", *TOP_TYPES]
WRONG_VALUES: dict[str, tuple[list[str], str, Any, str]] = {
    # Types, the array to change at token 4, its new value, and the message.
    "NaN": (ALL_TYPES, "logps", np.nan, "finite.*nan"),
    "infinity": (ALL_TYPES, "logps", -np.inf, "finite.*-inf"),
    "too large for float16": (
        ["token<float16>", "token<top2,float16>"],
        "logps",
        -7e4,
        "range of float16.*-70000",
    ),
    "negative id": (TOP_TYPES, "ids", -1, "at least 0.*found -1"),
    "id above int32": (TOP_TYPES, "ids", 2**31, "at most 2147483647.*2147483648"),
    "repeated id": (TOP_TYPES, "ids", 7, "distinct.*found 7"),
    "rising log-prob": (TOP_TYPES, "logps", -0.4, "highest to the lowest.*-0.4"),
    "probability": (TOP_TYPES, "logps", 0.25, "at most 0.*0.25.*probabilities"),
}
VALUE_CASES = [
    pytest.param(type_name, *case, id=f"{name}, {type_name}")
    for name, (types, *case) in WRONG_VALUES.items()
    for type_name in types
]


@pytest.mark.parametrize(("type_name", "array", "value", "message"), VALUE_CASES)
def test_the_writer_refuses_values_and_names_the_example(
    dataset: Dataset,
    tmp_path: Path,
    type_name: str,
    array: str,
    value: Any,
    message: str,
) -> None:
    values = valid_values(type_name)
    if isinstance(values, TopK):
        wide = values._replace(ids=values.ids.astype(np.int64))
        changed = with_value(getattr(wide, array), (TOKEN, 1), value)
        values = wide._replace(**{array: changed})
    else:
        values = with_value(values, TOKEN, value)
    with pytest.raises(FormatError, match=f"'values', example 1: .*{message}"):
        write(str(tmp_path / "side"), dataset, type_name, values)


def test_log_probs_just_above_0_are_0(dataset: Dataset, tmp_path: Path) -> None:
    logps = with_value(LOGPS, (TOKEN, 0), 9e-4)
    for type_name in TOP_TYPES:
        url = write(str(tmp_path / type_name), dataset, type_name, TopK(IDS, logps))
        (packs,) = PackedDataset(dataset, side=url, rank=0, world_size=1)
        stored = packs.token_columns["values"].logps
        assert sorted(stored[:, 0] == 0) == [False] * 8 + [True]
        assert (stored <= 0).all()


@pytest.mark.parametrize(
    ("num_targets", "message"),
    [
        (None, "values.*num_targets"),
        ([3, 2], "num_targets.*3 examples"),
        ([4, 6, -1], "num_targets.*-1"),
    ],
)
def test_counts_that_are_none(
    dataset: Dataset, tmp_path: Path, num_targets: Any, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        write(str(tmp_path / "side"), dataset, "token<float32>", NUMBERS, num_targets)


def test_the_total_is_that_of_the_dataset(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"values.*9 supervised tokens.*got 8"):
        write(str(tmp_path / "side"), dataset, "token<float32>", NUMBERS[1:], [2, 2, 4])


# Reading


def forge(url: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the row of example 1 in a shard, and make the manifest fit."""
    shard = open_side(url).manifest.shards[0]
    path = Path(url) / shard.path
    schema = pq.read_schema(path)
    rows = pq.read_table(path).to_pylist()
    change(rows[1])
    table = pa.Table.from_pylist(rows, schema)
    pq.write_table(table, path, use_dictionary=False, compression="zstd")
    data = path.read_bytes()
    entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit_manifest(url, lambda m: m["shards"][0].update(entry), manifest_path(1, "side"))


def read(url: str, dataset: Dataset) -> None:
    list(PackedDataset(dataset, side=url, rank=0, world_size=1))


HALVES = "token<top2,float16>"
BYTES = "token<top2,uint8>"
FORGED: dict[str, tuple[str, str, Any, str]] = {
    # Type of the column, its field, and the field's values in the row of example 1.
    "NaN": ("token<float32>", "", [-1.0, float("nan")], "finite.*nan"),
    "top k: NaN": (HALVES, "logps", [-1, -2, -1, float("nan")], "finite.*nan"),
    "above 0": (HALVES, "logps", [-1, -2, 1, -2], "at most 0.*1.0"),
    "rising": (HALVES, "logps", [-1, -2, -1, -0.5], "highest to the lowest.*-0.5"),
    "negative id": (HALVES, "ids", [1, 2, -3, 4], "at least 0.*-3"),
    "no multiple of k": (HALVES, "ids", [1, 2, 3], "2 ids.*3 ids and 4 log-probs"),
    "unequal lengths": (BYTES, "logps", [1, 2], "4 ids and 2 log-probs"),
    "scale of 0": (BYTES, "scale", 0.0, "scale.*above 0.*0.0"),
    "scale of infinity": (BYTES, "scale", float("inf"), "scale.*finite.*inf"),
    "scale that overflows": (BYTES, "scale", 3e38, "finite.*-inf"),
}


@pytest.mark.parametrize("case", FORGED)
def test_readers_refuse_and_name_the_example(
    dataset: Dataset, tmp_path: Path, case: str
) -> None:
    type_name, field, values, message = FORGED[case]
    url = write(str(tmp_path / "side"), dataset, type_name, valid_values(type_name))
    if field == "logps" and type_name == HALVES:
        values = [np.float16(value) for value in values]

    def change(row: dict[str, Any]) -> None:
        if field:
            row["values"][field] = values
        else:
            row["values"] = values

    forge(url, change)
    pattern = f"{Path(url).name}/data/.*'values', example 1: .*{message}"
    with pytest.raises(IntegrityError, match=pattern):
        read(url, dataset)
    (problem,) = open_side(url).verify().problems
    assert "example 1" in problem


def test_verify(dataset: Dataset, tmp_path: Path) -> None:
    url = write(str(tmp_path / "side"), dataset, HALVES, valid_values(HALVES))
    assert open_side(url).verify(dataset).ok
    other = pack(tmp_path / "other", RECORDS[::-1], kind="sft", append_eos=False)
    (problem,) = open_side(url).verify(other).problems
    assert "lineage" in problem

    forge(url, lambda row: row["values"].update(ids=[1, 2, 3, 3]))
    read(url, dataset)  # readers do not look for this
    (problem,) = open_side(url).verify(dataset).problems
    assert "distinct [top-distinct]; found 3" in problem

    moved = write(str(tmp_path / "moved"), dataset, HALVES, TopK(IDS, LOGPS), [2, 3, 4])
    assert open_side(moved).verify().ok
    (problem,) = open_side(moved).verify(dataset).problems
    assert "values of 2 supervised tokens [token-count]; found 3" in problem
