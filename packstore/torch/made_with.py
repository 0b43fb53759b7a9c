"""Which model made precomputed log-probs, and whether it is the one that training compares with."""

from __future__ import annotations

import hashlib
import json
import logging
from typing import Any

import torch
from torch import Tensor, nn

from packstore.errors import CompatibilityError, quote, sentence
from packstore.io.dataset import Dataset
from packstore.io.manifest import Manifest
from packstore.io.side import Side, open_side
from packstore.torch.attention import ATTENTION
from packstore.torch.fused_head import exact_dtype
from packstore.torch.head import find_head
from packstore.torch.model import unwrapped

logger = logging.getLogger(__name__)

MadeWith = dict[str, str | int | float | bool | None]

MODEL_NAMES = ("model_sha256", "tokenizer_sha256", "chat_template_sha256", "head_dtype")
COMPUTE_NAMES = ("dtype", "attention")
"""What must agree; the second in the last digits only."""

_VOLATILE = ("architectures", "dtype", "torch_dtype", "transformers_version", "use_cache")


def describe_reference(model: nn.Module, data: Dataset | Manifest) -> MadeWith:
    """What a side dataset of this model's log-probs says that it was made with.

    ``model_sha256`` is :func:`weights_sha256`; ``head_dtype`` what log-probs are summed in.
    """
    manifest = data.manifest if isinstance(data, Dataset) else data
    tokenizer = manifest.provenance.get("tokenizer") or {}
    template = tokenizer.get("chat_template")
    template_sha256 = None if template is None else hashlib.sha256(template.encode()).hexdigest()
    config: Any = unwrapped(model).config
    weight = find_head(model).weight
    return {
        "model": str(getattr(config, "_name_or_path", "") or "unnamed"),
        "model_sha256": weights_sha256(model),
        "adapter": hasattr(model, "peft_config"),
        "tokenizer_sha256": tokenizer.get("sha256"),
        "chat_template_sha256": template_sha256,
        "dtype": _short(next(iter(model.parameters())).dtype),
        "attention": _attention(config),
        "head_dtype": _short(exact_dtype(weight)),
        "device": weight.device.type,
    }


def weights_sha256(model: nn.Module, *, adapter: bool = True) -> str:
    """A hash of a model's config and of its weights rounded to bfloat16.

    So it is the same for one model in any dtype that holds bfloat16, wherever it was loaded from.

    Args:
        model: a Hugging Face model, also inside wrappers.
        adapter: False leaves out what PEFT added: that of the base model. True: with the active
            adapter alone.
    """
    inner = unwrapped(model)
    base: Any = inner.get_base_model() if hasattr(inner, "get_base_model") else inner
    settings = {n: v for n, v in base.config.to_diff_dict().items() if n not in _VOLATILE}
    public = {n: v for n, v in settings.items() if not n.startswith("_")}
    digest = hashlib.sha256(json.dumps(public, sort_keys=True, default=str).encode())
    tensors = {_plain_name(n): (n, t) for n, t in base.state_dict().items()}
    active = getattr(inner, "active_adapter", None)
    idle = {f".{name}." for name in getattr(inner, "peft_config", {}) if name != active}
    for name, (full, tensor) in sorted(tensors.items()):
        if _is_added(full) and (not adapter or any(other in full for other in idle)):
            continue
        digest.update(f"{name} {tuple(tensor.shape)}".encode())
        digest.update(_rounded(tensor))
    return digest.hexdigest()


def check_reference(
    side: Side | str,
    model: nn.Module,
    data: Dataset | Manifest,
    *,
    adapter: bool = False,
    dtype: str | None = None,
    exact: bool = True,
) -> None:
    """Refuses precomputed log-probs that are not those that the training would compute itself.

    Args:
        side: what :func:`~packstore.torch.reference.write_ref_logps` wrote, or its URL.
        model: the reference of the training: of a policy before its first step, the policy itself.
        data: the dataset that is trained on.
        adapter: whether the reference is the model with its adapter, not without.
        dtype: that the training computes in; default: that of the model's weights.
        exact: False only logs another dtype or attention backend: values then differ in the last
            digits, and the first step's margins are not exactly 0.

    Raises:
        CompatibilityError: another model, tokenizer, template, precision of the head, dtype or
            attention backend.
    """
    side = side if isinstance(side, Side) else open_side(side)
    told, own = side.manifest.made_with, describe_reference(model, data)
    own["dtype"] = dtype or own["dtype"]
    if not adapter:
        own["model_sha256"] = weights_sha256(model, adapter=False)
    if MODEL_NAMES[0] not in told:
        logger.warning("%s does not say which model made it", side.url)
    for name in (*MODEL_NAMES, *COMPUTE_NAMES):
        if name not in told or told[name] == own[name]:
            continue
        if name in COMPUTE_NAMES and not exact:
            text = "%s was made with %s %s, the training computes with %s"
            logger.warning(text, side.url, name, told[name], own[name])
            continue
        must = f"its {name} must be that of the training, {quote(own[name], 20)}"
        do = "Make it anew with the reference model and the settings of this training"
        raise CompatibilityError(sentence(side.url, must, quote(told[name], 20), do))


def _attention(config: Any) -> str:
    """The backend by the name that users give."""
    name = str(config._attn_implementation).removeprefix("packstore_")
    return ATTENTION.names()[int(name)] if name.isdigit() else name


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _plain_name(name: str) -> str:
    return name.replace(".base_layer.", ".").replace(".original_module.", ".")


def _is_added(name: str) -> bool:
    return "lora_" in name or ".modules_to_save." in name


def _rounded(tensor: Tensor) -> bytes:
    if tensor.is_floating_point():
        tensor = tensor.detach().to(torch.bfloat16)
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
