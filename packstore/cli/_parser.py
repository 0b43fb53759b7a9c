"""Argument parsers: a front page with an example of each command, and usage errors of one line."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import textwrap
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from packstore.cli import Command

GROUPS = ("prepare", "look", "keep", "train", "exchange")
"""Groups of commands, in the order of the front page."""


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line, with the nearest name for one that is unknown."""

    def error(self, message: str) -> NoReturn:
        """Prints the error without the usage, and exits with code 2."""
        self.exit(2, f"{self.prog}: error: {self._nearest(message)} See `{self.prog} --help`.\n")

    def _nearest(self, message: str) -> str:
        known = [option for action in self._actions for option in action.option_strings]
        wrong = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if wrong is None and (wrong := re.search(r"invalid choice: '([^']+)'", message)):
            known = re.findall(r"[\w-]+", message[wrong.end() :])
        near = difflib.get_close_matches(wrong[1], known, n=1) if wrong else []
        return f"{message.rstrip('.')}. Did you mean {near[0]}?" if near else f"{message}."


def front_page(about: str, commands: Mapping[str, Command]) -> str:
    """Returns the commands in groups, each with its first example.

    Args:
        about: one line on the program.
        commands: name -> command.
    """
    width = min(shutil.get_terminal_size().columns, 100)
    lines = [*textwrap.wrap(about, width), ""]
    for group in GROUPS:
        lines.append(f"{group}:")
        for name, command in commands.items():
            if command.group == group:
                lines += _wrapped(f"{name:<10} {command.help}", width)
                lines.append(f"{'':13}$ {command.examples.strip().splitlines()[0]}")
        lines.append("")
    lines.append("`packstore COMMAND --help` shows the arguments and more examples of a command.")
    return "\n".join(lines) + "\n"


def _wrapped(text: str, width: int) -> Iterable[str]:
    return textwrap.wrap(text, width, initial_indent="  ", subsequent_indent=" " * 13)


def parse(parser: argparse.ArgumentParser, given: list[str]) -> argparse.Namespace:
    """Parses a command line; an unknown option is an error of its command, not of the program."""
    args, rest = parser.parse_known_args(given)
    if rest:
        own: Any = getattr(args, "parser", parser)
        own.error(f"unrecognized arguments: {' '.join(rest)}")
    return args
