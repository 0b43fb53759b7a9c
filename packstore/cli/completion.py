"""``packstore completion``: commands and flags for the completion of a shell."""

from __future__ import annotations

import argparse

from packstore.cli import Command, build_parser
from packstore.errors import MissingExtraError, sentence

SHELLS = ("bash", "zsh", "fish")


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS)
    )


def _run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise MissingExtraError(
            sentence(
                "completion",
                rule="the package shtab writes the script",
                found="none",
                remedy="Run: pip install shtab",
            )
        ) from error

    print(shtab.complete(build_parser(), args.shell))
    return 0


COMPLETION = Command(
    configure=_configure,
    run=_run,
    examples="  packstore completion bash > "
    "~/.local/share/bash-completion/completions/packstore\n"
    "  packstore completion fish > ~/.config/fish/completions/packstore.fish\n",
)
