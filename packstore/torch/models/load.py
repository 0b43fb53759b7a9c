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
from typing import Any, Literal, get_args

import torch

from packstore.errors import ConfigError, quote, sentence
from packstore.registry import choice, missing_extra
from packstore.secrets import client_cause, client_text
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

    `path` is a folder or hub name, or the folder of a LoRA adapter, which names its
    base model. If `trainable` is False all weights are frozen; True with an adapter
    trains the adapter only. With `scores` it loads a reward model; to be trained, also
    a causal LM in place of one, whose new head torch's generator draws.
    """
    name = os.fspath(path)
    choice("dtype", dtype, get_args(DType))
    if is_adapter(name):
        # An adapter holds the head of scores, so that its base may have none.
        how: Any = {"dtype": dtype, "attention": attention}
        base = load_model(_adapter_base(name), trainable=scores, scores=scores, **how)
        return add_adapter(base.requires_grad_(False), name, trainable)
    try:
        from transformers import (
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
        )
    except ImportError as error:
        raise missing_extra("load_model", "train", error) from error
    auto, kind, labels = AutoModelForCausalLM, "causal LM", {}
    if scores:
        auto, kind = (
            AutoModelForSequenceClassification,
            "decoder with a score of one label",
        )
        labels = {"num_labels": 1}
    model, loading = _from_pretrained(
        auto, kind, name, dtype=getattr(torch, dtype), **labels
    )
    missing, unused = (
        sorted(loading["missing_keys"]),
        sorted(loading["unexpected_keys"]),
    )
    if scores and trainable and missing == [f"{SCORE}.weight"]:
        missing = unused = []  # of a causal LM, which has a head that it does not need
        logger.info("model %s: it has no head of scores, so a new one is drawn", name)
        _set_padding(model, name)
    wrong = [*missing, *sorted(key for key, *_ in loading["mismatched_keys"])]
    if wrong:  # the library initialises them at random
        rule = (
            "its files must hold every weight of the model that its config.json "
            "describes"
        )
        found = f"{len(wrong)} missing or of another shape, {quote(wrong[0])} first"
        raise ConfigError(
            sentence(f"model {name}", rule, found, "Copy the model's files anew")
        )
    if unused:
        text = (
            "model %s: its config.json has no place for %d of the weights in its "
            "files, %s first"
        )
        logger.warning(text, name, len(unused), quote(unused[0]))
    use_packed_attention(model, attention)
    return model.requires_grad_(trainable).eval()


def _from_pretrained(
    auto: Any, kind: str, name: str, **how: Any
) -> tuple[Any, dict[str, Any]]:
    """Loads a model by its class `auto`; returns it, and what transformers says of its
    weights.
    """
    cached = {"local_files_only": _is_out_of_reach(name)}
    how |= {"output_loading_info": True, "ignore_mismatched_sizes": True, **cached}
    try:
        return auto.from_pretrained(name, adapter_kwargs=cached, **how)  # type: ignore[no-any-return]
    except Exception as error:  # the library raises errors of any class
        text = client_text(error).strip().replace(":\n", ": ").partition("\n")[0]
        raise _not_loaded(name, kind, quote(text, 200)) from client_cause(error)


def _not_loaded(name: str, kind: str, found: str) -> ConfigError:
    rule, remedy = (
        f"it must be a folder or hub name of a {kind} that transformers loads",
        "",
    )
    shown = name
    if not os.path.exists(name):
        shown = client_text(name)
        found = f"no such folder: {found}"
        remedy = (
            f"Check the name; `hf download {shown} --local-dir FOLDER` gets one "
            "of the hub"
        )
    return ConfigError(sentence(f"model {shown}", rule, found, remedy))


def require_reachable_hub(name: str) -> None:
    """Refuses a name on a hub that is out of reach, where another trainer loads the
    model.
    """
    from huggingface_hub import try_to_load_from_cache

    if _is_out_of_reach(name) and not try_to_load_from_cache(name, "config.json"):
        raise _not_loaded(
            name, "causal LM", "the hub is out of reach, and its cache has none"
        )


def _is_out_of_reach(name: str) -> bool:
    """Returns True for a name on a hub that is out of reach, of which only the cache is
    read.

    transformers would ask for each file six times, for 45 s. A hub that is slow is
    asked as usual.
    """
    from huggingface_hub import HfApi

    try:
        if not os.path.exists(name):
            HfApi().model_info(name)
    except (
        Exception
    ) as error:  # of the hub, or of its HTTP client, which differs by release
        return type(error).__name__ in ("ConnectError", "ConnectTimeout")
    return False


def _set_padding(model: Any, name: str) -> None:
    """Sets the padding token of a new reward model: its tokenizer's, else the end
    token, as TRL.

    transformers scores a sequence at its last token that is not this one.
    """
    from transformers import AutoTokenizer

    text, tokenizer = text_config(model), None
    with suppress(
        Exception
    ):  # the library raises errors of any class where it finds none
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
    """Loads the adapter in a folder onto its model; refuses one that is not whole or
    not of it.
    """
    try:
        import peft
    except ImportError as error:
        raise missing_extra("LoRA", "train", error) from error
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Found missing adapter keys")
            return peft.PeftModel.from_pretrained(model, path, is_trainable=trainable)
    except (OSError, ValueError, RuntimeError, UserWarning) as error:
        rule = f"it must be an adapter of {client_text(_adapter_base(path))}"
        found = quote(client_text(error), 200)
        raise ConfigError(sentence(f"adapter {path}", rule, found)) from client_cause(
            error
        )
