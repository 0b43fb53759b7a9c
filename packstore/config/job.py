"""Settings in YAML files: packing jobs, with the arguments of ``packstore.pack``, and
training runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from os import PathLike
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
import yaml
from msgspec import Meta

from packstore.config.packing import PackConfig
from packstore.config.settings import check_names, kind_of
from packstore.errors import ConfigError, sentence, visible

_Path = Annotated[str, Meta(min_length=1)]
_Paths = Annotated[list[_Path], Meta(min_length=1)]


class Argument(NamedTuple):
    """Type of an argument of ``packstore.pack``, and its rule in words, for errors."""

    type: Any
    rule: str


ARGUMENTS: Mapping[str, Argument] = {
    "source": Argument(
        _Path | _Paths, "it must be a path, glob or URL, or a list of them"
    ),
    "out": Argument(_Path, "it must be a path or URL"),
    "tokenizer": Argument(_Path, "it must be a path or URL"),
    "storage_options": Argument(dict[str, Any], "it must be name: value"),
    "source_storage_options": Argument(dict[str, Any], "it must be name: value"),
}
"""The arguments of ``packstore.pack`` that are no settings."""

MAX_YAML_BYTES = 1 << 24
"""Maximum bytes of a file of settings: most have kilobytes, and a long list of inputs a
few megabytes.
"""

_SETTINGS_RULE = "it must hold settings, name: value"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """Read words without quotes as JSON does: null, true, false and numbers.

    All others are text, such as on, yes, 0123 and 12:30, which YAML 1.1 would convert.
    Repeated names are refused, and so are aliases: a few nested ones expand to more
    values than memory holds.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem="an alias", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = set[object]()
        for key, _ in node.value:
            name = (key.tag, str(key.value))
            if name in names:
                raise yaml.MarkedYAMLError(
                    problem="a name for the second time", problem_mark=key.start_mark
                )
            names.add(name)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Write no aliases, and texts with control characters in quotes."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        style = None if visible(data) == data else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)


class _PlainWord(NamedTuple):
    """A kind of words without quotes that are not text.

    Attributes:
        tag: name of the YAML type.
        first_characters: characters that such a word may begin with.
        pattern: regular expression of the word.
    """

    tag: str
    first_characters: str
    pattern: str


_PLAIN_WORDS = (
    _PlainWord("null", "~nN", "~|null|Null|NULL"),
    _PlainWord("bool", "tTfF", "true|True|TRUE|false|False|FALSE"),
    _PlainWord("int", "-+0123456789", "[-+]?(0|[1-9][0-9]*)"),
    _PlainWord(
        "float",
        "-+.0123456789",
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?"
        r"|[-+]?\.inf|\.nan",
    ),
)


def _add_resolvers(kind: Any) -> None:
    """Give a loader or dumper the rules of plain words.

    The dumper quotes a text that these rules, or YAML 1.1, would read as another value.
    """
    for word in _PLAIN_WORDS:
        tag = f"tag:yaml.org,2002:{word.tag}"
        pattern = re.compile(f"(?:{word.pattern})$")
        kind.add_implicit_resolver(tag, pattern, list(word.first_characters))
    kind.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("$"), [""])


_add_resolvers(_Loader)
_add_resolvers(_Dumper)


def read_yaml(path: str | PathLike[str]) -> dict[str, Any]:
    """Read a mapping from a YAML file.

    Raises:
        ConfigError: the file is no such mapping. The message names only the place in
            it, as the file may hold secrets.
    """
    data = _read_bytes(path)
    try:
        settings = yaml.load(data.decode(), _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(
            sentence(str(path), rule="it must be UTF-8", found=str(error))
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise _yaml_error(path, error) from None
    if not isinstance(settings, dict):
        raise ConfigError(
            sentence(str(path), rule=_SETTINGS_RULE, found=kind_of(settings))
        )
    return settings


def _read_bytes(path: str | PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)  # a pipe or a device has no size
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            sentence(str(path), rule="it must be a readable file", found=reason)
        ) from error
    if len(data) > MAX_YAML_BYTES:
        rule = f"it must have at most {MAX_YAML_BYTES:,} bytes"
        raise ConfigError(sentence(str(path), rule, found="more"))
    return data


def _yaml_error(path: str | PathLike[str], error: Exception) -> ConfigError:
    where = str(path)
    problem = "a text that YAML does not allow"
    if isinstance(error, yaml.MarkedYAMLError):
        problem = _without_text(error.problem or problem)
        mark = error.problem_mark or error.context_mark
        if mark:
            where += f", line {mark.line + 1}, column {mark.column + 1}"
    rule = "it must be YAML without aliases, and name each setting once"
    return ConfigError(sentence(where, rule, found=problem))


def _without_text(problem: str) -> str:
    """Return a message of PyYAML without text of the file, which may be a secret.

    Quoted names of tokens stay: ``expected '<document start>', but found '-'``.
    """

    def hide_text(quoted: re.Match[str]) -> str:
        is_token = re.fullmatch(r"'(<[a-z -]+>|[][{},:?-]|\\t)'", quoted[0])
        return quoted[0] if is_token else "…"

    return re.sub(r"""'[^']*'|"[^"]*\"""", hide_text, problem)


def to_yaml(settings: Mapping[str, Any]) -> str:
    """Return settings as YAML, in their order."""
    text = yaml.dump(
        dict(settings), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100
    )
    return visible(text)


def read_job(path: str | PathLike[str]) -> dict[str, Any]:
    """Read arguments of ``packstore.pack``; relative paths count from the current
    folder.

    Raises:
        ConfigError: the file is no mapping, or an argument has the wrong type.
        UnknownNameError: ``packstore.pack`` has no such argument.
    """
    job = read_yaml(path)
    check_names(job, (*ARGUMENTS, *PackConfig.names()), PackConfig.LISTED_BY)
    for name, argument in ARGUMENTS.items():
        if name not in job:
            continue
        try:
            msgspec.convert(job[name], argument.type)
        except msgspec.ValidationError:
            raise ConfigError(
                sentence(
                    f"{path}, {name}", rule=argument.rule, found=kind_of(job[name])
                )
            ) from None
    return job


def job_of(provenance: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return the job that packs a dataset again.

    A job with `validation_fraction` writes two datasets, in the folders ``train`` and
    ``validation`` of `out`. If one of them lies under another name, `out` is unknown,
    and the job has none.

    Args:
        provenance: provenance in the manifest of the dataset.
        url: folder or URL of the dataset.

    Raises:
        ConfigError: the dataset was not packed by one job from files.
    """
    settings = provenance.get("settings")
    sources = provenance.get("sources") or []
    paths = [source.get("path") for source in sources if isinstance(source, Mapping)]
    if not isinstance(settings, Mapping) or not paths or None in paths:
        raise ConfigError(
            sentence(
                url,
                rule="its manifest must record settings and input files",
                found="none",
                remedy="Only a dataset that packstore.pack made of files has a job",
            )
        )

    repacked = provenance.get("repacked_from")
    if isinstance(repacked, Mapping):
        return {
            "source": repacked["path"],
            "out": url,
            **_settings_without_records(settings),
        }

    if "combined_from" in provenance:
        num_parts = len(provenance["combined_from"])
        raise ConfigError(
            sentence(
                url,
                rule="it must be packed by one job",
                found=f"a dataset of {num_parts} parts, by append or concat",
                remedy="Pack the dataset itself to make it one",
            )
        )

    job: dict[str, Any] = {"source": paths[0] if len(paths) == 1 else paths}
    part = provenance.get("part")  # "train" or "validation"
    if part is None:
        job["out"] = url
    elif last_name_of(url) == part:
        job["out"] = parent_of(url)
    tokenizer = provenance.get("tokenizer")
    if isinstance(tokenizer, Mapping) and tokenizer.get("path"):
        job["tokenizer"] = tokenizer["path"]
    for name in settings:
        if name in PackConfig.names():
            job[name] = settings[name]
    return job


def _settings_without_records(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that also take effect if the source is a packed dataset."""
    names = PackConfig.names_without_records()
    packing = {name: value for name, value in settings.items() if name in names}
    answers = settings.get("on", {})
    if "overlong" in answers:
        packing["on"] = {"overlong": answers["overlong"]}
    return packing


def last_name_of(url: str) -> str:
    """Return the name of the folder at `url`."""
    path = url if "://" in url else os.path.abspath(url)
    return path.rstrip("/").rpartition("/")[2]


def parent_of(url: str) -> str:
    """Return the folder that holds the one at `url`."""
    if "://" in url:
        return url.rstrip("/").rpartition("/")[0]
    return os.path.normpath(os.path.join(url, os.pardir))
