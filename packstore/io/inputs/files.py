"""Reads the user's input as a stream of blocks: source -> files -> blocks -> (workers)
-> rows.

A *block* has some consecutive records of one file, as bytes. One process reads,
decompresses, hashes and cuts files; workers parse the blocks (:meth:`Block.parse`). The
cuts do not depend on the number of workers, and do not affect records or ordinals. An
*ordinal* counts from 0: of a file, its position among the inputs; of a record, its
line, row or item in the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from packstore.config import PackConfig
from packstore.config.record_fields import JSON_COLUMNS, SPELLINGS
from packstore.errors import InputError, quote, refuse_pointer, sentence, to_unicode
from packstore.format.arrays import Rows
from packstore.io.inputs.compression import CHUNK_BYTES, HashedStream, decompress
from packstore.io.inputs.formats import (
    COMPRESSIONS,
    FORMATS,
    SUFFIXES,
    UNITS,
    UNSUPPORTED_COMPRESSIONS,
    Format,
    Piece,
    ReadOptions,
    compressed_suffix,
    format_of,
    has_known_format,
)
from packstore.io.inputs.hugging_face import (
    FILES_WITHOUT_RECORDS,
    require_one_split,
    saved_files,
)
from packstore.io.inputs.in_memory import (
    MemorySource,
    open_in_memory,
    record_pieces,
)
from packstore.io.manifest.commit import FOLDER, list_splits
from packstore.io.store.location import Entry, Location
from packstore.io.store.storage_errors import as_storage_errors

BLOCK_BYTES = 2 << 20
"""Approximate bytes of a block, a worker's unit of work. Parsed records take ten times
as much memory; at this size they stay in the processor's cache.
"""

_MAX_LOGGED_FILES = 8
"""Ignored files of a folder that a warning names."""

_SUPPORTED_NAMES = (
    f"one of {' '.join(SUFFIXES)}, and {' or '.join(COMPRESSIONS)} after it"
)

log = logging.getLogger("packstore")


@dataclass(frozen=True)
class Input:
    """One input file.

    Attributes:
        ordinal: its position among the inputs, from 0.
        path: its path as the user would write it.
        location: its place in a store or on the disk.
        format: its format, a key of `FORMATS`.
        compression: its compression, a value of `COMPRESSIONS`; None: it is plain.
    """

    ordinal: int
    path: str
    location: Location
    format: str
    compression: str | None


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A part of one input, at least one record long; picklable.

    Attributes:
        source: ordinal of the input.
        path: path of the input, for messages.
        format: name of the format of the input.
        unit: `line`, `row` or `item`.
        first: ordinal of the first line, row or item of the block.
        num_records: number of records; fewer than lines if some are blank.
        payload: the argument of the format's parser.
        bytes: approximate bytes that the block takes up in the stored file.
    """

    source: int
    path: str
    format: str
    unit: str
    first: int
    num_records: int
    payload: Any = field(repr=False)
    bytes: int = 0

    def parse(self) -> Rows:
        """Return the records of the block.

        Raises:
            InputError: a record is damaged.
        """
        parse = FORMATS.load(self.format).parse
        ordinals, values = parse(self.payload, self.path, self.first)
        return Rows(
            source=self.source,
            path=self.path,
            unit=self.unit,
            ordinals=ordinals,
            values=values,
        )


class NoRecordsError(InputError):
    """There is no record: patterns match no file, folders hold none, or files hold no
    record.
    """


class InputReader:
    """Iterates over the blocks of all inputs, in order.

    Args:
        source: a path, glob, folder or URL, or a list of them; an Arrow table, a Polars
            frame, an iterable of records, or an open binary stream of JSON lines.
        storage_options: options of the fsspec filesystem.
        config: `fields` and `carry` decide which CSV columns are not text.
        block_bytes: approximate bytes of a block.
        skip_empty: leave out patterns and folders without a file.

    Attributes:
        inputs: its files; none for records in memory.
        paths: ordinal of an input -> its path.
        num_records: number of records in memory; None: unknown, or in files.
        is_finite: False for an iterable that may be endless.
        sources: path, bytes, sha256 and records of each input that was read to its end.

    Raises:
        NoRecordsError: there is no record; raised by iterating, too.
        InputError: the source, or one of its files, is not a supported input.
    """

    def __init__(
        self,
        source: Any,
        storage_options: Mapping[str, Any] | None = None,
        config: PackConfig | None = None,
        block_bytes: int = BLOCK_BYTES,
        skip_empty: bool = False,
    ) -> None:
        json_columns = _json_columns(config or PackConfig())
        self._options = ReadOptions(block_bytes, json_columns)
        self.sources: list[dict[str, Any]] = []
        self.inputs: tuple[Input, ...] = ()
        self._memory: MemorySource | None = None
        self.num_records: int | None = None
        self.is_finite = True

        paths = source if isinstance(source, list | tuple) else [source]
        if paths and all(isinstance(path, str | os.PathLike) for path in paths):
            self.inputs = tuple(expand(paths, storage_options, skip_empty))
            self.paths = {item.ordinal: item.path for item in self.inputs}
        else:
            self._memory = open_in_memory(source)
            self.paths = {0: self._memory.path}
            self.num_records = self._memory.num_records
            self.is_finite = self._memory.is_finite

    def __iter__(self) -> Iterator[Block]:
        self.sources = []
        if self._memory is not None:
            yield from self._read_memory(self._memory)
        for item in self.inputs:
            yield from self.read_file(item)

        if not any(source["records"] for source in self.sources):
            where = ", ".join(source["path"] for source in self.sources)
            raise NoRecordsError(
                sentence(
                    where=where,
                    rule="must hold at least one record",
                    found="no records",
                )
            )

    def read_file(self, item: Input) -> Iterator[Block]:
        """Yield the blocks of one file, even if it is not among the inputs.

        Raises:
            InputError: the file is damaged.
            StorageError: the store refuses.
        """
        file_format = FORMATS.load(item.format)
        num_records = 0
        stored_bytes = 0.0  # of the file, up to the end of the current piece
        with contextlib.ExitStack() as stack:
            raw = stack.enter_context(item.location.open_read())
            refuse_pointer(raw.peek(64), item.path, InputError)
            file = HashedStream(raw)
            stream: Any
            if file_format.check is None:
                stream = decompress(file, item.compression, item.path)
            else:  # the format has a footer, which is read first
                stream = _open_seekable(file_format, item, raw, file, stack)

            for piece in file_format.read(stream, item.path, self._options):
                num_records += piece.num_records
                if piece.share is None:
                    # The stream's buffer is ahead of the piece: only this share of the
                    # plain bytes that were read so far is in pieces.
                    consumed_share = stream.tell() / stream.raw.tell()
                    stored_bytes = file.num_bytes * consumed_share
                else:
                    stored_bytes += file.num_bytes * piece.share
                yield Block(
                    source=item.ordinal,
                    path=item.path,
                    format=item.format,
                    unit=file_format.unit,
                    first=piece.first,
                    num_records=piece.num_records,
                    payload=piece.payload,
                    bytes=round(stored_bytes * piece.num_records / num_records),
                )
        self._add_source(
            item.path,
            num_bytes=file.num_bytes,
            sha256=file.sha256(),
            num_records=num_records,
        )

    def _read_memory(self, memory: MemorySource) -> Iterator[Block]:
        if memory.is_stream:
            return self._read_stream(memory.path, memory.records)
        return self._read_records(memory.path, memory.records)

    def _read_records(self, path: str, values: Iterable[object]) -> Iterator[Block]:
        """Yield the blocks of records in memory, as JSON lines; these are hashed."""
        num_records = 0
        num_bytes = 0
        digest = hashlib.sha256()
        for piece in record_pieces(values, path, self._options.block_bytes):
            num_records += piece.num_records
            num_bytes += len(piece.payload)
            digest.update(piece.payload)
            yield _memory_block(path, piece)
        self._add_source(
            path,
            num_bytes=num_bytes,
            sha256=digest.hexdigest(),
            num_records=num_records,
        )

    def _read_stream(self, path: str, stream: Any) -> Iterator[Block]:
        """Yield the blocks of JSON lines, decompressed if their first bytes are those
        of a compressed file.
        """
        raw = io.BufferedReader(stream, CHUNK_BYTES)
        refuse_pointer(raw.peek(64), path, InputError)
        compression = COMPRESSIONS.get(compressed_suffix(raw.peek(8)))
        file = HashedStream(raw)
        lines = decompress(file, compression, path)
        num_records = 0
        for piece in FORMATS.load("jsonl").read(lines, path, self._options):
            num_records += piece.num_records
            yield _memory_block(path, piece)
        raw.detach()  # otherwise it would close the stream
        self._add_source(
            path,
            num_bytes=file.num_bytes,
            sha256=file.sha256(),
            num_records=num_records,
        )

    def _add_source(
        self, path: str, *, num_bytes: int, sha256: str, num_records: int
    ) -> None:
        self.sources.append(
            {
                "path": path,
                "bytes": num_bytes,
                "sha256": sha256,
                "records": num_records,
            }
        )


def _json_columns(config: PackConfig) -> frozenset[str]:
    """Return the CSV columns with JSON in their cells: numbers, ids and messages."""
    columns: set[str] = set()
    for field_name in JSON_COLUMNS:
        if field_name in config.fields:
            columns.add(config.fields[field_name])
        else:
            columns.update(SPELLINGS[field_name])
    for entry in config.carry:
        name, colon, type_ = entry.rpartition(":")
        if colon and type_ != "string":
            columns.add(name)
    return frozenset(columns)


def _open_seekable(
    file_format: Format,
    item: Input,
    raw: io.BufferedReader,
    file: HashedStream,
    stack: contextlib.ExitStack,
) -> BinaryIO:
    """Return a seekable stream of a file's plain bytes, after hashing the file.

    It is the file itself if that is plain and local, else a temporary copy.

    Args:
        file_format: a format with a footer, that is, with a `check`.
        item: the file.
        raw: its stored bytes.
        file: hashes `raw`.
        stack: closes a temporary file.
    """
    # Refuse a footer that declares too many bytes now, before terabytes are hashed.
    if file_format.check and not item.compression and raw.seekable():
        file_format.check(raw, item.path)
        raw.seek(0)

    stream = decompress(file, item.compression, item.path)
    if item.compression or item.location.local_path is None:
        copy = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        with as_storage_errors("write", tempfile.gettempdir(), {}):
            shutil.copyfileobj(stream, copy, CHUNK_BYTES)
            copy.seek(0)
        return copy

    while stream.read(CHUNK_BYTES):
        pass  # it is read only to be hashed
    raw.seek(0)
    return raw


def _memory_block(path: str, piece: Piece) -> Block:
    return Block(
        source=0,
        path=path,
        format="jsonl",
        unit=UNITS[path],
        first=piece.first,
        num_records=piece.num_records,
        payload=piece.payload,
    )


# From paths to files


def expand(
    paths: Iterable[str | os.PathLike[str]],
    storage_options: Mapping[str, Any] | None = None,
    skip_empty: bool = False,
) -> list[Input]:
    """Return the files of paths, globs, folders and URLs, at least one.

    The order of a list stays; files of a folder or glob are sorted.

    Args:
        paths, storage_options: see :class:`InputReader`.
        skip_empty: leave out patterns and folders without a file, unless all are.

    Raises:
        NoRecordsError: a pattern or folder has no file.
        InputError: a path leads to no file of a supported format.
    """
    inputs: list[Input] = []
    no_records: NoRecordsError | None = None
    for url in paths:
        location = Location(os.fspath(url), storage_options or {})
        try:
            files = _list_files(location)
        except NoRecordsError as error:
            if not skip_empty:
                raise
            no_records = error
            continue
        for path, file in files:
            file_format, compression = format_of(path)
            if file_format is None:
                raise InputError(
                    sentence(
                        path,
                        rule=f"its name must end in {_SUPPORTED_NAMES}",
                        found=quote(os.path.basename(path)),
                        remedy="Rename it, or name the wanted files alone",
                    )
                )
            inputs.append(
                Input(
                    ordinal=len(inputs),
                    path=path,
                    location=file,
                    format=file_format,
                    compression=compression,
                )
            )
    if no_records is not None and not inputs:
        raise no_records
    return inputs


def _list_files(location: Location) -> list[tuple[str, Location]]:
    """Return the path, as a user would write it, and the location of each file."""
    if location.is_dir():
        return [(file.display, file) for file in _list_folder(location)]
    if location.exists():
        return [(location.display, location)]
    if _is_pattern(location.url):
        return _list_matches(location)

    location.files()  # raises if the bucket is missing
    remedy = "Check the path"
    if re.fullmatch(r"[\w-]+/[\w-]+", location.url):
        remedy += (
            "; of a dataset on the Hugging Face hub, give "
            f"hf://datasets/{location.url}/FILES"
        )
    raise InputError(
        sentence(
            where=location.display,
            rule="must exist",
            found="no such file",
            remedy=remedy,
        )
    )


def _is_pattern(url: str) -> bool:
    """Return True if a path or URL has wildcards."""
    # In a URL a question mark starts the query.
    wildcards = "*[" if "://" in url else "*?["
    return any(wildcard in url for wildcard in wildcards)


def _list_matches(pattern: Location) -> list[tuple[str, Location]]:
    """Return the path and the location of each file that matches a pattern."""
    matches = pattern.glob()
    if not _is_hidden(pattern.url):
        matches = [file for file in matches if not _is_hidden(file.url)]
    if not matches:
        raise NoRecordsError(
            sentence(
                pattern.display,
                rule="the pattern must match at least one file",
                found="none",
                remedy="Check the pattern",
            )
        )
    is_relative = "://" not in pattern.url and not os.path.isabs(pattern.url)
    if is_relative:
        return [(to_unicode(os.path.relpath(file.url)), file) for file in matches]
    return [(file.display, file) for file in matches]


def _is_hidden(path: str) -> bool:
    return os.path.basename(path).startswith(".")


def _list_folder(folder: Location) -> list[Location]:
    """Return the files of records in a folder, by name.

    In a folder that ``save_to_disk`` of ``datasets`` wrote, these are its data files.
    """
    if folder.is_dir(FOLDER):
        _refuse_splits(folder)
        raise InputError(
            sentence(
                folder.display,
                rule="must be a file or folder of records",
                found="a packed dataset",
                remedy="Give it alone to pack it anew",
            )
        )
    entries = folder.entries()
    file_names = [entry.name for entry in entries if not entry.is_folder]
    files = saved_files(folder, file_names)
    if files is not None:
        return files

    _refuse_unsupported_compression(folder, file_names)
    names = [name for name in file_names if _has_records(name)]
    require_one_split(folder, names)
    if not names:
        _refuse_splits(folder)
        raise NoRecordsError(
            sentence(
                folder.display,
                rule=f"the folder must hold a file named {_SUPPORTED_NAMES}",
                found="none",
                remedy="Name the files, or a glob",
            )
        )
    _log_ignored_files(folder, entries, {*names, *FILES_WITHOUT_RECORDS})
    return [folder.join(name) for name in names]


def _refuse_splits(folder: Location) -> None:
    """Raise InputError for the folder of a job with `validation_fraction`."""
    splits = list_splits(folder)
    if not splits:
        return
    names = " and ".join(split.display for split in splits)
    raise InputError(
        sentence(
            folder.display,
            rule="must be a folder of records, or one packed dataset",
            found=f"the folder of a job with validation_fraction, which holds {names}",
            remedy="Pack each of them alone, by a command of its own",
        )
    )


def _has_records(name: str) -> bool:
    """Return True for a file that is read if its folder is the input."""
    if name.startswith((".", "_")) or name in FILES_WITHOUT_RECORDS:
        return False
    return has_known_format(name)


def _refuse_unsupported_compression(folder: Location, names: Iterable[str]) -> None:
    """Raise if a file of records has a compression that cannot be read.

    Without that it would be ignored, like other files of an unknown suffix.
    """
    for name in names:
        stem, suffix = os.path.splitext(name)
        is_unsupported = suffix.lower() in UNSUPPORTED_COMPRESSIONS
        is_ignored = stem.startswith((".", "_"))
        if is_unsupported and not is_ignored and has_known_format(stem):
            raise InputError(
                sentence(
                    folder.join(name).display,
                    rule=f"its compression must be one of {' '.join(COMPRESSIONS)}",
                    found=suffix,
                    remedy="Decompress it, or name the wanted files alone",
                )
            )


def _log_ignored_files(
    folder: Location, entries: Iterable[Entry], used_names: Collection[str]
) -> None:
    """Warn once of files in a folder that are not read, files with records first.

    Hidden files, of the system or of a download, are named only if they may hold
    records.
    """
    names_with_records = []
    other_names = []
    for entry in entries:
        if entry.name in used_names:
            continue
        name = quote(entry.name) + (", a folder" if entry.is_folder else "")
        if has_known_format(entry.name):
            names_with_records.append(name)
        elif not entry.name.startswith("."):
            other_names.append(name)

    names = names_with_records + other_names
    if not names:
        return
    listing = "; ".join(names[:_MAX_LOGGED_FILES])
    num_unlisted = len(names) - _MAX_LOGGED_FILES
    if num_unlisted > 0:
        listing += f"; and {num_unlisted} more"
    log.warning("left out of %s: %s", folder.display, listing)
