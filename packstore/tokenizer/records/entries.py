"""The schema of a shape's entry in a file of shapes, such as ``shapes.yaml``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from packstore.config.record_shapes import known
from packstore.errors import ConfigError, quote, sentence
from packstore.registry import meant
from packstore.tokenizer.records.old_forms import FORMS
from packstore.tokenizer.records.paths import parse_path

OPTIONAL = ("history", "judged", "earlier", "order")
"""Keys of `reads` whose paths may find nothing in a record."""

_READS = (
    *OPTIONAL,
    *("ranks", "first", "second", "options", "verdict", "votes", "first_score", "second_score"),
    *("questions", "good", "bad", "reasoning"),
)
"""Keys of `reads` that are no fields of ours."""

_KINDS = ("preference", "scored", "sft")


class Entry(msgspec.Struct, forbid_unknown_fields=True):
    """The keys of an entry, which the head of ``shapes.yaml`` explains, and their types."""

    fields: Annotated[dict[str, str], msgspec.Meta(min_length=1)]
    kind: str = ""
    becomes: str = ""
    takes: dict[str, str] = {}
    without: list[str] = []
    reads: dict[str, str | list[str]] = {}
    passes: list[str] = []
    drops: dict[str, list[Any]] = {}
    turns: dict[str, str | None] = {}
    roles: dict[str, str] = {}
    rounds: list[str | int] = []
    splits: str = ""
    role: str = ""
    as_chat: bool = False
    signed: bool = False
    first: list[Any] = []
    second: list[Any] = []
    tie: list[Any] = []
    refuse: str = ""
    source: str = ""
    note: str = ""
    sets: list[str] = []
    seen: bool = False
    tried: bool = False
    example: dict[str, Any] = {}
    shows: list[str] = []


def check_entry(where: str, entry: Any) -> None:
    """Checks the entry of a shape; `where` names the shape and its file.

    Raises:
        ConfigError: it breaks the schema; names the key, and the nearest name.
    """

    def check(names: Any, of: str, choices: Any) -> None:
        for name in names:
            if name not in choices:
                rule = f"{of} must be among: {', '.join(choices)}"
                raise ConfigError(sentence(where, rule, quote(name)) + meant(str(name), choices))

    check(entry if isinstance(entry, dict) else (), "its keys", Entry.__struct_fields__)
    try:
        given = msgspec.convert(entry, Entry)
    except msgspec.ValidationError as error:
        raise ConfigError(sentence(where, "its keys must be of their types", str(error))) from None
    if not given.refuse:
        check([given.kind], "its kind", _KINDS)
    check([*given.fields.values(), *given.takes.values()], "forms of fields", [*FORMS])
    check(given.reads, "what it reads", [*known().field_names, *_READS])
    read = ([paths] if isinstance(paths, str) else paths for paths in given.reads.values())
    for path in itertools.chain(given.fields, given.takes, given.without, given.drops, *read):
        try:
            parse_path(path)
        except ConfigError as error:
            raise ConfigError(sentence(where, "its paths must be paths", str(error))) from None
    for rule in _broken(given):
        raise ConfigError(sentence(where, rule))


def _broken(entry: Entry) -> Iterator[str]:
    """Yields the rules that keys break together."""
    reads = entry.reads.keys()
    if not (reads or entry.becomes or entry.refuse):
        yield "it must say what it reads, or why it cannot be read (refuse)"
    for one, other in (("first", "second"), ("good", "bad"), ("first_score", "second_score")):
        if (one in reads) != (other in reads):
            yield f"it must read both of {one} and {other}, or none"
    if reads & {"first", "options"} and not reads & {"verdict", "votes", "scores", "first_score"}:
        yield "it must read a verdict, votes or scores of the two answers"
    said_by = {"votes"} if entry.signed else {"votes", "verdict"}
    if reads & said_by and not (entry.first and entry.second):
        yield "first and second must list the values of the verdict"
    said = [*entry.first, *entry.second, *entry.tie]
    for value in [v for i, v in enumerate(said) if v in said[:i]]:
        yield f"a verdict must stand once in first, second and tie, and {quote(value)} does twice"
    if "earlier" in reads and len(entry.rounds) != 3:
        yield "rounds must name the question and both answers in each of earlier"
    try:
        re.compile(entry.splits)
    except re.error:
        yield f"splits must be a pattern, and {quote(entry.splits)} is none"
