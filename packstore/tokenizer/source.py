"""Loads a :class:`Tokenizer` from a file, a folder, an object, or the record in a manifest."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
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
    spelled,
)
from packstore.secrets import client_cause, client_text
from packstore.tokenizer.dialogue.template import BUILTIN
from packstore.tokenizer.engines import ENGINES, Engine
from packstore.tokenizer.tokenizer import FAST, Tokenizer

log = logging.getLogger("packstore")

FILE_NAMES = ("tokenizer.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""File names in a folder, the preferred one first."""

SETTINGS, TEMPLATE, TEXT = "tokenizer_config.json", "chat_template.json", "chat_template.jinja"
MAP, MORE = "special_tokens_map.json", "additional_chat_templates"
"""Files, and a folder, beside it."""

_ON_HUB = re.compile(r"([\w-][\w.-]*/)?(?!.*\.(json|model|jinja)$)[\w-][\w.-]*")

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

    name: str
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
        return _decoded(content, path.name)

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

    def read_templates(self, folder: Path) -> None:
        """Reads chat templates; later files override earlier ones, as in Hugging Face folders."""
        stored = self.read_json(folder / TEMPLATE).get("chat_template")
        for value in (self.settings.pop("chat_template", None), stored):
            if isinstance(value, list):
                named = [v for v in value if isinstance(v, dict)]
                self.templates |= {str(v.get("name")): str(v.get("template")) for v in named}
            elif value is not None:
                self.templates["default"] = str(value)
        text = self.read(folder / TEXT)
        if text is not None:
            self.templates["default"] = text
        for path in sorted((folder / MORE).glob("*.jinja")):
            self.templates[path.stem] = self.read(path) or ""


def load_tokenizer(
    source: object,
    *,
    chat_template: str | None = None,
    is_worthwhile: Callable[[int], bool] | None = None,
) -> Tokenizer:
    """Loads a tokenizer, with the reference library, and its chat template, if it has one.

    Args:
        source: path of a ``tokenizer.json``, of a SentencePiece ``.model`` or of a Hugging Face
            folder; a name on its hub, if there is no file or folder so named; a
            ``tokenizers.Tokenizer``, or a fast tokenizer of transformers. Of a path or name,
            ``tokenizer_config.json`` and similar files next to the tokenizer, which name EOS, BOS
            and the template, are read too.
        chat_template: ``chatml`` or ``plain``, a Jinja file, Jinja text, or the name of one of the
            tokenizer's templates; None: the tokenizer's default, and for records with tools its
            ``tool_use``, if any.
        is_worthwhile: whether a faster library shall load a file of so many bytes at the same time.
    """
    where = "tokenizer"
    if isinstance(source, str | PathLike):
        files, where = _from_path(_local(source)), f"tokenizer {source}"
    else:
        files = _from_object(source)
    engine_name = "tokenizers" if files.payload.lstrip()[:1] == b"{" else "sentencepiece"
    loading = None
    if is_worthwhile and engine_name == "tokenizers" and is_worthwhile(len(files.payload)):
        with contextlib.suppress(ImportError):  # not every platform has a wheel of it
            loading = ENGINES.load(FAST).start_loading(files.payload)  # type: ignore[attr-defined]
    engine = ENGINES.load(engine_name)(files.payload, where)
    engine.loading = loading  # type: ignore[attr-defined]
    if dropout := getattr(engine, "dropout", 0.0):
        text = "%s: its BPE dropout of %g is switched off: the same text always gets the same ids"
        log.warning(text, where, dropout)
    tokenizer = Tokenizer(
        name=files.name,
        engine_name=engine_name,
        payload=files.payload,
        chat_template=_choose_template(chat_template, files.templates),
        tool_template=files.templates.get("tool_use") if chat_template is None else None,
        files=files.hashes,
        **_roles(engine, files.settings),
    )
    engine.register(tokenizer.marks)
    return tokenizer.with_engine(engine_name, engine)


def recorded_tokenizer(
    provenance: Mapping[str, Any], path: str | None, where: str, remedy: str
) -> Tokenizer:
    """Loads the tokenizer that a dataset was made with: `path`, or what its manifest names.

    `path` is the user's word, and may be a name on the hub. What only the manifest names must be on
    this machine.
    """
    recorded = provenance.get("tokenizer") or {}
    chosen = path or recorded.get("path")
    if chosen is None:
        raise TokenizerError(
            sentence(where, "its tokenizer must be known to write text", remedy=remedy)
        )
    if path is None:
        _check_recorded(chosen, recorded.get("sha256"), where, remedy)
    tokenizer = load_tokenizer(chosen)
    if recorded.get("sha256") in (None, tokenizer.sha256):
        return tokenizer
    now = tokenizer.provenance()
    if any(recorded.get(name) != now[name] for name in ("vocab_sha256", "probe_sha256")):
        # Equal hashes: it was loaded and saved again, which may change the bytes of its file.
        rule = f"must be the tokenizer that {where} was packed with"
        found = f"sha256 {tokenizer.sha256[:12]}…, recorded {recorded['sha256'][:12]}…"
        raise CompatibilityError(sentence(str(chosen), rule, found, remedy))
    return tokenizer


def _check_recorded(named: str, sha256: str | None, where: str, remedy: str) -> None:
    """Refuses a tokenizer that only a manifest names, unless it is on this machine, of its hash.

    The manifest may be a stranger's: nothing is asked of a hub, and nothing parsed before.
    """
    if not os.path.exists(named):
        rule = f"the tokenizer that {where} names must be on this machine"
        raise TokenizerError(sentence(f"tokenizer {display(named)}", rule, "none", remedy))
    if hashlib.sha256(_read(_file_of(Path(named)))).hexdigest() != sha256:
        rule = f"must be the tokenizer that {where} was packed with"
        raise CompatibilityError(sentence(f"tokenizer {named}", rule, "another sha256", remedy))


def _local(source: str | PathLike[str]) -> Path:
    """Returns the local path that `source` names, or of the files of that name on the hub."""
    name, path = fspath(source), Path(source)
    if "://" in name or is_mistyped(name):
        rule, remedy = "it must be on this machine", "Copy it to a local folder, and give that"
        raise TokenizerError(sentence(f"tokenizer {display(name)}", rule, "", remedy))
    if path.exists() or not isinstance(source, str) or not _ON_HUB.fullmatch(name):
        return path
    try:
        from huggingface_hub import snapshot_download

        wanted = [*FILE_NAMES, SETTINGS, MAP, TEMPLATE, TEXT, f"{MORE}/*.jinja"]
        return Path(snapshot_download(name, allow_patterns=wanted))
    except Exception as error:  # of the hub, of its HTTP client, and of the disk
        rule = "it must be a file or folder on this machine, or a name on the Hugging Face hub"
        remedy = f"Where there is a network, `hf download {name} --local-dir FOLDER`, and give that"
        if isinstance(error, ImportError):
            remedy = f"Run: pip install huggingface-hub. Or {remedy}"
        found = f"neither: {client_text(error).partition(chr(10))[0]}"
        raise TokenizerError(sentence(f"tokenizer {name}", rule, found, remedy)) from client_cause(
            error
        )


def _from_object(source: Any) -> _Files:
    """Takes a ``tokenizers.Tokenizer``, or what transformers holds around one."""
    if hasattr(source, "to_str"):
        return _Files("tokenizers.Tokenizer", source.to_str().encode())
    if not hasattr(source, "backend_tokenizer"):
        rule = "it must be a path, a name on the hub, or a fast tokenizer"
        remedy = "Save it, e.g. tokenizer.save_pretrained(FOLDER), and give the folder"
        found = f"an object of type {type(source).__name__}"
        raise TokenizerError(sentence("tokenizer", rule, found, remedy))
    files = _Files(type(source).__name__, source.backend_tokenizer.to_str().encode())
    # Whether it adds BOS is in its post-processor.
    tokens = {role: getattr(source, role, None) for role in WELL_KNOWN}
    files.settings = {role: str(token) for role, token in tokens.items() if token is not None}
    template = getattr(source, "chat_template", None)
    if isinstance(template, Mapping):
        files.templates = dict(template)
    elif template is not None:
        files.templates["default"] = template
    return files


def _from_path(path: Path) -> _Files:
    file = _file_of(path)
    if file.is_dir():
        rule = f"the folder must hold one of {', '.join(FILE_NAMES)}"
        raise TokenizerError(sentence(f"tokenizer {path}", rule))
    files = _Files(spelled(file.name), _read(file))
    for name in (MAP, SETTINGS):
        files.settings |= files.read_json(file.parent / name)
    files.read_templates(file.parent)
    return files


def _file_of(path: Path) -> Path:
    """The tokenizer file of a folder, or the path itself."""
    return next((path / name for name in FILE_NAMES if (path / name).is_file()), path)


def _read(path: Path) -> bytes:
    try:
        if not path.is_file() and path.exists():
            raise OSError(f"a {'folder' if path.is_dir() else 'device or pipe'}")
        if (size := path.stat().st_size) > MAX_FILE_BYTES:
            raise OSError(f"{size} bytes, which are more than {MAX_FILE_BYTES}")
        data = path.read_bytes()
        refuse_pointer(data, f"tokenizer {path}", TokenizerError)
        return data
    except OSError as error:
        found = error.strerror or str(error)
        where = f"tokenizer {client_text(path)}"  # it may be no path, but a URL by mistake
        raise TokenizerError(
            sentence(where, "it must be a readable file or folder", found)
        ) from client_cause(error)


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise TokenizerError(sentence(where, "it must be UTF-8", str(error))) from error


def _choose_template(wanted: str | None, own: Mapping[str, str]) -> str | None:
    if wanted is None:
        return own.get("default")
    if wanted in BUILTIN:
        return BUILTIN[wanted]
    if "{" in wanted:
        return wanted
    if wanted in own:
        return own[wanted]
    if not os.path.isfile(wanted):
        rule = f"it must be Jinja text, a file, or one of: {', '.join([*BUILTIN, *own])}"
        raise TokenizerError(sentence("chat template", rule, quote(wanted)))
    return _decoded(_read(Path(wanted)), f"chat template {wanted}")


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
                rule = f"its {role} must be in the vocabulary"
                raise TokenizerError(sentence("tokenizer", rule, quote(token)))
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
