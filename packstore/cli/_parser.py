"""The front page, and argument parsers with a short usage whose errors are one line."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from packstore.errors import display, visible_line
from packstore.registry import meant

FRONT_PAGE = """\
Packed, checked, self-describing preference data: pack once, train anywhere.

prepare:
  pack       tokenize and pack records into a dataset, or repack a dataset
             $ packstore pack prefs.jsonl prefs-8k --tokenizer tokenizer.json
  append     pack more records into a dataset, as its next version
             $ packstore append prefs-8k more.jsonl
  concat     make one dataset of the shards of several, without rewriting them
             $ packstore concat prefs-a prefs-b prefs-all
  estimate   estimate fill, packs and steps of several pack sizes, from a sample
             $ packstore estimate prefs.jsonl --tokenizer tokenizer.json

look:
  inspect    show the manifest and statistics of a dataset
             $ packstore inspect prefs-8k
  show       decode packs, coloured by prompt, chosen, rejected and supervision
             $ packstore show prefs-8k
  view       look at packs in a browser; read-only, on this machine only
             $ packstore view prefs-8k
  stats      show distributions of lengths, supervision and rewards
             $ packstore stats prefs-8k

keep:
  clean      list or remove what killed jobs left, and old versions
             $ packstore clean prefs-8k
  verify     check every hash, every rule and every count of a dataset
             $ packstore verify prefs-8k

train:
  train      train a causal LM on a packed dataset: DPO and similar losses, SFT
             $ packstore train --example dpo > dpo.yaml
  ref-logps  compute the log-probs of a reference model once, as a side dataset
             $ packstore ref-logps prefs-8k prefs-8k-ref --model my-sft-model
  evaluate   compute accuracy, margins, rewards and loss of a model on a dataset
             $ packstore evaluate prefs-8k --model run --ref-logps ref-8k

exchange:
  export     write a dataset in the format of another trainer
             $ packstore export nemo prefs-8k packed_8192_seed0.npy
  publish    upload a dataset to the Hugging Face hub, with a card
             $ packstore publish prefs-8k me/prefs-8k

shell:
  completion print what completes commands and flags in bash, zsh or fish
             $ packstore completion zsh > ~/.zfunc/_packstore

`packstore COMMAND --help` shows the arguments and more examples of a command.
"""

SUMMARIES = {
    name: (text, example)
    for name, text, example in re.findall(
        r"^  ([\w-]+) +(.+)\n +\$ (.+)$", FRONT_PAGE, re.M
    )
}
"""Command -> what it does, and an example: the lines of the front page."""

NUMBERS = {"int": "a whole number", "float": "a number"}
"""Type of an argument -> what it must be, in an error."""


class Parser(argparse.ArgumentParser):
    """A parser with a short usage, whose errors are one line, with the nearest known
    name.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def format_help(self) -> str:
        """Returns the help; its usage names what is required."""
        flags = [a for a in self._actions if a.option_strings and a.required]
        words = [
            self.prog,
            *(f"{a.option_strings[0]} {a.metavar}" for a in flags),
            "[options]",
        ]
        for action in self._actions:
            if not action.option_strings:
                name = str(action.metavar or action.dest)
                name += (
                    " …"
                    if action.nargs in (argparse.ONE_OR_MORE, argparse.PARSER)
                    else ""
                )
                words.append(f"[{name}]" if action.nargs == argparse.OPTIONAL else name)
        self.usage = self.usage or " ".join(words)
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        """Prints the error without the usage, and exits with code 2."""
        text = f"{self.prog}: error: {self._clearer(message)} See `{self.prog} --help`."
        print(visible_line(text), file=sys.stderr)
        self.exit(2)

    def refuse(self, rest: Sequence[str]) -> NoReturn:
        """Refuses arguments that no flag takes; shows no values, which may be
        secrets.
        """
        flags = [text.partition("=")[0] for text in rest if text[0:1] == "-"]
        values = [display(text).partition("=")[0] for text in rest]
        self.error(f"unrecognized arguments: {' '.join(flags or values)}")

    def _clearer(self, message: str) -> str:
        known = [option for action in self._actions for option in action.option_strings]
        wrong = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if wrong is None and (
            wrong := re.search(r"invalid choice: '([^']+)'", message)
        ):
            known = re.findall(r"[\w-]+", message[wrong.end() :])
        if wrong and (hint := meant(wrong[1], known, str)):
            return f"{message.partition(' (choose from')[0]}.{hint}"
        number = re.fullmatch(
            r"argument (.+): invalid (int|float) value: (.+)", message
        )
        if number:
            message = f"{number[1]} must be {NUMBERS[number[2]]}; found {number[3]}"
        return f"{message.rstrip('.')}."


def add_command(
    commands: argparse._SubParsersAction[Any], name: str, summary: str, examples: str
) -> argparse.ArgumentParser:
    """Adds a command, whose help begins with the summary and ends with the examples."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser
