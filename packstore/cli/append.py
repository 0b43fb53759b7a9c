"""``packstore append`` and ``packstore concat``: add records to a dataset, or join datasets."""

from __future__ import annotations

import argparse

from packstore.cli import Command, common
from packstore.cli._messages import progress_of
from packstore.config import PackConfig, RunConfig


def _configure_append(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help="folder or URL of a packed dataset")
    common.add_source(parser, "files, globs, folders or URLs of records")
    common.add_flags(parser, {"--tokenizer PATH": "default: the one of the manifest"})
    common.add_json(parser)
    common.add_storage_options(parser, source=True)
    names = ("dedup", "fields", "on", "partitions")
    common.add_settings(parser, "records", PackConfig, names, default="DATASET's")
    common.add_settings(parser, "running", RunConfig)


def _append(args: argparse.Namespace) -> int:
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


def _configure_concat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "datasets", nargs="+", metavar="DATASET", help="folders or URLs of packed datasets"
    )
    parser.add_argument("out", metavar="OUT", help="folder or URL of the new dataset")
    common.add_flags(parser, {"--overwrite": "replace an existing dataset"})
    common.add_json(parser)
    common.add_storage_options(parser)


def _concat(args: argparse.Namespace) -> int:
    from packstore.etl.concat import concat

    with progress_of("concat", args) as progress:
        dataset = concat(
            args.datasets,
            args.out,
            overwrite=args.overwrite,
            storage_options=args.storage_option,
            progress=progress,
        )
    common.print_dataset(args, dataset)
    return 0


APPEND = Command(
    "  packstore append s3://bucket/prefs-8k 'new/*.jsonl.gz' --tokenizer Qwen3/\n",
    _configure_append,
    _append,
)
CONCAT = Command(
    "  packstore concat s3://bucket/jan s3://bucket/feb s3://bucket/year\n",
    _configure_concat,
    _concat,
)
