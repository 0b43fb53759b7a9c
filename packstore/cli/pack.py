"""``packstore pack``, ``append`` and ``concat``: make datasets, of records or of
others.
"""

from __future__ import annotations

import argparse
from typing import Any

from packstore.cli import command, common
from packstore.cli._messages import progress_of
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
        ".csv, also .gz "
        ".zst), one packed dataset, or - for JSON lines on standard input; OUT: folder "
        "or URL of "
        "the new dataset",
    )
    flags = {
        "--config FILE": "YAML file of SOURCE, OUT, settings; flags override",
        "--out OUT": "in place of the job file's",
        "--tokenizer PATH": "tokenizer.json, .model, Hugging Face folder or name",
        "--dry-run": "lint and plan a sample and try OUT; write no dataset",
    }
    common.add_flags(parser, flags)
    common.add_json(parser)
    common.add_storage_options(parser, source=True)
    common.add_settings(parser, "packing", PlanConfig)
    common.add_settings(parser, "tokenization", TokenizeConfig)
    common.add_settings(parser, "selection", SelectConfig)
    common.add_settings(parser, "files", WriteConfig)
    common.add_settings(parser, "running", RunConfig)


@command(
    _configure_pack,
    "  packstore pack 'raw/*.jsonl.gz' s3://bucket/prefs-8k --tokenizer Qwen3/\n"
    "  packstore pack qa.csv qa-4k --tokenizer t.json --field prompt=question "
    "--pack-size 4096\n"
    "  packstore pack odd.jsonl odd-8k --tokenizer t.json --adapter "
    "forms.py:read_pair\n"
    "  packstore pack prefs-8k prefs-32k --pack-size 32768 --layout shared_prefix\n"
    "  packstore pack --config job.yaml --dry-run\n"
    "  zcat raw.gz | packstore pack - prefs-8k --tokenizer tokenizer.json\n",
)
def _pack(args: argparse.Namespace) -> int:
    job = _job(args)
    if job["source"] == "-":
        job["source"] = common.source_of(["-"])
    if args.dry_run:
        return try_job(args, job)
    common.print_table(args, *run_job(args, job))
    return 0


def run_job(args: argparse.Namespace, job: dict[str, Any]) -> common.Result:
    """Packs; `job` holds the arguments of ``packstore.pack``."""
    from packstore.etl.pipeline import pack

    with progress_of("pack", args) as progress:
        dataset = pack(**job, progress=progress)
    return common.facts_of(dataset)


def _job(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the arguments of ``packstore.pack``, from the job file and the command
    line.
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
        job |= {"source": common.source_of(args.places[:-1]), "out": args.places[-1]}
    elif args.places or not {"source", "out"} <= job.keys():
        args.parser.error(
            "SOURCE and OUT must be given, both here or both in a job file (--config)"
        )
    values = {
        "tokenizer": args.tokenizer,
        "storage_options": args.storage_option or None,
        "source_storage_options": args.source_storage_option,
        **common.read_settings(args, PackConfig),
    }
    job |= {name: value for name, value in values.items() if value is not None}
    common.refuse_memory(args, job["out"], job.get("rejects"))
    return job


def try_job(args: argparse.Namespace, job: dict[str, Any]) -> int:
    """Lints and plans a sample of a job, and tries where it would write; returns the
    exit code.
    """
    from packstore.cli import reports
    from packstore.etl.reports.records import dry_run

    with progress_of("dry run", args) as progress:
        report, findings = dry_run(**job, progress=progress)
    if args.json:
        ok = all(finding.ok for finding in findings)
        diagnosis = reports.parts_of(report, reports.DIAGNOSIS)
        result = {
            "diagnosis": diagnosis,
            "estimate": report.choices[0],
            "findings": findings,
        }
        return common.print_outcome(ok, result)
    reports.print_diagnosis(report)
    reports.print_estimate(report)
    return reports.print_findings(findings)


def _configure_append(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "dataset", metavar="DATASET", help="folder or URL of a packed dataset"
    )
    common.add_source(parser, "files, globs, folders or URLs of records")
    flags = {
        "--tokenizer PATH": "default: the one of the manifest",
        "--adapter MODULE:FUNCTION": "function that read DATASET's records, if one did",
    }
    common.add_flags(parser, flags)
    common.add_json(parser)
    common.add_storage_options(parser, source=True)
    names = ("dedup", "fields", "on", "partitions")
    common.add_settings(parser, "records", PackConfig, names, default="DATASET's")
    common.add_settings(parser, "running", RunConfig)


@command(
    _configure_append,
    "  packstore append s3://bucket/prefs-8k 'new/*.jsonl.gz' --tokenizer Qwen3/\n",
)
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
    common.print_table(args, *common.facts_of(dataset))
    return 0


def _configure_concat(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "datasets",
        nargs="+",
        metavar="DATASET",
        help="folders or URLs of packed datasets",
    )
    parser.add_argument("out", metavar="OUT", help="folder or URL of the new dataset")
    common.add_flags(parser, {"--overwrite": "replace an existing dataset"})
    common.add_json(parser)
    common.add_storage_options(parser)


@command(
    _configure_concat,
    "  packstore concat s3://bucket/jan s3://bucket/feb s3://bucket/year\n",
)
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
    common.print_table(args, *common.facts_of(dataset))
    return 0
