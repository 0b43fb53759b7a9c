"""The command line: the file of a command is loaded when it is the one that runs.

Exit codes: 0 success, 1 a named error or a failed check, 2 wrong usage; 128 and the
    number of a
signal: 129 hung up, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import functools
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from packstore.cli._messages import add_message_options, fail, set_up
from packstore.cli._parser import FRONT_PAGE, SUMMARIES, Parser, add_command
from packstore.errors import (
    PackstoreError,
    message_with_notes,
    quote,
    sentence,
    visible,
)
from packstore.registry import Registry, missing_extra
from packstore.secrets import client_text
from packstore.version import VERSION


@dataclass(frozen=True)
class Command:
    """A sub-command: further examples, its arguments, and what returns the exit
    code.
    """

    examples: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def command(
    configure: Callable[[argparse.ArgumentParser], None], examples: str
) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Makes a sub-command of what returns its exit code."""
    return functools.partial(Command, examples, configure)


FILES = {
    "evaluate": "evaluate ref-logps",
    "export": "export publish",
    "maintenance": "clean verify",
    "pack": "pack append concat",
    "reports": "estimate",
    "show": "show view",
    "stats": "stats inspect",
}
"""File here -> its commands; others have files of their own."""

_FILE_OF = {name: file for file, names in FILES.items() for name in names.split()}

TRAIN = {
    "accelerate",
    "huggingface_hub",
    "peft",
    "safetensors",
    "torch",
    "transformers",
}
"""Packages of the extra `train`, which commands that need it import."""

COMMANDS: Registry[Command] = Registry(
    "command",
    {
        name: f"packstore.cli.{_FILE_OF.get(name, name)}:_{name.replace('-', '_')}"
        for name in SUMMARIES
    },
)


def parser(names: Iterable[str] = COMMANDS) -> Parser:
    """Makes the parser of the command line, with the commands `names` only."""
    top = Parser(prog="packstore", description=FRONT_PAGE.partition("\n")[0])
    top.add_argument("--version", action="version", version=f"packstore {VERSION}")
    top.set_defaults(debug=False, quiet=False, log_format="text")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in names:
        chosen = COMMANDS.load(name)
        text, example = SUMMARIES[name]
        sub = add_command(commands, name, text, f"  {example}\n{chosen.examples}")
        chosen.configure(sub)
        add_message_options(sub)
        sub.set_defaults(command=chosen, parser=sub)
    return top


def _terminate(number: int, frame: object) -> None:
    """Exits through an exception, so that temporary files are removed."""
    print("packstore: terminated", file=sys.stderr, flush=True)
    sys.exit(128 + number)


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _unwritten(cause: Exception) -> str:
    """Returns why standard output takes no more, and discards the rest; empty if it
    does.
    """
    if type(cause) is not OSError or cause.filename is not None:
        return ""
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as error:
        _discard_output()
        return error.strerror or str(error)
    return ""


def _dashed(text: str) -> str:
    """Returns a flag with dashes, as `--learning-rate` for the setting
    `learning_rate`.
    """
    return re.sub(
        r"^--[a-z0-9_-]+(?==|$)", lambda flag: flag[0].replace("_", "-"), text
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Errors become one line on stderr."""
    try:
        return _main(argv)
    except KeyboardInterrupt:  # while the command was loaded, or while it failed
        print("packstore: interrupted", file=sys.stderr)
        return 130


def _main(argv: Sequence[str] | None) -> int:
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    # Every character must print in any locale: UTF-8, or escaped.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            ascii_only = codecs.lookup(stream.encoding).name == "ascii"
            encoding = "utf-8" if ascii_only else stream.encoding
            stream.reconfigure(encoding=encoding, errors="backslashreplace")
    given = [_dashed(text) for text in (sys.argv[1:] if argv is None else argv)]
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    if given in ([], ["--help"], ["-h"]):
        print(FRONT_PAGE, end="")
        return 0
    # Other commands are not imported; only an unknown name is compared with all of
    # them.
    top = parser(given[:1] if given[0] in COMMANDS else COMMANDS)
    args, unknown = top.parse_known_args(given)
    has_further_flags = "add_further_flags" in args
    if unknown and not has_further_flags:
        # An error of the command, not of the program.
        getattr(args, "parser", top).refuse(unknown)
    with contextlib.suppress(
        ValueError
    ):  # only the main thread can set signal handlers
        for number in (signal.SIGTERM, signal.SIGHUP):
            if (
                signal.getsignal(number) is not signal.SIG_IGN
            ):  # nohup ignores the latter
                signal.signal(number, _terminate)
    set_up(args)
    try:
        if unknown and has_further_flags:
            args.add_further_flags(args.parser)
            args, unknown = top.parse_known_args(given)
            if unknown:
                args.parser.refuse(unknown)
        args.own_process = argv is None
        if "out" in args:
            from packstore.cli import common

            common.refuse_memory(args, args.out)
        from packstore.config.remedies import from_shell

        with from_shell():
            code: int = args.command.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        fail(args, "interrupted")
        return 130
    except (
        BrokenPipeError
    ):  # the reader of our output exited, e.g. `packstore show … | head`
        _discard_output()
        return 0
    except Exception as error:
        if unwritten := _unwritten(error):
            fail(
                args,
                "error: standard output: must take what is written; found "
                f"{unwritten}.",
            )
            return 1
        if args.debug:
            print(visible(traceback.format_exc()), end="", file=sys.stderr)
            return 1
        if (
            isinstance(error, ModuleNotFoundError)
            and str(error.name).partition(".")[0] in TRAIN
        ):
            error = missing_extra(f"packstore {given[0]}", "train", error)
        if isinstance(error, PackstoreError):
            fail(args, f"error: {message_with_notes(error)}")
            return 1
        if isinstance(error, OSError) and error.strerror:
            where = (
                "a file"
                if error.filename is None
                else quote(os.fspath(error.filename), 300)
            )
            fail(args, f"error: {sentence(where, 'it must be usable', error.strerror)}")
            return 1
        text = quote(client_text(f"{type(error).__name__}: {error}"), 300)
        remedy = (
            "This is a defect of packstore: please report it, with the traceback "
            "of --debug"
        )
        fail(args, f"internal error: {text}. {remedy}.")
        return 1
