"""Arguments that several commands have, and flags that are derived from settings.

A class of settings (``packstore.config``) describes each of its fields with a type, a
default and a help. :func:`add_settings` makes a flag of each, and
:func:`read_settings` returns the values of the flags that were used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from packstore.config import Settings
from packstore.errors import (
    ConfigError,
    display,
    quote,
    sentence,
    to_unicode,
)

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset
    from packstore.io.side.side import Side


FILE = "file"
"""Value of ``--by`` that groups by input file, unless a column has this name."""


def add_source(
    parser: argparse.ArgumentParser, help: str = "as for packstore pack"
) -> None:
    """Add the positional SOURCE, one or several; :func:`source_of` returns it."""
    parser.add_argument("source", nargs="+", metavar="SOURCE", help=help)


def source_of(paths: list[str]) -> Any:
    """Return the argument `source` of ``packstore.pack`` for paths of the command line.

    ``-`` becomes standard input, and a single path a text: only in that form may it be
    a packed dataset.
    """
    if paths == ["-"]:
        return sys.stdin.buffer
    return paths[0] if len(paths) == 1 else paths


def add_dataset(
    parser: argparse.ArgumentParser,
    versions: bool = False,
    help: str = "folder or URL of a packed dataset",
) -> None:
    """Add the positional DATASET and its storage options; with `versions` also
    ``--version``.
    """
    parser.add_argument("dataset", metavar="DATASET", help=help)
    if versions:
        parser.add_argument(
            "--version",
            type=int,
            metavar="N",
            help="an older version (default: the newest)",
        )
    add_storage_options(parser)


def open_dataset(args: argparse.Namespace) -> Dataset:
    """Open the dataset of :func:`add_dataset`."""
    from packstore.io.dataset.dataset import open as open_

    return open_(
        args.dataset, storage_options=args.storage_option, version=args.version
    )


def open_dataset_or_sides(args: argparse.Namespace) -> Dataset | list[Side]:
    """Open the dataset of :func:`add_dataset`, or the side datasets that are there."""
    from packstore.io.dataset.dataset import find_dataset
    from packstore.io.manifest.commit import list_versions
    from packstore.io.manifest.side_manifest import SIDE, list_part_folders
    from packstore.io.side.parts import open_all_sides
    from packstore.io.store.location import Location

    dataset = find_dataset(args.dataset, args.storage_option, args.version)
    if dataset is not None:
        return dataset
    location = Location(args.dataset, args.storage_option)
    if list_versions(location, SIDE) or list_part_folders(location):
        return open_all_sides(args.dataset, args.storage_option, args.version)
    return open_dataset(args)  # raises, as there is none


def add_side(parser: argparse.ArgumentParser, help: str) -> None:
    """Add ``--side``, which is repeatable."""
    parser.add_argument(
        "--side",
        action="append",
        default=[],
        metavar="VALUES",
        help=f"{help} (repeatable)",
    )


def check_group_column(by: str, columns: Iterable[str]) -> None:
    """Raise ConfigError if the value of ``--by`` is neither `file` nor a column.

    Args:
        by: the value of the flag.
        columns: names of columns whose values make groups.
    """
    names = [FILE, *columns]
    if by not in names:
        raise ConfigError(
            sentence(
                "--by",
                rule=f"must be one of: {', '.join(names)}",
                found=quote(by),
                remedy="`packstore pack --carry NAME` carries further columns",
            )
        )


def add_storage_options(parser: argparse.ArgumentParser, source: bool = False) -> None:
    """Add ``--storage-option``; with `source` also ``--source-storage-option``."""
    parser.add_argument(
        "--storage-option",
        action=KeyValue,
        read=read_storage_option,
        secret=True,
        default={},
        metavar="KEY=VALUE",
        help="option for fsspec, e.g. endpoint_url=… (repeatable)",
    )
    if source:
        parser.add_argument(
            "--source-storage-option",
            action=KeyValue,
            read=read_storage_option,
            secret=True,
            metavar="KEY=VALUE",
            help="option of SOURCE, if it lies elsewhere (repeatable)",
        )


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def refuse_memory(args: argparse.Namespace, *urls: str | None) -> None:
    """Raise ConfigError for output to ``memory://`` that would end with this process.

    Python code that calls ``main`` may use it afterwards, so it is not refused there.
    """
    if not args.own_process:
        return
    for url in urls:
        if url is not None and re.search(r"(?:^|::)memory://", url):
            raise ConfigError(
                sentence(
                    display(url),
                    rule="output must outlive the command",
                    found="a store in memory",
                    remedy="Name a folder or a URL of a store",
                )
            )


def add_settings(
    parser: argparse.ArgumentParser,
    title: str,
    config: type[Settings],
    names: Iterable[str] | None = None,
    default: str | None = None,
) -> None:
    """Add a flag for each setting, in a group of their own.

    A flag that is not used is absent from the namespace, so that `config` alone defines
    defaults. A flag that the parser already has is not added again.

    Args:
        title: title of the group.
        config: class of the settings.
        names: settings that get a flag; None: all.
        default: text for the help in place of each default of `config`.
    """
    group = parser.add_argument_group(title, argument_default=argparse.SUPPRESS)
    type_hints = typing.get_type_hints(config)
    flags_in_use = {
        flag for action in parser._actions for flag in action.option_strings
    }
    chosen_names = set(config.names() if names is None else names)
    for field in dataclasses.fields(config):
        flag = "--" + field.metadata.get("flag", field.name).replace("_", "-")
        if field.name in chosen_names and flag not in flags_in_use:
            keywords = _flag_keywords(field, type_hints[field.name])
            help = _flag_help(field, default)
            group.add_argument(flag, dest=field.name, help=help, **keywords)


def read_settings(args: argparse.Namespace, config: type[Settings]) -> dict[str, Any]:
    """Return the settings on the command line as keyword arguments of `config`."""
    values = vars(args)
    return {name: values[name] for name in config.names() if name in values}


def _flag_help(field: dataclasses.Field[Any], default: str | None) -> str:
    text: str = field.metadata["help"].replace("%", "%%")
    if field.default in (None, dataclasses.MISSING, ()):
        return text
    return f"{text} (default: {default or field.default})"


def _flag_keywords(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    """Return the keywords of ``add_argument`` for the type of a setting."""
    metavar = field.metadata.get("metavar")
    origin = typing.get_origin(hint)
    arguments = typing.get_args(hint)
    if origin is Literal:
        return {"choices": arguments}
    if origin is tuple:  # several texts: the flag is repeated
        return {"action": "append", "metavar": metavar or "NAME"}
    if origin is Mapping:
        is_secret = "secret" in field.metadata
        return {
            "action": KeyValue,
            "read": _value_reader(is_secret, value_type=arguments[1]),
            "secret": is_secret,
            "splits": "splits" in field.metadata,
            "metavar": metavar or "KEY=VALUE",
        }
    # `int | None` has the arguments int and None.
    value_type = arguments[0] if arguments else hint
    if value_type is bool:
        return {"action": argparse.BooleanOptionalAction}
    default_metavar = {int: "N", float: "X"}.get(value_type, "NAME")
    return {"type": value_type, "metavar": metavar or default_metavar}


def _value_reader(is_secret: bool, value_type: Any) -> Callable[[str], Any]:
    """Return the function that converts the text of a value in a mapping."""
    if is_secret:
        return read_storage_option
    if value_type is str:
        return str
    return json_or_text


class KeyValue(argparse.Action):
    """Collects KEY=VALUE items into a dict.

    Args:
        read: converts the text of a value.
        secret: values are secrets, so that an error does not show the item.
        splits: one argument may hold several items, joined by commas, and a key may
            have several values, which become a list: ``first=A,first=1,second=B``.
    """

    def __init__(
        self,
        *args: Any,
        read: Callable[[str], Any] = str,
        secret: bool = False,
        splits: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(*args, **settings)
        self.read = read
        self.secret = secret
        self.splits = splits

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add the items; one that cannot be read is a usage error."""
        text = to_unicode(values)
        for item in text.split(",") if self.splits else [text]:
            key, value = self._parse(parser, item, option_string)
            # A copy, as the first mapping is the default, which all parsers share.
            mapping = dict(getattr(namespace, self.dest, None) or {})
            if self.splits and key in mapping:
                earlier = mapping[key]
                value = [*(earlier if isinstance(earlier, list) else [earlier]), value]
            mapping[key] = value
            setattr(namespace, self.dest, mapping)

    def _parse(
        self, parser: argparse.ArgumentParser, item: str, flag: str | None
    ) -> tuple[str, Any]:
        key, equals, text = item.partition("=")
        if not equals or not key:
            shown_item = "no = after a name" if self.secret else repr(item)
            parser.error(
                f"{flag} must have the form {self.metavar}; found {shown_item}"
            )
        try:
            return key, self.read(text)
        except (ValueError, RecursionError) as error:
            parser.error(
                f"{flag} {key} must be JSON if it begins with a bracket: {error}"
            )


def read_storage_option(text: str) -> Any:
    """Parse the value of a storage option; digits stay text, as they may be a key."""
    if text in ("true", "false", "null") or text.startswith(("{", "[")):
        return json.loads(text)
    return text


def json_or_text(text: str) -> Any:
    """Parse JSON; text that is not JSON stays as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text
