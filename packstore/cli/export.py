"""``packstore export``: writes a dataset for another trainer."""

from __future__ import annotations

import argparse

from packstore.cli import Command
from packstore.cli._logs import add_log_options
from packstore.cli._parser import Formatter
from packstore.cli._progress import progress_of
from packstore.cli._results import add_json, print_result
from packstore.cli.common import add_dataset, number, stdout_console, storage_options, two_columns
from packstore.cli.settings import add_settings, read_settings
from packstore.exchange import EXPORTERS, export


def _configure(parser: argparse.ArgumentParser) -> None:
    formats = parser.add_subparsers(title="formats", metavar="FORMAT", dest="to", required=True)
    for name in EXPORTERS:
        exporter = EXPORTERS.load(name)
        sub = formats.add_parser(
            name,
            help=exporter.help,
            description=exporter.help[0].upper() + exporter.help[1:] + ".",
            epilog="examples:\n" + exporter.examples,
            formatter_class=Formatter,
        )
        add_log_options(sub, default=False)
        add_dataset(sub)
        sub.add_argument("out", metavar=exporter.out[0], help=exporter.out[1])
        add_json(sub)
        add_settings(sub, "format", exporter.options)


def _run(args: argparse.Namespace) -> int:
    options = EXPORTERS.load(args.to).options
    with progress_of("export", args) as progress:
        exported = export(
            args.to,
            args.dataset,
            args.out,
            storage_options=storage_options(args),
            progress=progress,
            **read_settings(args, options),
        )
    if args.json:
        print_result({"format": args.to, "files": exported.files, **exported.facts})
        return 0
    rows = {name: _shown(value) for name, value in exported.facts.items()}
    files = exported.files
    rows["files"] = files[0] if len(files) == 1 else f"{number(len(files))}, first {files[0]}"
    stdout_console().print(two_columns(f"exported {args.dataset} as {args.to}", rows))
    return 0


def _shown(value: object) -> object:
    return f"{value:.2%}" if isinstance(value, float) else value


COMMAND = Command(
    examples="  packstore export megatron chats-8k bridge-8k --context-parallel 2\n"
    "  packstore export nemo prefs-8k packed_8192_seed0.npy\n"
    "  packstore export megatron --help\n",
    configure=_configure,
    run=_run,
)
