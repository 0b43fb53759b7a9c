"""The numerics of a forward pass: weight dtype, autocast, attention, compiler, matmul rounding.

Two runs of one model give the same bits if weights, autocast, attention backend, compiled layers,
kind of device and products of float32 are the same. bf16 weights and float32 weights under bf16
autocast are not: the log-probs of a sequence differ by up to half a nat. Compiled layers round less
often, which moves them as much as another attention does. Head backends differ by less than is
stored, and are not compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from packstore.registry import choice
from packstore.torch.attention import ATTENTION, flash
from packstore.torch.logprobs.fused_head import exact_dtype
from packstore.torch.logprobs.head import find_head
from packstore.torch.models.probe import few_tokens
from packstore.torch.models.unwrap import evaluating, has_compiled_layers, uncompiled, unwrapped

logger = logging.getLogger(__name__)

Chosen = Literal["none", "bf16"]
"""``bf16``: bfloat16 by autocast; ``none``: the caller's autocast state."""

Precision = Literal["auto", "none", "bf16"]
"""``auto``: the choice of :func:`choose_precision`."""

Arithmetic = dict[str, str | None]


def choose_precision(asked: Precision, device: torch.device, weights: torch.dtype) -> Chosen:
    """Returns `asked`, or for ``auto``: ``bf16`` where float32 weights meet bfloat16 kernels.

    That is on a CUDA device of compute capability 8 or newer, without an autocast around the call.
    Logs the choice, and a warning if such a device computes in float32.
    """
    choice("mixed_precision", asked, get_args(Precision))
    around = torch.is_autocast_enabled(device.type)
    if around or weights != torch.float32 or not flash.runs_on(device):
        return "bf16" if asked == "bf16" else "none"
    if asked != "bf16":
        log_choice(asked)
    return "none" if asked == "none" else "bf16"


@cache
def log_choice(asked: Precision) -> None:
    """Logs once what `asked` means for float32 weights on a GPU."""
    if asked == "auto":
        logger.info("mixed_precision 'auto' is 'bf16': float32 weights on CUDA")
    else:
        logger.warning(
            "mixed_precision 'none' with float32 weights on CUDA: flash kernels take 16 bits only, "
            "so attention runs segment by segment, with about 1,300 kernel launches a layer for a "
            "row of 80 segments. Use mixed_precision 'bf16', or dtype 'bfloat16'"
        )


def lowered(asked: Precision, model: nn.Module) -> Callable[[], AbstractContextManager[Any]]:
    """Returns what makes the autocast context of a model, by :func:`choose_precision`."""
    weight = next(model.parameters())
    if choose_precision(asked, weight.device, weight.dtype) == "none":
        return nullcontext
    return partial(torch.autocast, weight.device.type, torch.bfloat16)


def describe_arithmetic(
    model: nn.Module, device: torch.device | None = None, *, adapter: bool = True
) -> Arithmetic:
    """Describes the numerics of `model` on `device`, with or without `adapter`, under autocast.

    The fields are those of ``schemas/format.md``, section "Side datasets".
    """
    weight = find_head(model).weight
    device = device or weight.device
    lower = None
    if torch.is_autocast_enabled(device.type):
        lower = torch.get_autocast_dtype(device.type)
    tensors = unwrapped(model).named_parameters()
    dtypes = {t.dtype for n, t in tensors if t.is_floating_point() and (adapter or not is_added(n))}
    kind = device.type
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"sm_{properties.major}{properties.minor}"
        kind = f"cuda {properties.gcnArchName.split(':')[0] if torch.version.hip else name}"
    products = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    rounding = str(products.matmul.fp32_precision)
    return {
        "weight_dtype": ", ".join(sorted(map(short, dtypes))),
        "autocast_dtype": None if lower is None else short(lower),
        "attention": _attention(model, device, lower),
        "compile": "layers" if has_compiled_layers(unwrapped(model)) else "none",
        "head_dtype": short(exact_dtype(weight)),
        "device": kind,
        "float32_matmul": "ieee" if rounding == "none" else rounding,
    }


def short(dtype: torch.dtype) -> str:
    """Returns the name of the dtype without its module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def is_added(name: str) -> bool:
    """Returns True for the name of a tensor that PEFT added to a model."""
    return "lora_" in name or ".modules_to_save." in name


def _attention(model: nn.Module, device: torch.device, lower: torch.dtype | None) -> str:
    """The backend's public name; several chosen by ``auto``: sorted, comma-separated."""
    name = str(unwrapped(model).config._attn_implementation).removeprefix("packstore_")
    if name.isdigit():
        name = list(ATTENTION)[int(name)]
    if name != "auto":
        return name
    from packstore.torch.attention import auto  # brings in torch's compiler, which takes a second

    head = find_head(model)
    with (
        evaluating(model),
        uncompiled(model),
        torch.no_grad(),
        torch.autocast(head.weight.device.type, lower, enabled=lower is not None),
        auto.chosen_on(device) as names,
    ):
        head.backbone(**few_tokens(head.weight.device).model_inputs())
    return ", ".join(sorted(names))
