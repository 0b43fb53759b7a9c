"""Settings in a YAML file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import yaml

from packstore.errors import ConfigError, quote, sentence


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """Also reads 1e-6 as a number: YAML 1.1 takes it for text."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def read_yaml(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads a mapping from a YAML file; lists become tuples.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or holds no mapping.
    """
    try:
        settings = yaml.load(Path(path).read_text(encoding="utf-8"), _Loader)
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(sentence(str(path), "it must be a readable file", reason)) from error
    except yaml.YAMLError as error:
        raise ConfigError(sentence(str(path), "it must be YAML", str(error))) from error
    if not isinstance(settings, Mapping):
        must = "it must hold settings, name: value"
        raise ConfigError(sentence(str(path), must, quote(settings)))
    return {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}


def to_yaml(settings: Mapping[str, Any]) -> str:
    """Returns settings as YAML, in their order."""
    text: str = yaml.safe_dump(dict(settings), sort_keys=False, allow_unicode=True, width=100)
    return text
