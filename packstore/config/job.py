"""Settings in YAML files: a packing job, with the names of the arguments of ``packstore.pack``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import msgspec
import yaml
from msgspec import Meta

from packstore.config.packing import PackConfig
from packstore.config.settings import check_names
from packstore.errors import ConfigError, quote, sentence

_Path = Annotated[str, Meta(min_length=1)]
_PATH = (_Path, "it must be a path or URL")
_OPTIONS = (dict[str, Any], "it must be name: value")
ARGUMENTS: Mapping[str, tuple[Any, str]] = {
    "source": (
        _Path | Annotated[tuple[_Path, ...], Meta(min_length=1)],
        "it must be a path, glob or URL, or a list of them",
    ),
    "out": _PATH,
    "tokenizer": _PATH,
    "storage_options": _OPTIONS,
    "source_storage_options": _OPTIONS,
}
"""Arguments of ``packstore.pack`` that are no settings -> their types, and these in words."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """Also reads 1e-6 as a number: YAML 1.1 takes it for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads a mapping from a YAML file; lists become tuples."""
    try:
        settings = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(sentence(str(path), "it must be a readable file", reason)) from error
    except yaml.YAMLError as error:
        raise ConfigError(sentence(str(path), "it must be YAML", str(error))) from error
    if not isinstance(settings, Mapping):
        rule = "it must hold settings, name: value"
        raise ConfigError(sentence(str(path), rule, quote(settings)))
    return {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}


def to_yaml(settings: Mapping[str, Any]) -> str:
    """Returns settings as YAML, in their order."""
    text: str = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=100)
    return text


def read_job(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads a job file: arguments of ``packstore.pack``, settings among them.

    Relative paths in it count from the current folder, as on the command line.
    """
    job = read_yaml(path)
    check_names(job, (*ARGUMENTS, *PackConfig.names()), PackConfig.LISTED_BY)
    for name in job.keys() & ARGUMENTS.keys():
        type_, rule = ARGUMENTS[name]
        try:
            msgspec.convert(job[name], type_)
        except msgspec.ValidationError:
            raise ConfigError(sentence(f"{path}, {name}", rule, quote(job[name]))) from None
    return job


def job_of(provenance: Mapping[str, Any], out: str) -> dict[str, Any]:
    """Returns the job that packed the dataset at `out`, from the `provenance` in its manifest."""
    settings, sources = provenance.get("settings"), provenance.get("sources") or []
    paths = [source.get("path") for source in sources if isinstance(source, Mapping)]
    if not isinstance(settings, Mapping) or not paths or None in paths:
        rule = "its manifest must record settings and input files"
        remedy = "Only a dataset that packstore.pack made of files has a job"
        raise ConfigError(sentence(out, rule, "none", remedy))
    job: dict[str, Any] = {"source": paths[0] if len(paths) == 1 else paths, "out": out}
    tokenizer = provenance.get("tokenizer")
    if isinstance(tokenizer, Mapping) and tokenizer.get("path"):
        job["tokenizer"] = tokenizer["path"]
    return {**job, **{n: value for n, value in settings.items() if n in PackConfig.names()}}
