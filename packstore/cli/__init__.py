"""The command line: one file per command, loaded when it is the one that runs.

Exit codes: 0 success, 1 a named error or a failed check, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from packstore.cli._front_page import SUMMARIES, front_page
from packstore.cli._logs import add_log_options, fail, set_up
from packstore.cli._parser import Formatter, Parser, parse
from packstore.errors import PackstoreError, quote, told
from packstore.registry import Registry
from packstore.version import VERSION


@dataclass(frozen=True)
class Command:
    """One sub-command: its arguments, and the function that returns the exit code.

    What it does and its first example are in :data:`packstore.cli._front_page.FRONT_PAGE`.

    Attributes:
        examples: command lines besides.
        configure: adds the arguments to its parser.
        run: runs it; returns the exit code.
    """

    examples: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


COMMANDS: Registry[Command] = Registry(
    "command",
    {
        "pack": "packstore.cli.pack:COMMAND",
        "append": "packstore.cli.append:COMMAND",
        "concat": "packstore.cli.concat:COMMAND",
        "clean": "packstore.cli.clean:COMMAND",
        "inspect": "packstore.cli.inspect:COMMAND",
        "show": "packstore.cli.show:COMMAND",
        "view": "packstore.cli.view:COMMAND",
        "verify": "packstore.cli.verify:COMMAND",
        "check": "packstore.cli.check:COMMAND",
        "stats": "packstore.cli.stats:COMMAND",
        "doctor": "packstore.cli.doctor:COMMAND",
        "estimate": "packstore.cli.estimate:COMMAND",
        "export": "packstore.cli.export:COMMAND",
        "train": "packstore.cli.train:COMMAND",
        "ref-logps": "packstore.cli.ref_logps:COMMAND",
        "evaluate": "packstore.cli.evaluate:COMMAND",
    },
)

ABOUT = "Packed, checked, self-describing preference data: pack once, train anywhere."


def parser(names: Iterable[str] = COMMANDS) -> argparse.ArgumentParser:
    """Makes the parser of the command line, with the commands `names` only."""
    top = Parser(prog="packstore", description=ABOUT)
    top.add_argument("--version", action="version", version=f"packstore {VERSION}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)
    width = shutil.get_terminal_size().columns - 2
    for name in names:
        command = COMMANDS.load(name)
        text, example = SUMMARIES[name]
        sub = commands.add_parser(
            name,
            help=text,
            description=textwrap.fill(text[0].upper() + text[1:] + ".", width),
            epilog=f"examples:\n  packstore {example}\n{command.examples}",
            formatter_class=Formatter,
        )
        command.configure(sub)
        add_log_options(sub)
        sub.set_defaults(command=command, parser=sub)
    return top


def _terminate(number: int, frame: object) -> None:
    """Exits through an exception, so that temporary files are removed."""
    print("packstore: terminated", file=sys.stderr, flush=True)
    sys.exit(128 + number)


def _take_any_text() -> None:
    """Makes stdout and stderr accept every character in any locale.

    Under ``LC_ALL=C`` they become UTF-8, as in Python's UTF-8 mode; in other locales characters
    outside the encoding are escaped.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            encoding = codecs.lookup(stream.encoding).name
            stream.reconfigure(
                encoding="utf-8" if encoding == "ascii" else encoding, errors="backslashreplace"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code. Errors become one line on stderr."""
    _take_any_text()
    given = list(sys.argv[1:] if argv is None else argv)
    if given[:1] == ["help"]:
        given = [*given[1:], "--help"]
    if given in ([], ["--help"], ["-h"]):
        print(front_page(ABOUT), end="")
        return 0
    # Other commands are not imported; only an unknown name is compared with all of them.
    args = parse(parser(given[:1] if given[0] in COMMANDS else COMMANDS), given)
    with contextlib.suppress(ValueError):  # only the main thread can set signal handlers
        signal.signal(signal.SIGTERM, _terminate)
    set_up(args)
    try:
        code: int = args.command.run(args)
        sys.stdout.flush()
        return code
    except PackstoreError as error:
        if args.debug:
            raise
        fail(args, f"error: {told(error)}", error)
        return 1
    except KeyboardInterrupt:
        fail(args, "interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output exited, e.g. `packstore show … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if args.debug:
            raise
        what = quote(f"{type(error).__name__}: {error}", 300)
        fail(
            args,
            f"internal error: {what}. This is a defect of packstore: please report it, with the "
            "traceback that --debug shows.",
            error,
        )
        return 1
