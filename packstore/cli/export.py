"""``packstore export`` and ``publish``: a dataset for another trainer, or on
the hub.
"""

from __future__ import annotations

import argparse
from typing import Any

from packstore.cli import command, common
from packstore.cli._messages import add_message_options, progress_of
from packstore.cli._parser import add_command
from packstore.errors import display
from packstore.exchange import EXPORTERS, export


def _configure_export(parser: argparse.ArgumentParser) -> None:
    formats = parser.add_subparsers(
        title="formats", metavar="FORMAT", dest="to", required=True
    )
    for name in EXPORTERS:
        exporter = EXPORTERS.load(name)
        sub = add_command(formats, name, exporter.help, exporter.examples)
        add_message_options(sub)
        common.add_dataset(sub)
        sub.add_argument("out", metavar=exporter.out_name, help=exporter.out_help)
        common.add_json(sub)
        common.add_settings(sub, "format", exporter.options)


@command(
    _configure_export,
    "  packstore export megatron chats-8k bridge-8k --context-parallel 2\n"
    "  packstore export nemo prefs-8k packed_8192_seed0.npy\n"
    "  packstore export megatron --help\n",
)
def _export(args: argparse.Namespace) -> int:
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
    common.print_table(
        args, f"exported {display(args.dataset)} as {args.to}", rows, result
    )
    return 0


def _configure_publish(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser)
    parser.add_argument(
        "repo", metavar="REPO", help="repository on the hub, OWNER/NAME"
    )
    common.add_flags(parser, {"--private": "if the repository is new, keep it private"})
    common.add_json(parser)


@command(
    _configure_publish,
    "  packstore publish s3://bucket/prefs-8k me/prefs-8k --private\n",
)
def _publish(args: argparse.Namespace) -> int:
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from packstore.io.versions.publish import publish

    disable_progress_bars()  # they would break up ours, and a log has none of them
    with progress_of("publish", args) as progress:
        how: dict[str, Any] = {
            "progress": progress,
            "storage_options": args.storage_option,
        }
        done = publish(args.dataset, args.repo, private=args.private, **how)
    common.print_table(args, f"published {done.url}", done._asdict(), done._asdict())
    return 0
