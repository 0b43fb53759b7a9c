"""``packstore pack``, ``append`` and ``concat``: make datasets from records or
datasets.
"""

from __future__ import annotations

import argparse
from typing import Any

from packstore.cli import Command
from packstore.cli._arguments import (
    add_json,
    add_settings,
    add_source,
    add_storage_options,
    read_settings,
    refuse_memory,
    source_of,
)
from packstore.cli._messages import show_progress
from packstore.cli._output import print_dataset
from packstore.config import (
    PackConfig,
    PlanConfig,
    RunConfig,
    SelectConfig,
    TokenizeConfig,
    WriteConfig,
)


def _configure_pack(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "places",
        nargs="*",
        metavar="SOURCE … OUT",
        help="SOURCE: files, globs, folders or URLs (.jsonl .json .parquet .arrow "
        ".csv, also .gz .zst), one packed dataset, or - for JSON lines on standard "
        "input; OUT: folder or URL of the new dataset",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of the job; flags override it",
    )
    parser.add_argument(
        "--out", metavar="OUT", help="destination, instead of OUT in the job file"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json, .model, Hugging Face folder or name",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="lint and plan a sample and try OUT; write nothing",
    )
    add_json(parser)
    add_storage_options(parser, source=True)
    add_settings(parser, "packing", PlanConfig)
    add_settings(parser, "tokenization", TokenizeConfig)
    add_settings(parser, "selection", SelectConfig)
    add_settings(parser, "files", WriteConfig)
    add_settings(parser, "running", RunConfig)


def _run_pack(args: argparse.Namespace) -> int:
    job = _read_job(args)
    refuse_memory(args, job["out"], job.get("rejects"))
    if args.dry_run:
        from packstore.cli._dry_run import try_job

        return try_job(args, job)

    from packstore.etl.pipeline import pack
    from packstore.etl.splits import with_sibling

    with show_progress("pack", args) as progress:
        dataset = pack(**job, progress=progress)
    print_dataset(args, with_sibling(dataset))
    return 0


def _read_job(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``packstore.pack``; the command line overrides the job
    file.
    """
    job: dict[str, Any] = {}
    if args.config is not None:
        from packstore.config.job import read_job

        job = read_job(args.config)

    if args.places and args.out:
        args.parser.error(
            "OUT must be given once: behind SOURCE, or by --out beside a job file"
        )
    if args.out:
        job["out"] = args.out
    if len(args.places) > 1:
        *sources, job["out"] = args.places
        job["source"] = source_of(sources)
    elif args.places or not {"source", "out"} <= job.keys():
        args.parser.error(
            "SOURCE and OUT must be given, both here or both in a job file (--config)"
        )
    elif job["source"] == "-":
        job["source"] = source_of(["-"])

    if args.tokenizer is not None:
        job["tokenizer"] = args.tokenizer
    if args.storage_option:
        job["storage_options"] = args.storage_option
    if args.source_storage_option is not None:
        job["source_storage_options"] = args.source_storage_option
    return {**job, **read_settings(args, PackConfig)}


PACK = Command(
    configure=_configure_pack,
    run=_run_pack,
    examples="  packstore pack 'raw/*.jsonl.gz' s3://bucket/prefs-8k --tokenizer "
    "Qwen3/\n"
    "  packstore pack qa.csv qa-4k --tokenizer t.json --field prompt=question "
    "--pack-size 4096\n"
    "  packstore pack odd.jsonl odd-8k --tokenizer t.json --adapter "
    "forms.py:read_pair\n"
    "  packstore pack prefs-8k prefs-32k --pack-size 32768\n"
    "  packstore pack --config job.yaml --dry-run\n"
    "  zcat raw.gz | packstore pack - prefs-8k --tokenizer tokenizer.json\n",
)


def _configure_append(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dataset",
        metavar="DATASET",
        help="folder or URL of a packed dataset, or of its train and validation splits",
    )
    add_source(parser, "files, globs, folders or URLs of records")
    parser.add_argument(
        "--tokenizer", metavar="PATH", help="tokenizer (default: the one of DATASET)"
    )
    parser.add_argument(
        "--adapter",
        metavar="MODULE:FUNCTION",
        help="function that read the records of DATASET, if any",
    )
    parser.add_argument(
        "--allow-empty",
        action="store_true",
        help="succeed without new files or records",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="lint and plan a sample and try DATASET; write nothing",
    )
    add_json(parser)
    add_storage_options(parser, source=True)
    names = ("dedup", "fields", "on", "partitions")
    add_settings(parser, "records", PackConfig, names, default="DATASET's")
    add_settings(parser, "running", RunConfig)


def _run_append(args: argparse.Namespace) -> int:
    arguments = {
        "dataset": args.dataset,
        "more": source_of(args.source),
        "tokenizer": args.tokenizer,
        "storage_options": args.storage_option,
        "source_storage_options": args.source_storage_option,
        **read_settings(args, PackConfig),
    }
    if args.dry_run:
        from packstore.cli._dry_run import try_append

        return try_append(args, arguments)

    from packstore.etl.append import append_records

    with show_progress("append", args) as progress:
        result = append_records(
            **arguments, allow_empty=args.allow_empty, progress=progress
        )
    print_dataset(args, result.datasets, result.records_by_split)
    return 0


APPEND = Command(
    configure=_configure_append,
    run=_run_append,
    examples="  packstore append s3://bucket/prefs-8k 'new/*.jsonl.gz' --tokenizer "
    "Qwen3/\n"
    "  packstore append prefs-8k 'new/*.jsonl' --allow-empty\n",
)


def _configure_concat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "datasets",
        nargs="+",
        metavar="DATASET",
        help="folders or URLs of packed datasets",
    )
    parser.add_argument("out", metavar="OUT", help="folder or URL of the new dataset")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an existing dataset"
    )
    add_json(parser)
    add_storage_options(parser)


def _run_concat(args: argparse.Namespace) -> int:
    from packstore.etl.concat import concat

    with show_progress("concat", args) as progress:
        dataset = concat(
            args.datasets,
            args.out,
            overwrite=args.overwrite,
            storage_options=args.storage_option,
            progress=progress,
        )
    print_dataset(args, {None: dataset})
    return 0


CONCAT = Command(
    configure=_configure_concat,
    run=_run_concat,
    examples="  packstore concat s3://bucket/jan s3://bucket/feb s3://bucket/year\n",
)
