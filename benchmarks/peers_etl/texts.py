"""Pairs made of real prompts and answers, put together anew: engines cache text that
repeats.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import orjson
from common import records

WANTED = {"long": (2, 10), "short": (1, 1)}
"""Paragraphs of an answer, at least and at most."""


def write_pairs(
    shared: Path, path: Path, number: int, kind: str, form: str = "text"
) -> None:
    """`number` pairs as JSON lines: ``long`` ones have about 4 kB, ``short`` ones a
    tenth.

    The same `number` gives the same texts in each form: ``text``, or ``chat``, lists of
    messages.
    """
    draw = random.Random(number)
    prompts, paragraphs = _texts(shared)
    if kind == "short":
        prompts = [p[p.rfind("\n\nHuman:") :] for p in prompts]
        paragraphs = [p[:120] for p in paragraphs]
    low, high = WANTED[kind]
    with open(path, "wb") as file:
        for _ in range(number):
            sides = [
                " " + "\n\n".join(draw.choices(paragraphs, k=draw.randint(low, high)))
                for _ in range(2)
            ]
            prompt: Any = draw.choice(prompts)
            if form == "chat":
                prompt, *sides = as_messages(prompt, *sides)
            pair = {"prompt": prompt, "chosen": sides[0], "rejected": sides[1]}
            file.write(orjson.dumps(pair) + b"\n")


def as_messages(prompt: str, *answers: str) -> list[list[dict[str, str]]]:
    """Messages of a prompt with "Human:" and "Assistant:", and of answers to it."""
    _, *pieces, _, _ = re.split(r"\n\n(Human|Assistant):", prompt)
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = zip(pieces[::2], pieces[1::2], strict=True)
    dialogue = [{"role": roles[role], "content": text.strip()} for role, text in turns]
    return [
        dialogue,
        *([{"role": "assistant", "content": one.strip()}] for one in answers),
    ]


def _texts(shared: Path) -> tuple[list[str], list[str]]:
    """Prompts that end where the assistant begins, and paragraphs of answers."""
    prompts: list[str] = []
    answers: list[str] = []
    for record in records(shared / "hh_harmless.jsonl.gz"):
        prompts.append(record["prompt"])
        answers += [record["chosen"], record["rejected"]]
    for name in ("chat_en.jsonl", "chat_zh.jsonl"):
        for record in records(shared / name):
            turns = [
                f"\n\nHuman: {m['content']}"
                for m in record["prompt"]
                if m["role"] == "user"
            ]
            prompts.append("".join(turns) + "\n\nAssistant:")
            answers += 3 * [record["chosen"], record["rejected"]]
    paragraphs = [p.strip() for answer in answers for p in answer.split("\n\n")]
    return [p for p in prompts if len(p) < 4000], [p for p in paragraphs if len(p) > 40]
