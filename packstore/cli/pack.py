"""``packstore pack``: packs records into a dataset."""

from __future__ import annotations

import argparse

from packstore.cli import Command
from packstore.cli._progress import progress_of
from packstore.cli._results import add_json, dataset_result, print_result
from packstore.cli.common import (
    add_storage_options,
    number,
    stdout_console,
    storage_options,
    two_columns,
)
from packstore.cli.settings import add_settings, read_settings
from packstore.config import (
    PackConfig,
    PlanConfig,
    RunConfig,
    SelectConfig,
    TokenizeConfig,
    WriteConfig,
)


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        nargs="+",
        metavar="SOURCE",
        help="files, globs, folders or URLs (.jsonl .json .parquet .arrow .csv, also .gz .zst), "
        "or one packed dataset",
    )
    parser.add_argument("out", metavar="OUT", help="folder or URL of the new dataset")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json, a Hugging Face folder, or a SentencePiece .model",
    )
    add_json(parser)
    add_storage_options(parser)
    add_settings(parser, "packing", PlanConfig)
    add_settings(parser, "tokenization", TokenizeConfig)
    add_settings(parser, "selection", SelectConfig)
    add_settings(parser, "files", WriteConfig)
    add_settings(parser, "running", RunConfig)


def _run(args: argparse.Namespace) -> int:
    from packstore.build.pipeline import pack

    source = args.source[0] if len(args.source) == 1 else args.source
    with progress_of("pack", args) as progress:
        dataset = pack(
            source,
            args.out,
            args.tokenizer,
            storage_options=storage_options(args),
            progress=progress,
            **read_settings(args, PackConfig),
        )
    if args.json:
        print_result(dataset_result(dataset))
        return 0
    m = dataset.manifest
    per_pack = m.statistics.examples_per_pack
    rows: dict[str, object] = {
        "records read": m.records.read,
        "records packed": m.records.packed,
        **{f"dropped: {reason}": count for reason, count in m.records.dropped.items()},
        **{f"noted: {event}": count for event, count in m.records.noted.items()},
        "packs": f"{number(m.num_packs)} of {number(m.pack_size)} tokens",
        "fill rate": f"{m.fill_rate:.2%}",
        "examples per pack": f"{per_pack.min} to {per_pack.max}, mean {per_pack.mean:.2f}",
        "tokens": m.totals.tokens,
        "bytes": m.totals.bytes,
        "shards": len(m.shards),
    }
    stdout_console().print(two_columns(f"{m.kind} dataset {dataset.url}", rows))
    return 0


COMMAND = Command(
    group="prepare",
    help="tokenize and pack records into a dataset, or repack a dataset",
    examples="  packstore pack prefs.jsonl prefs-8k --tokenizer tokenizer.json\n"
    "  packstore pack 'raw/*.jsonl.gz' s3://bucket/prefs-8k --tokenizer Qwen3/ --pack-size 8192\n"
    "  packstore pack qa.csv qa-4k --tokenizer t.json --field prompt=question --pack-size 4096\n"
    "  packstore pack prefs-8k prefs-32k --pack-size 32768 --layout shared_prefix\n",
    configure=_configure,
    run=_run,
)
