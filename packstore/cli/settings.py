"""Command-line flags derived from the fields of config dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import json
import typing
from collections.abc import Mapping
from typing import Any, Literal

from packstore.errors import ConfigError, spelled


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
    """Collects KEY=VALUE items into a dict: texts, or JSON values if the setting has others."""

    def __init__(self, *args: Any, text: bool, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.text = text

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        pairs: dict[str, Any] = dict(getattr(namespace, self.dest, None) or {})
        try:
            for key, value in key_values([values], option_string or "").items():
                pairs[key] = value if self.text else _from_json(value)
        except ConfigError as error:
            parser.error(str(error))
        setattr(namespace, self.dest, pairs)


def _from_json(text: str) -> Any:
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
    metavar = field.metadata.get("metavar")
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {**common, "choices": args}
    if origin is tuple:
        return {**common, "action": "append", "metavar": metavar or "NAME"}
    if origin is Mapping:
        only_text = args[1] is str
        return {**common, "action": _KeyValue, "text": only_text, "metavar": metavar or "KEY=VALUE"}
    base = args[0] if args else hint
    if base is bool:
        return {**common, "action": argparse.BooleanOptionalAction}
    return {**common, "type": base, "metavar": metavar or {int: "N", float: "X"}.get(base, "NAME")}
