"""Reads files, tables and frames as blocks of records; see ``README.md``."""

from packstore.io.inputs.files import InputReader
from packstore.io.inputs.formats import COMPRESSIONS, FORMATS, SUFFIXES, ReadOptions

__all__ = [
    "COMPRESSIONS",
    "FORMATS",
    "SUFFIXES",
    "InputReader",
    "ReadOptions",
]
