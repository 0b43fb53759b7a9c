"""``packstore view``: packs in a browser, from a server on this machine."""

from __future__ import annotations

import argparse
import threading
import webbrowser

from packstore.cli import Command, common
from packstore.pages.packs import PackReader
from packstore.pages.server import PackServer


def _configure(parser: argparse.ArgumentParser) -> None:
    common.add_dataset(parser, versions=True)
    parser.add_argument("--tokenizer", metavar="PATH", help="default: the dataset's")
    parser.add_argument("--ids", action="store_true", help="show token ids instead of text")
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="on 127.0.0.1; default: any free one"
    )
    parser.add_argument("--no-browser", action="store_true", help="only print the address")


def _run(args: argparse.Namespace) -> int:
    dataset = common.open_dataset(args)
    decode = None if args.ids else common.decoder_of(dataset, args.tokenizer)
    with PackServer(PackReader(dataset, decode), args.port) as server:
        print(f"{server.url} (Ctrl-C ends it)", flush=True)
        if not args.no_browser:
            # A text browser would run in the foreground, so that it must not keep others waiting.
            threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("\nended")
    return 0


COMMAND = Command(
    "  packstore view s3://bucket/prefs-8k --port 8765 --no-browser\n", _configure, _run
)
