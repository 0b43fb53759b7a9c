"""``packstore append``: adds records to a dataset."""

from __future__ import annotations

import argparse

from packstore.cli import Command, common
from packstore.cli._messages import progress_of
from packstore.config import PackConfig, RunConfig


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help="folder or URL of a packed dataset")
    common.add_source(parser, "files, globs, folders or URLs of records")
    parser.add_argument("--tokenizer", metavar="PATH", help="default: the one of the manifest")
    common.add_json(parser)
    common.add_storage_options(parser, source=True)
    common.add_settings(parser, "records", PackConfig, ("fields", "on", "partitions"))
    common.add_settings(parser, "running", RunConfig)


def _run(args: argparse.Namespace) -> int:
    from packstore.etl.concat import append

    with progress_of("append", args) as progress:
        dataset = append(
            args.dataset,
            common.source_of(args.source),
            args.tokenizer,
            storage_options=args.storage_option,
            source_storage_options=args.source_storage_option,
            progress=progress,
            **common.read_settings(args, PackConfig),
        )
    common.print_dataset(args, dataset)
    return 0


COMMAND = Command(
    "  packstore append s3://bucket/prefs-8k 'new/*.jsonl.gz' --tokenizer Qwen3/\n",
    _configure,
    _run,
)
