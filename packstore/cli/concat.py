"""``packstore concat``: concatenates datasets."""

from __future__ import annotations

import argparse

from packstore.cli import Command, common


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "datasets", nargs="+", metavar="DATASET", help="folders or URLs of packed datasets"
    )
    parser.add_argument("out", metavar="OUT", help="folder or URL of the new dataset")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing dataset")
    common.add_json(parser)
    common.add_storage_options(parser)


def _run(args: argparse.Namespace) -> int:
    from packstore.etl.concat import concat

    dataset = concat(
        args.datasets, args.out, overwrite=args.overwrite, storage_options=args.storage_option
    )
    common.print_dataset(args, dataset)
    return 0


COMMAND = Command(
    "  packstore concat s3://bucket/jan s3://bucket/feb s3://bucket/year\n", _configure, _run
)
