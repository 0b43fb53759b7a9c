"""Readers of packed data, ours and those of others, behind one small interface.

A reader is a class in a module of this package, which is the only place that imports its library.
It runs in a process of its own, with an interpreter in which that library is installed.
"""

from __future__ import annotations

import dataclasses
import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peers_loading.base import Reader


@dataclasses.dataclass(frozen=True)
class Entry:
    """The module and class of a reader.

    Attributes:
        target: module of this package and class, ``module:Class``.
        packages: distributions that it needs; the first is the one that is measured.
        files: name of the folder of its files; readers of the same files share them.
        options: arguments of the class.
        states: whether its position is saved and loaded in the run.
    """

    target: str
    packages: tuple[str, ...]
    files: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    states: bool = True

    def load(self) -> Reader:
        """Imports the reader's library and makes the reader."""
        module, name = self.target.split(":")
        reader: Reader = getattr(importlib.import_module(f"{__name__}.{module}"), name)(
            **self.options
        )
        return reader


def _ours(profile: str, *, padded: bool = False) -> Entry:
    name = "Padded" if padded else "Packed"
    return Entry(
        f"ours:{name}",
        ("packstore",),
        f"packstore-{profile}",
        {"profile": profile},
        states=not padded,
    )


def _hf(name: str, files: str) -> Entry:
    return Entry(f"hf:{name}", ("datasets", "torchdata"), files)


READERS: dict[str, Entry] = {
    "packstore": _ours("parquet"),
    "packstore-arrow": _ours("arrow"),
    "packstore padded": _ours("parquet", padded=True),
    "packstore-arrow padded": _ours("arrow", padded=True),
    "litdata": Entry("lit:LitData", ("litdata",), "litdata"),
    "mds": Entry("mosaic:Mds", ("mosaicml-streaming",), "mds"),
    "hf-streaming": _hf("Streaming", "hf-parquet"),
    "hf-map": _hf("Mapped", "hf-arrow"),
    "pyarrow-parquet": Entry("plain:PlainParquet", ("pyarrow",), "pyarrow-parquet"),
    "memmap": Entry("plain:Memmap", ("numpy",), "memmap"),
}
"""In the order of the table. Ours come twice: as :class:`PackedBatch`, and padded as the others."""
