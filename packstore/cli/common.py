"""Helpers of several commands: opening a dataset, consoles, decoding."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from packstore.cli.settings import key_values
from packstore.errors import ConfigError, visible

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset

UNFOLDED = 1 << 20
"""Width of output that is no terminal: cells are never folded, so that it can be searched."""


class _Screen(Console):
    """A console for untrusted text: reads no markup, and prints no control characters."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yields the segments of `renderable`, with control characters made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=visible(segment.text))


def stdout_console() -> Console:
    """Returns a console on stdout that reads no markup and prints no control characters.

    Without a terminal it folds no line, even if COLUMNS is set.
    """
    console = _Screen(highlight=False, soft_wrap=True, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = UNFOLDED
    return console


def heading(text: str) -> Text:
    """Returns the title of a table, on one line even if the table is narrower, without markup."""
    return Text(visible(text), no_wrap=True, overflow="ignore")


def add_storage_options(parser: argparse.ArgumentParser, source: bool = False) -> None:
    """Adds ``--storage-option KEY=VALUE``; with `source` also ``--source-storage-option``."""
    parser.add_argument(
        "--storage-option",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="passed to the fsspec filesystem, e.g. endpoint_url=… (repeatable)",
    )
    if source:
        parser.add_argument(
            "--source-storage-option",
            action="append",
            metavar="KEY=VALUE",
            help="passed to that of SOURCE instead, if it lies elsewhere (repeatable)",
        )


def storage_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the storage options given; true, false, null, {…} and […] are parsed as JSON."""
    return _options(args.storage_option, "--storage-option")


def source_storage_options(args: argparse.Namespace) -> dict[str, Any] | None:
    """Returns those of the source, or None if none are given."""
    given = args.source_storage_option
    return None if given is None else _options(given, "--source-storage-option")


def _options(items: list[str], flag: str) -> dict[str, Any]:
    given: dict[str, Any] = dict(key_values(items, flag))
    for name, text in given.items():
        if text in ("true", "false", "null") or text[:1] in ("{", "["):
            try:
                given[name] = json.loads(text)
            except ValueError:
                raise ConfigError(
                    f"{flag} {name} must be JSON if it begins with a bracket."
                ) from None
    return given


def add_dataset(parser: argparse.ArgumentParser, versions: bool = False) -> None:
    """Adds the positional DATASET and its storage options; with `versions` also ``--version``."""
    parser.add_argument("dataset", metavar="DATASET", help="folder or URL of a packed dataset")
    if versions:
        parser.add_argument(
            "--version", type=int, metavar="N", help="an older version (default: the newest)"
        )
    add_storage_options(parser)


def open_dataset(args: argparse.Namespace) -> Dataset:
    """Opens the dataset of :func:`add_dataset`'s arguments."""
    from packstore.io.dataset.dataset import open as open_

    version = getattr(args, "version", None)
    return open_(args.dataset, storage_options=storage_options(args), version=version)


def decoder_of(dataset: Dataset, path: str | None) -> Callable[[list[int]], str]:
    """Returns a function from ids to text, with the tokenizer at `path` or the manifest's.

    Raises:
        TokenizerError: there is no tokenizer.
        CompatibilityError: the tokenizer is not the one that the dataset was packed with.
    """
    from packstore.tokenizer import recorded_tokenizer

    provenance, do = dataset.manifest.provenance, "Give --tokenizer PATH, or --ids"
    return recorded_tokenizer(provenance, path, dataset.url, do).decode


def two_columns(title: str, rows: dict[str, object]) -> Table:
    """Returns a small table of names and values."""
    table = Table(title=heading(title), show_header=False, title_justify="left", title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(visible(name), Text(number(value)))
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


def print_json(text: str) -> None:
    """Prints JSON; also escapes control characters that JSON allows."""
    sys.stdout.write(re.sub(r"[\x7f-\x9f]", lambda found: f"\\u{ord(found[0]):04x}", text))
