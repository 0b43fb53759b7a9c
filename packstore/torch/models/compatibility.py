"""Checks that dataset, model and tokenizer belong together.

A mismatch that would train on wrong ids raises. A difference that also occurs in sound
setups (another EOS in the model's config) is logged.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from packstore.config.settings import check_class
from packstore.errors import CompatibilityError, ConfigError, quote, sentence
from packstore.format.tokenizer_identity import PROBES, probe_sha256, vocabulary_sha256
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.manifest import Manifest
from packstore.registry import missing_extra
from packstore.secrets import client_cause, client_text
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.models.unwrap import rope_kinds, text_config, unwrapped

logger = logging.getLogger(__name__)


def check_model(data: Dataset | Manifest, model: Any) -> None:
    """Refuses a model whose tokenizer, vocabulary or positions are not those of the
    dataset.

    The folder from which a model was loaded mostly holds its tokenizer, or the cache of
    the hub does: there each id must be the same token as in the dataset, and a text the
    same ids.

    A larger vocabulary is fine: heads are often padded. A BOS or EOS of the model's
    config that differs from the dataset's is only logged: a config often names several
    EOS, or still the base model's. Padding is not compared, as packs hold none. A
    sequence beyond `max_position_embeddings` is logged with RoPE, which has no limit,
    and refused with a table of learned positions.

    Args:
        data: the dataset, or its manifest.
        model: a Hugging Face model, optionally inside wrappers; or its config.

    Raises:
        CompatibilityError: the ids are not the model's, or a sequence is longer than a
            table of positions.
        ConfigError: `model` has no vocabulary size.
    """
    manifest = _manifest_of(data)
    text = text_config(unwrapped(model))
    size = getattr(text, "vocab_size", None)
    if not isinstance(size, int):
        raise ConfigError(
            "check_model takes a Hugging Face model or its config; found "
            f"{type(model).__name__}."
        )
    if manifest.vocab_size is not None and manifest.vocab_size > size:
        raise CompatibilityError(
            "dataset and model: token ids must be below the model's vocab_size of "
            f"{size}; found "
            f"a tokenizer of {manifest.vocab_size} ids. "
            "Use the model that belongs to the tokenizer, or pack again with the "
            "model's own."
        )
    _check_ids(manifest, getattr(unwrapped(model), "name_or_path", None))
    for role in ("bos", "eos"):
        ours = _tokenizer(manifest).get(f"{role}_id")
        theirs = getattr(text, f"{role}_token_id", None)
        known = theirs if isinstance(theirs, Sequence) else [theirs]
        if ours is not None and theirs is not None and ours not in known:
            message = "the model's config says %s is %s, the dataset was packed with %s"
            logger.warning(message, role, theirs, ours)
    places = getattr(text, "max_position_embeddings", None)
    longest = manifest.statistics.longest_sequence
    if not isinstance(places, int) or longest <= places:
        return
    kinds = rope_kinds(text)
    if not kinds and getattr(text, "position_embedding_type", None) != "nope":
        raise CompatibilityError(
            f"dataset and model: sequences must have at most the model's {places} "
            "positions; "
            f"found a sequence of {longest} tokens. Pack again with "
            f"max_length={places}."
        )
    if not any("dynamic" in kind for kind in kinds):  # made for longer ones
        message = (
            "dataset and model: a sequence of %s tokens, and the model was made for %d "
            "positions; "
            "RoPE goes on beyond"
        )
        logger.warning(message, longest, places)


def _manifest_of(data: Dataset | Manifest) -> Manifest:
    if isinstance(data, Manifest):
        return data
    check_class("argument dataset", data, Dataset, "packstore.open(path) opens one")
    return data.manifest


def check_ids(batch: PackedBatch, model: Any) -> None:
    """Refuses ids of which the model has no embedding, as a dataset without a tokenizer
    may have.

    A GPU would end the process without naming them; a batch that a loader made is on
    the CPU.
    """
    if batch.input_ids.device.type != "cpu":
        return
    size, largest = text_config(unwrapped(model)).vocab_size, int(batch.input_ids.max())
    if largest >= size:
        rule, remedy = (
            f"token ids must be below {size}",
            "Use the model that belongs to the ids",
        )
        raise CompatibilityError(
            sentence("dataset and model", rule, str(largest), remedy)
        )


def check_tokenizer(
    data: Dataset | Manifest, tokenizer: Any, *, chat_template: bool = True
) -> None:
    """Refuses a tokenizer other than the one that the dataset was packed with.

    Two tokenizers are the same if their files are; or if each id is the same token and
    the same texts become the same ids, so that a tokenizer that was loaded and saved
    again is accepted. Additional tokens after the dataset's are fine.

    Args:
        data: the dataset, or its manifest.
        tokenizer: path of a ``tokenizer.json`` or of a Hugging Face folder, a Hugging
            Face tokenizer, or a ``tokenizers.Tokenizer``.
        chat_template: compare chat templates where both are known; pass False for
            records that are not chats.

    Raises:
        CompatibilityError: another vocabulary, other ids for a text, another BOS, EOS
            or template.
        ConfigError: `tokenizer` is none of these.
        MissingExtraError: the file's bytes differ, so that it must be loaded, and
            transformers is not installed.
    """
    manifest = _manifest_of(data)
    facts = _tokenizer(manifest)
    if not facts:
        logger.warning("the dataset records no tokenizer; nothing to compare")
        return
    path = Path(tokenizer) if isinstance(tokenizer, str | PathLike) else None
    if path is not None and facts.get("sha256") in _file_hashes(path):
        templates = _stored_templates(path if path.is_dir() else path.parent)
    else:
        # A processor has its tokenizer inside.
        loaded = _load(path) if path else getattr(tokenizer, "tokenizer", tokenizer)
        _compare_ids(facts, loaded)
        for role in ("bos", "eos"):
            ours, theirs = (
                facts.get(f"{role}_id"),
                getattr(loaded, f"{role}_token_id", None),
            )
            if ours is not None and theirs is not None and ours != theirs:
                raise _refusal(f"its {role.upper()} must be id {ours}", str(theirs))
        templates = _templates(getattr(loaded, "chat_template", None))
    if chat_template:
        _compare_template(manifest, templates)


def check_same_tokenizer(manifests: Sequence[Manifest]) -> None:
    """Refuses datasets, as of one mix, that record different tokenizers."""
    known = [
        (n, facts) for n, each in enumerate(manifests) if (facts := _tokenizer(each))
    ]
    for number, facts in known[1:]:
        first, other = known[0]
        hashes: tuple[str, ...] = ("vocab_sha256", "probe_sha256")
        if any(each.get(name) is None for name in hashes for each in (facts, other)):
            hashes = ("sha256",)
        if any(facts.get(name) != other.get(name) for name in hashes):
            names = [
                f"{quote(t.get('name'))} of {t.get('vocab_size')} ids"
                for t in (other, facts)
            ]
            raise CompatibilityError(
                f"datasets {first} and {number}: they must be packed with one "
                "tokenizer; "
                f"found {' and '.join(names)}. Pack one of them again."
            )


def _tokenizer(manifest: Manifest) -> Mapping[str, Any]:
    return manifest.provenance.get("tokenizer") or {}


def _check_ids(manifest: Manifest, name: str | None) -> None:
    """Refuses a model, by its folder or hub name, whose tokenizer gives other ids."""
    facts = _tokenizer(manifest)
    file = Path(name or "", "tokenizer.json")
    if name and not Path(name).exists():
        from huggingface_hub import try_to_load_from_cache  # comes with transformers

        with contextlib.suppress(ValueError):  # it is no name of the hub
            file = Path(str(try_to_load_from_cache(name, file.name)))
    if (
        not name
        or not facts
        or not file.is_file()
        or facts.get("sha256") in _file_hashes(file)
    ):
        return
    try:
        tokenizer = _load(file)
    except ConfigError as error:
        logger.warning(
            "the dataset's tokenizer is not compared with the model's: %s", error
        )
        return
    _compare_ids(facts, tokenizer)


def _file_hashes(path: Path) -> set[str]:
    """sha256 of the file, or of each tokenizer file in the folder."""
    files = [path]
    if path.is_dir():
        files = [
            p for p in path.iterdir() if p.suffix in (".json", ".model") and p.is_file()
        ]
    try:
        return {hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    except OSError as error:
        raise ConfigError(
            f"tokenizer {path} must be a readable file or folder: "
            f"{error.strerror or error}."
        ) from error


def _load(path: Path) -> Any:
    """The tokenizer of a file or folder, as transformers loads it."""
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise missing_extra("check_tokenizer", "train", error) from error
    try:
        if path.is_dir():
            return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # the library raises errors of any class
        found = quote(client_text(error), 200)
        raise ConfigError(
            f"tokenizer {path} does not load: {found}."
        ) from client_cause(error)


def _compare_ids(facts: Mapping[str, Any], tokenizer: Any) -> None:
    """Compares vocabulary and ids of probe texts of a loaded tokenizer."""
    if not hasattr(tokenizer, "get_vocab") or not hasattr(tokenizer, "encode"):
        raise ConfigError(
            "check_tokenizer takes a path, a Hugging Face tokenizer or a "
            "tokenizers.Tokenizer; "
            f"found {type(tokenizer).__name__}."
        )
    by_id = {i: token for token, i in tokenizer.get_vocab().items()}
    size = max(by_id, default=-1) + 1
    expected = facts.get("vocab_size") or size
    if size < expected:
        raise _refusal(f"it must have at least {expected} ids", str(size))
    if facts.get("vocab_sha256") is None or facts.get("probe_sha256") is None:
        logger.warning(
            "the dataset records only its tokenizer file; vocabularies are not compared"
        )
    else:
        if vocabulary_sha256(map(by_id.get, range(expected))) != facts["vocab_sha256"]:
            raise _refusal("each id must be the same token", "another vocabulary")
        rows = [tokenizer.encode(text, add_special_tokens=False) for text in PROBES]
        if (
            probe_sha256([getattr(row, "ids", row) for row in rows])
            != facts["probe_sha256"]
        ):
            raise _refusal(
                "a text must become the same ids", "others for the same vocabulary"
            )


def _templates(value: object) -> list[str]:
    """The chat templates of a tokenizer, which may have several by name."""
    if isinstance(value, Mapping):
        return [str(v) for v in value.values()]
    if isinstance(value, list):
        return [str(v.get("template")) for v in value if isinstance(v, Mapping)]
    return [] if value is None else [str(value)]


def _stored_templates(folder: Path) -> list[str]:
    """The chat templates beside a tokenizer file."""
    templates = []
    for name in ("tokenizer_config.json", "chat_template.json", "chat_template.jinja"):
        if (folder / name).is_file():
            text = (folder / name).read_text(encoding="utf-8")
            value = (
                json.loads(text).get("chat_template")
                if name.endswith(".json")
                else text
            )
            templates += _templates(value)
    return templates


def _compare_template(manifest: Manifest, templates: list[str]) -> None:
    """Compares chat templates; logs a difference if packing overrode the tokenizer's
    template.
    """
    expected = _tokenizer(manifest).get("chat_template")
    if (
        expected is None
        or not templates
        or expected.strip() in (t.strip() for t in templates)
    ):
        return
    if (manifest.provenance.get("settings") or {}).get("chat_template") is not None:
        logger.warning(
            "the dataset was packed with another chat template than the tokenizer's"
        )
        return
    raise CompatibilityError(
        "dataset and tokenizer: its chat template must be the one that the dataset was "
        "packed "
        "with; found another text. "
        "Pack again with this template, or leave it out: check_tokenizer(…, "
        "chat_template=False)."
    )


def _refusal(rule: str, value: str) -> CompatibilityError:
    return CompatibilityError(
        f"dataset and tokenizer: {rule}; found {value}. "
        "Use the tokenizer that the dataset was packed with, or pack again with this "
        "one."
    )
