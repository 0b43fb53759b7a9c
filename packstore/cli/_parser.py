"""Argument parsers whose usage errors are one line."""

from __future__ import annotations

import argparse
import difflib
import re
import shutil
import sys
from typing import Any, ClassVar, NoReturn

from packstore.cli._logs import error_line, wants_json

NUMBERS = {"int": "a whole number", "float": "a number"}
"""Type of an argument -> what it must be, in an error."""


NARROW = 60
"""Columns below which a terminal is narrow."""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Formats help; in a narrow terminal, names of values have room beside the flags."""

    def __init__(self, prog: str, **settings: Any) -> None:
        narrow = shutil.get_terminal_size().columns < NARROW
        super().__init__(prog, **{"max_help_position": 14 if narrow else 24, **settings})


class Parser(argparse.ArgumentParser):
    """A parser with a short usage, whose errors are one line, with the nearest known name.

    Attributes:
        given: the command line that is parsed; its errors have the log format that it asks for.
    """

    given: ClassVar[list[str]] = []

    def format_help(self) -> str:
        """Returns the help; its usage names what is required."""
        self.usage = self.usage or self._short_usage().replace("%", "%%")
        return super().format_help()

    def _short_usage(self) -> str:
        options = [a for a in self._actions if a.option_strings]
        required = [
            f"{a.option_strings[0]} {a.metavar or a.dest.upper()}" for a in options if a.required
        ]
        words = [self.prog, *required, "[options]"]
        for action in self._actions:
            if not action.option_strings:
                name = str(action.metavar or action.dest)
                many = action.nargs in (argparse.ONE_OR_MORE, argparse.PARSER)
                name += " …" if many else ""
                words.append(f"[{name}]" if action.nargs == argparse.OPTIONAL else name)
        return " ".join(words)

    def error(self, message: str) -> NoReturn:
        """Prints the error without the usage, and exits with code 2."""
        text = f"{self._clearer(message)} See `{self.prog} --help`."
        print(error_line(f"error: {text}", wants_json(self.given), self.prog), file=sys.stderr)
        self.exit(2)

    def _clearer(self, message: str) -> str:
        known = [option for action in self._actions for option in action.option_strings]
        wrong = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if wrong is None and (wrong := re.search(r"invalid choice: '([^']+)'", message)):
            known = re.findall(r"[\w-]+", message[wrong.end() :])
        if wrong and (near := difflib.get_close_matches(wrong[1], known, n=1)):
            return f"{message.partition(' (choose from')[0]}. Did you mean {near[0]}?"
        number = re.fullmatch(r"argument (.+): invalid (int|float) value: (.+)", message)
        if number:
            message = f"{number[1]} must be {NUMBERS[number[2]]}; found {number[3]}"
        return f"{message.rstrip('.')}."


def parse(parser: argparse.ArgumentParser, given: list[str]) -> argparse.Namespace:
    """Parses a command line; an unknown option is an error of its command, not of the program."""
    Parser.given = given
    args, rest = parser.parse_known_args(given)
    if rest:
        own: Any = getattr(args, "parser", parser)
        own.error(f"unrecognized arguments: {' '.join(rest)}")
    return args
