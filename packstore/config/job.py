"""Settings in YAML files: a packing job, with the names of the arguments of
``packstore.pack``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from os import PathLike
from typing import Annotated, Any, ClassVar

import msgspec
import yaml
from msgspec import Meta

from packstore.config.packing import PackConfig
from packstore.config.settings import check_names, kind_of
from packstore.errors import ConfigError, sentence, visible

_Path = Annotated[str, Meta(min_length=1)]
_PATH = (_Path, "it must be a path or URL")
_OPTIONS = (dict[str, Any], "it must be name: value")
ARGUMENTS: Mapping[str, tuple[Any, str]] = {
    "source": (
        _Path | Annotated[list[_Path], Meta(min_length=1)],
        "it must be a path, glob or URL, or a list of them",
    ),
    "out": _PATH,
    "tokenizer": _PATH,
    "storage_options": _OPTIONS,
    "source_storage_options": _OPTIONS,
}
"""Arguments of ``packstore.pack`` that are no settings -> their types, and these in
words.
"""


MAX_YAML_BYTES = 1 << 24
"""Maximum bytes of a file of settings: one takes kilobytes, more only if it lists many
inputs.
"""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # it has no types
    """Reads plain words as JSON does; all others are text, such as on, yes, 0123 and
    12:30.

    A name stands once. Aliases are refused: a few nested ones are more values than
        memory holds.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                None, None, "an alias", self.peek_event().start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = set[object]()
        for key, _ in node.value:
            if (name := (key.tag, str(key.value))) in names:
                raise yaml.MarkedYAMLError(
                    None, None, "a name for the second time", key.start_mark
                )
            names.add(name)
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Writes no aliases, and texts with control characters in quotes."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        style = None if visible(data) == data else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_Dumper.add_representer(str, _Dumper.represent_str)
_PLAIN = {  # the first characters of a word, and the whole
    "null": ("~nN", "~|null|Null|NULL"),
    "bool": ("tTfF", "true|True|TRUE|false|False|FALSE"),
    "int": ("-+0123456789", "[-+]?(0|[1-9][0-9]*)"),
    "float": (
        "-+.0123456789",
        r"[-+]?([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
    ),
}
for _kind in (
    _Loader,
    _Dumper,
):  # which also quotes what other readers take for no text
    for _tag, (_first, _whole) in _PLAIN.items():
        _form = re.compile(f"(?:{_whole})$")
        _kind.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _form, [*_first])
    _kind.add_implicit_resolver("tag:yaml.org,2002:null", re.compile("$"), [""])


def read_yaml(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads a mapping from a YAML file. Errors show only the place."""
    where = str(path)
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_YAML_BYTES + 1)  # a pipe or a device has no size
    except OSError as error:
        found = error.strerror or str(error)
        raise ConfigError(
            sentence(where, "it must be a readable file", found)
        ) from error
    if len(data) > MAX_YAML_BYTES:
        rule = f"it must have at most {MAX_YAML_BYTES:,} bytes"
        raise ConfigError(sentence(where, rule, "more"))
    try:
        settings = yaml.load(data.decode(), _Loader)
    except UnicodeDecodeError as error:
        raise ConfigError(sentence(where, "it must be UTF-8", str(error))) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        found = "what YAML does not allow"
        if isinstance(error, yaml.MarkedYAMLError):
            found = _without_text(error.problem or found)
            if mark := error.problem_mark or error.context_mark:
                where += f", line {mark.line + 1}, column {mark.column + 1}"
        rule = "it must be YAML without aliases, and name each setting once"
        raise ConfigError(sentence(where, rule, found)) from None
    if not isinstance(settings, dict):
        rule = "it must hold settings, name: value"
        raise ConfigError(sentence(where, rule, kind_of(settings)))
    return settings


def _without_text(problem: str) -> str:
    """Returns a problem of PyYAML with the names of its tokens, and nothing else of the
    file.
    """

    def shown(quoted: re.Match[str]) -> str:
        return (
            quoted[0]
            if re.fullmatch(r"'(<[a-z -]+>|[][{},:?-]|\\t)'", quoted[0])
            else "…"
        )

    return re.sub(r"""'[^']*'|"[^"]*\"""", shown, problem)


def to_yaml(settings: Mapping[str, Any]) -> str:
    """Returns settings as YAML, in their order."""
    form: dict[str, Any] = {"sort_keys": False, "allow_unicode": True, "width": 100}
    return visible(yaml.dump(dict(settings), Dumper=_Dumper, **form))


def read_job(path: str | PathLike[str]) -> dict[str, Any]:
    """Reads arguments of ``packstore.pack``; relative paths count from the current
    folder.
    """
    job = read_yaml(path)
    check_names(job, (*ARGUMENTS, *PackConfig.names()), PackConfig.LISTED_BY)
    for name in job.keys() & ARGUMENTS.keys():
        type_, rule = ARGUMENTS[name]
        try:
            msgspec.convert(job[name], type_)
        except msgspec.ValidationError:
            raise ConfigError(
                sentence(f"{path}, {name}", rule, kind_of(job[name]))
            ) from None
    return job


def job_of(provenance: Mapping[str, Any], url: str) -> dict[str, Any]:
    """Return the job that packs the dataset at `url` again, from its provenance in the
    manifest.

    The job has no `out` if the dataset is one part of two and not under the name of its
    part, as the folder of both is unknown then.
    """
    settings = provenance.get("settings")
    sources = provenance.get("sources") or []
    paths = [source.get("path") for source in sources if isinstance(source, Mapping)]
    if not isinstance(settings, Mapping) or not paths or None in paths:
        rule = "its manifest must record settings and input files"
        remedy = "Only a dataset that packstore.pack made of files has a job"
        raise ConfigError(sentence(url, rule, "none", remedy))

    repacked = provenance.get("repacked_from")
    if isinstance(repacked, Mapping):
        names = PackConfig.names_without_records()
        packing = {name: value for name, value in settings.items() if name in names}
        answers = settings.get("on", {})
        if "overlong" in answers:
            packing["on"] = {"overlong": answers["overlong"]}
        return {"source": repacked["path"], "out": url, **packing}

    if "combined_from" in provenance:
        rule = "it must be packed by one job"
        found = (
            f"a dataset of {len(provenance['combined_from'])} parts, by append or "
            "concat"
        )
        raise ConfigError(
            sentence(url, rule, found, "Pack the dataset itself to make it one")
        )

    job: dict[str, Any] = {"source": paths[0] if len(paths) == 1 else paths}
    part = provenance.get("part")
    if part is None:
        job["out"] = url
    elif _last_name(url) == part:
        job["out"] = _parent(url)
    tokenizer = provenance.get("tokenizer")
    if isinstance(tokenizer, Mapping) and tokenizer.get("path"):
        job["tokenizer"] = tokenizer["path"]
    return {
        **job,
        **{n: value for n, value in settings.items() if n in PackConfig.names()},
    }


def _last_name(url: str) -> str:
    """Return the name of the folder at `url`."""
    path = url if "://" in url else os.path.abspath(url)
    return path.rstrip("/").rpartition("/")[2]


def _parent(url: str) -> str:
    """Return the folder that holds the one at `url`."""
    if "://" in url:
        return url.rstrip("/").rpartition("/")[0]
    return os.path.normpath(os.path.join(url, os.pardir))
