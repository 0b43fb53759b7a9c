"""``packstore export``: writes a dataset for another trainer."""

from __future__ import annotations

import argparse

from packstore.cli import Command, common
from packstore.cli._messages import add_message_options, progress_of
from packstore.cli._parser import add_command
from packstore.errors import display
from packstore.exchange import EXPORTERS, export


def _configure(parser: argparse.ArgumentParser) -> None:
    formats = parser.add_subparsers(title="formats", metavar="FORMAT", dest="to", required=True)
    for name in EXPORTERS:
        exporter = EXPORTERS.load(name)
        sub = add_command(formats, name, exporter.help, exporter.examples)
        add_message_options(sub)
        common.add_dataset(sub)
        sub.add_argument("out", metavar=exporter.out[0], help=exporter.out[1])
        common.add_json(sub)
        common.add_settings(sub, "format", exporter.options)


def _run(args: argparse.Namespace) -> int:
    with progress_of("export", args) as progress:
        exported = export(
            args.to,
            args.dataset,
            args.out,
            storage_options=args.storage_option,
            progress=progress,
            **common.read_settings(args, EXPORTERS.load(args.to).options),
        )
    rows = {
        name: f"{value:.2%}" if isinstance(value, float) else value
        for name, value in exported.facts.items()
    }
    files = exported.files
    rows["files"] = files[0] if len(files) == 1 else f"{len(files):,}, first {files[0]}"
    result = {"format": args.to, "files": files, **exported.facts}
    common.print_table(args, f"exported {display(args.dataset)} as {args.to}", rows, result)
    return 0


EXPORT = Command(
    "  packstore export megatron chats-8k bridge-8k --context-parallel 2\n"
    "  packstore export nemo prefs-8k packed_8192_seed0.npy\n"
    "  packstore export megatron --help\n",
    _configure,
    _run,
)
