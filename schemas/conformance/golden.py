"""Golden datasets: packstore writes them, and here is what they must decode to.

The expected content is laid out in plain Python, straight from format.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from packstore.config import PackConfig
from packstore.format.arrays import (
    IGNORE_INDEX,
    Examples,
    TopK,
    example_id,
    to_offsets,
)
from packstore.format.schema import KINDS, LAYOUTS
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.dataset.pack_index import put_index
from packstore.io.manifest.commit import commit
from packstore.io.manifest.manifest import Records, build_manifest
from packstore.io.shards.shard import PackShape
from packstore.io.side.side import SideWriter
from packstore.io.store.location import Location
from packstore.io.versions.shard_writer import ShardWriter
from packstore.pack.fill import fill

Row = dict[str, Any]
PACK_SIZE, VOCAB_SIZE = 96, 100
EXAMPLES_PER_PACK = (3, 1, 2, 4, 1, 3)
SIDES = ("preference-concat", "scored-shared_prefix")
TOKEN_SIDES = ("sft-concat", "scored-shared_prefix-forest")
"""Datasets that have values of tokens beside them."""

CARRY = {"source": "string", "turns": "int64", "weight": "float64", "checked": "bool"}


@dataclass(frozen=True)
class Sequence:
    """Token ids, which of them are supervised, and the reward."""

    ids: list[int]
    supervised: list[bool]
    reward: float

    @property
    def prompt(self) -> list[int]:
        """The ids before the first supervised token."""
        return self.ids[: self.supervised.index(True)]


@dataclass(frozen=True)
class Golden:
    """One golden dataset: its name, and the settings that make it.

    Attributes:
        kind, layout, file_format: of the dataset.
        is_forest: its sequences are conversations that continue each other, and share
            what they can with any earlier sequence of their pack.
    """

    kind: str
    layout: str
    file_format: str = "parquet"
    is_forest: bool = False

    @property
    def name(self) -> str:
        """Kind, layout, ``forest``, and the file format if it is not Parquet."""
        suffix = "-forest" if self.is_forest else ""
        if self.file_format != "parquet":
            suffix += f"-{self.file_format}"
        return f"{self.kind}-{self.layout}{suffix}"

    @property
    def carry(self) -> dict[str, str]:
        """Kind ``sft`` carries columns."""
        return CARRY if self.kind == "sft" else {}


def goldens() -> Iterator[Golden]:
    """Every kind and layout as Parquet, forests of every kind, and some as Arrow."""
    for kind, layout in itertools.product(KINDS, LAYOUTS):
        yield Golden(kind, layout)
    yield Golden("preference", "concat", "arrow")
    yield Golden("scored", "shared_prefix", "arrow")
    for kind in KINDS:
        yield Golden(kind, "shared_prefix", is_forest=True)
    yield Golden("sft", "shared_prefix", "arrow", is_forest=True)


PATHS = ("", "A", "AB", "AC", "ABD", "A", "ABDE", "ABDF", "G", "GA", "ABDEH", "ACA")
"""The turns of conversations; each turn has a letter. They continue each other, fork,
and one is there twice.
"""


def turn(letter: str) -> list[int]:
    """The tokens of a turn; some have one token."""
    n = ord(letter) - ord("A")
    return [(13 * n + 5 * j) % VOCAB_SIZE for j in range(1 + n % 3)]


def conversation(kind: str, number: int, k: int) -> Sequence:
    """Two tokens that all begin with, turns, and a token for the response."""
    ids = [1, 2]
    supervised = [False, False]
    for letter in PATHS[(number + k) % len(PATHS)]:
        ids += turn(letter)
        # Some learn the turns that others only read.
        supervised += [number % 4 == 1] * len(turn(letter))
    ids.append(90 + k)
    supervised.append(True)
    reward = 1.0 if kind == "sft" else (number - 4 * k) / 8
    return Sequence(ids, supervised, reward)


def example(golden: Golden, number: int) -> list[Sequence]:
    """An example whose sequences mostly share their prompt, and sometimes part inside
    it.
    """
    kind = golden.kind
    sequences = []
    if golden.is_forest:
        responses = range(KINDS[kind] or 1 + number % 3)
        return [conversation(kind, number, k) for k in responses]
    for k in range(KINDS[kind] or 2 + number % 3):
        prompt = [(5 * number + 3 * j) % VOCAB_SIZE for j in range(1 + number % 6)]
        if k and number % 5 == 4:
            prompt[k % len(prompt)] = 99
        ids = prompt + [
            (11 * number + 7 * k + j) % VOCAB_SIZE for j in range(1 + (number + k) % 4)
        ]
        supervised = [j >= len(prompt) for j in range(len(ids))]
        if number % 4 == 3:  # two more turns, of which only the second is supervised
            ids += [number, 0, k]
            supervised += [False, False, True]
        reward = 1.0 if kind == "sft" else (number - 4 * k) / 8
        sequences.append(Sequence(ids, supervised, reward))
    return sequences


def shared_tokens(a: list[int], b: list[int]) -> int:
    """The number of leading tokens that are the same in both."""
    pairs = zip(a, b, strict=False)
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))


def left_out(earlier: list[Sequence], sequence: Sequence) -> tuple[int, int]:
    """The leading tokens that a sequence leaves out in layout ``shared_prefix``.

    Args:
        earlier: the sequences before it that it may share them with.
        sequence: the sequence.

    Returns:
        Their number, and how many sequences before it its parent stands: the first of
        those that share the most of its prompt.
    """
    counts = [shared_tokens(other.ids, sequence.prompt) for other in earlier]
    most = max(counts, default=0)
    if most < 2:
        return 0, 0
    return most - 1, len(earlier) - counts.index(most)


def row(golden: Golden, numbers: list[int]) -> Row:
    """The pack of these examples, as JSON values."""
    out: Row = {n: [] for n in ("input_ids", "labels", "reward", "lengths")}
    out["seq_boundaries"] = [0]
    if golden.layout == "shared_prefix":
        out["parent_distances"] = []
    out["example_ids"] = [ident(n) for n in numbers]
    if golden.kind == "scored":
        out["num_responses"] = [len(example(golden, n)) for n in numbers]
    earlier: list[Sequence] = []
    for number in numbers:
        if not golden.is_forest:
            earlier = []
        for s in example(golden, number):
            start = 0
            if golden.layout == "shared_prefix":
                start, distance = left_out(earlier, s)
                out["parent_distances"].append(distance)
            earlier.append(s)
            labels = [
                i if on else IGNORE_INDEX
                for i, on in zip(s.ids, s.supervised, strict=True)
            ]
            out["input_ids"] += s.ids[start:]
            out["labels"] += labels[start:]
            out["reward"].append(s.reward)
            out["lengths"].append(len(s.ids))
            out["seq_boundaries"].append(len(out["input_ids"]))
    columns = carried(numbers) if golden.carry else {}
    return out | columns


def ident(number: int) -> int:
    """The records come from two files of seven."""
    return example_id(*divmod(number, 7))


def carried(numbers: list[int]) -> dict[str, list[Any]]:
    """The carried columns of these examples."""
    return {
        "source": [("forum", "", "naïve ☃")[n % 3] for n in numbers],
        "turns": [2**40 * n - 5 for n in numbers],
        "weight": [n / 16 for n in numbers],
        "checked": [n % 2 == 0 for n in numbers],
    }


def examples(golden: Golden, numbers: list[int]) -> Examples:
    """The same examples as packstore holds them."""
    groups = [example(golden, n) for n in numbers]
    flat = list(itertools.chain(*groups))
    columns = carried(numbers) if golden.carry else {}
    kinds = {
        "string": np.object_,
        "int64": np.int64,
        "float64": np.float64,
        "bool": np.bool_,
    }
    return Examples(
        input_ids=np.array([i for s in flat for i in s.ids], np.int32),
        supervised=np.array([on for s in flat for on in s.supervised], np.bool_),
        sequence_offsets=to_offsets(np.array([len(s.ids) for s in flat])),
        example_offsets=to_offsets(np.array([len(g) for g in groups])),
        reward=np.array([s.reward for s in flat], np.float32),
        example_ids=np.array([ident(n) for n in numbers], np.int64),
        columns={name: np.array(v, kinds[CARRY[name]]) for name, v in columns.items()},
    )


def write(golden: Golden, folder: Path, packs: list[list[int]]) -> None:
    """The dataset, through the writer that jobs use; several row groups and shards."""
    config = PackConfig.of(
        pack_size=PACK_SIZE,
        layout=golden.layout,
        format=golden.file_format,
        strategy="none",
        row_group_tokens=50,
        shard_tokens=1 if golden.file_format == "arrow" else 100,
    )
    shape = PackShape(
        kind=golden.kind,
        layout=golden.layout,
        pack_size=PACK_SIZE,
        carry=golden.carry,
        vocab_size=VOCAB_SIZE,
    )
    numbers = list(itertools.chain(*packs))
    sources = [{"path": f"part-{i}.jsonl", "records": 7} for i in range(2)]
    provenance = {
        "sources": sources,
        "tokenizer": {"vocab_size": VOCAB_SIZE},
        "settings": {},
        "package_version": "0.1.0",
    }
    location = Location(str(folder))
    with ShardWriter(location, shape, config, run="0123456789ab") as writer:
        offsets = to_offsets(np.array([len(p) for p in packs]))
        share = "pack" if golden.is_forest else "example"
        made = examples(golden, numbers)
        writer.write(fill(made, offsets, golden.layout, share=share))
        finished = writer.finish()
    records = Records(read=len(numbers), packed=len(numbers), dropped={}, noted={})
    manifest = build_manifest(shape, config, finished, records, {}, provenance)
    index = put_index(location, (part.sizes for part in finished), 1)
    commit(location, replace(manifest, pack_index=index).to_json(), 1)


def side_row(golden: Golden, number: int) -> Row:
    """Returns the row of an example in the side dataset."""
    sequences = len(example(golden, number))
    return {
        "example_ids": ident(number),
        "ref_logps": [-0.25 - number - k / 8 for k in range(sequences)],
        "note": ("", "naïve ☃")[number % 2],
        "rank": 2**40 - number,
        "score": number / 3,
        "good": number % 3 == 0,
        "margin": number / 4,
    }


SIDE_COLUMNS = {
    "ref_logps": "list<float32>",
    "note": "string",
    "rank": "int64",
    "score": "float64",
    "good": "bool",
    "margin": "float32",
}


def side_columns(golden: Golden, numbers: list[int]) -> Row:
    """Returns the columns of the side dataset, joined to the pack of these examples."""
    rows = [side_row(golden, number) for number in numbers]
    columns = {name: [row[name] for row in rows] for name in SIDE_COLUMNS}
    return columns | {"ref_logps": list(itertools.chain(*columns["ref_logps"]))}


def write_side(golden: Golden, where: str, source: Dataset) -> None:
    """The side dataset of a golden dataset, in two shards."""
    numbers = list(range(sum(EXAMPLES_PER_PACK)))
    provenance = {"model": "none", "dtype": "float32", "layers": 0, "checked": True}
    with SideWriter(where, source, SIDE_COLUMNS, provenance=provenance) as writer:
        for some in (numbers[7:], numbers[:7]):
            arrays = {c: np.array(v) for c, v in side_columns(golden, some).items()}
            counts = np.array([len(example(golden, n)) for n in some])
            writer.write(np.array([ident(n) for n in some]), arrays, counts)


TOKEN_COLUMNS = {
    "old_logps": "token<float32>",
    "half": "token<float16>",
    "teacher": "token<top4,float16>",
    "coarse": "token<top2,uint8>",
}


def num_targets(golden: Golden, number: int) -> int:
    """The supervised tokens of an example."""
    return sum(sum(s.supervised) for s in example(golden, number))


def token_row(golden: Golden, number: int) -> Row:
    """Returns the values of an example's tokens; those of 8 bits come back as given."""
    tokens = range(num_targets(golden, number))
    return {
        "old_logps": [float(np.float32(-number - t / 10)) for t in tokens],
        "half": [-number - t / 8 for t in tokens],
        "teacher": {
            "ids": [10 * k + t for t in tokens for k in range(4)],
            "logps": [-t / 8 - k / 4 for t in tokens for k in range(4)],
        },
        "coarse": {
            "ids": [i for t in tokens for i in (99 - t, t)],
            "logps": [x for _ in tokens for x in (-number / 16, -255 / 16)],
        },
    }


def token_columns(golden: Golden, numbers: list[int]) -> Row:
    """Returns the columns of values of tokens, joined to the pack of these examples."""
    rows = [token_row(golden, number) for number in numbers]
    columns: Row = {}
    for name, first in rows[0].items():
        values = [row[name] for row in rows]
        if isinstance(first, dict):
            columns[name] = {m: [x for v in values for x in v[m]] for m in first}
        else:
            columns[name] = list(itertools.chain(*values))
    return columns


def write_tokens(golden: Golden, where: str, source: Dataset) -> None:
    """The values of tokens of a golden dataset."""
    numbers = list(range(sum(EXAMPLES_PER_PACK)))
    columns = token_columns(golden, numbers)
    values: dict[str, Any] = {n: np.array(columns[n]) for n in ("old_logps", "half")}
    for name, k in (("teacher", 4), ("coarse", 2)):
        ids, logps = (np.array(columns[name][m]) for m in ("ids", "logps"))
        values[name] = TopK(ids.reshape(-1, k), logps.reshape(-1, k))
    with SideWriter(where, source, TOKEN_COLUMNS) as writer:
        ids = np.array([ident(n) for n in numbers])
        sequences = [len(example(golden, n)) for n in numbers]
        targets = [num_targets(golden, n) for n in numbers]
        writer.write(ids, values, sequences, targets)


def packs() -> list[list[int]]:
    """The numbers of the examples of each pack."""
    bounds = list(itertools.accumulate(EXAMPLES_PER_PACK, initial=0))
    return [list(range(a, b)) for a, b in itertools.pairwise(bounds)]


def make(root: Path) -> None:
    """All golden datasets below ``root/datasets``, and side datasets below
    ``root/sides``.
    """
    for golden in goldens():
        folder = root / "datasets" / golden.name
        write(golden, folder, packs())
        if golden.name in SIDES:
            source = open_dataset(str(folder))
            write_side(golden, str(root / "sides" / golden.name), source)
        if golden.name in TOKEN_SIDES:
            source = open_dataset(str(folder))
            write_tokens(golden, str(root / "sides" / f"{golden.name}-tokens"), source)
