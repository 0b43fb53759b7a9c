"""Argument parsers whose usage errors are one line."""

from __future__ import annotations

import argparse
import difflib
import re
from typing import Any, NoReturn


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


def parse(parser: argparse.ArgumentParser, given: list[str]) -> argparse.Namespace:
    """Parses a command line; an unknown option is an error of its command, not of the program."""
    args, rest = parser.parse_known_args(given)
    if rest:
        own: Any = getattr(args, "parser", parser)
        own.error(f"unrecognized arguments: {' '.join(rest)}")
    return args
