"""Settings in YAML files: a packing job, with the names of the arguments of ``packstore.pack``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from packstore.config.packing import PackConfig
from packstore.config.settings import check_names
from packstore.errors import ConfigError, quote, sentence

ARGUMENTS = ("source", "out", "tokenizer", "storage_options", "source_storage_options")
"""Arguments of ``packstore.pack`` that are no settings."""


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
        raise ConfigError(
            sentence(str(path), "it must hold settings, name: value", quote(settings))
        )
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
    for name in job.keys() & ARGUMENTS:
        rule, holds = _RULES[name]
        if not holds(job[name]):
            raise ConfigError(sentence(f"{path}, {name}", rule, quote(job[name])))
    return job


def job_of(provenance: Mapping[str, Any], out: str) -> dict[str, Any]:
    """Returns the job that packed a dataset, from what its manifest records.

    Args:
        provenance: of the manifest.
        out: folder or URL of the dataset.
    """
    settings, sources = provenance.get("settings"), provenance.get("sources") or []
    paths = [source.get("path") for source in sources if isinstance(source, Mapping)]
    if not isinstance(settings, Mapping) or not paths or None in paths:
        raise ConfigError(
            sentence(
                out,
                "its manifest must record settings and input files",
                "none",
                "Only a dataset that packstore.pack made of files has a job",
            )
        )
    job: dict[str, Any] = {"source": paths[0] if len(paths) == 1 else paths, "out": out}
    tokenizer = provenance.get("tokenizer")
    if isinstance(tokenizer, Mapping) and tokenizer.get("path"):
        job["tokenizer"] = tokenizer["path"]
    return {**job, **{n: value for n, value in settings.items() if n in PackConfig.names()}}


def _is_path(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_source(value: Any) -> bool:
    paths = value if isinstance(value, tuple) else (value,)
    return bool(paths) and all(map(_is_path, paths))


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


_RULES = {
    "source": ("it must be a path, glob or URL, or a list of them", _is_source),
    "out": ("it must be a path or URL", _is_path),
    "tokenizer": ("it must be a path or URL", _is_path),
    "storage_options": ("it must be name: value", _is_named),
    "source_storage_options": ("it must be name: value", _is_named),
}
