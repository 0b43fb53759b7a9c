"""Arguments and setup of commands that run a model: model, device, ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from packstore.cli.common import add_settings
from packstore.config.training import TrainModelConfig
from packstore.errors import ConfigError, quote, sentence
from packstore.registry import missing_extra

if TYPE_CHECKING:
    import torch


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds ``--model``, and the arguments of precision, attention, device and batching."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", required=True, metavar="PATH", help="folder or hub name, or a LoRA adapter"
    )
    group.add_argument("--adapter", metavar="PATH", help="LoRA adapter over the model")
    names = ("dtype", "attention", "head", "compile")
    add_settings(parser, "precision", TrainModelConfig, names)
    parser.add_argument(
        "--mixed-precision",
        choices=("auto", "none", "bf16"),
        default="auto",
        help="auto: bf16 where it is fast",
    )
    parser.set_defaults(**{name: getattr(TrainModelConfig, name) for name in names})
    group.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare packed with unpacked logits first",
    )
    group.add_argument("--device", metavar="NAME", help="default: one GPU per rank, else cpu")
    batching = group.add_mutually_exclusive_group()
    for flag, text in (("packs", "packs of one batch (default: 1)"), ("tokens", "instead: tokens")):
        batching.add_argument(f"--{flag}-per-batch", type=int, metavar="N", help=text)


def loaded(
    args: argparse.Namespace,
    path: str,
    adapter: str | None,
    device: torch.device,
    scores: bool = False,
) -> Any:
    """Loads the model at `path` with the dtype and attention of the arguments, on `device`."""
    join_logs()
    from packstore.torch.models.compiled import compile_as_asked
    from packstore.torch.models.load import (
        add_adapter,
        is_adapter,
        load_model,
    )
    from packstore.torch.models.probe import probe_model
    from packstore.torch.reference.arithmetic import lowered

    new = scores and adapter is not None  # the adapter holds the head
    how = {"dtype": args.dtype, "attention": args.attention, "trainable": new, "scores": scores}
    model = load_model(path, **how).requires_grad_(False)
    if adapter is not None:
        if not is_adapter(adapter):
            rule = "it must hold an adapter_config.json"
            raise ConfigError(sentence(f"adapter {adapter}", rule, "none"))
        model = add_adapter(model, adapter, False)
    model = model.to(device)
    autocast = lowered(args.mixed_precision, model)
    if args.probe:
        with autocast():
            probe_model(model)
    compile_as_asked(args.compile, model, device, autocast)
    return model


def join_logs() -> None:
    """Makes transformers log as packstore does, without bars, which would break up our lines."""
    with suppress(ImportError):
        from transformers.utils import logging

        logging.disable_progress_bar()
        logging.disable_default_handler()
        logging.enable_propagation()


@contextmanager
def ranks(device: str | None) -> Iterator[torch.device]:
    """Connects the ranks of a launcher, and yields the device of this rank."""
    try:
        import torch
    except ImportError as error:
        raise missing_extra("this command", "train", error) from error
    gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if gpu else "cpu"
    try:
        chosen = torch.device(device)
        torch.empty(0, device=chosen)
    except (RuntimeError, AssertionError) as error:
        rule = "it must be a device of this machine, such as cpu or cuda:0"
        raise ConfigError(sentence("--device", rule, quote(device))) from error
    if gpu:
        torch.cuda.set_device(chosen)
    if several:
        # It keeps the process group that exists at its import. Imported later, by transformers, it
        # would keep the group's threads alive, which may abort the process at exit.
        import torch.distributed.nn

        torch.distributed.init_process_group("nccl" if gpu else "gloo")
    try:
        yield chosen
        from packstore.torch.models.compiled import tell_uncompiled

        tell_uncompiled()
    finally:
        if several:
            torch.distributed.destroy_process_group()


def say() -> bool:
    """Returns True on the rank that prints."""
    return os.environ.get("RANK", "0") == "0"
