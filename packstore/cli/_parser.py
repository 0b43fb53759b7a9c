"""The front page, and argument parsers with a short usage and errors of one line."""

from __future__ import annotations

import argparse
import itertools
import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from packstore.errors import display, visible_line
from packstore.registry import suggest


class Summary(NamedTuple):
    """The entry of a command on the front page."""

    text: str
    example: str


GROUPS: Mapping[str, Mapping[str, Summary]] = {
    "prepare": {
        "pack": Summary(
            "tokenize and pack records into a dataset, or repack a dataset",
            "packstore pack prefs.jsonl prefs-8k --tokenizer tokenizer.json",
        ),
        "append": Summary(
            "pack more records into a dataset, as its next version",
            "packstore append prefs-8k more.jsonl",
        ),
        "concat": Summary(
            "join the shards of several datasets, without rewriting them",
            "packstore concat prefs-a prefs-b prefs-all",
        ),
        "estimate": Summary(
            "estimate fill, packs and steps of several pack sizes, from a sample",
            "packstore estimate prefs.jsonl --tokenizer tokenizer.json",
        ),
    },
    "look": {
        "inspect": Summary(
            "show the manifest and statistics of a dataset",
            "packstore inspect prefs-8k",
        ),
        "show": Summary(
            "decode packs, coloured by prompt, chosen, rejected and supervision",
            "packstore show prefs-8k",
        ),
        "view": Summary(
            "look at packs in a browser; read-only, on this machine only",
            "packstore view prefs-8k",
        ),
        "stats": Summary(
            "show distributions of lengths, supervision and rewards",
            "packstore stats prefs-8k",
        ),
    },
    "keep": {
        "clean": Summary(
            "list or remove old versions, and files that killed jobs left",
            "packstore clean prefs-8k",
        ),
        "verify": Summary(
            "check every hash, rule and count of a dataset, or of a side dataset",
            "packstore verify prefs-8k",
        ),
    },
    "train": {
        "train": Summary(
            "train a causal LM on a packed dataset: DPO and similar losses, SFT",
            "packstore train --example dpo > dpo.yaml",
        ),
        "ref-logps": Summary(
            "compute the log-probs of a reference model once, as a side dataset",
            "packstore ref-logps prefs-8k prefs-8k-ref --model my-sft-model",
        ),
        "evaluate": Summary(
            "compute accuracy, margins, rewards and loss of a model on a dataset",
            "packstore evaluate prefs-8k --model run --ref-logps ref-8k",
        ),
    },
    "exchange": {
        "export": Summary(
            "write a dataset as text, or in the format of another trainer",
            "packstore export text prefs-8k prefs.jsonl",
        ),
        "publish": Summary(
            "upload a dataset to the Hugging Face hub, with a card",
            "packstore publish prefs-8k me/prefs-8k",
        ),
    },
    "shell": {
        "completion": Summary(
            "print the completion of commands and flags for bash, zsh or fish",
            "packstore completion zsh > ~/.zfunc/_packstore",
        ),
    },
}
"""Group on the front page -> its commands."""

SUMMARIES = {
    name: summary for group in GROUPS.values() for name, summary in group.items()
}


_HELP_HINT = (
    "`packstore COMMAND --help` shows the arguments and more examples of a command."
)


def _front_page() -> str:
    lines = [
        "Packed, checked, self-describing preference data: pack once, train anywhere."
    ]
    for title, commands in GROUPS.items():
        lines += ["", f"{title}:"]
        for name, summary in commands.items():
            lines.append(f"  {name:10} {summary.text}")
            lines.append(f"             $ {summary.example}")
    lines += ["", _HELP_HINT]
    return "\n".join(lines) + "\n"


FRONT_PAGE = _front_page()

NUMBER_TYPES = {"int": "a whole number", "float": "a number"}
"""Type of an argument, as argparse calls it -> its name in an error."""


class Parser(argparse.ArgumentParser):
    """A parser with a short usage and short errors.

    An error is one line, which suggests the nearest name for an unknown one.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def format_help(self) -> str:
        """Return the help. The usage names only required arguments."""
        if self.usage is None:
            self.usage = self._short_usage()
        return super().format_help()

    def _short_usage(self) -> str:
        words = [self.prog]
        for action in self._actions:
            if action.option_strings and action.required:
                words.append(f"{action.option_strings[0]} {action.metavar}")
        words.append("[options]")
        for action in self._actions:
            if not action.option_strings:
                words.append(_usage_of_positional(action))
        return " ".join(words)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments. A switch takes no value: one that has true or false is
        refused, as the value would be taken for a file.
        """
        words = sys.argv[1:] if args is None else list(args)
        switches = set[str]()
        for action in self._actions:
            if action.nargs == 0:
                switches.update(action.option_strings)
        for flag, value in itertools.pairwise(words):
            if flag in switches and value.lower() in ("true", "false"):
                off = f"--no-{flag[2:]}"
                spelling = f"{flag} or {off}" if off in switches else flag
                self.error(f"{flag} takes no value: write {spelling}; found {value}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print the error without the usage, and exit with code 2."""
        text = f"{self.prog}: error: {self._improve(message)} See `{self.prog} --help`."
        print(visible_line(text), file=sys.stderr)
        self.exit(2)

    def refuse(self, unknown_words: Sequence[str]) -> NoReturn:
        """Refuse words that the parser does not know.

        The error shows flags without their values, which may be secrets; if none is a
        flag, it shows the words.
        """
        flags = [word.partition("=")[0] for word in unknown_words if word[:1] == "-"]
        shown_words = [display(word).partition("=")[0] for word in unknown_words]
        self.error(f"unrecognized arguments: {' '.join(flags or shown_words)}")

    def _improve(self, message: str) -> str:
        """Improve an error of argparse: suggest the nearest name, spell out types."""
        flag = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if flag is not None:
            hint = suggest(flag[1], self._flags(), str)
            if hint:
                return f"{message}.{hint}"

        choice = re.search(r"invalid choice: '([^']+)'", message)
        if choice is not None:
            choices = re.findall(r"[\w-]+", message[choice.end() :])
            hint = suggest(choice[1], choices, str)
            if hint:
                return f"{message.partition(' (choose from')[0]}.{hint}"

        number = re.fullmatch(
            r"argument (.+): invalid (int|float) value: (.+)", message
        )
        if number is not None:
            flag_name, type_name, value = number.groups()
            message = f"{flag_name} must be {NUMBER_TYPES[type_name]}; found {value}"
        return f"{message.rstrip('.')}."

    def _flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings]


def _usage_of_positional(action: argparse.Action) -> str:
    name = str(action.metavar or action.dest)
    if action.nargs in (argparse.ONE_OR_MORE, argparse.PARSER):
        return f"{name} …"
    if action.nargs == argparse.OPTIONAL:
        return f"[{name}]"
    return name


def add_command(
    commands: argparse._SubParsersAction[Any], name: str, summary: str, examples: str
) -> argparse.ArgumentParser:
    """Add a command. Its help begins with the summary and ends with the examples."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    return parser
