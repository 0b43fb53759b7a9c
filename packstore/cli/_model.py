"""Arguments and setup of commands that run a model: model, device, ranks."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from packstore.cli._arguments import add_settings
from packstore.config.training import TrainModelConfig

if TYPE_CHECKING:
    import torch

    from packstore.io.dataset.dataset import Dataset
    from packstore.io.side.side import Side


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add ``--model``, and flags for precision, attention, device and batch size."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="folder or hub name of a model, or a LoRA adapter",
    )
    group.add_argument(
        "--use-cpu",
        action="store_true",
        help="run on the CPU (default: one GPU per rank, if any)",
    )
    group.add_argument(
        "--packs-per-batch", type=int, metavar="N", help="packs per batch (default: 1)"
    )
    group.add_argument(
        "--tokens-per-batch",
        type=int,
        metavar="N",
        help="tokens per batch, instead of packs",
    )
    group.add_argument(
        "--max-keys",
        type=int,
        metavar="N",
        help="maximum keys per pack (default: 16 per token)",
    )
    setting_names = ("dtype", "attention", "head", "compile")
    add_settings(parser, "precision", TrainModelConfig, setting_names)
    # Unlike other settings these are read from the namespace, so they need defaults.
    parser.set_defaults(
        **{name: getattr(TrainModelConfig, name) for name in setting_names}
    )
    parser.add_argument(
        "--mixed-precision",
        choices=("auto", "none", "bf16"),
        default="auto",
        help="autocast; auto: bf16 where it is fast (default: auto)",
    )


def inference_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the keyword arguments for inference: precision, head and sizes."""
    return {
        "mixed_precision": args.mixed_precision,
        "head": args.head,
        "max_keys": args.max_keys,
        "packs_per_batch": args.packs_per_batch,
        "tokens_per_batch": args.tokens_per_batch,
    }


def load_on_device(
    args: argparse.Namespace,
    path: str,
    device: torch.device,
    dataset: Dataset,
    sides: Iterable[Side] = (),
    needs_scores: bool = False,
) -> Any:
    """Load a model, choose and probe its attention, and compile it if requested.

    A collective call. Models that are loaded later with the same `args` get the same
    attention.

    Args:
        args: the command line, with dtype, attention, autocast and `compile`;
            `attention` is replaced if it is ``auto``.
        path: folder or hub name.
        device: device to load it on.
        dataset: the dataset that the model runs over.
        sides: side datasets with log-probs that its own are compared with.
        needs_scores: load a reward model.
    """
    redirect_transformers_logs()
    from packstore.torch.batch.transfer import inference_batching
    from packstore.torch.models.compiled import compile_if_requested
    from packstore.torch.models.load import load_model
    from packstore.torch.models.probe import probe_model
    from packstore.torch.reference.provenance import choose_autocast
    from packstore.torch.training.attention_choice import (
        choose_attention,
        set_attention_backend,
    )

    model = load_model(
        path, dtype=args.dtype, attention=args.attention, scores=needs_scores
    ).to(device)
    autocast = choose_autocast(args.mixed_precision, model)
    if args.attention == "auto":
        batching = inference_batching(
            {
                "packs_per_batch": args.packs_per_batch,
                "tokens_per_batch": args.tokens_per_batch,
            },
            device,
            dataset.manifest.pack_size,
        )
        with autocast():
            args.attention = choose_attention(
                model, device, dataset, sides=sides, batching=batching
            )
        if args.attention != "auto":
            set_attention_backend(model, args.attention)
    with autocast():
        probe_model(model)
    compile_if_requested(args.compile, model, device, autocast)
    return model


def redirect_transformers_logs() -> None:
    """Send the log records of transformers to our handler.

    Its progress bars and its table of loaded weights would break up our lines;
    `load_model` reports the weights that matter.
    """
    with suppress(ImportError):
        from transformers.utils import logging as transformers_logging

        transformers_logging.disable_progress_bar()
        transformers_logging.disable_default_handler()
        transformers_logging.enable_propagation()
        loading = transformers_logging.get_logger("transformers.modeling_utils")
        loading.addFilter(_is_no_load_report)


def _is_no_load_report(record: logging.LogRecord) -> bool:
    return "LOAD REPORT" not in record.getMessage()


@contextmanager
def process_group(args: argparse.Namespace) -> Iterator[torch.device]:
    """Connect the ranks of a launcher, as a training does; yield the device of this
    rank.
    """
    # This module keeps a reference to the process group that exists at its import. If
    # transformers imported it later, the reference would keep the threads of the group
    # alive, which may abort the process at exit.
    import torch.distributed.nn
    from accelerate import PartialState

    state = PartialState(cpu=args.use_cpu)
    try:
        yield torch.device("cpu") if args.use_cpu else state.device
        from packstore.torch.models.compiled import warn_about_uncompiled

        warn_about_uncompiled()
    finally:
        state.destroy_process_group()


def is_main_rank() -> bool:
    """Return True on the rank that prints."""
    return os.environ.get("RANK", "0") == "0"
