"""Versions of a dataset: numbered manifests, each written atomically, with a hash of
its text.

They are ``_packstore/manifest-000001.json``, ``-000002`` and so on; the highest number
is the current version. A manifest is created only if its number is free, so that
exactly one of several writers commits, and a reader needs one listing and one read.
Side datasets use the same scheme with the name ``side``
(:mod:`packstore.io.side.side`).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping

import msgspec

from packstore.errors import (
    ConfigError,
    DatasetExistsError,
    DatasetNotFoundError,
    FormatError,
    IntegrityError,
    MissingFilesError,
    StorageError,
    quote,
    sentence,
)
from packstore.io.store.location import Location

FOLDER, DATA = "_packstore", "data"
"""Folders of a dataset: manifests and notes; shards."""
MAX_MANIFEST_BYTES = 256 << 20
"""Maximum bytes of a manifest, checked on write and on read."""
MAX_COST, FREE_COST = 8, 64 << 20
"""A manifest takes at most so many times its bytes in memory, and free bytes more."""
_COSTS = {b",": 40, b":": 40, b"[": 64, b"{": 64, b'"': 16}
"""Bytes that values take at most in memory, by the characters of JSON that there are
for each: a number in a list 40, an empty list 80, a text 32 besides its own, a name 80.
"""

_SHARD = r"[0-9a-f]{12}(?:-p[0-9]{5,})?-[0-9]{5,}-[0-9a-f]{16}\.(?:parquet|arrow)"
SHARD = re.compile(rf"{DATA}/(?:{_SHARD}|\.{_SHARD}\.[0-9a-f]{{32}})")
"""Path of a shard of any job; a hidden one is not finished."""
DATASET = "manifest"
"""Prefix of the names of a dataset's manifests."""

_HASH, _END = "sha256", b"\n}\n"
_LAST = re.compile(rb',\s*"([^"]*)"\s*:\s*("[^"]*"|[^"{}\[\]]*?)\s*}\s*')


def manifest_path(version: int, name: str = DATASET) -> str:
    """Returns the path of a manifest in its dataset."""
    return f"{FOLDER}/{name}-{version:06d}.json"


def versions(location: Location, name: str = DATASET) -> dict[int, int]:
    """Maps the committed versions of a dataset to the sizes of their manifests, oldest
    first.
    """
    pattern = re.compile(rf"{name}-([0-9]{{6}}|[1-9][0-9]{{6,}})\.json")
    matches = ((pattern.fullmatch(e.name), e.size) for e in location.files(FOLDER))
    found = sorted((int(m.group(1)), size) for m, size in matches if m)
    return {number: size for number, size in found if number}  # they begin with 1


def read_committed(
    location: Location,
    version: int | None = None,
    name: str = DATASET,
    sizes: Mapping[int, int] | None = None,
) -> tuple[bytes, str, int]:
    """Returns a manifest's text without its hash, its place for error texts, its
    version; `sizes` as :func:`versions` returns them.
    """
    sizes = versions(location, name) if sizes is None else sizes
    number = version if version is not None else max(sizes, default=0)
    if number not in sizes:
        raise _not_found(location, version, list(sizes), name)
    path = manifest_path(number, name)
    where = location.join(path).display
    if sizes[number] > MAX_MANIFEST_BYTES:
        raise manifest_too_large(where, str(sizes[number]))
    data = location.read_bytes(path)
    _check_cost(data, where)
    other, remedy = (
        max((n for n in sizes if n != number), default=0),
        "Restore it from a copy",
    )
    remedy += (
        f", open version {other} (version={other}, --version {other})" if other else ""
    )
    if number > other:
        remedy += ", or write another version (overwrite=True, --overwrite)"
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
        _check_names(data, where)
    except (
        msgspec.DecodeError,
        UnicodeDecodeError,
        RecursionError,
    ) as error:  # torn, perhaps
        found = f"{len(data)} bytes: {error}"
        raise IntegrityError(
            sentence(where, "must be valid JSON", found, remedy)
        ) from error
    return _without_hash(data, where, remedy), where, number


def require_exclusive(location: Location) -> None:
    """Raises :class:`ConfigError` for a location where two writers could both
    commit.
    """
    if not location.creates_exclusively:
        rule = (
            "a dataset is written only where a file can be created only if it is absent"
        )
        remedy = "Write to a local disk, and copy the folder data, then _packstore"
        found = "a filesystem that is not known to do so"
        raise ConfigError(sentence(location.display, rule, found, remedy))


def refuse_existing(location: Location, overwrite: bool, name: str = DATASET) -> int:
    """Returns the number of the next manifest."""
    current = max(versions(location, name), default=0)
    if current and not overwrite:
        parts = "must not hold a dataset yet", f"version {current} of one"
        remedy = "Name another place, or overwrite it (overwrite=True, --overwrite)"
        raise DatasetExistsError(sentence(location.display, *parts, remedy))
    return current + 1


def commit(location: Location, data: bytes, version: int, name: str = DATASET) -> None:
    """Writes the text of a manifest, with its hash, if its number is free
    (``create_bytes``).

    `version` is that of :func:`refuse_existing` at the start of the job. The same text
    under it counts as written: an equal job was first, or this put was sent twice.
    """
    data, path = with_hash(data), manifest_path(version, name)
    if len(data) > MAX_MANIFEST_BYTES:
        raise manifest_too_large(location.join(path).display, str(len(data)))
    _check_cost(data, location.join(path).display)
    with contextlib.suppress(DatasetExistsError):
        if version == refuse_existing(location, True, name):
            try:
                location.create_bytes(path, data)
            except StorageError as error:
                if not error.written:
                    raise
                rule = (
                    f"version {version} is committed, but might not survive a power cut"
                )
                raise StorageError(
                    sentence(location.display, rule, remedy=str(error))
                ) from error
            return
    if version not in versions(location, name) or location.read_bytes(path) != data:
        raise lost_commit_race(location)


def require_files(
    location: Location, files: Mapping[str, int], rule: str, remedy: str
) -> None:
    """Refuses a dataset that lacks one of `files` (path -> bytes), with this rule and
    remedy.
    """
    folders = {path.rpartition("/")[0] for path in files}
    listed = {
        f"{folder}/{e.name}": e.size
        for folder in folders
        for e in location.files(folder)
    }
    lacking = [path for path, size in files.items() if listed.get(path) != size]
    # A listing may be older than the file.
    lacking = [path for path in lacking if _size(location, path) != files[path]]
    if lacking:
        counts = f"{len(lacking)} of its {len(files)} files missing or of another size"
        found = f"{counts} (first: {lacking[0]})"
        raise MissingFilesError(sentence(location.display, rule, found, remedy))


def require_committed(
    location: Location, files: Mapping[str, int], version: int
) -> None:
    """Checks after a commit that the version has all its files; raises like
    `require_files`.
    """
    rule = f"version {version}, which was just committed, must have all its files"
    remedy = (
        "Somebody removed them meanwhile: make it again with overwrite=True "
        "(--overwrite)"
    )
    require_files(location, files, rule, remedy)


def with_hash(text: bytes) -> bytes:
    """Appends its hash as the last field of canonical JSON, so that flipped bits are
    detected.
    """
    body = text.removesuffix(_END)
    return body + b',\n "%s": %s%s' % (_HASH.encode(), _sha256(body), _END)


def _without_hash(data: bytes, where: str, remedy: str) -> bytes:
    """Verifies and removes the hash; returns the JSON object, or `data` if it has no
    hash.
    """
    comma = data.rfind(b",")
    last = _LAST.fullmatch(data, comma) if comma >= 0 else None
    if last is None:
        return data
    named, matches = (
        last[1] == _HASH.encode(),
        last[2] == _sha256(memoryview(data)[:comma]),
    )
    if named and matches:
        return data[:comma] + _END
    if named:
        rule = f"the text before field {_HASH!r} must have the sha256 that it names"
        raise IntegrityError(
            sentence(where, rule, "another: the file is damaged", remedy)
        )
    if matches:
        # One flipped bit in its name would make the hash a field that readers ignore. A
        # value that matches shows that it is not the last field of another writer.
        rule = f"the field with the hash of the manifest must be named {_HASH!r}"
        raise IntegrityError(sentence(where, rule, quote(last[1]), remedy))
    return data


def _sha256(text: bytes | memoryview) -> bytes:
    return b'"%s"' % hashlib.sha256(text).hexdigest().encode()


def _size(location: Location, path: str) -> int | None:
    try:
        return location.size(path)
    except StorageError as error:
        if error.is_missing:
            return None
        raise


def _not_found(
    location: Location, version: int | None, known: list[int], name: str
) -> DatasetNotFoundError:
    where, noun, command = location.display, "a dataset", "pack"
    if name != DATASET:
        noun, command = f"a {name} dataset", "ref-logps"
    if known:
        text = sentence(
            where, f"must have version {version}", f"{known[0]} to {known[-1]}"
        )
    elif not location.exists():
        text = sentence(where, f"must be {noun}", "no such folder", "Check the path")
    else:
        remedy = f"Name the folder that `packstore {command}` wrote"
        text = sentence(
            where, f"must be {noun}", f"no {FOLDER}/{name}-….json in it", remedy
        )
    return DatasetNotFoundError(text)


def lost_commit_race(location: Location) -> DatasetExistsError:
    """Returns the error for a writer after another has committed."""
    parts = "only one writer may commit at a time", "that another one just did"
    remedy = "Look at its dataset, then run again if it is not yours"
    return DatasetExistsError(sentence(location.display, *parts, remedy))


def _check_cost(data: bytes, where: str) -> None:
    """Refuses, before it is parsed, a manifest of very many small values."""
    cost, most = (
        sum(data.count(c) * n for c, n in _COSTS.items()),
        MAX_COST * len(data) + FREE_COST,
    )
    if cost > most:
        rule = f"a manifest must take at most {MAX_COST} times its bytes in memory"
        found = f"{cost} from {len(data)}"
        remedy = "Write larger row groups (row_group_tokens)"
        raise FormatError(sentence(where, rule, found, remedy))


def _check_names(data: bytes, where: str) -> None:
    """Refuses valid JSON in which an object has two members of one name: readers would
    differ.
    """
    # No text of valid JSON holds the bytes 0 and 1, so they can stand for what is
    # escaped.
    parts = data.replace(rb"\\", b"\0").replace(rb"\"", b"\1").split(b'"')
    objects = [set[bytes]()]
    for between, text, after in zip(parts[::2], parts[1::2], parts[2::2], strict=False):
        for brace in between.translate(None, _NO_BRACES):
            objects.append(set()) if brace == ord("{") else objects.pop()
        if after.lstrip()[:1] == b":":
            if _ESCAPED.search(text):
                whole = text.replace(b"\0", rb"\\").replace(b"\1", rb"\"")
                text = msgspec.json.decode(b'"%s"' % whole).encode()
            if text in objects[-1]:
                rule = "an object must not have two members of one name"
                raise FormatError(sentence(where, rule, quote(text.decode())))
            objects[-1].add(text)


_ESCAPED = re.compile(rb"[\0\1\\]")
_NO_BRACES = bytes(set(range(256)) - set(b"{}"))


def manifest_too_large(where: str, found: str) -> FormatError:
    """Returns the error for a manifest that is larger than readers accept."""
    rule = f"a manifest must have at most {MAX_MANIFEST_BYTES} bytes"
    return FormatError(
        sentence(where, rule, found, "Write larger row groups (row_group_tokens)")
    )
