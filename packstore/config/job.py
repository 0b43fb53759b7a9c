"""A job file: one packing job as YAML, with the names of the arguments of ``packstore.pack``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from os import PathLike
from typing import Any

from packstore.config.checks import unknown
from packstore.config.packing import PackConfig
from packstore.config.yaml_file import read_yaml
from packstore.errors import ConfigError, UnknownNameError, quote, sentence

ARGUMENTS = ("source", "out", "tokenizer", "storage_options", "source_storage_options")
"""Arguments of ``packstore.pack`` that are no settings."""


def read_job(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads a job file: arguments of ``packstore.pack``, settings among them.

    Relative paths in it count from the current folder, as on the command line.

    Raises:
        ConfigError: the file cannot be read, holds no mapping, or a name has a wrong value.
        UnknownNameError: a name is neither an argument nor a setting; suggests the nearest.
    """
    job = read_yaml(path)
    known = {*ARGUMENTS, *(f.name for f in dataclasses.fields(PackConfig))}
    for name, value in job.items():
        if name not in known:
            raise UnknownNameError(
                f"{path}: {unknown(str(name), known, '`packstore pack --help`')}"
            )
        if name in ("out", "tokenizer") and not isinstance(value, str):
            raise ConfigError(sentence(f"{path}, {name}", "it must be a path or URL", quote(value)))
        if name.endswith("storage_options") and not _is_named(value):
            raise ConfigError(sentence(f"{path}, {name}", "it must be name: value", quote(value)))
        if name == "source" and not _is_source(value):
            must = "it must be a path, glob or URL, or a list of them"
            raise ConfigError(sentence(f"{path}, {name}", must, quote(value)))
    return job


def job_of(provenance: Mapping[str, Any], out: str) -> dict[str, Any]:
    """Returns the job that packed a dataset, from what its manifest records.

    Args:
        provenance: of the manifest.
        out: folder or URL of the dataset.

    Raises:
        ConfigError: its manifest records no settings or no input files.
    """
    settings, sources = provenance.get("settings"), provenance.get("sources") or []
    paths = [one.get("path") for one in sources if isinstance(one, Mapping)]
    if not isinstance(settings, Mapping) or not paths or None in paths:
        must = "its manifest must record settings and input files"
        do = "Only a dataset that packstore.pack made of files has a job"
        raise ConfigError(sentence(out, must, "none", do))
    known = {f.name for f in dataclasses.fields(PackConfig)}
    job: dict[str, Any] = {"source": paths[0] if len(paths) == 1 else paths, "out": out}
    tokenizer = provenance.get("tokenizer")
    if isinstance(tokenizer, Mapping) and tokenizer.get("path"):
        job["tokenizer"] = tokenizer["path"]
    return {**job, **{name: value for name, value in settings.items() if name in known}}


def _is_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(isinstance(name, str) for name in value)


def _is_source(value: Any) -> bool:
    each = value if isinstance(value, tuple) and value else (value,)
    return all(isinstance(one, str) and one for one in each)
