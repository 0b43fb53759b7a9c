"""Command-line flags derived from the fields of settings."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

from packstore.config import Settings
from packstore.errors import spelled


def add_settings(
    parser: argparse.ArgumentParser,
    title: str,
    config: type[Settings],
    names: Iterable[str] | None = None,
) -> None:
    """Adds one flag per field of `config`, or of the fields `names`, in a separate group.

    A flag that is not given is absent from the namespace, so that defaults live in `config` only.
    """
    group = parser.add_argument_group(title, argument_default=argparse.SUPPRESS)
    hints = typing.get_type_hints(config)
    taken = {option for action in parser._actions for option in action.option_strings}
    chosen = set(config.names() if names is None else names)
    for field in dataclasses.fields(config):
        flag = "--" + field.metadata.get("flag", field.name).replace("_", "-")
        if flag not in taken and field.name in chosen:
            group.add_argument(flag, dest=field.name, **_argument(field, hints[field.name]))


def read_settings(args: argparse.Namespace, config: type[Settings]) -> dict[str, Any]:
    """Returns the settings given on the command line, as keywords of `config`."""
    given = vars(args)
    return {
        name: tuple(map(spelled, given[name])) if isinstance(given[name], list) else given[name]
        for name in config.names()
        if name in given
    }


class KeyValue(argparse.Action):
    """Collects KEY=VALUE items into a dict, with values as `read` makes them of the text."""

    def __init__(self, *args: Any, read: Callable[[str], Any] = str, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.read = read

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Adds an item; one that cannot be read is a usage error."""
        key, equals, value = spelled(values).partition("=")
        if not equals or not key:
            parser.error(f"{option_string} must have the form {self.metavar}; found {values!r}")
        try:
            item = {key: self.read(value)}
        except ValueError as error:
            parser.error(f"{option_string} {key} must be JSON if it begins with a bracket: {error}")
        setattr(namespace, self.dest, {**(getattr(namespace, self.dest, None) or {}), **item})


def json_or_text(text: str) -> Any:
    """Parses JSON; what is none stays text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _argument(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Returns the keywords of ``add_argument`` for one field."""
    text = field.metadata["help"].replace("%", "%%")
    if field.default not in (None, dataclasses.MISSING, ()):
        text += f" (default: {field.default})"
    metavar = field.metadata.get("metavar")
    origin, types = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"help": text, "choices": types}
    if origin is tuple:
        return {"help": text, "action": "append", "metavar": metavar or "NAME"}
    if origin is Mapping:
        read = str if types[1] is str else json_or_text
        return {"help": text, "action": KeyValue, "read": read, "metavar": metavar or "KEY=VALUE"}
    base = types[0] if types else hint
    if base is bool:
        return {"help": text, "action": argparse.BooleanOptionalAction}
    metavar = metavar or {int: "N", float: "X"}.get(base, "NAME")
    return {"help": text, "type": base, "metavar": metavar}
