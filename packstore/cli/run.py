"""``packstore run``: packs and trains, as one job file says."""

from __future__ import annotations

import argparse
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from packstore.cli import Command, common
from packstore.cli._model import is_main_rank
from packstore.cli.pack import run_job, try_job
from packstore.cli.train import train_model
from packstore.config.job import check_job, read_steps
from packstore.config.training import TrainConfig
from packstore.errors import ConfigError, sentence

STEPS = ("pack", "train")


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config",
        metavar="JOB",
        help="YAML file with pack: (arguments of packstore pack), train: (settings of packstore "
        "train, whose train_dataset is what was packed unless it says otherwise), or both",
    )
    flags = {"--dry-run": "check the job, and a sample of its records"}
    common.add_flags(parser, flags)
    common.add_json(parser)


def _run(args: argparse.Namespace) -> int:
    steps = read_steps(args.config, STEPS)
    if not steps:
        rule = f"it must have {' or '.join(f'{step}:' for step in STEPS)}"
        raise ConfigError(sentence(args.config, rule, "neither"))
    job, packed = steps.get("pack", {}), {}
    if "pack" in steps:
        where = f"{args.config}, pack"
        for name in {"source", "out"} - check_job(job, where).keys():
            raise ConfigError(sentence(where, f"it must have {name}", "none"))
        common.refuse_memory(args, job["out"], job.get("rejects"))
        packed = {"train_dataset": job["out"]}
    config = TrainConfig.of(**packed | steps["train"]) if "train" in steps else None
    if args.dry_run:
        return try_job(args, job) if job else 0
    facts: dict[str, Any] = {}
    for step in steps:
        if step == "pack":
            with _first_rank_first():
                title, rows, facts[step] = run_job(args, job)
        elif config is not None:
            title, rows, facts[step] = train_model(config)
        if is_main_rank() and not args.json:
            common.print_table(args, title, rows, None)
    if is_main_rank() and args.json:
        common.print_result(facts)
    return 0


def _first_rank_first() -> AbstractContextManager[Any]:
    """The first of several ranks packs; to the others the dataset is then there."""
    if "RANK" not in os.environ:
        return nullcontext()
    from accelerate import PartialState

    return PartialState().main_process_first()  # type: ignore[no-any-return]


RUN = Command(
    "  packstore run job.yaml --dry-run\n"
    "  accelerate launch -m packstore run job.yaml        # several GPUs or nodes\n",
    _configure,
    _run,
)
