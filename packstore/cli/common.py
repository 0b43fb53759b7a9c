"""Helpers of several commands: arguments, flags of settings, opening a dataset, tables,
results.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from packstore.config import Settings
from packstore.errors import CONTROL, ConfigError, display, sentence, spelled, visible

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset
    from packstore.io.manifest.manifest import Records

Result = tuple[str, dict[str, object], Any]
"""What a command prints: a title, rows of a table, and all of it for JSON."""
UNFOLDED = 1 << 20
"""Width of output that is no terminal: cells are never folded, so that it can be
searched.
"""


class _Screen(Console):
    def render(self, *objects: Any, **options: Any) -> Iterator[Segment]:
        """Yields the segments of what is printed, with control characters made
        visible.
        """
        for segment in super().render(*objects, **options):
            yield (
                segment
                if segment.control
                else segment._replace(text=visible(segment.text))
            )


def stdout_console() -> Console:
    """Returns a console on stdout that reads no markup and prints no control
    characters.

    Without a terminal it folds no line, even if COLUMNS is set.
    """
    console = _Screen(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = UNFOLDED
    return console


def _whole_numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            "must be whole numbers, comma-separated"
        ) from None


_TYPES: dict[str, Callable[[str], Any]] = {
    "N": int,
    "X": float,
    "N,N,…": _whole_numbers,
    "NAME,NAME,…": lambda text: text.split(","),
}
"""Metavar of a flag -> what reads its value; all others are text."""


def add_flags(parser: Any, flags: Mapping[str, str], **defaults: object) -> None:
    """Adds flags, from "--flag --another METAVAR" to help; one without a metavar is a
    switch.
    """
    for words, text in flags.items():
        *names, metavar = words.split()
        if metavar.startswith("-"):
            parser.add_argument(*names, metavar, action="store_true", help=text)
            continue
        default = defaults.get(
            names[0].strip("-").replace("-", "_"), parser.argument_default
        )
        kind = _TYPES.get(metavar, str)
        parser.add_argument(
            *names, metavar=metavar, type=kind, default=default, help=text
        )


def add_source(
    parser: argparse.ArgumentParser, help: str = "as for packstore pack"
) -> None:
    """Adds the positional SOURCE, one or several; :func:`source_of` returns it."""
    parser.add_argument("source", nargs="+", metavar="SOURCE", help=help)


def source_of(paths: list[str]) -> Any:
    """Returns the one path alone, as only that may be a packed dataset, or all; - is
    stdin.
    """
    one = paths[0] if len(paths) == 1 else paths
    return sys.stdin.buffer if one == "-" else one


def refuse_memory(args: argparse.Namespace, *places: str | None) -> None:
    """Refuses output in memory, which ends with the process of a command."""
    for place in places if args.own_process else ():
        if re.search(r"(?:^|::)memory://", place or ""):
            rule, remedy = (
                "output must outlive the command",
                "Name a folder or a URL of a store",
            )
            raise ConfigError(
                sentence(display(str(place)), rule, "a store in memory", remedy)
            )


def add_storage_options(parser: argparse.ArgumentParser, source: bool = False) -> None:
    """Adds ``--storage-option KEY=VALUE``; with `source` also
    ``--source-storage-option``.
    """

    flag: dict[str, Any] = {"action": KeyValue, "read": _read_option, "secret": True}
    flag["metavar"] = "KEY=VALUE"
    text = "for fsspec, e.g. endpoint_url=… (repeatable)"
    parser.add_argument("--storage-option", default={}, help=text, **flag)
    if source:
        text = "of SOURCE, if it lies elsewhere"
        parser.add_argument("--source-storage-option", help=text, **flag)


def add_dataset(parser: argparse.ArgumentParser, versions: bool = False) -> None:
    """Adds the positional DATASET and its storage options; with `versions` also
    ``--version``.
    """
    parser.add_argument(
        "dataset", metavar="DATASET", help="folder or URL of a packed dataset"
    )
    if versions:
        add_flags(parser, {"--version N": "an older version (default: the newest)"})
    add_storage_options(parser)


def open_dataset(args: argparse.Namespace) -> Dataset:
    """Opens the dataset of :func:`add_dataset`'s arguments."""
    from packstore.io.dataset.dataset import open as open_

    return open_(
        args.dataset, storage_options=args.storage_option, version=args.version
    )


def titled(title: str, **settings: Any) -> Table:
    """Returns an empty table whose title stays on one line even if the table is
    narrower.
    """
    text = Text(visible(title), no_wrap=True, overflow="ignore")
    return Table(title=text, title_justify="left", title_style="bold", **settings)


def two_columns(title: str, rows: Mapping[str, object]) -> Table:
    """Returns a small table of names and values."""
    table = titled(title, show_header=False)
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(visible(name), Text(number(value)))
    return table


def figures_table(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> Table:
    """Returns a table of names, to the left, and figures, to the right."""
    table = titled(title)
    for i, column in enumerate(columns):
        table.add_column(visible(column), justify="right" if i else "left")
    for row in rows:
        table.add_row(*map(visible, row))
    return table


def number(value: object) -> str:
    """Formats a value for people: grouped digits, few decimals."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return visible(str(value))


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds ``--json``."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def print_json(text: str) -> None:
    """Prints JSON; also escapes control characters that JSON allows."""
    sys.stdout.write(CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text))


def print_result(result: Any) -> None:
    """Prints one JSON value; dataclasses become objects, and other values text."""
    print_json(json.dumps(result, indent=1, default=_plain) + "\n")


def print_outcome(ok: bool, parts: Mapping[str, Any]) -> int:
    """Prints a check's parts as JSON, with whether it is ok; returns the exit code."""
    print_result({"ok": ok, **parts})
    return 0 if ok else 1


def print_table(
    args: argparse.Namespace, title: str, rows: Mapping[str, object], result: Any
) -> None:
    """Prints the result of a command: as JSON, or `rows` as a table of names and
    values.
    """
    if args.json:
        print_result(result)
    else:
        stdout_console().print(two_columns(title, rows))


def counts_of(records: Records) -> dict[str, int]:
    """Returns the records that a job has read, packed, dropped and noted, by name."""
    counts = {"records read": records.read, "records packed": records.packed}
    counts |= {f"dropped: {reason}": count for reason, count in records.dropped.items()}
    return counts | {f"noted: {event}": count for event, count in records.noted.items()}


def facts_of(dataset: Dataset) -> Result:
    """Returns what is printed of a dataset that a job has committed."""
    m = dataset.manifest
    per_pack = m.statistics.examples_per_pack
    rows: dict[str, object] = {
        "version": dataset.version,
        **counts_of(m.records),
        "packs": f"{m.num_packs:,} of {m.pack_size:,} tokens",
        "fill rate": f"{m.fill_rate:.2%}",
        "examples per pack": f"{per_pack.min} to {per_pack.max}, mean "
        f"{per_pack.mean:.2f}",
        "tokens": m.totals.tokens,
        "bytes": m.totals.bytes,
        "shards": len(m.shards),
    }
    names = (
        "kind",
        "layout",
        "pack_size",
        "fill_rate",
        "records",
        "totals",
        "fingerprint",
    )
    result = {"url": dataset.url, "version": dataset.version, "shards": len(m.shards)}
    result |= {name: getattr(m, name) for name in names}
    return f"{m.kind} dataset {dataset.url}", rows, result


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return dict(value) if isinstance(value, Mapping) else str(value)


def add_settings(
    parser: argparse.ArgumentParser,
    title: str,
    config: type[Settings],
    names: Iterable[str] | None = None,
    default: str | None = None,
) -> None:
    """Adds one flag per field of `config`, or of the fields `names`, in a separate
    group.

    A flag that is not given is absent from the namespace, so that defaults live in
    `config` only; `default` is what the help says where they come from elsewhere.
    """
    group = parser.add_argument_group(title, argument_default=argparse.SUPPRESS)
    hints = typing.get_type_hints(config)
    taken = {option for action in parser._actions for option in action.option_strings}
    chosen = set(config.names() if names is None else names)
    for field in dataclasses.fields(config):
        flag = "--" + field.metadata.get("flag", field.name).replace("_", "-")
        if flag not in taken and field.name in chosen:
            group.add_argument(
                flag, dest=field.name, **_argument(field, hints[field.name], default)
            )


def read_settings(args: argparse.Namespace, config: type[Settings]) -> dict[str, Any]:
    """Returns the settings given on the command line, as keywords of `config`."""
    values = vars(args)
    return {name: values[name] for name in config.names() if name in values}


class KeyValue(argparse.Action):
    """Collects KEY=VALUE items into a dict, with values as `read` makes them of the
    text.

    An error does not show an item that is `secret`. With `splits`, one argument may
    hold several items, with commas between, and a key may stand in several of them.
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
        """Adds an item; one that cannot be read is a usage error."""
        for item in spelled(values).split(",") if self.splits else [spelled(values)]:
            self._add(parser, namespace, item, option_string)

    def _add(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str,
        option_string: str | None,
    ) -> None:
        key, equals, value = values.partition("=")
        if not equals or not key:
            found = "no = after a name" if self.secret else repr(values)
            parser.error(
                f"{option_string} must have the form {self.metavar}; found {found}"
            )
        try:
            item = {key: self.read(value)}
        except (ValueError, RecursionError) as error:
            parser.error(
                f"{option_string} {key} must be JSON if it begins with a bracket: "
                f"{error}"
            )
        earlier = getattr(namespace, self.dest, None) or {}
        if self.splits and key in earlier:  # several values of one key
            before = earlier[key] if isinstance(earlier[key], list) else [earlier[key]]
            item[key] = [*before, item[key]]
        setattr(namespace, self.dest, {**earlier, **item})


def _read_option(text: str) -> Any:
    """Parses a storage option; secrets that are digits stay text."""
    is_json = text in ("true", "false", "null") or text.startswith(("{", "["))
    return json.loads(text) if is_json else text


def json_or_text(text: str) -> Any:
    """Parses JSON; text that is not JSON stays as it is."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _argument(
    field: dataclasses.Field[Any], hint: Any, default: str | None = None
) -> dict[str, Any]:
    """Returns the keywords of ``add_argument`` for one field."""
    text = field.metadata["help"].replace("%", "%%")
    if field.default not in (None, dataclasses.MISSING, ()):
        text += f" (default: {default or field.default})"
    metavar = field.metadata.get("metavar")
    origin, types = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return {"help": text, "choices": types}
    if origin is tuple:
        return {"help": text, "action": "append", "metavar": metavar or "NAME"}
    if origin is Mapping:
        secret = "secret" in field.metadata
        read = _read_option if secret else str if types[1] is str else json_or_text
        more = {"metavar": metavar or "KEY=VALUE", "secret": secret}
        if "splits" in field.metadata:
            more["splits"] = True
        return {"help": text, "action": KeyValue, "read": read, **more}
    base = types[0] if types else hint
    if base is bool:
        return {"help": text, "action": argparse.BooleanOptionalAction}
    metavar = metavar or {int: "N", float: "X"}.get(base, "NAME")
    return {"help": text, "type": base, "metavar": metavar}
