"""The front page: every command in its group, with what it does and an example.

It imports no command, so that it appears at once.
"""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Mapping

FRONT_PAGE: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "prepare": {
        "pack": (
            "tokenize and pack records into a dataset, or repack a dataset",
            "pack prefs.jsonl prefs-8k --tokenizer tokenizer.json",
        ),
        "append": (
            "pack more records into a dataset, as its next version",
            "append prefs-8k more.jsonl",
        ),
        "concat": (
            "make one dataset of the shards of several, without rewriting them",
            "concat prefs-a prefs-b prefs-all",
        ),
        "doctor": (
            "lint records against tokenizer and template, before packing",
            "doctor prefs.jsonl --tokenizer tokenizer.json",
        ),
        "estimate": (
            "estimate fill, packs and steps for several pack sizes, from a sample; "
            "writes no dataset",
            "estimate prefs.jsonl --tokenizer tokenizer.json",
        ),
    },
    "look": {
        "inspect": (
            "show the manifest and statistics of a dataset",
            "inspect prefs-8k",
        ),
        "show": (
            "decode packs, coloured by prompt, chosen, rejected and supervision",
            "show prefs-8k",
        ),
        "view": (
            "look at packs in a browser: search, filters, attention; read-only, on "
            "this machine only",
            "view prefs-8k",
        ),
        "stats": (
            "show distributions of lengths, supervision, examples per pack and rewards",
            "stats prefs-8k",
        ),
    },
    "keep": {
        "clean": (
            "list or remove what killed jobs left, and old versions",
            "clean prefs-8k",
        ),
        "verify": (
            "check every hash, every rule and every count of a dataset",
            "verify prefs-8k",
        ),
        "check": (
            "try a place: list, read, write, commit, speed; each line is ok or a remedy",
            "check s3://bucket/prefs-8k",
        ),
    },
    "train": {
        "train": (
            "train a causal LM on a packed dataset: DPO and similar losses, or SFT",
            "train examples/dpo.yaml",
        ),
        "ref-logps": (
            "compute the log-probs of a reference model once, as a side dataset",
            "ref-logps prefs-8k prefs-8k-ref --model my-sft-model",
        ),
        "evaluate": (
            "compute accuracy, margins, rewards and loss of a model on a packed dataset",
            "evaluate prefs-8k --model run/model --reference-model sft",
        ),
    },
    "exchange": {
        "export": (
            "write a dataset in the format of another trainer",
            "export nemo prefs-8k packed_8192_seed0.npy",
        ),
    },
}
"""Group -> command -> what it does, in one line, and the arguments of an example."""

SUMMARIES = {name: texts for group in FRONT_PAGE.values() for name, texts in group.items()}
"""Command -> the same two texts."""


def front_page(about: str) -> str:
    """Returns the page; `about` is one line on the program."""
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [*textwrap.wrap(about, width), ""]
    for group, commands in FRONT_PAGE.items():
        lines.append(f"{group}:")
        for name, (text, example) in commands.items():
            lines += _wrapped(f"{name:<10} {text}", width)
            lines.append(f"{'':13}$ packstore {example}")
        lines.append("")
    lines.append("`packstore COMMAND --help` shows the arguments and more examples of a command.")
    return "\n".join(lines) + "\n"


def _wrapped(text: str, width: int) -> Iterable[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent=" " * 13)
