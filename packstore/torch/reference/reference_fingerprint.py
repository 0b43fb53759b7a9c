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
from packstore.io.side.side import Side, open_side
from packstore.torch.models.unwrap import adapted, unwrapped
from packstore.torch.reference.arithmetic import describe_arithmetic, is_added, short

logger = logging.getLogger(__name__)

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
    **dict.fromkeys(("model_rounded_sha256", "tokenizer_sha256", "chat_template_sha256"), _OTHER),
    "head_dtype": _OTHER,
    **ARITHMETIC,
    "model_sha256": "with the same weights in the same dtype",
}
"""What must agree, first what says whose log-probs they are -> how to make those that do."""

_VOLATILE = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


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
    template_sha256 = None if template is None else hashlib.sha256(template.encode()).hexdigest()
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


def weights_sha256(model: nn.Module, *, adapter: bool = True, rounded: bool = False) -> str:
    """Hashes config, weights and dtypes of a model, with the active `adapter` or without any.

    With `rounded`, weights are rounded to bfloat16, so that any dtype that holds it hashes alike.
    """
    base, adapters = unwrapped(model), adapted(model)
    settings = base.config.to_diff_dict().items()
    kept = {n: v for n, v in settings if n not in _VOLATILE and not n.startswith("_")}
    digest = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode())
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
    dataset: Dataset,
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
            raise CompatibilityError(sentence(side.url, f"it must say its {name}", "none", remedy))
        if recorded[name] != value:
            rule = f"its {name} must be that of the training, {quote(value, 20)}"
            raise CompatibilityError(sentence(side.url, rule, quote(recorded[name], 20), remedy))


def check_arithmetic(side: Side, model: nn.Module, device: torch.device | None = None) -> None:
    """Logs a warning if log-probs have other numerics than `model`, whose weights may differ."""
    for name, value in describe_arithmetic(model, device, adapter=False).items():
        recorded = side.manifest.provenance.get(name, "unknown")
        if name in ARITHMETIC and recorded != value:
            logger.warning(
                "%s was made with %s %s, this run computes with %s", side.url, name, recorded, value
            )


def _plain_name(name: str) -> str:
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")
