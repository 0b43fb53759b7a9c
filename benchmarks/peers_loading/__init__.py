"""Readers of packed data, ours and those of others, behind one small interface.

A reader is a class in a module of this package, which is the only place that imports
its library. It runs in a process of its own, with an interpreter in which that library
is installed.
"""

from __future__ import annotations

from typing import NamedTuple


class Entry(NamedTuple):
    """The module and class of a reader."""

    target: str  # module of this package and class, ``module:Class``
    packages: tuple[str, ...]  # distributions; the first is the one that is measured
    files: str  # folder of its files; readers of the same files share them
    arguments: tuple[str, ...] = ()  # of the class
    states: bool = True  # its position is saved and loaded in the run


_OURS, _HF = ("packstore",), ("datasets", "torchdata")
READERS: dict[str, Entry] = {
    "packstore": Entry("ours:Packed", _OURS, "packstore-parquet", ("parquet",)),
    "packstore-arrow": Entry("ours:Packed", _OURS, "packstore-arrow", ("arrow",)),
    "packstore padded": Entry(
        "ours:Padded", _OURS, "packstore-parquet", ("parquet",), False
    ),
    "packstore-arrow padded": Entry(
        "ours:Padded", _OURS, "packstore-arrow", ("arrow",), False
    ),
    "litdata": Entry("lit:LitData", ("litdata",), "litdata"),
    "mds": Entry("mosaic:Mds", ("mosaicml-streaming",), "mds"),
    "hf-streaming": Entry("hf:Streaming", _HF, "hf-parquet"),
    "hf-map": Entry("hf:Mapped", _HF, "hf-arrow"),
    "pyarrow-parquet": Entry("plain:PlainParquet", ("pyarrow",), "pyarrow-parquet"),
    "memmap": Entry("plain:Memmap", ("numpy",), "memmap"),
}
"""In the order of the table. Ours come twice: as :class:`PackedBatch`, and padded as
the others.
"""
