"""Loads a :class:`Tokenizer` from a file, a folder, or an object."""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from packstore.errors import TokenizerError, display, quote, sentence, spelled
from packstore.tokenizer.chat.builtin_templates import BUILTIN
from packstore.tokenizer.engines import ENGINES, Engine
from packstore.tokenizer.fastest import FASTER
from packstore.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("packstore")

FILE_NAMES = {
    "tokenizers": ("tokenizer.json",),
    "sentencepiece": ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
}
"""Reference engine -> file names in a folder."""

FILE_ENGINES = {
    "tokenizers": ("auto", "tokenizers", *FASTER),
    "sentencepiece": ("auto", "sentencepiece"),
}
"""Reference engine -> values of `tokenizer_engine` that accept its files."""

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
class _Found:
    """The files of a tokenizer."""

    name: str
    engine: str
    payload: bytes
    settings: dict[str, Any] = field(default_factory=dict)
    templates: dict[str, str] = field(default_factory=dict)
    hashes: dict[str, str] = field(default_factory=dict)

    def read(self, path: Path) -> str | None:
        """Reads a text file; None if it does not exist."""
        if not path.is_file():
            return None
        content = _read(path)
        self.hashes[spelled(path.name)] = hashlib.sha256(content).hexdigest()
        try:
            return content.decode()
        except UnicodeDecodeError as error:
            raise TokenizerError(sentence(path.name, "it must be UTF-8", str(error))) from error

    def read_json(self, path: Path) -> dict[str, Any]:
        """Reads a JSON file; empty if it does not exist."""
        text = self.read(path)
        try:
            value = json.loads(text) if text is not None else {}
        except (ValueError, RecursionError) as error:
            raise TokenizerError(sentence(path.name, "it must be JSON", str(error))) from error
        if not isinstance(value, dict):
            raise TokenizerError(sentence(path.name, "it must hold a JSON object", quote(value)))
        return value


def load_tokenizer(
    source: object, *, engine: str = "auto", chat_template: str | None = None
) -> Tokenizer:
    """Loads a tokenizer and its chat template, if it has one.

    Args:
        source: path of a ``tokenizer.json``, of a SentencePiece ``.model`` or of a Hugging Face
            folder, or a ``tokenizers.Tokenizer``. ``tokenizer_config.json`` and similar files next
            to it, which name EOS, BOS and the template, are read too.
        engine: a name in :data:`packstore.tokenizer.engines.ENGINES`; ``auto``: the reference for
            the file. A faster one is for :func:`packstore.tokenizer.fastest.fastest` to choose.
        chat_template: ``chatml`` or ``plain``, a Jinja file, Jinja text, or the name of one of the
            tokenizer's templates; None: the tokenizer's default, and for records with tools its
            ``tool_use``, if any.

    Raises:
        TokenizerError: the tokenizer does not exist or load.
        UnknownNameError: `engine` is unknown.
        MissingExtraError: the engine's package is not installed.
    """
    if engine != "auto":
        ENGINES.check(engine)
    if isinstance(source, str | PathLike):
        found = _from_path(_local(source), engine)
    elif hasattr(source, "to_str") and engine in FILE_ENGINES["tokenizers"]:
        found = _Found("tokenizers.Tokenizer", "tokenizers", source.to_str().encode())
    else:
        must = "it must be a path or a tokenizers.Tokenizer"
        do = "Save it, e.g. tokenizer.save_pretrained(FOLDER), and give the folder"
        raise TokenizerError(
            sentence("tokenizer", must, f"an object of type {type(source).__name__}", do)
        )
    where = f"tokenizer {source}" if isinstance(source, str | PathLike) else "tokenizer"
    loaded = ENGINES.load(found.engine)(found.payload, where)
    if dropout := getattr(loaded, "dropout", 0.0):
        log.warning(
            "%s: its BPE dropout of %g is switched off: the same text always gets the same ids",
            *(where, dropout),
        )
    tokenizer = Tokenizer(
        name=found.name,
        engine_name=found.engine,
        payload=found.payload,
        chat_template=_choose_template(chat_template, found.templates),
        tool_template=found.templates.get("tool_use") if chat_template is None else None,
        files=found.hashes,
        **_roles(loaded, found.settings),
    )
    loaded.register(tokenizer.marks)
    tokenizer = tokenizer.with_engine(found.engine, loaded)
    _ = (
        tokenizer.template,
        tokenizer.tool_use_template,
    )  # raises for a syntax error here, not in a worker
    if engine in ("auto", found.engine):
        return tokenizer
    return tokenizer.with_engine(engine)  # likewise for an unsupported kind of tokenizer


def _local(source: str | PathLike[str]) -> Path:
    """Returns the local path that `source` names.

    Raises:
        TokenizerError: `source` is a URL, or looks like a hub name.
    """
    name, path = fspath(source), Path(source)
    do = ""
    if "://" in name:
        name = display(name)
        do = "Copy it to a local folder, and give that"
    elif not path.exists() and re.fullmatch(r"[\w-]+/[\w.-]+", name) and not path.parent.exists():
        do = f"Of a name on a hub: `hf download {name} --local-dir FOLDER`, and give that"
    if do:
        must = "it must be a file or folder on this machine"
        raise TokenizerError(sentence(f"tokenizer {name}", must, "", do))
    return path


def _from_path(path: Path, engine: str) -> _Found:
    file, folder = path, path.parent
    if path.is_dir():
        folder = path
        names = [n for e, files in FILE_NAMES.items() if engine in FILE_ENGINES[e] for n in files]
        file = next((path / n for n in names if (path / n).is_file()), path)
        if file == path:
            must = f"the folder must hold one of {', '.join(names)}"
            raise TokenizerError(sentence(f"tokenizer {path}", must))
    payload = _read(file)
    kind = "tokenizers" if payload.lstrip()[:1] == b"{" else "sentencepiece"
    if engine not in FILE_ENGINES[kind]:
        must = f"engine {engine!r} needs a file of its own kind"
        raise TokenizerError(sentence(f"tokenizer {path}", must, f"one for {kind!r}"))
    found = _Found(spelled(file.name), kind, payload)
    found.settings = {
        **found.read_json(folder / "special_tokens_map.json"),
        **found.read_json(folder / "tokenizer_config.json"),
    }
    _add_templates(found, folder)
    return found


def _read(path: Path) -> bytes:
    try:
        if not path.is_file() and path.exists():
            raise OSError(f"a {'folder' if path.is_dir() else 'device or pipe'}")
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise OSError(f"{size} bytes, which are more than {MAX_FILE_BYTES}")
        return path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise TokenizerError(
            sentence(f"tokenizer {path}", "it must be a readable file or folder", reason)
        ) from error


def _add_templates(found: _Found, folder: Path) -> None:
    """Adds chat templates; later files override earlier ones, as in Hugging Face folders."""
    stored = found.read_json(folder / "chat_template.json").get("chat_template")
    for value in (found.settings.pop("chat_template", None), stored):
        if isinstance(value, list):
            named = [v for v in value if isinstance(v, dict)]
            found.templates |= {str(v.get("name")): str(v.get("template")) for v in named}
        elif value is not None:
            found.templates["default"] = str(value)
    text = found.read(folder / "chat_template.jinja")
    if text is not None:
        found.templates["default"] = text
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found.templates[path.stem] = found.read(path) or ""


def _choose_template(wanted: str | None, own: Mapping[str, str]) -> str | None:
    if wanted is None:
        return own.get("default")
    if wanted in BUILTIN:
        return BUILTIN[wanted]
    if "{" in wanted:
        return wanted
    if wanted in own:
        return own[wanted]
    path = Path(wanted)
    if not path.is_file():
        names = ", ".join([*BUILTIN, *own])
        must = f"it must be Jinja text, a file, or one of: {names}"
        raise TokenizerError(sentence("chat template", must, quote(wanted)))
    try:
        return _read(path).decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(
            sentence(f"chat template {path}", "it must be UTF-8", str(error))
        ) from error


def _roles(engine: Engine, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Finds BOS, EOS, ...: by the settings, by the tokenizer file, by well-known names."""
    before, after = engine.wrapping()
    roles = {name: _token(settings.get(name)) for name in WELL_KNOWN}
    if before:
        roles["bos_token"] = roles["bos_token"] or engine.id_to_token(before[0])
    if after:
        roles["eos_token"] = roles["eos_token"] or engine.id_to_token(after[-1])
    # Some vocabularies hold "</s>" as a piece of markup; as a control token it is declared.
    declared = engine.specials
    for role, names in WELL_KNOWN.items():
        known = (n for n in names if (n in declared if declared else _has(engine, n)))
        roles[role] = roles[role] or next(known, None)
    for role, token in roles.items():
        if token is not None and not _has(engine, token):
            if role in ("bos_token", "eos_token"):
                must = f"its {role} must be in the vocabulary"
                raise TokenizerError(sentence("tokenizer", must, quote(token)))
            roles[role] = None
    says = settings.get("add_bos_token")
    adds_bos = roles["bos_token"] is not None and (says if isinstance(says, bool) else bool(before))
    return {**roles, "adds_bos": adds_bos}


def _has(engine: Engine, token: str) -> bool:
    return engine.token_to_id(token) is not None


def _token(value: object) -> str | None:
    """Parses a token in the settings: text, or an object with its text under ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
