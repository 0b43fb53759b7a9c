"""``packstore completion``: commands and flags for the completion of a shell."""

from __future__ import annotations

import argparse

from packstore.cli import command
from packstore.errors import MissingExtraError, sentence

SHELLS = ("bash", "zsh", "fish")


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS)
    )


@command(
    _configure,
    "  packstore completion bash > "
    "~/.local/share/bash-completion/completions/packstore\n"
    "  packstore completion fish > ~/.config/fish/completions/packstore.fish\n",
)
def _completion(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        rule, remedy = "the package shtab writes it", "Run: pip install shtab"
        raise MissingExtraError(sentence("completion", rule, "none", remedy)) from error
    from packstore.cli import parser

    print(shtab.complete(parser(), args.shell))
    return 0
