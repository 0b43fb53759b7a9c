"""``packstore export``: writes a dataset for another trainer."""

from __future__ import annotations

import argparse

from packstore.cli import Command, common
from packstore.cli._messages import add_message_options, progress_of
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
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add_message_options(sub)
        common.add_dataset(sub)
        sub.add_argument("out", metavar=exporter.out[0], help=exporter.out[1])
        common.add_json(sub)
        add_settings(sub, "format", exporter.options)


def _run(args: argparse.Namespace) -> int:
    options = EXPORTERS.load(args.to).options
    with progress_of("export", args) as progress:
        exported = export(
            args.to,
            args.dataset,
            args.out,
            storage_options=args.storage_option,
            progress=progress,
            **read_settings(args, options),
        )
    if args.json:
        common.print_result({"format": args.to, "files": exported.files, **exported.facts})
        return 0
    rows = {
        name: f"{value:.2%}" if isinstance(value, float) else value
        for name, value in exported.facts.items()
    }
    files = exported.files
    rows["files"] = files[0] if len(files) == 1 else f"{len(files):,}, first {files[0]}"
    common.stdout_console().print(common.two_columns(f"exported {args.dataset} as {args.to}", rows))
    return 0


COMMAND = Command(
    "  packstore export megatron chats-8k bridge-8k --context-parallel 2\n"
    "  packstore export nemo prefs-8k packed_8192_seed0.npy\n"
    "  packstore export megatron --help\n",
    _configure,
    _run,
)
