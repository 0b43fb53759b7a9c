"""``packstore show`` and ``packstore view``: packs on a terminal, as a page, or in a
browser.
"""

from __future__ import annotations

import argparse
import json
import logging
import threading
import webbrowser
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.text import Text

from packstore.cli import command, common
from packstore.errors import ConfigError, visible
from packstore.format.arrays import IGNORE_INDEX, Packs, ids_of
from packstore.pages import frame
from packstore.pages.packs import (
    MOST_BYTES,
    MOST_PACKS,
    PackReader,
    columns_of,
    pack_page,
)
from packstore.pages.server import PackServer

if TYPE_CHECKING:
    from packstore.io.dataset.dataset import Dataset

_STYLES = {"chosen": "green", "rejected": "red"}
_RESPONSE, _PROMPT, _UNSUPERVISED = "cyan", "dim", "yellow"
_LEGEND = {
    "prompt": _PROMPT,
    **{f"{side}, supervised": style for side, style in _STYLES.items()},
    "other response, supervised": _RESPONSE,
    "in a response, not supervised": _UNSUPERVISED,
}

_TEXT = {
    "--tokenizer PATH": "path or hub name; default: the dataset's",
    "--ids": "token ids instead of text",
}
"""Flags of both commands."""

log = logging.getLogger("packstore")


def _reader(args: argparse.Namespace, dataset: Dataset) -> PackReader:
    """Returns the reader of packs, with texts unless ids are asked for."""
    if args.ids:
        return PackReader(dataset, None)
    from packstore.tokenizer import recorded_tokenizer

    remedy = "Give --tokenizer PATH or NAME, or --ids"
    recorded = dataset.manifest.provenance
    tokenizer = recorded_tokenizer(recorded, args.tokenizer, dataset.url, remedy)
    return PackReader(dataset, tokenizer.decode)


def _configure_show(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser, versions=True)
    flags = {"--pack N": "first pack to show", "--count N": "packs to show", **_TEXT}
    common.add_flags(parser, flags, pack=0, count=1)
    common.add_json(parser)
    bound = f"at most {MOST_PACKS} or {MOST_BYTES // 1_000_000} MB"
    common.add_flags(parser, {"--html FILE": f"write a page instead, {bound}"})


@command(
    _configure_show,
    "  packstore show s3://bucket/prefs-8k --pack 17 --count 2 --tokenizer t.json\n"
    "  packstore show prefs-8k --pack 100 --count 50 --html packs.html\n"
    "  packstore show prefs-8k --json | jq '.packs[0].sequences'\n",
)
def _show(args: argparse.Namespace) -> int:
    dataset = common.open_dataset(args)
    if not 0 <= args.pack < len(dataset):
        raise ConfigError(
            f"--pack must lie in 0..{len(dataset) - 1}; found {args.pack}."
        )
    if args.count < 1:
        raise ConfigError(f"--count must be at least 1; found {args.count}.")
    if args.html:
        frame.check_writable(args.html)
    reader, m = _reader(args, dataset), dataset.manifest
    numbers = range(args.pack, min(args.pack + args.count, len(dataset)))
    if args.html:
        page, left_out = pack_page(reader, numbers)
        frame.write(args.html, page)
        if left_out:
            log.warning("%s", left_out)
    elif args.json:
        about = {
            "url": dataset.url,
            "kind": m.kind,
            "layout": m.layout,
            "pack_size": m.pack_size,
        }
        packs = [_plain(reader, number) for number in numbers]
        common.print_json(json.dumps({**about, "packs": packs}) + "\n")
    else:
        console = common.stdout_console()
        legend = [Text(part, style) for part, style in _LEGEND.items()]
        if not console.is_terminal:
            legend = [Text("supervised text stands in ⟦ ⟧")]
        form = m.provenance.get("reading", {}).get("form")
        if form:
            legend.append(Text(f"records: {visible(str(form))}"))
        console.print(Text("  ").join(legend))
        for number in numbers:
            for line in _lines(reader, number, console.is_terminal):
                console.print(line)
    return 0


def _plain(reader: PackReader, number: int) -> dict[str, Any]:
    """Returns a pack with the ids, labels and text of each stored segment, as a JSON
    value.
    """
    pack = reader.read(number)
    sequences = reader.sequences(pack)
    for sequence in sequences:
        signed = pack.signed_ids[sequence["start"] : sequence["stop"]]
        ids = ids_of(signed).tolist()
        sequence["input_ids"] = ids
        sequence["labels"] = np.where(signed < 0, IGNORE_INDEX, signed).tolist()
        if reader.decode is not None:
            sequence["text"] = reader.decode(ids)
    return {"number": number, "sequences": sequences, "columns": columns_of(pack)}


def _lines(reader: PackReader, number: int, colour: bool) -> list[Text]:
    """Returns the lines of a pack: its head, and a title and the text of each
    sequence.
    """
    pack = reader.read(number)
    head = (
        f"pack {number}: {len(pack.signed_ids)} of {reader.dataset.manifest.pack_size} "
        "tokens, "
        f"{len(pack.num_responses)} examples, {len(pack.seq_boundaries) - 1} segments"
    )
    lines = [Text(head, "bold")]
    for sequence in reader.sequences(pack):
        start, stop, side = sequence["start"], sequence["stop"], sequence["side"]
        title = (
            f"{sequence['place']} · {side} · reward {sequence['reward']:g} · tokens "
        )
        title += f"{start}–{stop}"
        if omitted := sequence["length"] - (stop - start):
            title += f" · first {omitted} shared with the first segment"
        lines += [Text(title, "blue"), _painted(reader, pack, sequence, colour)]
    return lines


def _painted(
    reader: PackReader, pack: Packs, sequence: dict[str, Any], colour: bool
) -> Text:
    """Decodes a segment; runs of tokens with the same role are decoded together."""
    signed = pack.signed_ids[sequence["start"] : sequence["stop"]]
    edges = np.flatnonzero(np.diff(signed >= 0)) + 1
    text = Text()
    for i, run in enumerate(np.split(signed, edges)):
        ids = ids_of(run).tolist()
        plain = (
            " ".join(map(str, ids))
            if reader.decode is None
            else visible(reader.decode(ids))
        )
        if run[0] >= 0:
            style = _STYLES.get(sequence["side"], _RESPONSE)
            text.append(plain if colour else f"⟦{plain}⟧", style)
        else:
            text.append(plain, _UNSUPERVISED if i else _PROMPT)
    return text


def _configure_view(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser, versions=True)
    flags = {
        **_TEXT,
        "--port N": "on 127.0.0.1; default: any free one",
        "--no-browser": "only print the address",
    }
    common.add_flags(parser, flags, port=0)


@command(
    _configure_view, "  packstore view s3://bucket/prefs-8k --port 8765 --no-browser\n"
)
def _view(args: argparse.Namespace) -> int:
    reader = _reader(args, common.open_dataset(args))
    with PackServer(reader, args.port) as server:
        print(f"{server.url} (Ctrl-C ends it)", flush=True)
        if not args.no_browser:
            # A text browser would run in the foreground, so that it must not keep
            # others waiting.
            threading.Thread(
                target=webbrowser.open, args=(server.url,), daemon=True
            ).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nended")
    return 0
