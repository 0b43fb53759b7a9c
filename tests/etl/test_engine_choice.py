"""The engine that `auto` takes: a faster one only where it saves more than it takes to load."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from packstore.config import PackConfig
from packstore.etl.sources import RecordExampleReader, open_examples
from packstore.tokenizer import recorded_tokenizer
from packstore.tokenizer.fastest import LOADING

Record = dict[str, str]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Bytes as tokens."""
    names = {c: i for i, c in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(names, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path_factory.mktemp("model") / "tokenizer.json"
    made.save(str(path))
    return str(path)


def write_jsonl(path: Path, records: list[Record]) -> str:
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return str(path)


def write_csv(path: Path, records: list[Record]) -> str:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, records[0])
        writer.writeheader()
        writer.writerows(records)
    return str(path)


SOURCES: dict[str, Callable[[Path, list[Record]], Any]] = {
    "in.jsonl": write_jsonl,
    "in.csv": write_csv,
    "memory": lambda _, records: records,
}


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("block_bytes", [1000, 1 << 20])
def test_size_decides_not_blocks_or_formats(
    name: str, block_bytes: int, model: str, tmp_path: Path
) -> None:
    size = Path(model).stat().st_size // LOADING
    for share, engine in ((0.4, "tokenizers"), (3, "fastokens")):
        number = int(share * size) // 100 + 1
        records = [{"prompt": "p" * 60, "chosen": f"{i}", "rejected": "no"} for i in range(number)]
        source = SOURCES[name](tmp_path / name, records)
        reader = open_examples(source, model, PackConfig(), {}, block_bytes)
        assert isinstance(reader, RecordExampleReader)
        assert reader.tokenizer is not None
        assert reader.tokenizer.engine_name == engine
        assert sum(tally.read for _, tally in reader) == number  # also of the blocks read before


def test_text_is_decoded_by_the_reference_alone(model: str) -> None:
    assert recorded_tokenizer({}, model, "ds", "").engine_name == "tokenizers"
