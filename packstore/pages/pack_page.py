"""The page that draws packs: with some embedded, or asking the server that it came from."""

from __future__ import annotations

from typing import Any

from packstore.pages import frame
from packstore.pages.packs import PackReader

MOST_PACKS = 300
MOST_BYTES = 20_000_000
"""Bounds of a page with embedded packs, of their number and of their JSON."""


def pack_page(reader: PackReader, numbers: range | None) -> tuple[str, str]:
    """Returns a page, and a sentence on what it leaves out (empty: nothing).

    Args:
        reader: reads the packs.
        numbers: packs to embed; None: the page asks a server for packs (:mod:`.server`).

    Raises:
        StorageError: a file is missing, or the store refuses.
        IntegrityError: a checksum does not match.
    """
    m = reader.dataset.manifest
    packs: list[dict[str, Any]] = []
    left, size = "", 0
    for number in numbers or ():
        pack = reader.pack(number)
        size += len(frame.embedded(pack))
        if packs and (size > MOST_BYTES or len(packs) == MOST_PACKS):
            left = (
                f"The page holds packs {packs[0]['number']} to {number - 1} of the "
                f"{len(numbers or ())} asked for: at most {MOST_PACKS} packs, and "
                f"{MOST_BYTES // 1_000_000} MB. `packstore view` shows all of them."
            )
            break
        packs.append(pack)
    data = {**reader.about(), "embedded": None if numbers is None else packs, "note": left}
    about = f"kind {m.kind}, layout {m.layout}, {len(reader):,} packs of {m.pack_size:,} tokens"
    page = frame.page(
        reader.dataset.url,
        f"{about}, fill {m.fill_rate:.1%}, version {reader.dataset.version}",
        [frame.asset("packs.html")],
        style=frame.asset("packs.css"),
        script=frame.asset("packs.js"),
        data=data,
        connect=numbers is None,
    )
    return page, left
