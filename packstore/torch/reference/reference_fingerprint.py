"""Records which model made precomputed log-probs, and compares it with the training's reference."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

import torch
from torch import nn

from packstore.errors import CompatibilityError, quote, sentence
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.manifest import Manifest
from packstore.io.side.side import Side, open_side
from packstore.torch.models.unwrap import adapted, unwrapped
from packstore.torch.reference.arithmetic import describe_arithmetic, is_added, short

logger = logging.getLogger(__name__)

Provenance = dict[str, str | int | float | bool | None]

MODEL_NAMES = ("model_rounded_sha256", "tokenizer_sha256", "chat_template_sha256", "head_dtype")
"""Must agree, or the log-probs belong to another model or text."""

ARITHMETIC_NAMES = ("weight_dtype", "autocast_dtype", "attention", "device", "float32_matmul")
EXACT_NAMES = (*ARITHMETIC_NAMES, "model_sha256")
"""Must also agree for bit-identical log-probs."""

_VOLATILE = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


def describe_reference(
    model: nn.Module,
    data: Dataset | Manifest,
    device: torch.device | None = None,
    *,
    adapter: bool = True,
) -> Provenance:
    """Returns the provenance that a side dataset of this model's log-probs records.

    ``model_sha256`` and ``model_rounded_sha256`` are :func:`weights_sha256` of the exact weights,
    and of the weights rounded to bfloat16; the rest is :func:`describe_arithmetic`.
    """
    manifest = data.manifest if isinstance(data, Dataset) else data
    tokenizer = manifest.provenance.get("tokenizer") or {}
    template = tokenizer.get("chat_template")
    config: Any = unwrapped(model).config
    return {
        "model": str(getattr(config, "_name_or_path", "") or "unnamed"),
        "model_sha256": weights_sha256(model, adapter=adapter),
        "model_rounded_sha256": weights_sha256(model, adapter=adapter, rounded=True),
        "adapter": adapter and adapted(model) is not None,
        "tokenizer_sha256": tokenizer.get("sha256"),
        "chat_template_sha256": None
        if template is None
        else hashlib.sha256(template.encode()).hexdigest(),
        **describe_arithmetic(model, device, adapter=adapter),
    }


def weights_sha256(model: nn.Module, *, adapter: bool = True, rounded: bool = False) -> str:
    """Hashes a model's config and weights, independent of where it was loaded from.

    Args:
        model: a Hugging Face model, optionally inside wrappers.
        adapter: False hashes the base model alone; True includes the active adapter.
        rounded: False hashes the bytes and dtypes of all weights, and the dtypes of buffers that
            are not stored (such as tables of positions). True hashes the weights rounded to
            bfloat16, so that the hash is the same in any dtype that can hold bfloat16.
    """
    base, adapters = unwrapped(model), adapted(model)
    settings = {n: v for n, v in base.config.to_diff_dict().items() if n not in _VOLATILE}
    public = {n: v for n, v in settings.items() if not n.startswith("_")}
    digest = hashlib.sha256(json.dumps(public, sort_keys=True, default=str).encode())
    tensors = {_plain_name(n): (n, t) for n, t in base.state_dict().items()}
    active = getattr(adapters, "active_adapter", None)
    idle = {f".{name}." for name in getattr(adapters, "peft_config", {}) if name != active}
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
    data: Dataset | Manifest,
    *,
    adapter: bool = False,
    device: torch.device | None = None,
) -> None:
    """Refuses precomputed log-probs that differ from those that the training would compute.

    Call it under the training's autocast, if there is one.

    Args:
        side: a side dataset from :func:`~packstore.torch.reference.reference.write_ref_logps`, or
            its URL.
        model: the training's reference; before the first step, the policy itself will do.
        data: the training dataset.
        adapter: True: the reference is the model with its adapter; False: without.
        device: the device of the training; default: that of the model.
    """
    side = side if isinstance(side, Side) else open_side(side)
    recorded = side.manifest.provenance
    expected = describe_reference(model, data, device, adapter=adapter)
    for name in (*MODEL_NAMES, *EXACT_NAMES):
        if name not in recorded:
            remedy = "Make it anew with packstore ref-logps"
            raise CompatibilityError(sentence(side.url, f"it must say its {name}", "none", remedy))
        if recorded[name] != expected[name]:
            raise CompatibilityError(
                sentence(
                    side.url,
                    f"its {name} must be that of the training, {quote(expected[name], 20)}",
                    quote(recorded[name], 20),
                    _remedy(name, expected[name]),
                )
            )


def check_arithmetic(side: Side, model: nn.Module, device: torch.device | None = None) -> None:
    """Logs a warning if log-probs have other numerics than `model`, whose weights may differ."""
    for name, value in describe_arithmetic(model, device, adapter=False).items():
        recorded = side.manifest.provenance.get(name, "unknown")
        if name in ARITHMETIC_NAMES and recorded != value:
            logger.warning(
                "%s was made with %s %s, this run computes with %s", side.url, name, recorded, value
            )


def _remedy(name: str, value: object) -> str:
    """The remedy of an error: how to make a side dataset whose `name` is `value`."""
    if name not in EXACT_NAMES:
        return "Make it anew with the reference model and the settings of this training"
    how = {
        "weight_dtype": f"with --dtype {value}",
        "autocast_dtype": "with --mixed-precision " + ("bf16" if value else "none"),
        "attention": f"with --attention {value}",
        "device": f"on a device of the kind {value}",
        "float32_matmul": f"with float32 products in {value}",
        "model_sha256": "with the same weights in the same dtype",
    }
    return f"Make it anew: packstore ref-logps {how[name]}"


def _plain_name(name: str) -> str:
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")
