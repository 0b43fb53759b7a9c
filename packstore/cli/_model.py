"""Arguments and setup of commands that run a model: model, device, ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from packstore.cli.common import add_flags, add_settings
from packstore.config.training import TrainModelConfig

if TYPE_CHECKING:
    import torch


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds ``--model``, and the arguments of precision, attention, device and
    batching.
    """
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        required=True,
        metavar="PATH",
        help="folder or hub name, or a LoRA adapter",
    )
    names = ("dtype", "attention", "head", "compile")
    add_settings(parser, "precision", TrainModelConfig, names)
    parser.add_argument(
        "--mixed-precision",
        choices=("auto", "none", "bf16"),
        default="auto",
        help="auto: bf16 where it is fast",
    )
    parser.set_defaults(**{name: getattr(TrainModelConfig, name) for name in names})
    flags = {
        "--use-cpu": "default: one GPU per rank, where there are any",
        "--packs-per-batch N": "packs of one batch (default: 1)",
        "--tokens-per-batch N": "instead: tokens",
    }
    add_flags(group, flags)


def inference_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Returns those arguments that inference on packs takes as keywords."""
    names = ("mixed_precision", "head", "packs_per_batch", "tokens_per_batch")
    return {name: getattr(args, name) for name in names}


def loaded(
    args: argparse.Namespace, path: str, device: torch.device, scores: bool = False
) -> Any:
    """Loads the model at `path` with the dtype and attention of the arguments, on
    `device`.
    """
    join_logs()
    from packstore.torch.models.compiled import compile_if_requested
    from packstore.torch.models.load import load_model
    from packstore.torch.models.probe import probe_model
    from packstore.torch.reference.provenance import choose_autocast

    model = load_model(
        path, dtype=args.dtype, attention=args.attention, scores=scores
    ).to(device)
    autocast = choose_autocast(args.mixed_precision, model)
    with autocast():
        probe_model(model)
    compile_if_requested(args.compile, model, device, autocast)
    return model


def join_logs() -> None:
    """Makes transformers log as packstore does, without what would break up our lines:
    bars, and its table of weights, of which `load_model` says what matters.
    """
    with suppress(ImportError):
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.disable_default_handler()
        logging.enable_propagation()
        loading = logging.get_logger("transformers.modeling_utils")
        loading.addFilter(lambda record: "LOAD REPORT" not in record.getMessage())


@contextmanager
def process_group(args: argparse.Namespace) -> Iterator[torch.device]:
    """Connects the ranks of a launcher, as a training does, and yields the device of
    this rank.
    """
    # It keeps the process group that exists at its import. Imported later, by
    # transformers, it would keep the group's threads alive, which may abort the process
    # at exit.
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
    """Returns True on the rank that prints."""
    return os.environ.get("RANK", "0") == "0"
