"""``packstore ref-logps``: computes log-probs of a reference model as a side dataset."""

from __future__ import annotations

import argparse

from packstore.cli import Command, common
from packstore.cli._messages import progress_of
from packstore.cli._model import add_model, loaded, ranks, say


def _configure(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser, versions=True)
    parser.add_argument("out", metavar="OUT", help="folder or URL of the side dataset")
    add_model(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace what is at OUT")
    common.add_json(parser)


def _run(args: argparse.Namespace) -> int:
    dataset = common.open_dataset(args)
    with ranks(args.device) as device:
        from packstore.torch.reference.reference import write_ref_logps

        model = loaded(args, args.model, args.adapter, device)
        with progress_of("ref-logps", args) as progress:
            side = write_ref_logps(
                model,
                dataset,
                args.out,
                overwrite=args.overwrite,
                storage_options=args.storage_option,
                progress=progress,
                mixed_precision=args.mixed_precision,
                packs_per_batch=args.packs_per_batch,
                tokens_per_batch=args.tokens_per_batch,
            )
    if not say():
        return 0
    facts = {"examples": len(side), **side.manifest.provenance}
    common.print_table(args, f"side dataset {side.url}", facts, {"url": side.url, **facts})
    return 0


REF_LOGPS = Command(
    "  torchrun --nproc-per-node 8 -m packstore ref-logps prefs-8k ref-8k --model my-sft-model\n"
    "The same command again continues a run that was killed.\n",
    _configure,
    _run,
)
