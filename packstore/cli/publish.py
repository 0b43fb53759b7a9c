"""``packstore publish``: a dataset on the Hugging Face hub."""

from __future__ import annotations

import argparse
from typing import Any

from packstore.cli import Command, common
from packstore.cli._messages import progress_of


def _configure(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser)
    parser.add_argument("repo", metavar="REPO", help="repository on the hub, OWNER/NAME")
    common.add_flags(parser, {"--private": "if the repository is new, keep it private"})
    common.add_json(parser)


def _run(args: argparse.Namespace) -> int:
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from packstore.io.versions.publish import publish

    disable_progress_bars()  # they would break up ours, and a log has none of them
    with progress_of("publish", args) as progress:
        how: dict[str, Any] = {"progress": progress, "storage_options": args.storage_option}
        done = publish(args.dataset, args.repo, private=args.private, **how)
    common.print_table(args, f"published {done.url}", done._asdict(), done._asdict())
    return 0


PUBLISH = Command(
    "  packstore publish s3://bucket/prefs-8k me/prefs-8k --private\n", _configure, _run
)
