"""``packstore show``: decodes packs to text, coloured by the role of each token."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.text import Text

from packstore.cli import Command
from packstore.cli._results import add_json
from packstore.cli.common import (
    add_dataset,
    decoder_of,
    open_dataset,
    print_json,
    stdout_console,
)
from packstore.errors import ConfigError, visible
from packstore.format.arrays import IGNORE_INDEX, Bool, Int32, Packs, ids_of
from packstore.pages import frame
from packstore.pages.pack_page import MOST_BYTES, MOST_PACKS, pack_page
from packstore.pages.packs import PackReader, columns_of, record_place, side_of

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset

_STYLES = {"chosen": "green", "rejected": "red", "response": "cyan"}
_PROMPT, _UNSUPERVISED = "dim", "yellow"

log = logging.getLogger("packstore")

Decode = Callable[[list[int]], str] | None
"""From ids to text; None: show the ids."""


def _configure(parser: argparse.ArgumentParser) -> None:
    add_dataset(parser, versions=True)
    parser.add_argument("--pack", type=int, default=0, metavar="N", help="first pack to show")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="packs to show")
    parser.add_argument("--tokenizer", metavar="PATH", help="default: the dataset's")
    parser.add_argument("--ids", action="store_true", help="show token ids instead of text")
    add_json(parser)
    bound = f"at most {MOST_PACKS} packs or {MOST_BYTES // 1_000_000} MB"
    parser.add_argument(
        "--html", metavar="FILE", help=f"write a page with the packs instead, {bound}"
    )


def _run(args: argparse.Namespace) -> int:
    dataset = open_dataset(args)
    if not 0 <= args.pack < len(dataset):
        raise ConfigError(
            f"--pack must lie in 0..{len(dataset) - 1} for this dataset; found {args.pack}."
        )
    if args.count < 1:
        raise ConfigError(f"--count must be at least 1; found {args.count}.")
    if args.html:
        frame.check_writable(args.html)
    decode = None if args.ids else decoder_of(dataset, args.tokenizer)
    numbers = range(args.pack, min(args.pack + args.count, len(dataset)))
    if args.html:
        page, left_out = pack_page(PackReader(dataset, decode), numbers)
        frame.write(args.html, page)
        if left_out:
            log.warning("%s", left_out)
    if args.json:
        reader, m = PackReader(dataset, decode), dataset.manifest
        about = {"url": dataset.url, "kind": m.kind, "layout": m.layout, "pack_size": m.pack_size}
        packs = [_plain(reader, number) for number in numbers]
        print_json(json.dumps({**about, "packs": packs}) + "\n")
    if args.html or args.json:
        return 0
    console = stdout_console()
    console.print(_legend(console.is_terminal))
    for number, pack in _rows(dataset, args.pack, args.count):
        _show_pack(console, dataset, number, pack, decode)
    return 0


def _legend(colour: bool) -> Text:
    if not colour:
        return Text("supervised text stands in ⟦ ⟧")
    parts = [
        ("prompt", _PROMPT),
        ("chosen, supervised", _STYLES["chosen"]),
        ("rejected, supervised", _STYLES["rejected"]),
        ("other response, supervised", _STYLES["response"]),
        ("in a response, not supervised", _UNSUPERVISED),
    ]
    return Text("  ").join(Text(*part) for part in parts)


def _rows(dataset: Dataset, first: int, count: int) -> Iterator[tuple[int, Packs]]:
    """Yields number and pack of `count` packs from `first` on, in file order."""
    start = 0
    for group, rows in enumerate(dataset.group_rows):
        if start + rows > first:
            packs = dataset.read_packs(group)
            for row in range(max(first - start, 0), min(first + count - start, len(packs))):
                yield start + row, packs.row(row)
        start += int(rows)
        if start >= first + count:
            return


def _plain(reader: PackReader, number: int) -> dict[str, Any]:
    """Returns a pack with the ids, labels and text of each stored segment, as a JSON value."""
    pack = reader.read(number)
    sequences = []
    for i in range(len(pack.lengths)):
        own = reader.sequence(pack, i)
        signed = pack.signed_ids[own["start"] : own["stop"]]
        ids = ids_of(signed).tolist()
        own |= {"input_ids": ids, "labels": np.where(signed < 0, IGNORE_INDEX, signed).tolist()}
        sequences.append(own if reader.decode is None else {**own, "text": reader.decode(ids)})
    return {"number": number, "sequences": sequences, "columns": columns_of(pack)}


def _show_pack(
    console: Console, dataset: Dataset, number: int, pack: Packs, decode: Decode
) -> None:
    ids, on, bounds, k = pack.input_ids, pack.supervised, pack.seq_boundaries, pack.num_responses
    head = f"pack {number}: {len(ids)} of {dataset.manifest.pack_size} tokens, "
    console.print(head + f"{len(k)} examples, {len(bounds) - 1} segments", style="bold")
    example_ids = np.repeat(pack.example_ids, k)
    response_of = np.arange(len(example_ids)) - np.repeat(np.cumsum(k) - k, k)
    for i, (example_id, response) in enumerate(zip(example_ids, response_of, strict=True)):
        name = side_of(dataset.manifest.kind, int(response))
        start, stop = int(bounds[i]), int(bounds[i + 1])
        omitted = int(pack.lengths[i]) - (stop - start)
        title = (
            f"{record_place(dataset.manifest.provenance, int(example_id))} · {name} · "
            f"reward {pack.reward[i]:g} · tokens {start}–{stop}"
        )
        title += f" · first {omitted} shared with the first segment" if omitted else ""
        console.print(title, style="blue", markup=False)
        painted = _paint(ids[start:stop], on[start:stop], name, decode, console.is_terminal)
        console.print(painted)


def _paint(ids: Int32, on: Bool, name: str, decode: Decode, colour: bool) -> Text:
    """Decodes a segment; runs of tokens with the same role are decoded together."""
    edges = np.flatnonzero(np.diff(on)) + 1
    text = Text()
    for run, supervised in zip(np.split(ids, edges), on[np.r_[0, edges]], strict=True):
        plain = " ".join(map(str, run)) if decode is None else visible(decode(run.tolist()))
        if supervised:
            style = _STYLES.get(name, _STYLES["response"])
            text.append(plain if colour else f"⟦{plain}⟧", style)
        else:
            text.append(plain, _UNSUPERVISED if len(text) and text.spans else _PROMPT)
    return text


COMMAND = Command(
    examples="  packstore show s3://bucket/prefs-8k --pack 17 --count 2 --tokenizer "
    "tokenizer.json\n"
    "  packstore show prefs-8k --pack 100 --count 50 --html packs.html\n"
    "  packstore show prefs-8k --json | jq '.packs[0].sequences'\n",
    configure=_configure,
    run=_run,
)
