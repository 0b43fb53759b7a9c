"""``packstore import``: makes a dataset from another trainer's file."""

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
from packstore.cli.export import add_format
from packstore.cli.settings import add_settings, read_settings
from packstore.exchange import import_
from packstore.exchange.importers import IMPORTERS


def _configure(parser: argparse.ArgumentParser) -> None:
    formats = parser.add_subparsers(title="formats", metavar="FORMAT", dest="of", required=True)
    for name in IMPORTERS:
        importer = IMPORTERS.load(name)
        sub = add_format(formats, name, importer.help, importer.examples)
        sub.add_argument("source", metavar="FILE", help="path or URL of the file")
        sub.add_argument("out", metavar="OUT", help="folder or URL of the new dataset")
        add_json(sub)
        add_storage_options(sub)
        add_settings(sub, "format", importer.options)


def _run(args: argparse.Namespace) -> int:
    options = IMPORTERS.load(args.of).options
    with progress_of("import", args) as progress:
        dataset = import_(
            args.of,
            args.source,
            args.out,
            storage_options=storage_options(args),
            progress=progress,
            **read_settings(args, options),
        )
    if args.json:
        print_result(dataset_result(dataset))
        return 0
    m = dataset.manifest
    rows: dict[str, object] = {
        "examples": m.totals.examples,
        "packs": f"{number(m.num_packs)} of {number(m.pack_size)} tokens",
        "fill rate": f"{m.fill_rate:.2%}",
        "tokens": m.totals.tokens,
        "bytes": m.totals.bytes,
        "shards": len(m.shards),
    }
    stdout_console().print(two_columns(f"{m.kind} dataset {dataset.url}", rows))
    return 0


COMMAND = Command(
    examples="  packstore import nemo packed_8192_seed0.npy prefs-8k --tokenizer tokenizer.json\n"
    "  packstore import nemo --help\n",
    configure=_configure,
    run=_run,
)
