"""``packstore append``: adds records to a dataset."""

from __future__ import annotations

import argparse

from packstore.cli import Command
from packstore.cli._progress import progress_of
from packstore.cli._results import add_json, dataset_result, print_result
from packstore.cli.common import (
    add_storage_options,
    number,
    source_storage_options,
    storage_options,
)
from packstore.cli.common import stdout_console as console
from packstore.cli.settings import add_settings, key_values, read_settings
from packstore.config import RunConfig


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dataset", metavar="DATASET", help="folder or URL of a packed dataset")
    parser.add_argument(
        "source", nargs="+", metavar="SOURCE", help="files, globs, folders or URLs of records"
    )
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="default: the path recorded in the manifest"
    )
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="field names of the input (repeatable); default: the dataset's",
    )
    parser.add_argument(
        "--on",
        action="append",
        default=[],
        metavar="REASON=ANSWER",
        help="drop or error for a reason to refuse records; default: the dataset's",
    )
    parser.add_argument(
        "--partitions",
        type=int,
        metavar="N",
        help="of what is appended; default: one for each GiB of the input files",
    )
    add_json(parser)
    add_storage_options(parser, source=True)
    add_settings(parser, "running", RunConfig)


def _run(args: argparse.Namespace) -> int:
    from packstore.etl.concat import append

    settings = read_settings(args, RunConfig)
    if args.field:
        settings["fields"] = key_values(args.field, "--field")
    if args.partitions is not None:
        settings["partitions"] = args.partitions
    if args.on:
        settings["on"] = key_values(args.on, "--on")
    source = args.source[0] if len(args.source) == 1 else args.source
    with progress_of("append", args) as progress:
        dataset = append(
            args.dataset,
            source,
            args.tokenizer,
            storage_options=storage_options(args),
            source_storage_options=source_storage_options(args),
            progress=progress,
            **settings,
        )
    if args.json:
        print_result(dataset_result(dataset))
        return 0
    m = dataset.manifest
    console().print(
        f"{dataset.url}, version {dataset.version}: {number(m.totals.examples)} examples in "
        f"{number(m.num_packs)} packs",
        markup=False,
    )
    return 0


COMMAND = Command(
    examples="  packstore append s3://bucket/prefs-8k 'new/*.jsonl.gz' --tokenizer Qwen3/\n",
    configure=_configure,
    run=_run,
)
