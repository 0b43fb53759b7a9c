"""The model and the arithmetic of stored log-probs: recorded, and compared with the
training.

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
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor, nn

from packstore.errors import CompatibilityError, quote, sentence
from packstore.io.dataset.dataset import Dataset
from packstore.io.side.side import Side, open_side
from packstore.registry import choice
from packstore.torch.attention import ATTENTION, AUTOMATIC, flash
from packstore.torch.logprobs.head import find_head
from packstore.torch.logprobs.logprobs import exact_dtype
from packstore.torch.models.mask import PREFIX
from packstore.torch.models.probe import few_tokens
from packstore.torch.models.unwrap import (
    backbone_of,
    evaluating,
    has_compiled_layers,
    peft_model_of,
    uncompiled,
    unwrapped,
)

if TYPE_CHECKING:
    from packstore.torch.attention.auto import Call

logger = logging.getLogger(__name__)

Precision = Literal["auto", "none", "bf16"]
"""``bf16``: bfloat16 by autocast; ``none``: the caller's autocast state; ``auto``: see
:func:`choose_precision`.
"""

ResolvedPrecision = Literal["none", "bf16"]

Provenance = dict[str, str | int | float | bool | None]

_ALL_SETTINGS = "with the reference model and the settings of this training"

ARITHMETIC = {
    "weight_dtype": "with --dtype {}",
    "autocast_dtype": "with --mixed-precision {}",
    "attention": "with --attention {}",
    "compile": "with --compile {}",
    "device": "on a device of the kind {}",
    "float32_matmul": "with float32 products in {}",
}
"""Fields of the arithmetic -> how to compute with a value of it."""

REMEDIES = {
    "model_rounded_sha256": _ALL_SETTINGS,
    "tokenizer_sha256": _ALL_SETTINGS,
    "chat_template_sha256": _ALL_SETTINGS,
    "head_dtype": _ALL_SETTINGS,
    **ARITHMETIC,
    "model_sha256": "with the same weights in the same dtype",
}
"""Fields that must match the training -> how to compute the log-probs so that they do.

The first fields identify the model: they are compared first.
"""

_UNRELATED_CONFIG = (
    "architectures",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "use_cache",
)
"""Fields of a model's config that do not change its log-probs."""


def choose_precision(
    requested: Precision, device: torch.device, weights: torch.dtype
) -> ResolvedPrecision:
    """Return the requested precision; for ``auto``, ``bf16`` where kernels need it.

    They need it for float32 weights on a CUDA device of compute capability 8 or newer,
    without an autocast around the call. Logs the choice there, and a warning if such a
    device computes in float32.
    """
    choice("mixed_precision", requested, get_args(Precision))
    has_autocast = torch.is_autocast_enabled(device.type)
    computes_in_float32 = weights == torch.float32 and not has_autocast
    if not (computes_in_float32 and flash.runs_on(device)):
        return "bf16" if requested == "bf16" else "none"
    if requested != "bf16":
        log_choice(requested)
    return "none" if requested == "none" else "bf16"


@cache
def log_choice(requested: Precision) -> None:
    """Log, once, the effect of `requested` on float32 weights on a GPU."""
    if requested == "auto":
        logger.info("mixed_precision 'auto' is 'bf16': float32 weights on CUDA")
    else:
        logger.warning(
            "mixed_precision 'none' with float32 weights on CUDA: flash kernels take "
            "16 bits only, so attention runs segment by segment, with about 1,300 "
            "kernel launches a layer for a row of 80 segments. Use mixed_precision "
            "'bf16', or dtype 'bfloat16'"
        )


def choose_autocast(
    requested: Precision, model: nn.Module
) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that makes the autocast context of a model.

    See :func:`choose_precision`.
    """
    weight = next(model.parameters())
    if choose_precision(requested, weight.device, weight.dtype) == "none":
        return nullcontext
    return partial(torch.autocast, weight.device.type, torch.bfloat16)


def describe_arithmetic(
    model: nn.Module, device: torch.device | None = None, *, adapter: bool = True
) -> dict[str, str | None]:
    """Describe the numerics of a model under the current autocast state.

    ``schemas/annex-e-side-data.md``, "Origin of `ref_logps`", defines the fields.

    Args:
        model: the model.
        device: device that it computes on; default: the device of its head.
        adapter: True: with its adapter; False: without.
    """
    head_weight = find_head(model).weight
    device = device or head_weight.device
    autocast_dtype = None
    if torch.is_autocast_enabled(device.type):
        autocast_dtype = torch.get_autocast_dtype(device.type)
    return {
        "weight_dtype": ", ".join(_weight_dtypes(model, adapter=adapter)),
        "autocast_dtype": None
        if autocast_dtype is None
        else _dtype_name(autocast_dtype),
        "attention": _attention(model, device, autocast_dtype),
        "compile": "layers" if has_compiled_layers(unwrapped(model)) else "none",
        "head_dtype": _dtype_name(exact_dtype(head_weight)),
        "device": _kind_of_device(device),
        "float32_matmul": _rounding_of_float32(device),
    }


def _weight_dtypes(model: nn.Module, *, adapter: bool) -> list[str]:
    dtypes = set()
    for name, weight in unwrapped(model).named_parameters():
        if weight.is_floating_point() and (adapter or not _is_of_adapter(name)):
            dtypes.add(_dtype_name(weight.dtype))
    return sorted(dtypes)


def _attention(
    model: nn.Module, device: torch.device, autocast_dtype: torch.dtype | None
) -> str:
    """Return the public name of the attention backend.

    If ``auto`` chooses several: their names, sorted, comma-separated.
    """
    name = attention_of(model)
    if name not in AUTOMATIC:
        return name
    calls = record_calls(model, device, autocast_dtype)
    return ", ".join(sorted({call.backend for call in calls}))


def attention_of(model: nn.Module) -> str:
    """Return the name of a model's attention: a backend, or one of transformers."""
    implementation = str(unwrapped(model).config._attn_implementation)
    name = implementation.removeprefix(PREFIX)
    if name.isdigit():
        name = list(ATTENTION)[int(name)]
    return name


def record_calls(
    model: nn.Module, device: torch.device, autocast_dtype: torch.dtype | None
) -> list[Call]:
    """Return a call of attention for each layer, as it would run on `device`.

    Args:
        model: a model whose backend is in :data:`AUTOMATIC`, on any device.
        device: device of the training.
        autocast_dtype: dtype of autocast in the training; None: without.
    """
    # Imported here, as it imports torch's compiler, which takes a second.
    from packstore.torch.attention import auto

    backbone = backbone_of(unwrapped(model))
    weight_device = next(backbone.parameters()).device
    autocast = torch.autocast(
        weight_device.type, autocast_dtype, enabled=autocast_dtype is not None
    )
    with (
        evaluating(model),
        uncompiled(model),
        torch.no_grad(),
        autocast,
        auto.calls_on(device) as calls,
    ):
        backbone(**few_tokens(weight_device).model_inputs())
    return calls


def _kind_of_device(device: torch.device) -> str:
    """Return the type of a device, with the architecture of a GPU."""
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        architecture = properties.gcnArchName.split(":")[0]
    else:
        architecture = f"sm_{properties.major}{properties.minor}"
    return f"cuda {architecture}"


def _rounding_of_float32(device: torch.device) -> str:
    """Return the precision of products of float32 matrices."""
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    rounding = str(backend.matmul.fp32_precision)
    return "ieee" if rounding == "none" else rounding


def _dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def describe_reference(
    model: nn.Module,
    dataset: Dataset,
    device: torch.device | None = None,
    *,
    adapter: bool = True,
) -> Provenance:
    """Return the provenance that a side dataset of this model's log-probs records."""
    tokenizer = dataset.manifest.provenance.get("tokenizer") or {}
    template = tokenizer.get("chat_template")
    template_sha256 = None
    if template is not None:
        template_sha256 = hashlib.sha256(template.encode()).hexdigest()
    config: Any = unwrapped(model).config
    return {
        "model": str(getattr(config, "_name_or_path", "") or "unnamed"),
        "model_sha256": weights_sha256(model, adapter=adapter),
        "model_rounded_sha256": weights_sha256(model, adapter=adapter, rounded=True),
        "adapter": adapter and peft_model_of(model) is not None,
        "tokenizer_sha256": tokenizer.get("sha256"),
        "chat_template_sha256": template_sha256,
        **describe_arithmetic(model, device, adapter=adapter),
    }


def weights_sha256(
    model: nn.Module, *, adapter: bool = True, rounded: bool = False
) -> str:
    """Hash config, weights and dtypes of a model.

    Args:
        model: the model.
        adapter: True: with the active adapter; False: without any.
        rounded: round weights to bfloat16, and leave out dtypes: models that differ
            only in dtypes that hold bfloat16 hash alike.
    """
    base = unwrapped(model)
    digest = hashlib.sha256(_config_json(base.config).encode())
    weights = _named_weights(model, adapter=adapter)
    for name, weight in sorted(weights.items()):
        header = f"{name} {tuple(weight.shape)}"
        if not rounded:
            header += f" {_dtype_name(weight.dtype)}"
        elif weight.is_floating_point():
            weight = weight.detach().to(torch.bfloat16)
        digest.update(header.encode())
        flat = weight.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())

    if not rounded:
        # Buffers outside the state follow from the config; their dtypes do not.
        state = {_name_without_peft(name) for name in base.state_dict()}
        for full_name, buffer in sorted(base.named_buffers()):
            name = _name_without_peft(full_name)
            if name not in state:
                digest.update(f"{name} {_dtype_name(buffer.dtype)}".encode())
    return digest.hexdigest()


def _config_json(config: Any) -> str:
    """Return the fields of a model's config that may change its log-probs."""
    fields = {
        name: value
        for name, value in config.to_diff_dict().items()
        if name not in _UNRELATED_CONFIG and not name.startswith("_")
    }
    return json.dumps(fields, sort_keys=True, default=str)


def _named_weights(model: nn.Module, *, adapter: bool) -> dict[str, Tensor]:
    """Return the weights of a model under their names without PEFT.

    Without adapters that are not active, or without any.
    """
    peft_model = peft_model_of(model)
    active = getattr(peft_model, "active_adapter", None)
    all_adapters = getattr(peft_model, "peft_config", {})
    inactive = [f".{name}." for name in all_adapters if name != active]

    weights = {}
    for full_name, weight in unwrapped(model).state_dict().items():
        if _is_of_adapter(full_name):
            is_inactive = any(part in full_name for part in inactive)
            if is_inactive or not adapter:
                continue
        weights[_name_without_peft(full_name)] = weight
    return weights


def _is_of_adapter(name: str) -> bool:
    """Return True for the name of a tensor that PEFT added to a model."""
    return "lora_" in name or ".modules_to_save." in name


def _name_without_peft(name: str) -> str:
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def check_reference(
    side: Side | str,
    model: nn.Module,
    dataset: Dataset,
    *,
    adapter: bool = False,
    device: torch.device | None = None,
) -> None:
    """Raise if the training would compute other log-probs than a side dataset holds.

    Call it under the training's autocast, if there is one.

    Args:
        side: a side dataset from
            :func:`~packstore.torch.reference.reference.write_ref_logps`, or its URL.
        model: the training's reference; before the first step, the policy itself will
            do.
        dataset: the training dataset.
        adapter: True: the reference is the model with its adapter; False: without.
        device: the device of the training; default: the device of the model.

    Raises:
        CompatibilityError: a recorded field is absent, or differs.
    """
    side = side if isinstance(side, Side) else open_side(side)
    recorded = side.manifest.provenance
    expected = describe_reference(model, dataset, device, adapter=adapter)
    for name in REMEDIES:
        value = expected[name]
        if name not in recorded:
            rule = f"it must say its {name}"
            actual = "none"
        elif recorded[name] != value:
            rule = f"its {name} must be that of the training, {quote(value, 20)}"
            actual = quote(recorded[name], 20)
        else:
            continue
        raise CompatibilityError(
            sentence(
                side.url,
                rule=rule,
                found=actual,
                remedy=f"Make it anew: packstore ref-logps {_flags_for(name, value)}",
            )
        )


def _flags_for(name: str, value: object) -> str:
    """Return how to compute log-probs with a value of a field."""
    if name == "autocast_dtype":
        value = "bf16" if value else "none"
    if name == "attention":
        value = attention_setting(str(value))
    return REMEDIES[name].format(value)


def attention_setting(recorded: str) -> str:
    """Return the setting `attention` that gives the recorded backends.

    Args:
        recorded: a name, or several of them, comma-separated: layers of different kinds
            have different backends.
    """
    names = recorded.split(", ")
    if len(names) == 1:
        return recorded
    if "ranges" in names:
        return "auto_ranges"
    return "auto_varlen" if "torch_varlen" in names else "auto"


def check_arithmetic(
    side: Side, model: nn.Module, device: torch.device | None = None
) -> None:
    """Log a warning if log-probs have other numerics than a model.

    The weights of the model may differ.
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
