"""Command-line flags derived from the fields of config dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any, Literal

from packstore.errors import ConfigError, spelled

METAVARS = {
    **dict.fromkeys(("dataset", "validation", "tokenizer", "model", "reference_model"), "PATH"),
    **dict.fromkeys(("ref_logps", "validation_ref_logps"), "SIDE"),
    "fields": "FIELD=NAME",
    "where": "SQL",
    "select": "FIELD=SQL",
    "carry": "NAME[:TYPE]",
    "chat_template": "TEMPLATE",
    "spill_dir": "DIR",
    "output": "DIR",
    "rejects": "FILE",
    "validation_by": "COLUMN",
    "loss_parameters": "NAME=NUMBER",
    "wandb": "PROJECT",
}
"""Setting -> the name of its value in the help, where NAME, KEY=VALUE, N or X would say less."""


def add_settings(parser: argparse.ArgumentParser, title: str, config: type) -> None:
    """Adds one flag per field of the dataclass `config`, in a separate group.

    A flag that is not given is absent from the namespace, so that defaults live in the dataclass
    only.
    """
    group = parser.add_argument_group(title)
    hints = typing.get_type_hints(config)
    taken = {option for action in parser._actions for option in action.option_strings}
    for field in dataclasses.fields(config):
        flag = "--" + field.metadata.get("flag", field.name).replace("_", "-")
        if flag not in taken:
            group.add_argument(flag, **_argument(field, hints[field.name]))


def read_settings(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """Returns the settings given on the command line, as keywords of `config`."""
    names = {field.name for field in dataclasses.fields(config)}
    given = {name: value for name, value in vars(args).items() if name in names}
    return {
        name: tuple(map(spelled, value)) if isinstance(value, list) else value
        for name, value in given.items()
    }


def key_values(items: list[str], flag: str) -> dict[str, str]:
    """Parses ``["a=b"]`` to ``{"a": "b"}``.

    Raises:
        ConfigError: an item has no ``=``.
    """
    pairs = {}
    for item in items:
        key, equals, value = spelled(item).partition("=")
        if not equals or not key:
            raise ConfigError(f"{flag} must have the form KEY=VALUE; found {item!r}.")
        pairs[key] = value
    return pairs


class _KeyValue(argparse.Action):
    """Collects KEY=VALUE items into a dict, with values as text."""

    @staticmethod
    def read(text: str) -> Any:
        """Returns the value of an item."""
        return text

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        pairs = dict(getattr(namespace, self.dest, None) or {})
        try:
            found = key_values([values], option_string or "")
            pairs.update({key: self.read(value) for key, value in found.items()})
        except ConfigError as error:
            parser.error(str(error))
        setattr(namespace, self.dest, pairs)


class _KeyJson(_KeyValue):
    """Collects KEY=VALUE items into a dict, with values parsed as JSON, else as text."""

    @staticmethod
    def read(text: str) -> Any:
        """Returns the value of an item."""
        try:
            return json.loads(text)
        except ValueError:
            return text


def _argument(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Returns the keywords of ``add_argument`` for one field."""
    text = field.metadata["help"].replace("%", "%%")
    if field.default not in (None, dataclasses.MISSING, ()):
        text += f" (default: {field.default})"
    common = {"dest": field.name, "default": argparse.SUPPRESS, "help": text}
    named = METAVARS.get(field.name)
    options = [a for a in typing.get_args(hint) if a is not type(None)]
    origin = typing.get_origin(hint)
    if origin is Literal:
        return {**common, "choices": typing.get_args(hint)}
    if origin is tuple:
        return {**common, "action": "append", "metavar": named or "NAME"}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        action = _KeyJson if field.metadata.get("json") else _KeyValue
        return {**common, "action": action, "metavar": named or "KEY=VALUE"}
    base = options[0] if options else hint
    if base is bool:
        return {**common, "action": argparse.BooleanOptionalAction}
    return {**common, "type": base, "metavar": named or {int: "N", float: "X"}.get(base, "NAME")}
