"""The command line, ``packstore COMMAND``: only the file of that command is imported.

Exit codes: 0 success; 1 a named error or a failed check; 2 wrong usage; 128 and the
number of a signal: 129 hung up, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import io
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from packstore.cli._messages import add_message_options, fail, set_up_messages
from packstore.cli._parser import FRONT_PAGE, SUMMARIES, Parser, add_command
from packstore.errors import (
    PackstoreError,
    message_with_notes,
    quote,
    sentence,
    visible,
)
from packstore.registry import LEFT_OUT_OF_LEAN, Registry, missing_extra
from packstore.secrets import client_text
from packstore.version import VERSION


@dataclass(frozen=True, kw_only=True)
class Command:
    """A sub-command.

    Attributes:
        configure: adds the arguments to a parser.
        run: runs the command with parsed arguments; returns the exit code.
        examples: lines of the help, after the example of the front page.
    """

    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    examples: str


COMMANDS: Registry[Command] = Registry(
    "command",
    {
        "pack": "packstore.cli.pack:PACK",
        "append": "packstore.cli.pack:APPEND",
        "concat": "packstore.cli.pack:CONCAT",
        "estimate": "packstore.cli.estimate:ESTIMATE",
        "inspect": "packstore.cli.inspect:INSPECT",
        "show": "packstore.cli.show:SHOW",
        "view": "packstore.cli.show:VIEW",
        "stats": "packstore.cli.stats:STATS",
        "clean": "packstore.cli.maintenance:CLEAN",
        "verify": "packstore.cli.maintenance:VERIFY",
        "train": "packstore.cli.train:TRAIN",
        "ref-logps": "packstore.cli.evaluate:REF_LOGPS",
        "evaluate": "packstore.cli.evaluate:EVALUATE",
        "export": "packstore.cli.export:EXPORT",
        "publish": "packstore.cli.export:PUBLISH",
        "completion": "packstore.cli.completion:COMPLETION",
    },
)

TRAIN_PACKAGES = {
    "accelerate",
    "huggingface_hub",
    "peft",
    "safetensors",
    "torch",
    "transformers",
}
"""Packages of the extra `train`, which some commands import."""


def build_parser(names: Iterable[str] = COMMANDS) -> Parser:
    """Return the parser of the command line.

    Args:
        names: the commands that it knows; their files are imported.
    """
    parser = Parser(prog="packstore", description=FRONT_PAGE.partition("\n")[0])
    parser.add_argument("--version", action="version", version=f"packstore {VERSION}")
    parser.set_defaults(debug=False, quiet=False, log_format="text")

    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in names:
        command = COMMANDS.load(name)
        summary = SUMMARIES[name]
        command_parser = add_command(
            commands,
            name,
            summary=summary.text,
            examples=f"  {summary.example}\n{command.examples}",
        )
        command.configure(command_parser)
        add_message_options(command_parser)
        command_parser.set_defaults(command=command, parser=command_parser)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code. Errors become one line on stderr.

    Args:
        argv: the words after ``packstore``; None: the command line of this process.
    """
    try:
        return _main(argv)
    except KeyboardInterrupt:  # while the command was loaded, or while it failed
        print("packstore: interrupted", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:  # while the command was loaded
        reason = missing_extra("the command line", "", error)
        print(f"packstore: error: {reason}", file=sys.stderr)
        return 1


def _main(argv: Sequence[str] | None) -> int:
    _prepare_streams()
    words = _normalize(sys.argv[1:] if argv is None else argv)
    if words in ([], ["--help"], ["-h"]):
        print(FRONT_PAGE, end="")
        return 0
    if words == ["--version"]:
        print(f"packstore {VERSION}")
        return 0

    # Usually only the file of one command is imported. An unknown command needs all of
    # them, to suggest the nearest name.
    names = words[:1] if words[0] in COMMANDS else COMMANDS
    parser = build_parser(names)
    args, unknown_words = parser.parse_known_args(words)
    # `train` may know them once it has imported transformers; see below.
    has_further_flags = "add_further_flags" in args
    if unknown_words and not has_further_flags:
        # By the parser of the command, whose flags can then be suggested.
        getattr(args, "parser", parser).refuse(unknown_words)

    _exit_on_signals()
    set_up_messages(args)
    try:
        if unknown_words:
            args.add_further_flags(args.parser)
            args, unknown_words = parser.parse_known_args(words)
            if unknown_words:
                args.parser.refuse(unknown_words)
        args.own_process = argv is None  # the process ends with the command
        return _run(args)
    except KeyboardInterrupt:
        fail(args, "interrupted")
        return 130
    except BrokenPipeError:
        # The reader of our output has exited, as in `packstore show … | head`.
        _discard_output()
        return 0
    except Exception as error:
        _report(error, args, command_name=words[0])
        return 1


def _run(args: argparse.Namespace) -> int:
    # Imported here, so that the front page appears at once.
    from packstore.config.remedies import from_shell

    if "out" in args:
        from packstore.cli._arguments import refuse_memory

        refuse_memory(args, args.out)
    with from_shell():
        code: int = args.command.run(args)
    sys.stdout.flush()
    return code


def _prepare_streams() -> None:
    """Open the streams that the caller closed, and let every character be printed.

    Characters that an encoding lacks are escaped. ASCII becomes UTF-8: it mostly means
    that no locale is set, as in a container, not that the terminal knows no more.
    """
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            mode = "r" if name == "stdin" else "w"
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            is_ascii = codecs.lookup(stream.encoding).name == "ascii"
            encoding = "utf-8" if is_ascii else stream.encoding
            stream.reconfigure(encoding=encoding, errors="backslashreplace")


def _normalize(words: Sequence[str]) -> list[str]:
    """Return the command line as the parser takes it.

    ``help COMMAND`` becomes ``COMMAND --help``, and ``--pack_size`` ``--pack-size``.
    """
    words = [_with_dashes(word) for word in words]
    if words[:1] == ["help"]:
        return [*words[1:], "--help"]
    return words


def _with_dashes(word: str) -> str:
    """Return a flag spelled like a setting, ``--pack_size``, as ``--pack-size``."""
    flag = re.match(r"--[a-z0-9_-]+(?==|$)", word)
    if flag is None:
        return word
    return flag[0].replace("_", "-") + word[flag.end() :]


def _exit_on_signals() -> None:
    """Let signals that end a process raise SystemExit, so that temporary files are
    removed.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:  # as nohup has it
            continue
        # Only the main thread can set a handler.
        with contextlib.suppress(ValueError):
            signal.signal(number, _exit_on_signal)


def _exit_on_signal(number: int, frame: object) -> None:
    print("packstore: terminated", file=sys.stderr, flush=True)
    sys.exit(128 + number)


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _report(error: Exception, args: argparse.Namespace, command_name: str) -> None:
    """Print the error of a command."""
    output_problem = _find_output_problem(error)
    if output_problem:
        text = sentence("standard output", "must accept all output", output_problem)
        fail(args, f"error: {text}")
        return
    if args.debug:
        print(visible(traceback.format_exc()), end="", file=sys.stderr)
        return

    if isinstance(error, ModuleNotFoundError):
        package = str(error.name).partition(".")[0]
        if package in TRAIN_PACKAGES:
            error = missing_extra(f"packstore {command_name}", "train", error)
        elif package in LEFT_OUT_OF_LEAN:
            error = missing_extra(f"packstore {command_name}", "", error)
    if isinstance(error, PackstoreError):
        fail(args, f"error: {message_with_notes(error)}")
    elif isinstance(error, OSError) and error.strerror:
        fail(args, f"error: {_describe_os_error(error)}")
    else:
        text = quote(client_text(f"{type(error).__name__}: {error}"), 300)
        fail(
            args,
            f"internal error: {text}. This is a defect of packstore: please report it, "
            "with the traceback of --debug.",
        )


def _find_output_problem(error: Exception) -> str:
    """Return why standard output cannot be written (disk full, …); "" if it can.

    Output that cannot be written is discarded, so that the interpreter does not fail
    when it flushes at exit.
    """
    if type(error) is not OSError or error.filename is not None:
        return ""
    # The error does not name the stream, so try whether it is this one.
    try:
        sys.stdout.write("\n")
        sys.stdout.flush()
    except OSError as write_error:
        _discard_output()
        return write_error.strerror or str(write_error)
    return ""


def _describe_os_error(error: OSError) -> str:
    where = "a file"
    if error.filename is not None:
        where = quote(os.fspath(error.filename), 300)
    return sentence(where, rule="it must be usable", found=error.strerror or "")
