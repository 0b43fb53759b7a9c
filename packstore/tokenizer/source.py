"""Loads a :class:`Tokenizer` from a file, a folder, an object, or the record in a
manifest.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from packstore.errors import (
    CompatibilityError,
    TokenizerError,
    display,
    is_mistyped,
    quote,
    refuse_pointer,
    sentence,
    to_unicode,
)
from packstore.secrets import client_cause, client_text
from packstore.tokenizer.dialogue.template import BUILTIN
from packstore.tokenizer.engines import ENGINES, Engine
from packstore.tokenizer.tokenizer import FAST, Tokenizer

log = logging.getLogger("packstore")

FILE_NAMES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
)
"""File names in a folder, the preferred one first."""

SETTINGS_FILE = "tokenizer_config.json"
TOKENS_FILE = "special_tokens_map.json"
TEMPLATE_FILE = "chat_template.json"
TEMPLATE_TEXT = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
"""Files, and a folder, beside the tokenizer."""

# ``name`` or ``owner/name``.
_HUB_NAME = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")

_FILE_SUFFIXES = (".json", ".model", ".jinja")

MAX_FILE_BYTES = 1 << 30
"""Largest size of a tokenizer file in bytes."""

WELL_KNOWN = {
    "bos_token": ("<s>", "<|begin_of_text|>", "<bos>"),
    "eos_token": ("</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "<eos>"),
    "pad_token": ("<pad>", "<|pad|>"),
    "unk_token": ("<unk>",),
}
"""Names to try, in this order, if no file names the token."""


@dataclass
class _Files:
    """The files of a tokenizer."""

    name: str  # of the tokenizer file
    payload: bytes  # of the tokenizer file
    settings: dict[str, Any] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)  # name -> Jinja text
    hashes: dict[str, str] = field(default_factory=dict)  # other file -> sha256

    def read(self, path: Path) -> str | None:
        """Return the text of a file, and note its hash; None if it does not exist."""
        if not path.is_file():
            return None
        content = _read(path)
        name = to_unicode(path.name)  # the name on disk may hold undecodable bytes
        self.hashes[name] = hashlib.sha256(content).hexdigest()
        return _decoded(content, path.name)

    def read_json(self, path: Path) -> dict[str, Any]:
        """Return the object in a JSON file; empty if it does not exist."""
        text = self.read(path)
        if text is None:
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            rule = "it must be JSON"
            message = sentence(path.name, rule, found=str(error))
            raise TokenizerError(message) from error
        if not isinstance(value, dict):
            rule = "it must hold a JSON object"
            raise TokenizerError(sentence(path.name, rule, found=quote(value)))
        return value

    def read_templates(self, folder: Path) -> None:
        """Read chat templates; later files override earlier ones, as in Hugging Face
        folders.
        """
        self._add_templates(self.settings.pop("chat_template", None))
        self._add_templates(self.read_json(folder / TEMPLATE_FILE).get("chat_template"))
        self._add_templates(self.read(folder / TEMPLATE_TEXT))
        for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja")):
            self.templates[path.stem] = self.read(path) or ""

    def _add_templates(self, value: object) -> None:
        """Add a template, or a list of templates with names."""
        if value is None:
            return
        if isinstance(value, list):
            entries = value
        else:
            entries = [{"name": "default", "template": value}]
        for entry in entries:
            if isinstance(entry, dict):
                self.templates[str(entry.get("name"))] = str(entry.get("template"))


def load_tokenizer(
    source: object,
    *,
    chat_template: str | None = None,
    is_worthwhile: Callable[[int], bool] | None = None,
) -> Tokenizer:
    """Load a tokenizer and its chat template, if it has one.

    The library ``tokenizers`` encodes for a JSON file, ``sentencepiece`` for others.

    Args:
        source: path of a ``tokenizer.json``, of a SentencePiece ``.model`` or of a
            Hugging Face folder; a name on its hub, if there is no file or folder so
            named; a ``tokenizers.Tokenizer``, or a fast tokenizer of transformers. For
            a path or name, ``tokenizer_config.json`` and similar files next to the
            tokenizer, which name EOS, BOS and the template, are read too.
        chat_template: ``chatml`` or ``plain``, a Jinja file, Jinja text, or the name of
            one of the tokenizer's templates; None: the tokenizer's default, and for
            records with tools its ``tool_use``, if any.
        is_worthwhile: called with the size of a JSON tokenizer file in bytes; if it
            returns True, a faster library loads the file at the same time.
    """
    if isinstance(source, str | PathLike):
        where = f"tokenizer {source}"
        files = _from_path(_local(source))
    else:
        where = "tokenizer"
        files = _from_object(source)
    is_json = files.payload.lstrip()[:1] == b"{"
    engine_name = "tokenizers" if is_json else "sentencepiece"

    fast_loading = None
    if is_json and is_worthwhile is not None and is_worthwhile(len(files.payload)):
        fast_loading = _start_fast_loading(files.payload)
    engine = ENGINES.load(engine_name)(files.payload, where)
    # `with_fastest_engine` takes the fast engine from this one, and compares the two.
    engine.loading = fast_loading  # type: ignore[attr-defined]

    dropout = getattr(engine, "dropout", 0.0)  # in the file; the engine ignores it
    if dropout:
        text = (
            "%s: its BPE dropout of %g is switched off: the same text always gets "
            "the same ids"
        )
        log.warning(text, where, dropout)

    tool_template = None
    if chat_template is None:
        tool_template = files.templates.get("tool_use")
    tokenizer = Tokenizer(
        name=files.name,
        engine_name=engine_name,
        payload=files.payload,
        chat_template=_choose_template(chat_template, files.templates),
        tool_template=tool_template,
        files=files.hashes,
        **_find_tokens(engine, files.settings),
    )
    # Not every file declares its BOS, EOS and padding as control tokens.
    engine.register(tokenizer.marker_tokens)
    return tokenizer.with_engine(engine_name, engine)


def _start_fast_loading(payload: bytes) -> Future[Any] | None:
    """Start to load a tokenizer file in the faster library, in a thread.

    Returns:
        The future of the loaded file; None if the library is not installed, or cannot
        take the file.
    """
    try:
        return ENGINES.load(FAST).start_loading(payload)  # type: ignore[attr-defined,no-any-return]
    except ImportError:  # not every platform has a wheel of it
        return None


def recorded_tokenizer(
    provenance: Mapping[str, Any], path: str | None, where: str, remedy: str
) -> Tokenizer:
    """Load the tokenizer that a dataset was made with: `path`, or the one its manifest
    names.

    Args:
        provenance: of the manifest.
        path: tokenizer that the user names, which may be a name on the hub; None: the
            recorded one, which must be on this machine.
        where: the dataset, for messages.
        remedy: for messages.
    """
    recorded = provenance.get("tokenizer") or {}
    source = path or recorded.get("path")
    if source is None:
        rule = "its tokenizer must be known to write text"
        raise TokenizerError(sentence(where, rule, remedy=remedy))
    if path is None:
        _check_recorded(source, recorded.get("sha256"), where, remedy)
    tokenizer = load_tokenizer(source)
    recorded_sha256 = recorded.get("sha256")
    if recorded_sha256 is None or recorded_sha256 == tokenizer.sha256:
        return tokenizer
    # A program that loads and saves a tokenizer may write other bytes. Hashes of its
    # vocabulary and of encoded texts stay equal.
    actual = tokenizer.provenance()
    identity = ("vocab_sha256", "probe_sha256")
    if any(recorded.get(name) != actual[name] for name in identity):
        rule = f"must be the tokenizer that {where} was packed with"
        hashes = f"sha256 {tokenizer.sha256[:12]}…, recorded {recorded_sha256[:12]}…"
        raise CompatibilityError(
            sentence(where=str(source), rule=rule, found=hashes, remedy=remedy)
        )
    return tokenizer


def _check_recorded(source: str, sha256: str | None, where: str, remedy: str) -> None:
    """Raise unless the recorded tokenizer is on this machine and has the recorded hash.

    The manifest may come from a stranger: no hub is asked, and the file is not parsed
    before its hash is compared.
    """
    if not os.path.exists(source):
        rule = f"the tokenizer that {where} names must be on this machine"
        name = f"tokenizer {display(source)}"  # it may be a URL with a login
        raise TokenizerError(
            sentence(where=name, rule=rule, found="none", remedy=remedy)
        )
    content = _read(_file_of(Path(source)))
    if hashlib.sha256(content).hexdigest() != sha256:
        name = f"tokenizer {source}"
        rule = f"must be the tokenizer that {where} was packed with"
        raise CompatibilityError(
            sentence(where=name, rule=rule, found="another sha256", remedy=remedy)
        )


def _local(source: str | PathLike[str]) -> Path:
    """Return `source` as a path; a name on the hub is downloaded first."""
    name = fspath(source)
    path = Path(source)
    resembles_url = "://" in name or is_mistyped(name)
    if resembles_url:
        rule = "it must be on this machine"
        remedy = "Copy it to a local folder, and give that"
        raise TokenizerError(
            sentence(f"tokenizer {display(name)}", rule, remedy=remedy)
        )
    if path.exists() or not isinstance(source, str) or not _may_be_on_hub(name):
        return path
    try:
        return _download(name)
    except Exception as error:  # of the hub, of its HTTP client, and of the disk
        rule = (
            "it must be a file or folder on this machine, or a name on the Hugging "
            "Face hub"
        )
        remedy = (
            f"Where there is a network, `hf download {name} --local-dir FOLDER`, "
            "and give that"
        )
        if isinstance(error, ImportError):
            remedy = f"Run: pip install huggingface-hub. Or {remedy}"
        # Both hide secrets: errors of the hub's client may show a login or a token.
        cause_text = client_text(error).partition("\n")[0]
        cause = client_cause(error)
        found = f"neither: {cause_text}"
        # By name, as the package is imported only for a download.
        if type(error).__name__ in ("LocalEntryNotFoundError", "ConnectError"):
            from huggingface_hub import constants

            endpoint = client_text(constants.ENDPOINT)
            found = (
                f"no such file or folder, and no connection to {endpoint} to look for "
                "the name"
            )
        message = sentence(
            where=f"tokenizer {name}",
            rule=rule,
            found=found,
            remedy=remedy,
        )
        raise TokenizerError(message) from cause


def _may_be_on_hub(name: str) -> bool:
    """Return True for the form of a name on the hub, unless it ends like a file."""
    has_form = _HUB_NAME.fullmatch(name) is not None
    return has_form and not name.endswith(_FILE_SUFFIXES)


def _download(name: str) -> Path:
    """Return the folder with the files of a tokenizer on the hub."""
    from huggingface_hub import snapshot_download

    patterns = [
        *FILE_NAMES,
        SETTINGS_FILE,
        TOKENS_FILE,
        TEMPLATE_FILE,
        TEMPLATE_TEXT,
        f"{TEMPLATE_FOLDER}/*.jinja",
    ]
    return Path(snapshot_download(name, allow_patterns=patterns))


def _from_object(source: Any) -> _Files:
    """Return the files of a ``tokenizers.Tokenizer``, or of a transformers object
    around one.
    """
    if hasattr(source, "to_str"):
        return _Files("tokenizers.Tokenizer", source.to_str().encode())
    if not hasattr(source, "backend_tokenizer"):
        rule = "it must be a path, a name on the hub, or a fast tokenizer"
        remedy = (
            "Tokenize with it yourself and pack records of token ids, without a "
            "tokenizer: docs/tokenizing.md, your own tokenizer"
        )
        description = f"an object of type {type(source).__name__}"
        raise TokenizerError(sentence("tokenizer", rule, description, remedy))
    files = _Files(type(source).__name__, source.backend_tokenizer.to_str().encode())
    # `add_bos_token` is not needed: the post-processor shows whether it adds BOS.
    tokens = {role: getattr(source, role, None) for role in WELL_KNOWN}
    files.settings = {
        role: str(token) for role, token in tokens.items() if token is not None
    }
    template = getattr(source, "chat_template", None)
    if isinstance(template, Mapping):
        files.templates = dict(template)
    elif template is not None:
        files.templates["default"] = template
    return files


def _from_path(path: Path) -> _Files:
    file = _file_of(path)
    if file.is_dir():  # a folder without a tokenizer file
        rule = f"the folder must hold one of {', '.join(FILE_NAMES)}"
        raise TokenizerError(sentence(f"tokenizer {path}", rule))
    files = _Files(to_unicode(file.name), _read(file))
    for name in (TOKENS_FILE, SETTINGS_FILE):
        files.settings |= files.read_json(file.parent / name)
    files.read_templates(file.parent)
    return files


def _file_of(path: Path) -> Path:
    """Return the tokenizer file of a folder; if there is none, the path itself."""
    for name in FILE_NAMES:
        if (path / name).is_file():
            return path / name
    return path


def _read(path: Path) -> bytes:
    try:
        _validate_file(path)
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        message = sentence(
            # The path may be a URL by mistake: hide its login.
            where=f"tokenizer {client_text(path)}",
            rule="it must be a readable file or folder",
            found=reason,
        )
        raise TokenizerError(message) from client_cause(error)
    # Git LFS leaves a small pointer in place of a large file.
    refuse_pointer(data, f"tokenizer {path}", TokenizerError)
    return data


def _validate_file(path: Path) -> None:
    """Raise OSError if `path` is no regular file, is missing, or is too large."""
    if path.is_dir():
        raise OSError("a folder")
    if path.exists() and not path.is_file():
        raise OSError("a device or pipe")
    size = path.stat().st_size
    if size > MAX_FILE_BYTES:
        raise OSError(f"{size} bytes, which are more than {MAX_FILE_BYTES}")


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(sentence(where, "it must be UTF-8", str(error))) from error


def _choose_template(choice: str | None, templates: Mapping[str, str]) -> str | None:
    """Return the text of a chat template.

    Args:
        choice: see :func:`load_tokenizer`.
        templates: of the tokenizer, by name.
    """
    if choice is None:
        return templates.get("default")
    if choice in BUILTIN:
        return BUILTIN[choice]
    if "{" in choice:
        return choice
    if choice in templates:
        return templates[choice]
    if not os.path.isfile(choice):
        rule = (
            "it must be Jinja text, a file, or one of: "
            f"{', '.join([*BUILTIN, *templates])}"
        )
        raise TokenizerError(sentence("chat template", rule, quote(choice)))
    return _decoded(_read(Path(choice)), f"chat template {choice}")


def _find_tokens(engine: Engine, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tokens BOS, EOS and so on, and whether BOS is added, as arguments of
    :class:`Tokenizer`.

    The settings decide, then the tokenizer file, then `WELL_KNOWN` names.
    """
    before, after = engine.wrapping()  # ids that it adds to a text
    tokens = {role: _parse_token(settings.get(role)) for role in WELL_KNOWN}
    if before:
        tokens["bos_token"] = tokens["bos_token"] or engine.id_to_token(before[0])
    if after:
        tokens["eos_token"] = tokens["eos_token"] or engine.id_to_token(after[-1])
    for role, names in WELL_KNOWN.items():
        tokens[role] = tokens[role] or _first_control(engine, names)

    for role, token in tokens.items():
        if token is None or engine.token_to_id(token) is not None:
            continue
        if role in ("bos_token", "eos_token"):
            rule = f"its {role} must be in the vocabulary"
            raise TokenizerError(sentence("tokenizer", rule, quote(token)))
        tokens[role] = None

    adds_bos = settings.get("add_bos_token")
    if not isinstance(adds_bos, bool):
        adds_bos = bool(before)
    return {**tokens, "adds_bos": adds_bos and tokens["bos_token"] is not None}


def _first_control(engine: Engine, names: Sequence[str]) -> str | None:
    """Return the first of some names that is a control token, or None.

    To be in the vocabulary is not enough if the tokenizer declares control tokens: some
    vocabularies hold "</s>" as a piece of markup.
    """
    for name in names:
        if name in engine.specials:
            return name
        if not engine.specials and engine.token_to_id(name) is not None:
            return name
    return None


def _parse_token(value: object) -> str | None:
    """Return a token in the settings: text, or an object with its text under
    ``content``.
    """
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
