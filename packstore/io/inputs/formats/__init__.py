"""File formats of the input: a module and a line in :data:`FORMATS` for each.

One process reads: :attr:`~.pieces.Format.read` cuts a file into payloads and inspects records as
little as possible. Workers parse: :attr:`~.pieces.Format.parse` turns a payload into records.
"""

from __future__ import annotations

from packstore.io.inputs.pieces import Format
from packstore.registry import Registry

FORMATS: Registry[Format] = Registry(
    "input format",
    {
        "jsonl": "packstore.io.inputs.formats.jsonl:JSONL",
        "json": "packstore.io.inputs.formats.json:JSON",
        "parquet": "packstore.io.inputs.formats.parquet:PARQUET",
        "arrow": "packstore.io.inputs.formats.arrow:ARROW",
        "csv": "packstore.io.inputs.formats.csv:CSV",
        "tsv": "packstore.io.inputs.formats.csv:TSV",
    },
)

SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".csv": "csv",
    ".tsv": "tsv",
}
"""Suffix of a file name -> its format."""

COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Last suffix of a file name -> its compression."""
