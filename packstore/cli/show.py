"""``packstore show`` and ``packstore view``: packs on a terminal, as a page, or in a
browser.
"""

from __future__ import annotations

import argparse
import logging
import threading
import webbrowser
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from packstore.cli import Command
from packstore.cli._arguments import add_dataset, add_json, add_side, open_dataset
from packstore.cli._output import identity_of, print_result, stdout_console
from packstore.cli._token_values import (
    PackValues,
    ValueDrawing,
    has_colours,
    has_scale_colours,
)
from packstore.errors import ConfigError, visible
from packstore.format.arrays import IGNORE_INDEX, Packs, ids_of
from packstore.pages import frame
from packstore.pages.packs import (
    MAX_BYTES,
    MAX_PACKS,
    Decode,
    PackReader,
    columns_of,
    embedded_page,
    split_by_supervision,
)
from packstore.pages.server import PackServer
from packstore.pages.values import aligned_values
from packstore.registry import choice

if TYPE_CHECKING:
    from rich.console import Console

    from packstore.io.dataset.dataset import Dataset

SIDE_STYLES = {"chosen": "green", "rejected": "red"}
RESPONSE_STYLE = "cyan"
PROMPT_STYLE = "dim"
UNSUPERVISED_STYLE = "yellow"

LEGEND = {
    "prompt": PROMPT_STYLE,
    "chosen, supervised": SIDE_STYLES["chosen"],
    "rejected, supervised": SIDE_STYLES["rejected"],
    "other response, supervised": RESPONSE_STYLE,
    "in a response, not supervised": UNSUPERVISED_STYLE,
}
"""Kind of a token -> its style on a terminal."""

log = logging.getLogger("packstore")


def _add_content_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="path or hub name (default: the dataset's)",
    )
    parser.add_argument(
        "--ids", action="store_true", help="show token ids instead of text"
    )
    add_side(parser, help="side dataset with values to show")
    parser.add_argument(
        "--column",
        metavar="NAME",
        help="values of tokens that give the colours",
    )


def _make_reader(args: argparse.Namespace, dataset: Dataset) -> PackReader:
    """Return the reader of packs, with texts unless ids are requested."""
    side = None
    if args.side:
        from packstore.io.side.join import SideColumns

        side = SideColumns(dataset, args.side)
    reader = PackReader(dataset, _make_decode(args, dataset), side)
    if args.column is not None:
        _put_first(reader, args.column)
    return reader


def _put_first(reader: PackReader, column: str) -> None:
    """Make a column of tokens the first, which gives the colours."""
    if not reader.token_columns:
        raise ConfigError(
            "--column must name values of tokens; found none. Name a side dataset "
            "that has them with --side."
        )
    choice("--column", column, tuple(reader.token_columns))
    reader.token_columns.remove(column)
    reader.token_columns.insert(0, column)


def _make_decode(args: argparse.Namespace, dataset: Dataset) -> Decode | None:
    """Return the function that decodes token ids; None: ids are requested."""
    if args.ids:
        return None
    from packstore.tokenizer import recorded_tokenizer

    tokenizer = recorded_tokenizer(
        dataset.manifest.provenance,
        args.tokenizer,
        dataset.url,
        "Give --tokenizer PATH or NAME, or --ids",
    )
    return tokenizer.decode


def _configure_show(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser, versions=True)
    parser.add_argument(
        "--pack",
        type=int,
        metavar="N",
        default=0,
        help="first pack to show (default: 0)",
    )
    parser.add_argument(
        "--count",
        type=int,
        metavar="N",
        default=1,
        help="number of packs (default: 1)",
    )
    parser.add_argument(
        "--examples",
        type=int,
        metavar="N",
        help="first examples of each pack (default: all)",
    )
    _add_content_arguments(parser)
    parser.add_argument(
        "--numbers",
        action="store_true",
        help="print values of tokens as numbers, not as colours",
    )
    add_json(parser)
    parser.add_argument(
        "--html",
        metavar="FILE",
        help=f"write a page, at most {MAX_PACKS} packs or {MAX_BYTES // 1_000_000} MB",
    )


def _run_show(args: argparse.Namespace) -> int:
    dataset = open_dataset(args)
    if not 0 <= args.pack < len(dataset):
        raise ConfigError(
            f"--pack must lie in 0..{len(dataset) - 1}; found {args.pack}."
        )
    if args.count < 1:
        raise ConfigError(f"--count must be at least 1; found {args.count}.")
    if args.examples is not None and args.examples < 1:
        raise ConfigError(f"--examples must be at least 1; found {args.examples}.")
    if args.examples is not None and (args.html or args.json):
        raise ConfigError(
            "--examples shortens text: leave it out with --html or --json."
        )
    if args.html:
        frame.check_writable(args.html)
    if args.numbers and not args.side:
        raise ConfigError("--numbers prints values of --side; found no --side.")

    reader = _make_reader(args, dataset)
    numbers = range(args.pack, min(args.pack + args.count, len(dataset)))
    if args.html:
        page, omission = embedded_page(reader, numbers)
        frame.write(args.html, page)
        if omission:
            log.warning("%s", omission)
    elif args.json:
        _print_packs_as_json(reader, numbers)
    else:
        _print_packs(
            reader, numbers, max_examples=args.examples, as_numbers=args.numbers
        )
    return 0


def _print_packs_as_json(reader: PackReader, numbers: range) -> None:
    m = reader.dataset.manifest
    value = {
        **identity_of(reader.dataset),
        "kind": m.kind,
        "layout": m.layout,
        "pack_size": m.pack_size,
        "packs": [_pack_as_json(reader, number) for number in numbers],
    }
    print_result(value, indent=None)


def _pack_as_json(reader: PackReader, number: int) -> dict[str, Any]:
    """Return a pack as a JSON value, with ids, labels, text and values of each
    segment.
    """
    pack = reader.read(number)
    values = {name: aligned_values(pack, name) for name in reader.token_columns}
    sequences = reader.sequences(pack)
    for sequence in sequences:
        signed_ids = pack.signed_ids[sequence["start"] : sequence["stop"]]
        ids = ids_of(signed_ids).tolist()
        labels = np.where(signed_ids < 0, IGNORE_INDEX, signed_ids)
        sequence["input_ids"] = ids
        sequence["labels"] = labels.tolist()
        for name, values_of_tokens in values.items():
            part = values_of_tokens[sequence["start"] : sequence["stop"]]
            sequence["values"][name] = part
        if reader.decode is not None:
            sequence["text"] = reader.decode(ids)
    return {"number": number, "sequences": sequences, "columns": columns_of(pack)}


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    """A way to draw packs as text.

    Attributes:
        marks_supervised: supervised text stands in brackets, as there are no colours.
        values: how values of tokens are drawn; None: there are none.
    """

    marks_supervised: bool
    values: ValueDrawing | None


def _drawing(reader: PackReader, console: Console, as_numbers: bool) -> _Drawing:
    values = None
    if reader.token_columns:
        values = ValueDrawing(
            column=reader.token_columns[0],
            as_numbers=as_numbers or not has_scale_colours(console),
        )
    return _Drawing(marks_supervised=not has_colours(console), values=values)


def _print_packs(
    reader: PackReader, numbers: range, max_examples: int | None, as_numbers: bool
) -> None:
    console = stdout_console()
    drawing = _drawing(reader, console, as_numbers)
    if drawing.marks_supervised:
        legend = [Text("supervised text stands in ⟦ ⟧")]
    elif drawing.values is None or drawing.values.as_numbers:
        legend = [Text(name, style) for name, style in LEGEND.items()]
    else:
        # Supervised tokens have the colours of their values.
        names = ("prompt", "in a response, not supervised")
        legend = [Text(name, LEGEND[name]) for name in names]
    form = reader.dataset.manifest.provenance.get("reading", {}).get("form")
    if form:
        legend.append(Text(f"records: {visible(str(form))}"))
    console.print(Text("  ").join(legend))

    for number in numbers:
        for line in _pack_lines(reader, number, max_examples, drawing):
            console.print(line)


def _pack_lines(
    reader: PackReader, number: int, max_examples: int | None, drawing: _Drawing
) -> list[Text]:
    """Return the lines of a pack: a heading, and a title and the text of each
    sequence of its first `max_examples`.
    """
    pack = reader.read(number)
    num_examples = len(pack.num_responses)
    num_shown = num_examples if max_examples is None else max_examples
    heading = (
        f"pack {number}: {len(pack.signed_ids)} of {reader.dataset.manifest.pack_size} "
        f"tokens, {num_examples} examples, {len(pack.seq_boundaries) - 1} "
        "segments"
    )
    num_shared = int(pack.segment_offsets.sum())
    if num_shared:
        heading += f", {num_shared} shared tokens left out"
    lines = [Text(heading, "bold")]
    values = None
    if drawing.values is not None:
        values = drawing.values.pack(pack)
        lines.append(values.legend())
    for i, sequence in enumerate(reader.sequences(pack)):
        if sequence["example"] >= num_shown:
            break
        lines.append(Text(_sequence_title(i, sequence), "blue"))
        lines.append(_sequence_text(reader, pack, sequence, drawing, values))
    if num_examples > num_shown:
        lines.append(Text(f"… and {num_examples - num_shown} more examples", "dim"))
    return lines


def _sequence_title(number: int, sequence: dict[str, Any]) -> str:
    """Return the title of a sequence, `number` in its pack."""
    facts = [
        f"sequence {number}",
        sequence["place"],
        sequence["side"],
        f"reward {sequence['reward']:g}",
        f"tokens {sequence['start']}–{sequence['stop']}",
    ]
    facts += [f"{name} {value:.4g}" for name, value in sequence["values"].items()]
    if sequence["shared"]:
        facts.append(
            f"first {sequence['shared']} shared with sequence {sequence['parent']}"
        )
    return " · ".join(facts)


def _sequence_text(
    reader: PackReader,
    pack: Packs,
    sequence: dict[str, Any],
    drawing: _Drawing,
    values: PackValues | None,
) -> Text:
    """Return the text of a segment.

    Runs of supervised and of unsupervised tokens are decoded one by one, so that each
    has its style; the first unsupervised run is the prompt. With values, supervised
    tokens are decoded one by one.
    """
    signed_ids = pack.signed_ids[sequence["start"] : sequence["stop"]]
    style = SIDE_STYLES.get(sequence["side"], RESPONSE_STYLE)
    next_target = int(pack.supervised[: sequence["start"]].sum())
    text = Text()
    for i, run in enumerate(split_by_supervision(signed_ids)):
        ids = ids_of(run).tolist()
        is_supervised = run[0] >= 0
        if not is_supervised:
            run_style = PROMPT_STYLE if i == 0 else UNSUPERVISED_STYLE
            text.append(_run_text(reader, ids), run_style)
            continue
        text.append("⟦" if drawing.marks_supervised else "", style)
        if values is None:
            text.append(_run_text(reader, ids), style)
        else:
            values.append_run(text, reader.texts(ids), next_target, style)
            if reader.decode is None:
                text.rstrip()  # the space after the last id
        text.append("⟧" if drawing.marks_supervised else "", style)
        next_target += len(ids)
    return text


def _run_text(reader: PackReader, ids: list[int]) -> str:
    if reader.decode is None:
        return " ".join(str(token) for token in ids)
    return visible(reader.decode(ids))


SHOW = Command(
    configure=_configure_show,
    run=_run_show,
    examples="  packstore show s3://bucket/prefs-8k --pack 17 --count 2 --tokenizer "
    "t.json\n"
    "  packstore show prefs-8k --pack 100 --count 50 --html packs.html\n"
    "  packstore show prefs-8k --json | jq '.packs[0].sequences'\n",
)


def _configure_view(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser, versions=True)
    _add_content_arguments(parser)
    parser.add_argument(
        "--port",
        type=int,
        metavar="N",
        default=0,
        help="port on 127.0.0.1 (default: any free one)",
    )
    parser.add_argument(
        "--no-browser", action="store_true", help="only print the address"
    )


def _run_view(args: argparse.Namespace) -> int:
    reader = _make_reader(args, open_dataset(args))
    with PackServer(reader, args.port) as server:
        print(f"{server.url} (Ctrl-C ends it)", flush=True)
        if not args.no_browser:
            # In a thread, as a text browser runs in the foreground until it is closed.
            threading.Thread(
                target=webbrowser.open, args=(server.url,), daemon=True
            ).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nended")
    return 0


VIEW = Command(
    configure=_configure_view,
    run=_run_view,
    examples="  packstore view s3://bucket/prefs-8k --port 8765 --no-browser\n",
)
