"""Compares stored token ids with those of the libraries alone.

    python benchmarks/tokenizing.py --data ../shared/data

`exactness`: every file of records with every tokenizer, packed to disk with every engine and read
again with `packstore.scan`. Each sequence must equal what transformers makes of the same record:
`apply_chat_template` of messages, and one text of prompt and response with the tokenizer's BOS and
EOS; the labels of text must begin where the ids of the prompt alone end. Packs of the other engines
must equal those of the reference engine, `tokenizers`, in labels, too, and in what was dropped.
Only the shapes of records (names of fields, roles, tool calls) are taken from packstore. An engine
that refuses a tokenizer is named as such. A SentencePiece ``.model`` is compared with the
``tokenizer.json`` of the same vocabulary.
"""

from __future__ import annotations

import argparse
import gzip
import itertools
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

import polars as pl
from jinja2 import UndefinedError
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerFast

import packstore
from packstore.errors import PackstoreError
from packstore.format.arrays import IGNORE_INDEX, Rows, example_id
from packstore.tokenizer import FASTER, Tokenizer, load_tokenizer
from packstore.tokenizer.chat.messages import normalize_messages, normalize_tools
from packstore.tokenizer.fastest import fastest
from packstore.version import VERSION

RESULTS = Path(__file__).parent / "results" / "tokenizing.json"
TOKENIZERS = {
    "qwen3": ("tokenizers/qwen3", None, None, "<|im_end|>"),
    "mistral_v1": ("tokenizers/mistral_v1/tokenizer.json", "plain", "<s>", "</s>"),
    "mistral_v1 .model": ("tokenizers/mistral_v1/tokenizer.model", "plain", "<s>", "</s>"),
    "small_bpe": ("tokenizers/small_bpe/tokenizer.json", "chatml", None, None),
    "t5_unigram": ("tokenizers/t5_unigram/tokenizer.json", "plain", None, "</s>"),
    "nemo": ("nemo/tokenizer.json", "chatml", "<|begin_of_text|>", "<|end_of_text|>"),
}
"""Name -> path, the chat template where the tokenizer has none, BOS and EOS."""

SAME_AS = {"mistral_v1 .model": "mistral_v1"}
REFERENCE = "tokenizers"
KINDS = {
    "preference": ("nemo", "pairs"),
    "ranked": ("ranked",),
    "sft": ("sft",),
}
"""Kind -> folders of files of this kind."""

PACK_SIZE = 65536
"""No record is longer."""

Sequence = tuple[list[int], int | None]
"""Ids, and the number of tokens before the first label; None where only the ids are known."""


def read(path: Path) -> Rows:
    """All records of a file."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        values = [json.loads(line) for line in lines]
    return Rows(0, path.name, "line", list(range(len(values))), values)


def load(data: Path, name: str, engine: str) -> Tokenizer:
    """A tokenizer with one engine.

    Raises:
        PackstoreError: the engine refuses it.
    """
    path, template, *_ = TOKENIZERS[name]
    found = load_tokenizer(data / path, engine=engine, chat_template=template)
    return fastest(found) if engine == "auto" else found


class Library:
    """Ids of a record by transformers alone."""

    def __init__(self, data: Path, name: str) -> None:
        path, _, bos, eos = TOKENIZERS[SAME_AS.get(name, name)]
        file = data / path / "tokenizer.json" if (data / path).is_dir() else data / path
        self._tokenizer = PreTrainedTokenizerFast(
            tokenizer_file=str(file), bos_token=bos, eos_token=eos,
            chat_template=load(data, name, "auto").chat_template,
        )  # fmt: skip
        self._end = [] if eos is None else [self._tokenizer.eos_token_id]

    def sequences(self, record: dict[str, Any]) -> list[Sequence]:
        """Each response of a record with its prompt."""
        prompt, tools = record.get("prompt"), normalize_tools(record.get("tools"))
        if "messages" in record:
            return [self._of_chat(record["messages"], tools)]
        responses = record.get("responses") or [
            record.get(f"{side}_response", record.get(side)) for side in ("chosen", "rejected")
        ]
        if isinstance(prompt, list):
            return [self._of_chat([*prompt, *_turns(one)], tools) for one in responses]
        texts = [(prompt or "") + one for one in responses]
        if prompt is None:  # whole dialogues; the prompt is found in them
            return [(self._of_text(text), None) for text in texts]
        before = self._tokenizer(prompt)["input_ids"]
        return [(ids, _agreeing(before, ids)) for ids in map(self._of_text, texts)]

    def _of_text(self, text: str) -> list[int]:
        return [*self._tokenizer(text)["input_ids"], *self._end]

    def _of_chat(self, messages: list[Any], tools: list[Any] | None) -> Sequence:
        turns = normalize_messages(messages)
        try:
            ids = self._tokenizer.apply_chat_template(turns, tools=tools, return_dict=False)
        except UndefinedError:  # a turn with calls only; transformers leaves out its null content
            turns = [{**turn, "content": turn["content"] or ""} for turn in turns]
            ids = self._tokenizer.apply_chat_template(turns, tools=tools, return_dict=False)
        return list(ids), None


def _turns(response: Any) -> list[Any]:
    if isinstance(response, str):
        return [{"role": "assistant", "content": response}]
    return response if isinstance(response, list) else [response]


def _agreeing(a: list[int], b: list[int]) -> int:
    """Length of the common prefix."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


def stored(sources: list[Path], data: Path, name: str, engine: str, kind: str) -> pl.DataFrame:
    """Packs files with an engine, and reads the dataset: one row for each example.

    Raises:
        PackstoreError: the engine refuses the tokenizer.
    """
    path, template, *_ = TOKENIZERS[name]
    with tempfile.TemporaryDirectory(prefix="packstore-bench-") as scratch:
        dataset = packstore.pack(
            [str(source) for source in sources], f"{scratch}/out", str(data / path), kind=kind,
            tokenizer_engine=engine, chat_template=template, pack_size=PACK_SIZE,
        )  # fmt: skip
        assert dataset.manifest.provenance["tokenizer"]["engine"] == engine
        frame = packstore.scan(dataset, tokens=True).select("example_id", "input_ids", "labels")
        return frame.collect().sort("example_id")


def examples(frame: pl.DataFrame) -> dict[int, tuple[list[list[int]], list[list[int]]]]:
    """Id of each example -> ids and labels of its sequences."""
    return {key: (ids, labels) for key, ids, labels in frame.iter_rows()}


def differing(
    found: tuple[list[list[int]], list[list[int]]], expected: list[Sequence]
) -> Iterator[bool]:
    """For each sequence, if ids or the first label differ from the library's."""
    for ids, labels, (wanted, start) in zip(*found, expected, strict=True):
        rest = ids if start is None else [IGNORE_INDEX] * max(start, 1) + ids[max(start, 1) :]
        yield ids != wanted or (start is not None and labels != rest)


def exactness(data: Path) -> list[dict[str, Any]]:
    """One entry for each tokenizer and file."""
    found = []
    for name, (kind, folders) in itertools.product(TOKENIZERS, KINDS.items()):
        files = sorted(p for folder in folders for p in data.glob(f"{folder}/*.jsonl*"))
        library = Library(data, name)
        engines = ("sentencepiece",) if name in SAME_AS else (REFERENCE, *FASTER)
        frames: dict[str, Any] = {}
        for engine in engines:
            try:
                frames[engine] = examples(stored(files, data, name, engine, kind))
            except PackstoreError as error:
                frames[engine] = f"refused: {error}".replace(f"{data}/", "")[:160]
        first = frames[engines[0]]
        for number, file in enumerate(files):
            records = read(file).values
            keys = [example_id(number, i) for i in range(len(records))]
            expected = {
                key: library.sequences(record)  # type: ignore[arg-type]
                for key, record in zip(keys, records, strict=True)
                if key in first
            }
            entry: dict[str, Any] = {
                "tokenizer": name, "file": str(file.relative_to(data)), "records": len(records),
                "dropped": len(records) - len(expected),
                "sequences": sum(map(len, expected.values())),
                "tokens": sum(len(ids) for one in expected.values() for ids, _ in one),
            }  # fmt: skip
            for engine, own in frames.items():
                entry[engine] = own if isinstance(own, str) else 0
                if isinstance(own, str):
                    continue
                for key in keys:
                    if key not in expected or key not in own:
                        entry[engine] += (key in own) + len(expected.get(key, ()))
                    elif own[key] != first[key]:
                        entry[engine] += len(expected[key])
                    else:
                        entry[engine] += sum(differing(own[key], expected[key]))
            found.append(entry)
            print(json.dumps(entry), flush=True)
    show(found)
    return found


def show(entries: list[dict[str, Any]]) -> None:
    """Prints a table of files and tokenizers: sequences compared, and how many differ."""
    names = list(dict.fromkeys(entry["tokenizer"] for entry in entries))
    table = Table("file", *names, title="sequences compared (with each engine), and differing")
    for file in dict.fromkeys(entry["file"] for entry in entries):
        cells = []
        for entry in (e for e in entries if e["file"] == file):
            engines = [e for e in (REFERENCE, *FASTER, "sentencepiece") if e in entry]
            counts = [entry[e] for e in engines if isinstance(entry[e], int)]
            cells.append(f"{len(counts)} x {entry['sequences']:,}: {sum(counts)}")
        table.add_row(file, *cells)
    Console(width=150).print(table)


def main() -> None:
    """Writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    libraries = ("tokenizers", "fastokens", "gigatoken", "sentencepiece", "jinja2")
    result = {
        "exactness": exactness(arguments.data),
        "machine": {"cpu": platform.machine(), "python": platform.python_version()},
        "versions": {"packstore": VERSION, **{name: version(name) for name in libraries}},
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
