"""Compares the cost of chats with that of the texts that their templates write.

    python benchmarks/templates.py --data ../shared/data

Lists of messages beside the same chats as text, as pairs and as dialogues with all turns supervised
(of which the text has only the last), with Qwen3's tokenizer, the engine that `auto` takes, and the
chat templates of several models from the package `trl`: CPU nanoseconds per token of one thread,
least of several interleaved runs. `jinja` is with every dialogue rendered by Jinja.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import platform
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

import trl

from packstore.config import PackConfig
from packstore.format.arrays import Rows
from packstore.tokenizer import RecordTokenizer, Tokenizer, load_tokenizer
from packstore.tokenizer.fastest import fastest
from packstore.tokenizer.records.shapes import parse_record
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.rendered import check_responses, draft_record
from packstore.version import VERSION

RESULTS = Path(__file__).parent / "results" / "templates.json"
CHATS = {
    "pairs": ("preference", "pairs/chat_en.jsonl"),
    "short pairs": ("preference", "pairs/hh_harmless_messages.jsonl.gz"),
    "short dialogues": ("sft", "pairs/hh_harmless_messages.jsonl.gz"),
}
"""Name -> kind and file; dialogues are prompt and chosen answer."""
TEMPLATES = ("qwen3", "chatml", "llama3_1", "gemma3", "gemma4", "deepseekv3", "gptoss", "phi3")
RUNS = 5
MOST = 1000
"""Most records of chats."""


def read(path: Path) -> Rows:
    """All records of a file."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
        values = [json.loads(line) for line in lines]
    return Rows(0, path.name, "line", list(range(len(values))), values)


def dialogues(rows: Rows) -> Rows:
    """The prompts with the chosen answers."""
    values = [
        {"messages": [*value["prompt"], {"role": "assistant", "content": value["chosen"]}]}
        for value in rows.values
    ]
    return replace(rows, values=values)


def as_text(rows: Rows, tokenizer: Tokenizer, kind: str) -> Rows:
    """The records as prompt and responses in the words that the template writes."""
    config, values = PackConfig(pack_size=8192), []
    names = ("chosen", "rejected") if kind == "preference" else ("response",)
    for value in rows.values:
        try:
            parsed = check_responses(parse_record(value, kind, config), config)
            drafts = draft_record(parsed, tokenizer, config)[0]
        except Refused:
            continue
        at = drafts[0].spans[-1][0]
        texts = {name: draft.text[at:] for name, draft in zip(names, drafts, strict=True)}
        values.append({"prompt": drafts[0].text[:at], **texts})
    return Rows(0, rows.path, rows.unit, list(range(len(values))), values)


def chats(data: Path) -> list[dict[str, Any]]:
    """One entry for each template and kind of chats."""
    found = []
    folder = Path(trl.__file__).parent / "chat_templates"
    for name in TEMPLATES:
        template = name if name == "chatml" else str(folder / f"{name}.jinja")
        tokenizer = fastest(load_tokenizer(data / "tokenizers/qwen3", chat_template=template))
        by_jinja = replace(tokenizer)
        by_jinja.__dict__["engine"] = tokenizer.engine
        by_jinja.__dict__["template"] = replace(tokenizer.template, traced=False)  # type: ignore[type-var]
        for case, (kind, file) in CHATS.items():
            rows = read(data / file)
            rows = replace(rows, ordinals=rows.ordinals[:MOST], values=rows.values[:MOST])
            rows = dialogues(rows) if kind == "sft" else rows
            config = PackConfig(pack_size=8192, special_tokens="control")
            forms = {
                "messages": (RecordTokenizer(tokenizer, config, kind), rows),
                "jinja": (RecordTokenizer(by_jinja, config, kind), rows),
                "text": (RecordTokenizer(tokenizer, config, kind), as_text(rows, tokenizer, kind)),
            }
            best: dict[str, float] = {}
            for _ in range(RUNS):
                for form, (tokenize, some) in forms.items():
                    start = time.process_time()
                    examples = tokenize(some)[0]
                    took = 1e9 * (time.process_time() - start) / examples.num_tokens
                    best[form] = min(best.get(form, took), took)
            entry: dict[str, Any] = {
                "template": name, "chats": case, "records": examples.num_examples,
                "tokens": examples.num_tokens,
                "ns_per_token": {form: round(took, 1) for form, took in best.items()},
                "ratio": round(best["messages"] / best["text"], 2),
                "ratio_by_jinja": round(best["jinja"] / best["text"], 2),
            }  # fmt: skip
            found.append(entry)
            print(json.dumps(entry), flush=True)
    return found


def main() -> None:
    """Writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    libraries = ("fastokens", "jinja2", "tokenizers", "trl")
    result = {
        "chats": chats(arguments.data),
        "machine": {"cpu": platform.machine(), "python": platform.python_version()},
        "versions": {"packstore": VERSION, **{name: version(name) for name in libraries}},
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
