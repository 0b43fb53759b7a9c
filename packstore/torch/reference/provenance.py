"""Which model made log-probs, in which arithmetic: recorded, and compared with the
training's.

Two runs of one model give the same bits if weights, autocast, attention backend,
compiled layers, kind of device and products of float32 are the same. bf16 weights and
float32 weights under bf16 autocast are not: the log-probs of a sequence differ by up to
half a nat. Compiled layers round less often, which moves them as much as another
attention does. Head backends differ by less than is stored, and are not compared.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any, Literal, get_args

import torch
from torch import nn

from packstore.errors import CompatibilityError, quote, sentence
from packstore.io.dataset.dataset import Dataset
from packstore.io.side.side import Side, open_side
from packstore.registry import choice
from packstore.torch.attention import ATTENTION, flash
from packstore.torch.logprobs.head import find_head
from packstore.torch.logprobs.logprobs import exact_dtype
from packstore.torch.models.probe import few_tokens
from packstore.torch.models.unwrap import (
    adapted,
    evaluating,
    has_compiled_layers,
    uncompiled,
    unwrapped,
)

logger = logging.getLogger(__name__)

Chosen = Literal["none", "bf16"]
"""``bf16``: bfloat16 by autocast; ``none``: the caller's autocast state."""

Precision = Literal["auto", "none", "bf16"]
"""``auto``: the choice of :func:`choose_precision`."""

Provenance = dict[str, str | int | float | bool | None]

_OTHER = "with the reference model and the settings of this training"
ARITHMETIC = {
    "weight_dtype": "with --dtype {}",
    "autocast_dtype": "with --mixed-precision {}",
    "attention": "with --attention {}",
    "compile": "with --compile {}",
    "device": "on a device of the kind {}",
    "float32_matmul": "with float32 products in {}",
}
REMEDIES = {
    **dict.fromkeys(
        ("model_rounded_sha256", "tokenizer_sha256", "chat_template_sha256"), _OTHER
    ),
    "head_dtype": _OTHER,
    **ARITHMETIC,
    "model_sha256": "with the same weights in the same dtype",
}
"""What must agree, first what says whose log-probs they are -> how to make those that
do.
"""

_VOLATILE = (
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)


def choose_precision(
    asked: Precision, device: torch.device, weights: torch.dtype
) -> Chosen:
    """Returns `asked`, or for ``auto``: ``bf16`` where float32 weights meet bfloat16
    kernels.

    That is on a CUDA device of compute capability 8 or newer, without an autocast
    around the call. Logs the choice, and a warning if such a device computes in
    float32.
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
            "mixed_precision 'none' with float32 weights on CUDA: flash kernels take "
            "16 bits only, "
            "so attention runs segment by segment, with about 1,300 kernel launches a "
            "layer for a "
            "row of 80 segments. Use mixed_precision 'bf16', or dtype 'bfloat16'"
        )


def choose_autocast(
    asked: Precision, model: nn.Module
) -> Callable[[], AbstractContextManager[Any]]:
    """Returns what makes the autocast context of a model, by
    :func:`choose_precision`.
    """
    weight = next(model.parameters())
    if choose_precision(asked, weight.device, weight.dtype) == "none":
        return nullcontext
    return partial(torch.autocast, weight.device.type, torch.bfloat16)


def describe_arithmetic(
    model: nn.Module, device: torch.device | None = None, *, adapter: bool = True
) -> dict[str, str | None]:
    """Describes the numerics of `model` on `device`, with or without `adapter`, under
    autocast.

    The fields are those of ``schemas/format.md``, section "Side datasets".
    """
    weight = find_head(model).weight
    device = device or weight.device
    lower = None
    if torch.is_autocast_enabled(device.type):
        lower = torch.get_autocast_dtype(device.type)
    tensors = unwrapped(model).named_parameters()
    dtypes = {
        t.dtype
        for n, t in tensors
        if t.is_floating_point() and (adapter or not is_added(n))
    }
    kind = device.type
    if kind == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name = f"sm_{properties.major}{properties.minor}"
        if torch.version.hip:
            name = properties.gcnArchName.split(":")[0]
        kind = f"cuda {name}"
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


def _attention(
    model: nn.Module, device: torch.device, lower: torch.dtype | None
) -> str:
    """The backend's public name; several chosen by ``auto``: sorted,
    comma-separated.
    """
    name = str(unwrapped(model).config._attn_implementation).removeprefix("packstore_")
    if name.isdigit():
        name = list(ATTENTION)[int(name)]
    if name != "auto":
        return name
    from packstore.torch.attention import (
        auto,
    )  # brings in torch's compiler, which takes a second

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


def describe_reference(
    model: nn.Module,
    dataset: Dataset,
    device: torch.device | None = None,
    *,
    adapter: bool = True,
) -> Provenance:
    """Returns the provenance that a side dataset of this model's log-probs records."""
    tokenizer = dataset.manifest.provenance.get("tokenizer") or {}
    template = tokenizer.get("chat_template")
    template_sha256 = (
        None if template is None else hashlib.sha256(template.encode()).hexdigest()
    )
    config: Any = unwrapped(model).config
    return {
        "model": str(getattr(config, "_name_or_path", "") or "unnamed"),
        "model_sha256": weights_sha256(model, adapter=adapter),
        "model_rounded_sha256": weights_sha256(model, adapter=adapter, rounded=True),
        "adapter": adapter and adapted(model) is not None,
        "tokenizer_sha256": tokenizer.get("sha256"),
        "chat_template_sha256": template_sha256,
        **describe_arithmetic(model, device, adapter=adapter),
    }


def weights_sha256(
    model: nn.Module, *, adapter: bool = True, rounded: bool = False
) -> str:
    """Hashes config, weights and dtypes of a model, with the active `adapter` or
    without any.

    With `rounded`, weights are rounded to bfloat16, so that any dtype that holds it
    hashes alike.
    """
    base, adapters = unwrapped(model), adapted(model)
    settings = base.config.to_diff_dict().items()
    kept = {n: v for n, v in settings if n not in _VOLATILE and not n.startswith("_")}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
    tensors = {_plain_name(n): (n, t) for n, t in base.state_dict().items()}
    active = getattr(adapters, "active_adapter", None)
    idle = {
        f".{name}." for name in getattr(adapters, "peft_config", {}) if name != active
    }
    for name, (full, tensor) in sorted(tensors.items()):
        if is_added(full) and (not adapter or any(other in full for other in idle)):
            continue
        kind = "" if rounded else f" {short(tensor.dtype)}"
        digest.update(f"{name} {tuple(tensor.shape)}{kind}".encode())
        if rounded and tensor.is_floating_point():
            tensor = tensor.detach().to(torch.bfloat16)
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    if not rounded:
        for name, buffer in sorted(base.named_buffers()):
            if _plain_name(name) not in tensors:
                digest.update(f"{_plain_name(name)} {short(buffer.dtype)}".encode())
    return digest.hexdigest()


def check_reference(
    side: Side | str,
    model: nn.Module,
    dataset: Dataset,
    *,
    adapter: bool = False,
    device: torch.device | None = None,
) -> None:
    """Refuses precomputed log-probs that differ from those that the training would
    compute.

    Call it under the training's autocast, if there is one.

    Args:
        side: a side dataset from
            :func:`~packstore.torch.reference.reference.write_ref_logps`, or its URL.
        model: the training's reference; before the first step, the policy itself will
            do.
        dataset: the training dataset.
        adapter: True: the reference is the model with its adapter; False: without.
        device: the device of the training; default: that of the model.
    """
    side = side if isinstance(side, Side) else open_side(side)
    recorded = side.manifest.provenance
    expected = describe_reference(model, dataset, device, adapter=adapter)
    for name, setting in REMEDIES.items():
        value = expected[name]
        flag = ("bf16" if value else "none") if name == "autocast_dtype" else value
        remedy = f"Make it anew: packstore ref-logps {setting.format(flag)}"
        if name not in recorded:
            raise CompatibilityError(
                sentence(side.url, f"it must say its {name}", "none", remedy)
            )
        if recorded[name] != value:
            rule = f"its {name} must be that of the training, {quote(value, 20)}"
            raise CompatibilityError(
                sentence(side.url, rule, quote(recorded[name], 20), remedy)
            )


def check_arithmetic(
    side: Side, model: nn.Module, device: torch.device | None = None
) -> None:
    """Logs a warning if log-probs have other numerics than `model`, whose weights may
    differ.
    """
    for name, value in describe_arithmetic(model, device, adapter=False).items():
        recorded = side.manifest.provenance.get(name, "unknown")
        if name in ARITHMETIC and recorded != value:
            logger.warning(
                "%s was made with %s %s, this run computes with %s",
                side.url,
                name,
                recorded,
                value,
            )


def _plain_name(name: str) -> str:
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")
