"""What commands that run a model share: which model, on which device, on which ranks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from packstore.errors import ConfigError, quote, sentence
from packstore.registry import missing_extra

if TYPE_CHECKING:
    import torch

DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "float32": "float32", "float64": "float64"}


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds ``--model``, how it computes, and how packs are batched."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model", required=True, metavar="PATH", help="folder or hub name, or a LoRA adapter"
    )
    group.add_argument("--adapter", metavar="PATH", help="LoRA adapter over the model")
    group.add_argument(
        "--dtype", choices=DTYPES, default="float32", help="of the weights (default: float32)"
    )
    group.add_argument(
        "--mixed-precision",
        choices=("none", "bf16"),
        default="none",
        help="of the computation, by autocast, as in packstore train (default: none)",
    )
    group.add_argument(
        "--attention", default="auto", metavar="NAME", help="backend (default: auto)"
    )
    group.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="first compare packed with unpacked logits of the model (default: True)",
    )
    group.add_argument("--device", metavar="NAME", help="default: a GPU for each rank, else cpu")
    batching = group.add_mutually_exclusive_group()
    batching.add_argument(
        "--packs-per-batch", type=int, metavar="N", help="packs of one batch (default: 1)"
    )
    batching.add_argument(
        "--tokens-per-batch", type=int, metavar="N", help="tokens of one batch at most"
    )


def loaded(args: argparse.Namespace, path: str, adapter: str | None, device: torch.device) -> Any:
    """The model at `path` in the dtype and with the attention that were asked for, on `device`."""
    from packstore.torch.arithmetic import autocast
    from packstore.torch.isolation import probe_model
    from packstore.torch.load import add_adapter, is_adapter, load_model

    model = load_model(path, dtype=DTYPES[args.dtype], attention=args.attention)  # type: ignore[arg-type]
    if adapter is not None:
        if not is_adapter(adapter):
            must = "the folder must hold an adapter_config.json"
            raise ConfigError(sentence(f"adapter {adapter}", must, "none"))
        model = add_adapter(model, adapter, False)
    model = model.to(device)
    if args.probe:
        with autocast(device, args.mixed_precision):
            probe_model(model)
    return model


@contextmanager
def ranks(device: str | None) -> Iterator[torch.device]:
    """The device of this rank, while the ranks that a launcher started are connected."""
    try:
        import torch
    except ImportError as error:
        raise missing_extra("this command", "train", error) from error
    gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if device is None:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if gpu else "cpu"
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError) as error:
        must = "it must be a device of this machine, such as cpu or cuda:0"
        raise ConfigError(sentence("--device", must, quote(device))) from error
    if gpu:
        torch.cuda.set_device(found)
    if several:
        # Its defaults keep the group that is there when it is imported. Imported later, as part of
        # transformers, it would keep the group's threads, which may abort the end of the process.
        import torch.distributed.nn

        torch.distributed.init_process_group("nccl" if gpu else "gloo")
    try:
        yield found
    finally:
        if several:
            torch.distributed.destroy_process_group()


def say() -> bool:
    """Whether this rank is the one that prints."""
    return os.environ.get("RANK", "0") == "0"
