"""``packstore export`` and ``packstore publish``: a dataset as text, for another
trainer, or on the hub.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from packstore.cli import Command
from packstore.cli._arguments import add_dataset, add_json, add_settings, read_settings
from packstore.cli._messages import add_message_options, show_progress
from packstore.cli._output import identity_of, print_facts, print_json
from packstore.cli._parser import add_command
from packstore.exchange import EXPORTERS, export

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset

STDOUT = "-"
"""In place of a file: standard output."""


def _configure_export(parser: argparse.ArgumentParser) -> None:
    formats = parser.add_subparsers(
        title="formats", metavar="FORMAT", dest="format", required=True
    )
    for name in EXPORTERS:
        exporter = EXPORTERS.load(name)
        format_parser = add_command(formats, name, exporter.help, exporter.examples)
        add_message_options(format_parser)
        add_dataset(format_parser)
        format_parser.add_argument(
            "out", metavar=exporter.out_name, help=exporter.out_help
        )
        add_json(format_parser)
        add_settings(format_parser, "options of the format", exporter.options)


def _run_export(args: argparse.Namespace) -> int:
    from packstore.io.dataset.dataset import open as open_dataset

    options = read_settings(args, EXPORTERS.load(args.format).options)
    dataset = open_dataset(args.dataset, args.storage_option)
    if args.format == "text" and args.out == STDOUT:
        return _print_text(args, dataset, options)

    with show_progress("export", args) as progress:
        exported = export(
            args.format,
            dataset,
            args.out,
            storage_options=args.storage_option,
            progress=progress,
            **options,
        )

    facts: dict[str, object] = {}
    for name, value in exported.facts.items():
        if value is None:
            facts[name] = "unknown"
        elif isinstance(value, float):
            facts[name] = f"{value:.2%}"
        else:
            facts[name] = value
    files = exported.files
    facts["files"] = files[0]
    if len(files) > 1:
        facts["files"] = f"{len(files):,}, first {files[0]}"
    title = f"exported {dataset.url} as {args.format}"
    result = {
        **identity_of(dataset),
        "format": args.format,
        "files": files,
        **exported.facts,
    }
    print_facts(args, title, facts, result)
    return 0


def _print_text(
    args: argparse.Namespace, dataset: Dataset, options: dict[str, Any]
) -> int:
    """Print a dataset as JSON lines, and nothing else."""
    from packstore.exchange.text import TextOptions, TextWriter

    writer = TextWriter(dataset, TextOptions(**options))
    with show_progress("export", args) as progress:
        for line in writer.lines(progress):
            print_json(line.decode())
    return 0


EXPORT = Command(
    configure=_configure_export,
    run=_run_export,
    examples="  packstore export megatron chats-8k bridge-8k --context-parallel 2\n"
    "  packstore export nemo prefs-8k packed_8192_seed0.npy\n"
    "  packstore export megatron --help\n",
)


def _configure_publish(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser)
    parser.add_argument(
        "repo", metavar="REPO", help="repository on the hub, OWNER/NAME"
    )
    parser.add_argument(
        "--private",
        action="store_true",
        help="keep the repository private, if it is new",
    )
    add_json(parser)


def _run_publish(args: argparse.Namespace) -> int:
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from packstore.io.versions.publish import publish

    disable_progress_bars()  # they would break up our own bars, or the lines of a log
    with show_progress("publish", args) as progress:
        published = publish(
            args.dataset,
            args.repo,
            private=args.private,
            progress=progress,
            storage_options=args.storage_option,
        )
    facts = published._asdict()
    print_facts(args, f"published {published.url}", facts, facts)
    return 0


PUBLISH = Command(
    configure=_configure_publish,
    run=_run_publish,
    examples="  packstore publish s3://bucket/prefs-8k me/prefs-8k --private\n",
)
