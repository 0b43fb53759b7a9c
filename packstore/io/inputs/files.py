"""Reads the user's input as a stream of blocks: source -> files -> blocks -> (workers)
-> rows.

One process reads, decompresses, hashes and cuts; :meth:`Block.parse` runs in workers.
The cuts do not depend on the number of workers, and do not affect records or ordinals.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import itertools
import logging
import lzma
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from packstore.config import PackConfig
from packstore.config.record_fields import JSON_COLUMNS, SPELLINGS
from packstore.errors import (
    InputError,
    PackstoreError,
    quote,
    refuse_pointer,
    sentence,
    spelled,
)
from packstore.format.arrays import Rows
from packstore.io.inputs.hugging_face import (
    NO_RECORDS,
    check_splits,
    plain,
    records_of,
    require_one_split,
    saved_files,
)
from packstore.io.inputs.pieces import (
    COMPRESSIONS,
    FORMATS,
    NOT_READ,
    SUFFIXES,
    UNITS,
    ReadOptions,
    format_of,
    suffix_of,
)
from packstore.io.inputs.tables import is_table, record_pieces, table_records
from packstore.io.manifest.commit import FOLDER
from packstore.io.store.location import Entry, Location
from packstore.io.store.storage_errors import as_storage_errors

BLOCK_BYTES = 2 << 20
"""Approximate bytes of a block, a worker's unit of work. Its records take ten times as
much memory; at this size they stay in the processor's cache.
"""

CHUNK = 1 << 20
"""Bytes read or copied at once."""

MAX_RATIO, FREE_BYTES = 400, 1 << 28
"""Limit of decompressed bytes: `MAX_RATIO` times the compressed ones, plus
`FREE_BYTES`. Text has a ratio of 3 to 20.
"""

_SHOWN = 8
"""Files left out of a folder that are named."""

log = logging.getLogger("packstore")

_KNOWN = f"one of {' '.join(SUFFIXES)}, and {' or '.join(COMPRESSIONS)} after it"


@dataclass(frozen=True)
class Input:
    """One input file: its position from 0, and its path as the user would write it."""

    ordinal: int
    path: str
    location: Location
    format: str
    compression: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A part of one input, at least one record long; picklable.

    `first`: ordinal, from 0, of its first line, row or item (`unit`); `payload`: what
        is parsed.
    """

    source: int
    path: str
    format: str
    unit: str
    first: int
    records: int
    payload: Any = field(repr=False)
    bytes: int = 0  # of its file, approximately

    def parse(self) -> Rows:
        """Returns its records."""
        ordinals, values = FORMATS.load(self.format).parse(
            self.payload, self.path, self.first
        )
        return Rows(self.source, self.path, self.unit, ordinals, values)


class InputReader:
    """Iterates over the blocks, of about `block_bytes`, of all inputs, in order.

    `source`: a path, glob, folder or URL, or a list of them; an Arrow table, a Polars
    frame, an iterable of records, or an open binary stream of JSON lines. `config`:
    `fields` and `carry` decide which CSV columns are not text. `inputs` are its files,
    `paths` those of each ordinal; `ends`: it is known to be finite; `records`: number
    of its records if it is not in files and that is known, else None; `sources`: path,
    bytes, sha256 and records of each input read to its end.
    """

    def __init__(
        self,
        source: Any,
        storage_options: Mapping[str, Any] | None = None,
        config: PackConfig | None = None,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        config = config or PackConfig()
        carried = (entry.rpartition(":") for entry in config.carry)
        typed = (name for name, colon, type_ in carried if colon and type_ != "string")
        names = (
            (config.fields[name],) if name in config.fields else SPELLINGS[name]
            for name in JSON_COLUMNS
        )
        self._options = ReadOptions(
            block_bytes, frozenset(itertools.chain(*names, typed))
        )
        self.sources: list[dict[str, Any]] = []
        self._memory: tuple[str, Any] | None = None
        inputs: list[Input] = []
        source = plain(require_one_split(source))
        items = source if isinstance(source, list | tuple) else [source]
        if items and all(isinstance(path, str | os.PathLike) for path in items):
            inputs = expand(items, storage_options)
        elif is_table(source):
            self._memory = ("<table>", table_records(source))
        elif hasattr(source, "readinto"):
            self._memory = ("<standard input>", source)
        elif isinstance(source, Iterable) and not isinstance(source, Mapping | bytes):
            self._memory = ("<iterable>", source)
        else:  # a mapping iterates over names
            rule = "must be a path, a list of paths, a table, or an iterable of records"
            remedy = "Give a list of records" if isinstance(source, Mapping) else ""
            raise InputError(
                sentence("input", rule, f"a {type(source).__name__}", remedy)
            )
        self.inputs = tuple(inputs)
        paths = [self._memory[0]] if self._memory else [item.path for item in inputs]
        self.paths = dict(enumerate(paths))
        sized = self._memory is not None and hasattr(source, "__len__")
        self.records = len(source) if sized else None
        self.ends = self._memory is None or is_table(source) or sized

    def __iter__(self) -> Iterator[Block]:
        self.sources = []
        if self._memory:
            read = (
                self._read_stream
                if hasattr(self._memory[1], "readinto")
                else self._read_memory
            )
            yield from read(*self._memory)
        for item in self.inputs:
            yield from self.read_file(item)
        if not any(source["records"] for source in self.sources):
            where = ", ".join(source["path"] for source in self.sources)
            raise InputError(
                sentence(where, "must hold at least one record", "no records")
            )

    def read_file(self, item: Input) -> Iterator[Block]:
        """Yields the blocks of one file, even if not among the inputs; raises like
        iterating.
        """
        records = 0
        form = FORMATS.load(item.format)
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(item.location.open_read())
            refuse_pointer(raw.peek(64), item.path, InputError)
            if form.check and not item.compression and raw.seekable():
                form.check(raw, item.path)
                raw.seek(0)
            hashed = HashedStream(raw)
            stream: Any = decompressed(hashed, item.compression, item.path)
            if form.check and (item.compression or item.location.local_path is None):
                copy = stack.enter_context(tempfile.TemporaryFile())
                with as_storage_errors("write", tempfile.gettempdir(), {}):
                    shutil.copyfileobj(stream, copy, CHUNK)
                    copy.seek(0)
                stream = copy
            elif form.check:  # reads all of it once, to hash it
                while stream.read(CHUNK):
                    pass
                raw.seek(0)
                stream = raw
            reached = 0.0
            for piece in form.read(stream, item.path, self._options):
                records += piece.records
                if piece.share is None:
                    reached = hashed.bytes * stream.tell() / stream.raw.tell()
                else:
                    reached += hashed.bytes * piece.share
                size = round(reached * piece.records / records)
                yield Block(
                    item.ordinal, item.path, item.format, form.unit, *piece[:3], size
                )
        self._note(item.path, hashed.bytes, hashed.hash, records)

    def _read_memory(self, path: str, values: Iterable[object]) -> Iterator[Block]:
        records, size, digest = 0, 0, hashlib.sha256()
        for piece in record_pieces(records_of(values), path, self._options.block_bytes):
            records += piece.records
            size += len(piece.payload)
            digest.update(piece.payload)
            yield Block(0, path, "jsonl", UNITS[path], *piece[:3])
        self._note(path, size, digest, records)

    def _read_stream(self, path: str, stream: Any) -> Iterator[Block]:
        """Yields the blocks of JSON lines, compressed or not, as their first
        bytes say.
        """
        raw = io.BufferedReader(stream, CHUNK)
        refuse_pointer(raw.peek(64), path, InputError)
        hashed, records = HashedStream(raw), 0
        lines = decompressed(hashed, COMPRESSIONS.get(suffix_of(raw.peek(8))), path)
        for piece in FORMATS.load("jsonl").read(lines, path, self._options):
            records += piece.records
            yield Block(0, path, "jsonl", UNITS[path], *piece[:3])
        raw.detach()  # otherwise it would close the stream
        self._note(path, hashed.bytes, hashed.hash, records)

    def _note(self, path: str, size: int, digest: Any, records: int) -> None:
        sha256 = digest.hexdigest()
        self.sources.append(
            {"path": path, "bytes": size, "sha256": sha256, "records": records}
        )


class HashedStream(io.RawIOBase):
    """Counts and hashes the bytes read from `raw`."""

    def __init__(self, raw: Any) -> None:
        self._raw, self.hash, self.bytes = raw, hashlib.sha256(), 0

    def readable(self) -> bool:
        """Always."""
        return True

    def tell(self) -> int:
        """Returns the number of bytes read."""
        return self.bytes

    def readinto(self, buffer: Any) -> int:
        """Fills the start of `buffer`; returns how much."""
        count = int(self._raw.readinto(buffer))
        self.hash.update(buffer[:count])
        self.bytes += count
        return count


class _Decompressed(HashedStream):
    """The plain bytes of a compressed stream, of all its concatenated members."""

    def __init__(self, packed: HashedStream, compression: str, path: str) -> None:
        if compression == "xz":  # pyarrow has none
            plain: Any = _Xz(packed)
        else:
            plain = pa.CompressedInputStream(
                pa.PythonFile(packed, mode="r"), compression
            )
        super().__init__(plain)
        self._packed, self._compression, self._path = packed, compression, path

    def readinto(self, buffer: Any) -> int:
        try:
            count = int(self._raw.readinto(buffer))
        except PackstoreError:
            raise
        except (OSError, EOFError, lzma.LZMAError) as error:
            truncated = "Truncated" in str(error) or isinstance(error, EOFError)
            other = f"other bytes ({error})"
            other = (
                "an end in the middle of the compressed stream" if truncated else other
            )
            rule = f"must be a complete {self._compression} file"
            remedy = "Check the suffix of its name, or copy it again"
            raise InputError(sentence(self._path, rule, other, remedy)) from error
        self.bytes += count
        if self.bytes > MAX_RATIO * self._packed.bytes + FREE_BYTES:
            rule = f"must not decompress to more than {MAX_RATIO} times its bytes"
            found = f"{self.bytes} bytes out of {self._packed.bytes}"
            raise InputError(
                sentence(self._path, rule, found, "Compress it in smaller steps")
            )
        return count


class _Xz(io.RawIOBase):
    """The plain bytes of all streams of an xz file; ``lzma.LZMAFile`` stops silently at
    the zeros that may stand between two, and at garbage behind one.
    """

    def __init__(self, packed: HashedStream) -> None:
        self._packed, self._stream = packed, lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        rest = b""
        while True:
            if self._stream.eof:
                rest = self._stream.unused_data or rest
                while not (rest := rest.lstrip(b"\0")):
                    if not (rest := self._packed.read(CHUNK)):
                        return 0
                self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            elif self._stream.needs_input and not (rest := self._packed.read(CHUNK)):
                raise EOFError
            if plain := self._stream.decompress(rest, len(buffer)):
                buffer[: len(plain)] = plain
                return len(plain)
            rest = b""


def decompressed(
    raw: HashedStream, compression: str | None, path: str
) -> io.BufferedReader:
    """Opens a buffered stream of the plain bytes; broken ones raise
    :class:`InputError`.
    """
    return io.BufferedReader(
        _Decompressed(raw, compression, path) if compression else raw, CHUNK
    )


def expand(
    paths: Iterable[str | os.PathLike[str]],
    storage_options: Mapping[str, Any] | None = None,
) -> list[Input]:
    """Returns the files of paths, globs, folders, URLs; keeps the order of lists, sorts
    others.
    """
    inputs: list[Input] = []
    for url in paths:
        for path, place in _files(Location(os.fspath(url), storage_options or {})):
            form, compression = format_of(path)
            if form is None:
                rule, found = (
                    f"its name must end in {_KNOWN}",
                    quote(os.path.basename(path)),
                )
                remedy = "Rename it, or name the wanted files alone"
                raise InputError(sentence(path, rule, found, remedy))
            inputs.append(Input(len(inputs), path, place, form, compression))
    return inputs


def _files(location: Location) -> list[tuple[str, Location]]:
    """Returns the path, as a user would write it, and the location of each file."""
    if location.is_dir():
        return _files_of_folder(location)
    if location.exists():
        return [(location.display, location)]
    url = location.url
    # In a URL a question mark starts the query.
    if not any(c in url for c in ("*[" if "://" in url else "*?[")):
        location.files()  # raises if the bucket is missing
        remedy = "Check the path"
        if re.fullmatch(r"[\w-]+/[\w-]+", url):
            remedy += (
                "; of a dataset on the Hugging Face hub, give "
                f"hf://datasets/{url}/FILES"
            )
        raise InputError(
            sentence(location.display, "must exist", "no such file", remedy)
        )
    dotted = os.path.basename(url).startswith(".")
    matches = [
        m
        for m in location.glob()
        if dotted or not os.path.basename(m.url).startswith(".")
    ]
    if not matches:
        rule = "the pattern must match at least one file"
        raise InputError(sentence(location.display, rule, "none", "Check the pattern"))
    relative = "://" not in url and not os.path.isabs(url)
    return [
        (spelled(os.path.relpath(m.url)) if relative else m.display, m) for m in matches
    ]


def _files_of_folder(folder: Location) -> list[tuple[str, Location]]:
    if folder.is_dir(FOLDER):
        rule, remedy = (
            "must be a file or folder of records",
            "Give it alone to pack it anew",
        )
        raise InputError(sentence(folder.display, rule, "a packed dataset", remedy))
    entries = folder.entries()
    listed = [entry.name for entry in entries if not entry.is_folder]
    names = [
        n
        for n in listed
        if n[0] not in "._" and n not in NO_RECORDS and format_of(n)[0]
    ]
    if (saved := saved_files(folder, listed)) is not None:
        return [(place.display, place) for place in saved]
    _refuse_unread(folder, listed)
    check_splits(folder, names)
    if not names:
        rule = f"the folder must hold a file named {_KNOWN}"
        raise InputError(
            sentence(folder.display, rule, "none", "Name the files, or a glob")
        )
    _log_ignored_files(folder, entries, {*names, *NO_RECORDS})
    return [(place.display, place) for place in map(folder.join, names)]


def _refuse_unread(folder: Location, names: Iterable[str]) -> None:
    """Raises InputError for records in a compression that cannot be read."""
    for name in names:
        stem, suffix = os.path.splitext(name)
        if (
            suffix.lower() in NOT_READ.split()
            and stem[0] not in "._"
            and format_of(stem)[0]
        ):
            rule = f"its compression must be one of {' '.join(COMPRESSIONS)}"
            remedy = "Decompress it, or name the wanted files alone"
            raise InputError(sentence(folder.join(name).display, rule, suffix, remedy))


def _log_ignored_files(
    folder: Location, entries: Iterable[Entry], used: Collection[str]
) -> None:
    """Warns once of files in a folder that are not read; those that may hold records
    come first.

    Hidden files, of the system or of a download, are named only if they may hold
    records.
    """
    others = [
        e
        for e in entries
        if e.name not in used and (e.name[0] != "." or format_of(e.name)[0])
    ]
    others.sort(key=lambda entry: format_of(entry.name)[0] is None)
    texts = [quote(e.name) + (", a folder" if e.is_folder else "") for e in others]
    if texts:
        more = f"; and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
        log.warning(
            "left out of %s: %s%s", folder.display, "; ".join(texts[:_SHOWN]), more
        )
