"""Loads Hugging Face causal LMs, reward models, and adapters of them."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Sequence
from contextlib import suppress
from os import PathLike
from pathlib import Path
from typing import Any, Literal

import torch

from packstore.errors import ConfigError, quote
from packstore.registry import missing_extra
from packstore.torch.models.model import use_packed_attention
from packstore.torch.models.unwrap import SCORE, text_config

logger = logging.getLogger(__name__)

DType = Literal["float32", "bfloat16", "float64"]
ADAPTER_FILE = "adapter_config.json"


def load_model(
    path: str | PathLike[str],
    *,
    dtype: DType = "float32",
    attention: str = "auto",
    trainable: bool = False,
    scores: bool = False,
) -> Any:
    """Loads a causal LM that takes packed batches, in evaluation mode, on the CPU.

    `path` is a folder or hub name, or the folder of a LoRA adapter, which names its base model. If
    `trainable` is False all weights are frozen; True with an adapter trains the adapter only.
    With `scores` it loads a reward model; to be trained, also a causal LM in place of one, whose
    new head torch's generator draws.
    """
    name = os.fspath(path)
    if is_adapter(name):
        # An adapter holds the head of scores, so that its base may have none.
        how: Any = {"dtype": dtype, "attention": attention}
        base = load_model(_adapter_base(name), trainable=scores, scores=scores, **how)
        return add_adapter(base.requires_grad_(False), name, trainable)
    try:
        from transformers import AutoModelForCausalLM
        from transformers import AutoModelForSequenceClassification as AutoModelOfScores
    except ImportError as error:
        raise missing_extra("load_model", "train", error) from error
    auto, kind, labels = AutoModelForCausalLM, "causal LM", {}
    if scores:
        auto, kind, labels = (
            AutoModelOfScores,
            "decoder with a score of one label",
            {"num_labels": 1},
        )
    loading: Any
    try:
        model, loading = auto.from_pretrained(
            name, dtype=getattr(torch, dtype), output_loading_info=True, **labels
        )
    except Exception as error:  # the library raises errors of any class
        raise ConfigError(
            f"model {name}: it must be a folder or hub name of a {kind} that transformers "
            f"loads; found {'this' if os.path.exists(name) else 'no such folder'}: "
            f"{quote(str(error), 200)}."
        ) from error
    missing, unused = sorted(loading["missing_keys"]), sorted(loading["unexpected_keys"])
    if scores and trainable and missing == [f"{SCORE}.weight"]:
        missing = unused = []  # of a causal LM, which has a head that it does not need
        _set_padding(model, name)
    if missing:  # the library initialises them at random
        raise ConfigError(
            f"model {name}: its files must hold every weight of the model that its config.json "
            f"describes; found {len(missing)} missing, {quote(missing[0])} first. "
            "Copy the model's files anew."
        )
    if unused:
        text = "model %s: its config.json has no place for %d weights of its files, %s first"
        logger.warning(text, name, len(unused), quote(unused[0]))
    use_packed_attention(model, attention)
    return model.requires_grad_(trainable).eval()


def _set_padding(model: Any, name: str) -> None:
    """Sets the padding token of a new reward model: its tokenizer's, else the end token, as TRL.

    transformers scores a sequence at its last token that is not this one.
    """
    from transformers import AutoTokenizer

    text, tokenizer = text_config(model), None
    with suppress(Exception):  # the library raises errors of any class where it finds none
        tokenizer = AutoTokenizer.from_pretrained(name)
    roles = [(tokenizer, "pad"), (text, "pad"), (tokenizer, "eos"), (text, "eos")]
    ids = (getattr(place, f"{role}_token_id", None) for place, role in roles)
    known = (x[0] if isinstance(x, Sequence) else x for x in ids)
    text.pad_token_id = next((x for x in known if x is not None), None)


def is_adapter(path: str | PathLike[str]) -> bool:
    """Returns True for the folder of an adapter."""
    return Path(path, ADAPTER_FILE).is_file()


def _adapter_base(path: str) -> str:
    """Returns the folder or hub name of the model that an adapter was trained on."""
    file = Path(path, ADAPTER_FILE)
    base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{file}: it must name base_model_name_or_path; found none.")
    return base


def add_adapter(model: Any, path: str, trainable: bool) -> Any:
    """Loads the adapter in a folder onto its model; refuses one that is not whole or not of it."""
    peft = _peft()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            return peft.PeftModel.from_pretrained(model, path, is_trainable=trainable)
    except (OSError, ValueError, RuntimeError, UserWarning) as error:
        raise ConfigError(
            f"adapter {path}: it must be an adapter of {_adapter_base(path)}; "
            f"found {quote(str(error), 200)}."
        ) from error


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise missing_extra("LoRA", "train", error) from error
    return peft
