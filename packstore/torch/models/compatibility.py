"""Checks that dataset, model and tokenizer belong together.

A mismatch that would train on wrong ids raises. A difference that also occurs in sound
setups (another EOS in the model's config) is logged.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from packstore.config.settings import check_class
from packstore.errors import CompatibilityError, ConfigError, quote, sentence
from packstore.format.arrays import TopK
from packstore.format.tokenizer_identity import PROBES, probe_sha256, vocabulary_sha256
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.manifest import Manifest
from packstore.registry import missing_extra
from packstore.secrets import client_cause, client_text
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.models.unwrap import rope_kinds, text_config, unwrapped

logger = logging.getLogger(__name__)


def check_model(data: Dataset | Manifest, model: Any) -> None:
    """Raise if `model` cannot train on the token ids of a dataset.

    Compares these, in this order:

    - Vocabulary: the model may have more ids than the dataset's tokenizer, as heads are
      often padded, but not fewer.
    - Tokenizer: if the model's folder, or the hub's cache, holds a ``tokenizer.json``,
      it must give each id the same token, and each text the same ids.
    - BOS and EOS of the model's config: a difference is only logged, as a config often
      lists several EOS, or still the base model's. Padding is not compared: packs hold
      none.
    - Positions: a sequence longer than `max_position_embeddings` is logged with RoPE,
      which has no limit, and refused with a table of learned positions.

    Args:
        data: the dataset, or its manifest.
        model: a Hugging Face model, optionally inside wrappers; or its config.

    Raises:
        CompatibilityError: the ids are not the model's, or a sequence is longer than a
            table of positions.
        ConfigError: `model` has no vocabulary size.
    """
    manifest = _manifest_of(data)
    config = text_config(unwrapped(model))
    vocab_size = getattr(config, "vocab_size", None)
    if not isinstance(vocab_size, int):
        raise ConfigError(
            "check_model takes a Hugging Face model or its config; found "
            f"{type(model).__name__}."
        )
    if manifest.vocab_size is not None and manifest.vocab_size > vocab_size:
        raise CompatibilityError(
            "dataset and model: token ids must be below the model's vocab_size of "
            f"{vocab_size}; found a tokenizer of {manifest.vocab_size} ids. "
            "Use the model that belongs to the tokenizer, or pack again with the "
            "model's own."
        )
    _check_tokenizer_of_model(manifest, getattr(unwrapped(model), "name_or_path", None))
    _log_other_special_tokens(manifest, config)
    _check_positions(manifest, config)


def _log_other_special_tokens(manifest: Manifest, config: Any) -> None:
    for role in ("bos", "eos"):
        packed_id = _tokenizer_record(manifest).get(f"{role}_id")
        config_ids = getattr(config, f"{role}_token_id", None)
        if packed_id is None or config_ids is None:
            continue
        is_list = isinstance(config_ids, Sequence)
        if packed_id not in (config_ids if is_list else [config_ids]):
            logger.warning(
                "the model's config has %s_token_id %s, but the dataset was packed "
                "with %s",
                role,
                config_ids,
                packed_id,
            )


def _check_positions(manifest: Manifest, config: Any) -> None:
    max_positions = getattr(config, "max_position_embeddings", None)
    longest = manifest.statistics.longest_sequence
    if not isinstance(max_positions, int) or longest <= max_positions:
        return
    kinds = rope_kinds(config)
    # "nope": the model has no positional embeddings at all.
    if not kinds and getattr(config, "position_embedding_type", None) != "nope":
        raise CompatibilityError(
            "dataset and model: sequences must have at most the model's "
            f"{max_positions} positions; found a sequence of {longest} tokens. "
            f"Pack again with max_length={max_positions}."
        )
    # Dynamic RoPE rescales itself to the length of a call.
    is_extensible = any("dynamic" in kind for kind in kinds)
    if not is_extensible:
        logger.warning(
            "dataset and model: a sequence of %s tokens, and the model was made for %d "
            "positions; RoPE goes on beyond",
            longest,
            max_positions,
        )


def _manifest_of(data: Dataset | Manifest) -> Manifest:
    if isinstance(data, Manifest):
        return data
    check_class("argument dataset", data, Dataset, "packstore.open(path) opens one")
    return data.manifest


def check_ids(batch: PackedBatch, model: Any) -> None:
    """Raise for ids beyond the model's embeddings, also for those of a teacher's top k.

    A dataset of ids that records no tokenizer may hold them. On a GPU, the lookup would
    end the process without naming the id.
    """
    if batch.input_ids.device.type != "cpu":
        return  # reading the ids would wait for the device; a loader's are on the CPU
    vocab_size = text_config(unwrapped(model)).vocab_size
    ids_of_columns = {"dataset and model": batch.input_ids}
    for name, values in batch.token_columns.items():
        if isinstance(values, TopK):
            ids_of_columns[f"column {quote(name)} and model"] = values.ids
    for where, ids in ids_of_columns.items():
        largest = int(ids.max()) if ids.numel() else 0
        if largest >= vocab_size:
            raise CompatibilityError(
                sentence(
                    where=where,
                    rule=f"token ids must be below {vocab_size}",
                    found=str(largest),
                    remedy="Use the model that belongs to the ids",
                )
            )


def check_tokenizer(
    data: Dataset | Manifest, tokenizer: Any, *, chat_template: bool = True
) -> None:
    """Raise for a tokenizer other than the dataset's.

    Two tokenizers are the same if their files are; or if each id is the same token and
    the same texts become the same ids, so a tokenizer that was loaded and saved again
    is accepted. Additional tokens after the dataset's are fine.

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
    record = _tokenizer_record(manifest)
    if not record:
        logger.warning("the dataset records no tokenizer; nothing to compare")
        return
    path = Path(tokenizer) if isinstance(tokenizer, str | PathLike) else None
    if path is not None and record.get("sha256") in _file_hashes(path):
        # The very file that the dataset was packed with: no need to load it.
        templates = _stored_templates(path if path.is_dir() else path.parent)
    else:
        # A processor has its tokenizer inside.
        loaded = _load(path) if path else getattr(tokenizer, "tokenizer", tokenizer)
        _compare_ids(record, loaded)
        _compare_special_tokens(record, loaded)
        templates = _templates(getattr(loaded, "chat_template", None))
    if chat_template:
        _compare_template(manifest, templates)


def check_same_tokenizer(manifests: Sequence[Manifest]) -> None:
    """Raise for datasets that record different tokenizers, such as those of a mix."""
    records = {
        number: _tokenizer_record(manifest)
        for number, manifest in enumerate(manifests)
        if _tokenizer_record(manifest)
    }
    if not records:
        return
    first = min(records)
    for number, record in records.items():
        if not _are_same_tokenizer(records[first], record):
            raise CompatibilityError(
                f"datasets {first} and {number}: they must be packed with one "
                f"tokenizer; found {_describe(records[first])} and "
                f"{_describe(record)}. Pack one of them again."
            )


def _are_same_tokenizer(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    for name in ("vocab_sha256", "probe_sha256"):
        if a.get(name) is None or b.get(name) is None:
            # Recorded without these: only the files can be compared.
            return bool(a.get("sha256") == b.get("sha256"))
    return bool(
        a["vocab_sha256"] == b["vocab_sha256"]
        and a["probe_sha256"] == b["probe_sha256"]
    )


def _describe(record: Mapping[str, Any]) -> str:
    return f"{quote(record.get('name'))} of {record.get('vocab_size')} ids"


def _tokenizer_record(manifest: Manifest) -> Mapping[str, Any]:
    """Return the manifest's entry on the tokenizer: names, hashes, ids; or empty."""
    return manifest.provenance.get("tokenizer") or {}


def _check_tokenizer_of_model(manifest: Manifest, name: str | None) -> None:
    """Raise for a model, by its folder or hub name, with a tokenizer of other ids."""
    record = _tokenizer_record(manifest)
    if not name or not record:
        return
    file = _tokenizer_file(name)
    if not file.is_file() or record.get("sha256") in _file_hashes(file):
        return
    try:
        tokenizer = _load(file)
    except ConfigError as error:
        logger.warning(
            "the dataset's tokenizer is not compared with the model's: %s", error
        )
        return
    _compare_ids(record, tokenizer)


def _tokenizer_file(name: str) -> Path:
    """Return the path of a model's ``tokenizer.json``, which may not exist."""
    file = Path(name, "tokenizer.json")
    if Path(name).exists():
        return file
    from huggingface_hub import try_to_load_from_cache  # comes with transformers

    try:
        return Path(str(try_to_load_from_cache(name, file.name)))
    except ValueError:  # it is no name of the hub
        return file


def _file_hashes(path: Path) -> set[str]:
    """Return the sha256 of the file, or of each tokenizer file in the folder."""
    files = [path]
    if path.is_dir():
        files = [
            file
            for file in path.iterdir()
            if file.suffix in (".json", ".model") and file.is_file()
        ]
    try:
        return {hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
    except OSError as error:
        raise ConfigError(
            f"tokenizer {path} must be a readable file or folder: "
            f"{error.strerror or error}."
        ) from error


def _load(path: Path) -> Any:
    """Load the tokenizer of a file or folder by transformers."""
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast
    except ImportError as error:
        raise missing_extra("check_tokenizer", "train", error) from error
    try:
        if path.is_dir():
            return AutoTokenizer.from_pretrained(str(path), local_files_only=True)
        return PreTrainedTokenizerFast(tokenizer_file=str(path))
    except Exception as error:  # the library raises errors of any class
        text = quote(client_text(error), 200)
        raise ConfigError(f"tokenizer {path} does not load: {text}.") from client_cause(
            error
        )


def _compare_ids(record: Mapping[str, Any], tokenizer: Any) -> None:
    """Raise if a loaded tokenizer has another vocabulary, or other ids for a text.

    Args:
        record: the dataset's entry on its tokenizer, see :func:`_tokenizer_record`.
        tokenizer: of transformers or of ``tokenizers``.
    """
    if not hasattr(tokenizer, "get_vocab") or not hasattr(tokenizer, "encode"):
        raise ConfigError(
            "check_tokenizer takes a path, a Hugging Face tokenizer or a "
            f"tokenizers.Tokenizer; found {type(tokenizer).__name__}."
        )
    token_of = {token_id: token for token, token_id in tokenizer.get_vocab().items()}
    vocab_size = max(token_of, default=-1) + 1
    packed_size = record.get("vocab_size") or vocab_size
    if vocab_size < packed_size:
        raise _mismatch(
            f"it must have at least {packed_size} ids", found=str(vocab_size)
        )
    if record.get("vocab_sha256") is None or record.get("probe_sha256") is None:
        logger.warning(
            "the dataset records only its tokenizer file; vocabularies are not compared"
        )
        return

    # Tokens that were added after the dataset's do not count.
    tokens = [token_of.get(token_id) for token_id in range(packed_size)]
    if vocabulary_sha256(tokens) != record["vocab_sha256"]:
        raise _mismatch("each id must be the same token", found="another vocabulary")
    # Equal vocabularies may still split texts differently, so a few texts are encoded.
    encodings = [tokenizer.encode(text, add_special_tokens=False) for text in PROBES]
    # transformers returns lists of ids, tokenizers returns objects with `ids`.
    ids = [getattr(encoding, "ids", encoding) for encoding in encodings]
    if probe_sha256(ids) != record["probe_sha256"]:
        raise _mismatch(
            "a text must become the same ids", found="others for the same vocabulary"
        )


def _compare_special_tokens(record: Mapping[str, Any], tokenizer: Any) -> None:
    for role in ("bos", "eos"):
        packed_id = record.get(f"{role}_id")
        token_id = getattr(tokenizer, f"{role}_token_id", None)
        if packed_id is None or token_id is None:
            continue
        if packed_id != token_id:
            raise _mismatch(
                f"its {role.upper()} must be id {packed_id}", found=str(token_id)
            )


def _templates(value: object) -> list[str]:
    """Return the chat templates of a tokenizer, which may have several by name."""
    if isinstance(value, Mapping):
        return [str(template) for template in value.values()]
    if isinstance(value, list):
        named_templates = [entry for entry in value if isinstance(entry, Mapping)]
        return [str(entry.get("template")) for entry in named_templates]
    return [] if value is None else [str(value)]


def _stored_templates(folder: Path) -> list[str]:
    """Return the chat templates beside a tokenizer file."""
    templates = []
    for name in ("tokenizer_config.json", "chat_template.json"):
        if (folder / name).is_file():
            settings = json.loads((folder / name).read_text(encoding="utf-8"))
            templates += _templates(settings.get("chat_template"))
    file = folder / "chat_template.jinja"
    if file.is_file():
        templates.append(file.read_text(encoding="utf-8"))
    return templates


def _compare_template(manifest: Manifest, templates: list[str]) -> None:
    """Raise if the dataset was packed with none of these chat templates.

    Only log it if the dataset was packed with the setting `chat_template`: then the
    user chose a template other than the tokenizer's.
    """
    packed_template = _tokenizer_record(manifest).get("chat_template")
    if packed_template is None or not templates:
        return
    if packed_template.strip() in [template.strip() for template in templates]:
        return
    settings = manifest.provenance.get("settings") or {}
    if settings.get("chat_template") is not None:
        logger.warning(
            "the dataset was packed with another chat template than the tokenizer's"
        )
        return
    raise CompatibilityError(
        "dataset and tokenizer: its chat template must be the one that the dataset was "
        "packed with; found another text. Pack again with this template, or leave it "
        "out: check_tokenizer(…, chat_template=False)."
    )


def _mismatch(rule: str, found: str) -> CompatibilityError:
    return CompatibilityError(
        f"dataset and tokenizer: {rule}; found {found}. Use the tokenizer that the "
        "dataset was packed with, or pack again with this one."
    )
