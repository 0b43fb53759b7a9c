"""Compares tokenizer engines on real records: equal ids from all, and the cost of chats.

    python benchmarks/tokenizing.py --data ../shared/data

`exactness`: every file of records with every tokenizer and chat template; what the reference engine
makes of all records, and whether each other engine makes the same: token ids, labels, boundaries,
example ids, and what was dropped or noted. An engine that refuses a tokenizer is named as such. The
two forms of a SentencePiece vocabulary are compared likewise.

`chats`: pairs that are lists of messages beside the same pairs as the text that their template
writes, with the engine that `auto` takes: CPU nanoseconds per token of one thread, least of several
interleaved runs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

from importlib.metadata import version

import numpy as np

from packstore.config import PackConfig
from packstore.errors import PackstoreError
from packstore.format.arrays import Examples, Rows, Tally
from packstore.tokenizer import FASTER, RecordTokenizer, Tokenizer, detect_kind, load_tokenizer
from packstore.tokenizer.records.shapes import parse_record
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.rendered import check_responses, draft_record
from packstore.version import VERSION

RESULTS = Path(__file__).parent / "results" / "tokenizing.json"
TOKENIZERS = {
    "qwen3": ("tokenizers/qwen3", None),
    "mistral_v1": ("tokenizers/mistral_v1/tokenizer.json", "plain"),
    "mistral_v1 .model": ("tokenizers/mistral_v1/tokenizer.model", "plain"),
    "small_bpe": ("tokenizers/small_bpe/tokenizer.json", "chatml"),
    "t5_unigram": ("tokenizers/t5_unigram/tokenizer.json", "plain"),
    "nemo": ("nemo/tokenizer.json", "chatml"),
}
"""Name -> path, and the chat template where the tokenizer has none."""

SAME_AS = {"mistral_v1 .model": "mistral_v1"}
CHATS = ("pairs/chat_en.jsonl", "pairs/chat_zh.jsonl", "pairs/hh_harmless_messages.jsonl.gz")
RUNS = 5

Made = tuple[Examples, Tally]


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
    path, template = TOKENIZERS[name]
    return load_tokenizer(data / path, engine=engine, chat_template=template)


def make(tokenizer: Tokenizer, rows: Rows) -> Made:
    """Examples and tally of all records."""
    config = PackConfig(pack_size=8192)
    kind = detect_kind(rows.values[0], config, rows.where(0))
    return RecordTokenizer(tokenizer, config, kind)(rows)


def same(a: Made, b: Made) -> bool:
    """Returns True if ids, labels, boundaries and counts are equal."""
    arrays = ("input_ids", "supervised", "sequence_offsets", "example_offsets", "example_ids")
    equal = all(np.array_equal(getattr(a[0], n), getattr(b[0], n)) for n in arrays)
    return equal and asdict(a[1]) == asdict(b[1])


def exactness(data: Path) -> list[dict[str, Any]]:
    """One entry for each tokenizer and file."""
    found = []
    files = sorted(p for p in data.glob("*/*.jsonl*"))
    for name in TOKENIZERS:
        base = SAME_AS.get(name, name)
        reference = load(data, base, "tokenizers")
        engines: dict[str, Tokenizer | str] = {}
        for engine in ("sentencepiece",) if name in SAME_AS else FASTER:
            try:
                engines[engine] = load(data, name, engine)
            except PackstoreError as error:
                engines[engine] = f"refused: {error}".replace(f"{data}/", "")[:160]
        for file in files:
            rows = read(file)
            expected = make(reference, rows)
            entry: dict[str, Any] = {
                "tokenizer": name,
                "file": str(file.relative_to(data)),
                "records": len(rows.values),
                "tokens": expected[0].num_tokens,
            }
            for engine, tokenizer in engines.items():
                refused = isinstance(tokenizer, str)
                entry[engine] = tokenizer if refused else same(make(tokenizer, rows), expected)
            found.append(entry)
            print(json.dumps(entry), flush=True)
    return found


def as_text(rows: Rows, tokenizer: Tokenizer) -> Rows:
    """The pairs as prompt and responses in the words that the template writes."""
    config, values = PackConfig(pack_size=8192), []
    for value in rows.values:
        try:
            parsed = check_responses(parse_record(value, "preference", config), config)
            chosen, rejected = draft_record(parsed, tokenizer, config)[0]
        except Refused:
            continue
        at = chosen.spans[0][0]
        texts = (chosen.text[:at], chosen.text[at:], rejected.text[at:])
        values.append(dict(zip(("prompt", "chosen", "rejected"), texts, strict=True)))
    return Rows(0, rows.path, rows.unit, list(range(len(values))), values)


def chats(data: Path) -> list[dict[str, Any]]:
    """One entry for each file of chats."""
    found = []
    for name in ("qwen3", "mistral_v1"):
        tokenizer = load(data, name, "auto")
        tokenize = RecordTokenizer(
            tokenizer, PackConfig(pack_size=8192, special_tokens="control"), "preference"
        )
        for file in CHATS:
            rows = read(data / file)
            forms = {"messages": rows, "text": as_text(rows, tokenizer)}
            best: dict[str, tuple[float, int]] = {}
            for _ in range(RUNS):
                for form, some in forms.items():
                    start = time.process_time()
                    examples = tokenize(some)[0]
                    took = (time.process_time() - start) / examples.num_tokens
                    best[form] = min(best.get(form, (9e9, 0)), (took, examples.num_tokens))
            pairs = tokenize(rows)[0].num_examples
            entry: dict[str, Any] = {
                "tokenizer": name, "engine": tokenizer.engine_name, "file": file, "pairs": pairs,
            }  # fmt: skip
            for form, (took, tokens) in best.items():
                entry[form] = {
                    "ns_per_token": round(1e9 * took, 1),
                    "pairs_per_s": round(pairs / took / tokens),
                }
            entry["ratio"] = round(best["messages"][0] / best["text"][0], 2)
            found.append(entry)
            print(json.dumps(entry), flush=True)
    return found


def main() -> None:
    """Writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--only", choices=("exactness", "chats"))
    arguments = parser.parse_args()
    libraries = ("tokenizers", "fastokens", "gigatoken", "sentencepiece", "jinja2")
    result: dict[str, Any] = {}
    if arguments.out.exists():
        result = json.loads(arguments.out.read_text(encoding="utf-8"))
    for name, measure in {"exactness": exactness, "chats": chats}.items():
        if arguments.only in (None, name):
            result[name] = measure(arguments.data)
    result["machine"] = {"cpu": platform.machine(), "python": platform.python_version()}
    result["versions"] = {"packstore": VERSION, **{name: version(name) for name in libraries}}
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
