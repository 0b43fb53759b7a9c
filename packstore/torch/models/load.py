"""Hugging Face causal LMs, reward models and adapters, loaded for packed batches."""

from __future__ import annotations

import json
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
    """Load a causal LM that takes packed batches, in evaluation mode, on the CPU.

    Args:
        path: a folder or hub name, or the folder of a LoRA adapter, which names its
            base model.
        dtype: dtype of the weights.
        attention: backend of :func:`use_packed_attention`.
        trainable: False freezes all weights; True with an adapter trains the adapter
            only.
        scores: load a reward model: a decoder with a head of one score. If `trainable`,
            `path` may be a causal LM: its new head is drawn from torch's generator.

    Raises:
        ConfigError: transformers does not load the model, or its files lack weights.
        MissingExtraError: transformers or PEFT is not installed.
    """
    name = os.fspath(path)
    choice("dtype", dtype, get_args(DType))
    if is_adapter(name):
        base = load_model(
            _adapter_base(name),
            dtype=dtype,
            attention=attention,
            # The adapter of a reward model holds the head, so its base may be a causal
            # LM, which loads as a reward model only if it is trainable.
            trainable=scores,
            scores=scores,
        )
        return add_adapter(base.requires_grad_(False), name, trainable=trainable)
    try:
        from transformers import (
            AutoModelForCausalLM,
            AutoModelForSequenceClassification,
        )
    except ImportError as error:
        raise missing_extra("load_model", "train", error) from error

    torch_dtype = getattr(torch, dtype)
    if scores:
        model, loading = _from_pretrained(
            AutoModelForSequenceClassification,
            "decoder with a score of one label",
            name,
            dtype=torch_dtype,
            num_labels=1,
        )
    else:
        model, loading = _from_pretrained(
            AutoModelForCausalLM, "causal LM", name, dtype=torch_dtype
        )
    lacks_head_only = sorted(loading["missing_keys"]) == [f"{SCORE}.weight"]
    if scores and trainable and lacks_head_only:
        logger.info("model %s: it has no head of scores, so a new one is drawn", name)
        _set_padding(model, name)
        # Expected here: the new head is missing, the causal LM's has no place.
        loading = {**loading, "missing_keys": (), "unexpected_keys": ()}
    _check_weights(name, loading)
    use_packed_attention(model, attention)
    return model.requires_grad_(trainable).eval()


def _check_weights(name: str, loading: Mapping[str, Any]) -> None:
    """Raise if the files lack weights of the model, and warn if they hold others."""
    absent = sorted(loading["missing_keys"])
    misshapen = sorted(key for key, *_ in loading["mismatched_keys"])
    drawn_at_random = [*absent, *misshapen]
    if drawn_at_random:
        raise ConfigError(
            sentence(
                where=f"model {name}",
                rule="its files must hold every weight of the model that its "
                "config.json describes",
                found=f"{len(drawn_at_random)} missing or of another shape, "
                f"{quote(drawn_at_random[0])} first",
                remedy="Copy the model's files anew",
            )
        )
    unused = sorted(loading["unexpected_keys"])
    if unused:
        logger.warning(
            "model %s: its config.json has no place for %d of the weights in its "
            "files, %s first",
            name,
            len(unused),
            quote(unused[0]),
        )


def _from_pretrained(
    auto: Any, kind: str, name: str, **settings: Any
) -> tuple[Any, dict[str, Any]]:
    """Load a model by an auto class of transformers.

    Args:
        auto: the class, such as ``AutoModelForCausalLM``.
        kind: words for such a model in an error.
        name: folder or hub name.
        settings: further keywords of ``from_pretrained``.

    Returns:
        The model; and transformers' loading info, which lists weights by name under
        ``missing_keys``, ``unexpected_keys`` and ``mismatched_keys``.
    """
    is_out_of_reach = _is_out_of_reach(name)
    offline = {"local_files_only": is_out_of_reach}
    try:
        return auto.from_pretrained(  # type: ignore[no-any-return]
            name,
            adapter_kwargs=offline,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            **offline,
            **settings,
        )
    except Exception as error:  # the library raises errors of any class
        if is_out_of_reach and not _is_cached(name):
            raise _unreachable_hub(name, kind) from client_cause(error)
        text = client_text(error).strip().replace(":\n", ": ").partition("\n")[0]
        raise _load_error(name, kind, quote(text, 200)) from client_cause(error)


def _load_error(name: str, kind: str, found: str) -> ConfigError:
    if os.path.exists(name):
        rule = _load_rule(kind)
        return ConfigError(sentence(f"model {name}", rule=rule, found=found))
    safe_name = client_text(name)
    return ConfigError(
        sentence(
            where=f"model {safe_name}",
            rule=_load_rule(kind),
            found=f"no such folder: {found}",
            remedy=f"Check the name; `hf download {safe_name} --local-dir FOLDER` gets "
            "one of the hub",
        )
    )


def _unreachable_hub(name: str, kind: str) -> ConfigError:
    """Return the error of a name that only the hub could have, without a network."""
    from huggingface_hub import constants

    safe_name = client_text(name)
    endpoint = client_text(constants.ENDPOINT)
    return ConfigError(
        sentence(
            where=f"model {safe_name}",
            rule=_load_rule(kind),
            found=f"no such folder, and no connection to {endpoint} to look for the "
            "name",
            remedy=f"Where there is a network, `hf download {safe_name} --local-dir "
            "FOLDER`, and give that folder",
        )
    )


def _load_rule(kind: str) -> str:
    return f"it must be a folder or hub name of a {kind} that transformers loads"


def require_reachable_hub(name: str) -> None:
    """Raise if a model must come from the hub, and the hub is out of reach.

    For trainers that load the model themselves: they would wait long, see
    :func:`_is_out_of_reach`.
    """
    if _is_out_of_reach(name) and not _is_cached(name):
        raise _unreachable_hub(name, "causal LM")


def _is_cached(name: str) -> bool:
    """Return True if the hub's cache has the config of a model."""
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _is_out_of_reach(name: str) -> bool:
    """Return True if `name` is no folder, and the hub does not answer.

    The model is then loaded from the hub's cache alone: transformers would otherwise
    ask for each file six times, for 45 s. A hub that is merely slow is in reach.
    """
    from huggingface_hub import HfApi

    if os.path.exists(name):
        return False
    try:
        HfApi().model_info(name)
    except Exception as error:
        # By name, as the class is of the hub's HTTP client, which differs by release.
        return type(error).__name__ in ("ConnectError", "ConnectTimeout")
    return False


def _set_padding(model: Any, name: str) -> None:
    """Set the padding token of a new reward model, as TRL does.

    It is the first that exists of the padding and end tokens of tokenizer and config.
    transformers needs one: it scores a sequence at its last token that is not padding.
    """
    from transformers import AutoTokenizer

    config = text_config(model)
    tokenizer = None
    with suppress(Exception):  # the library raises errors of any class if it has none
        tokenizer = AutoTokenizer.from_pretrained(name)
    candidates = [
        getattr(tokenizer, "pad_token_id", None),
        getattr(config, "pad_token_id", None),
        getattr(tokenizer, "eos_token_id", None),
        getattr(config, "eos_token_id", None),
    ]
    config.pad_token_id = None
    for token_id in candidates:
        if token_id is not None:
            is_list = isinstance(token_id, Sequence)  # some configs list several
            config.pad_token_id = token_id[0] if is_list else token_id
            return


def is_adapter(path: str | PathLike[str]) -> bool:
    """Return True for the folder of an adapter."""
    return Path(path, ADAPTER_FILE).is_file()


def _adapter_base(path: str) -> str:
    """Return the folder or hub name of an adapter's base model."""
    file = Path(path, ADAPTER_FILE)
    base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ConfigError(f"{file}: it must name base_model_name_or_path; found none.")
    return base


@contextmanager
def ignoring_deprecations_of_peft() -> Iterator[None]:
    """Ignore PEFT's use of a name that transformers 5.23 deprecates."""
    with warnings.catch_warnings():
        message = "`is_gradient_checkpointing` is deprecated"
        warnings.filterwarnings("ignore", message, FutureWarning)
        yield


def add_adapter(model: Any, path: str, *, trainable: bool) -> Any:
    """Load the adapter in a folder onto its model.

    Raises:
        ConfigError: the adapter is incomplete, or belongs to another model.
    """
    try:
        import peft
    except ImportError as error:
        raise missing_extra("LoRA", "train", error) from error
    try:
        with ignoring_deprecations_of_peft():
            # PEFT only warns of absent weights, and leaves them as they were drawn.
            warnings.filterwarnings("error", "Found missing adapter keys")
            return peft.PeftModel.from_pretrained(model, path, is_trainable=trainable)
    except (OSError, ValueError, RuntimeError, UserWarning) as error:
        text = sentence(
            where=f"adapter {path}",
            rule=f"it must be an adapter of {client_text(_adapter_base(path))}",
            found=quote(client_text(error), 200),
        )
        raise ConfigError(text) from client_cause(error)
