"""Versions of a dataset: numbered manifests, each written atomically, with a hash.

The manifests are ``_packstore/manifest-000001.json``, ``-000002`` and so on; the
highest number is the current version. A manifest is created only if its number is free,
so that exactly one of several writers commits, and a reader needs one listing and one
read. Side datasets use the same scheme with the name ``side``
(:mod:`packstore.io.side.side`).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence

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

FOLDER = "_packstore"
"""Folder of manifests and notes in a dataset."""

DATA = "data"
"""Folder of shards in a dataset."""

DATASET = "manifest"
"""Prefix of the names of a dataset's manifests."""

SPLITS = ("train", "validation")
"""Folders of the two datasets of a job with `validation_fraction`."""

_SHARD = r"[0-9a-f]{12}(?:-p[0-9]{5,})?-[0-9]{5,}-[0-9a-f]{16}\.(?:parquet|arrow)"
SHARD = re.compile(rf"{DATA}/(?:{_SHARD}|\.{_SHARD}\.[0-9a-f]{{32}})")
"""Path of a shard, ``data/<run>[-p<partition>]-<index>-<hash>.<format>``, of any job; a
hidden one is not finished.
"""

MAX_MANIFEST_BYTES = 256 << 20
"""Maximum bytes of a manifest, checked on write and on read."""

MAX_COST = 8
"""Maximum memory of a parsed manifest, as a multiple of its bytes."""

FREE_COST = 64 << 20
"""Bytes of memory that any parsed manifest may take on top of `MAX_COST`."""

# Bytes of memory that parsed values take, counted by characters of JSON, so that a
# bound is known without parsing. A number in a list, for example, comes with a comma
# and takes at most 40 bytes; a text comes with two quotes and takes at most 32 bytes
# besides its characters.
_COST_OF_CHARACTER = {b",": 40, b":": 40, b"[": 64, b"{": 64, b'"': 16}

FEW_FILES = 4
"""Files of a folder that are looked up one by one, as it may have many others."""

_VERSION = re.compile(r"[0-9]{6}|[1-9][0-9]{6,}")
_HASH_FIELD = "sha256"
_END = b"\n}\n"
# From the last comma to the end of the text: the name of a field, and its plain value.
_LAST_FIELD = re.compile(rb',\s*"([^"]*)"\s*:\s*("[^"]*"|[^"{}\[\]]*?)\s*}\s*')


def manifest_path(version: int, name: str = DATASET) -> str:
    """Return the path of a manifest in its dataset."""
    return f"{FOLDER}/{name}-{version:06d}.json"


def list_versions(location: Location, name: str = DATASET) -> dict[int, int]:
    """Return the committed versions, oldest first, with the bytes of their manifests.

    Versions are numbered from 1.
    """
    sizes = {}
    for entry in location.files(FOLDER):
        version = _version_of(entry.name, name)
        if version > 0:
            sizes[version] = entry.size
    return dict(sorted(sizes.items()))


def newest_version(location: Location, name: str = DATASET) -> int:
    """Return the number of the current version; 0 if none was committed."""
    versions = (_version_of(file, name) for file in location.names(FOLDER))
    return max(versions, default=0)


def list_splits(location: Location) -> list[Location]:
    """Return the splits of a job with `validation_fraction` that lie in a folder."""
    splits = [location.join(name) for name in SPLITS]
    return [split for split in splits if newest_version(split)]


def _version_of(file: str, name: str) -> int:
    """Return the number of a version from the name of its manifest; else 0."""
    number = file.removeprefix(f"{name}-").removesuffix(".json")
    if file != f"{name}-{number}.json" or not _VERSION.fullmatch(number):
        return 0
    return int(number)


# Reading


def read_committed(
    location: Location,
    version: int | None = None,
    name: str = DATASET,
    sizes: Mapping[int, int] | None = None,
) -> tuple[bytes, str, int]:
    """Read a manifest, and verify its hash.

    Args:
        location: of the dataset.
        version: None: the current one.
        name: prefix of the names of its manifests.
        sizes: the result of :func:`list_versions`, if the caller has it.

    Returns:
        The text without its hash; its place for messages; the version.

    Raises:
        DatasetNotFoundError: the version does not exist.
        IntegrityError: the text is not JSON, or differs from its hash.
        FormatError: the text is too large, or repeats a name in an object.
        StorageError: the store refuses.
    """
    if sizes is None:
        sizes = list_versions(location, name)
    number = max(sizes, default=0) if version is None else version
    if number not in sizes:
        raise _not_found(location, version, list(sizes), name)

    path = manifest_path(number, name)
    where = location.join(path).display
    if sizes[number] > MAX_MANIFEST_BYTES:
        raise manifest_too_large(where, size=str(sizes[number]))

    data = location.read_bytes(path)
    _check_memory_cost(data, where)
    remedy = _remedy_for_damage(number, list(sizes))
    _check_json(data, where, remedy)
    return _remove_hash(data, where, remedy), where, number


def _not_found(
    location: Location, version: int | None, versions: list[int], name: str
) -> DatasetNotFoundError:
    """Return the error for a version, or a dataset, that does not exist."""
    if versions:
        text = sentence(
            where=location.display,
            rule=f"must have version {version}",
            found=f"{versions[0]} to {versions[-1]}",
        )
        return DatasetNotFoundError(text)

    if name == DATASET:
        splits = list_splits(location)
        if splits:
            return splits_instead_of_dataset(location, splits)
        noun = "a dataset"
        remedy = "Name the folder that `packstore pack` wrote"
    else:
        noun = f"a {name} dataset"
        remedy = "Name the folder that `packstore ref-logps` wrote"
    if not location.exists():
        text = sentence(
            where=location.display,
            rule=f"must be {noun}",
            found="no such folder",
            remedy="Check the path",
        )
        return DatasetNotFoundError(text)
    text = sentence(
        where=location.display,
        rule=f"must be {noun}",
        found=f"no {FOLDER}/{name}-….json in it",
        remedy=remedy,
    )
    return DatasetNotFoundError(text)


def splits_instead_of_dataset(
    location: Location, splits: Sequence[Location]
) -> DatasetNotFoundError:
    """Return the error for a folder of splits where one dataset is needed."""
    names = " and ".join(split.display for split in splits)
    text = sentence(
        where=location.display,
        rule="must be one dataset",
        found=f"the folder of a job with validation_fraction, which holds {names}",
        remedy="Name one of them" if len(splits) > 1 else "Name it",
    )
    return DatasetNotFoundError(text)


def _remedy_for_damage(number: int, versions: list[int]) -> str:
    """Return the remedy for a damaged manifest."""
    newest_other = max((n for n in versions if n != number), default=0)

    remedy = "Restore it from a copy"
    if newest_other:
        remedy += (
            f", open version {newest_other} (version={newest_other}, "
            f"--version {newest_other})"
        )
    if number > newest_other:
        remedy += ", or write another version (overwrite=True, --overwrite)"
    return remedy


def _check_memory_cost(data: bytes, where: str) -> None:
    """Refuse a manifest of very many small values before it is parsed."""
    cost = sum(data.count(c) * bound for c, bound in _COST_OF_CHARACTER.items())
    if cost <= MAX_COST * len(data) + FREE_COST:
        return
    text = sentence(
        where=where,
        rule=f"a manifest must take at most {MAX_COST} times its bytes in memory",
        found=f"{cost} from {len(data)}",
        remedy="Write larger row groups (row_group_tokens)",
    )
    raise FormatError(text)


def _check_json(data: bytes, where: str, remedy: str) -> None:
    """Raise unless `data` is valid JSON, with distinct names in each object."""
    try:
        msgspec.json.decode(data, type=msgspec.Raw)
        _check_names(data, where)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Most likely a torn copy, and no mistake of a writer: an IntegrityError.
        text = sentence(
            where=where,
            rule="must be valid JSON",
            found=f"{len(data)} bytes: {error}",
            remedy=remedy,
        )
        raise IntegrityError(text) from error


def _check_names(data: bytes, where: str) -> None:
    """Refuse valid JSON with an object that has two members of one name.

    JSON leaves open which of the two counts, so that readers would differ.
    """

    def check_object(members: list[tuple[str, object]]) -> None:
        names = [name for name, _ in members]
        if len(set(names)) == len(names):
            return
        repeated_name, _ = Counter(names).most_common(1)[0]
        rule = "an object must not have two members of one name"
        raise FormatError(sentence(where, rule, found=quote(repeated_name)))

    json.loads(
        # UTF-8 is checked later; different bytes must give different names.
        data.decode(errors="surrogateescape"),
        object_pairs_hook=check_object,
        parse_int=float,  # int refuses numbers of thousands of digits
        strict=False,
    )


# Writing


def require_exclusive(location: Location) -> None:
    """Raise ConfigError for a location where two writers could both commit."""
    if location.creates_exclusively:
        return
    text = sentence(
        where=location.display,
        rule=(
            "a dataset is written only where a file can be created only if it is absent"
        ),
        found="a filesystem that is not known to do so",
        remedy="Write to a local disk, and copy the folder data, then _packstore",
    )
    raise ConfigError(text)


def next_version(location: Location, overwrite: bool, name: str = DATASET) -> int:
    """Return the number of the next manifest.

    Raises:
        DatasetExistsError: the place has a version, and `overwrite` is False.
    """
    current = newest_version(location, name)
    if current and not overwrite:
        text = sentence(
            where=location.display,
            rule="must not hold a dataset yet",
            found=f"version {current} of one",
            remedy="Name another place, or overwrite it (overwrite=True, --overwrite)",
        )
        raise DatasetExistsError(text)
    return current + 1


def commit(location: Location, text: bytes, version: int, name: str = DATASET) -> None:
    """Write the text of a manifest, with its hash, if its number is free.

    The same text under that number counts as written: an equal job was first, or the
    request was sent twice.

    Args:
        location: of the dataset.
        text: canonical JSON.
        version: the result of :func:`next_version` at the start of the job.
        name: prefix of the names of its manifests.

    Raises:
        DatasetExistsError: another writer committed first.
        FormatError: the text is too large.
        StorageError: the store refuses.
    """
    data = with_hash(text)
    path = manifest_path(version, name)
    where = location.join(path).display
    if len(data) > MAX_MANIFEST_BYTES:
        raise manifest_too_large(where, size=str(len(data)))
    _check_memory_cost(data, where)

    # A number may be free because `clean` has removed the version of another writer: it
    # counts only if no later version exists.
    is_next = version == next_version(location, overwrite=True, name=name)
    if is_next and _create_manifest(location, path, data, version):
        return

    is_committed = version in list_versions(location, name)
    if not is_committed or location.read_bytes(path) != data:
        raise lost_commit_race(location)


def _create_manifest(location: Location, path: str, data: bytes, version: int) -> bool:
    """Create the file of a manifest; return False if another one is there."""
    try:
        location.create_bytes(path, data)
    except DatasetExistsError:
        return False
    except StorageError as error:
        if not error.written:
            raise
        text = sentence(
            where=location.display,
            rule=f"version {version} is committed, but might not survive a power cut",
            remedy=str(error),
        )
        raise StorageError(text) from error
    return True


def lost_commit_race(location: Location) -> DatasetExistsError:
    """Return the error for a writer after another has committed."""
    text = sentence(
        where=location.display,
        rule="only one writer may commit at a time",
        found="that another one just did",
        remedy="Look at its dataset, then run again if it is not yours",
    )
    return DatasetExistsError(text)


def manifest_too_large(where: str, size: str) -> FormatError:
    """Return the error for a manifest of `size` bytes, more than readers accept."""
    text = sentence(
        where=where,
        rule=f"a manifest must have at most {MAX_MANIFEST_BYTES} bytes",
        found=size,
        remedy="Write larger row groups (row_group_tokens)",
    )
    return FormatError(text)


# Files that a manifest names


def require_files(
    location: Location, files: Mapping[str, int], rule: str, remedy: str
) -> None:
    """Raise MissingFilesError, with this rule and remedy, if a file is absent.

    Args:
        location: of the dataset.
        files: path -> bytes; another size counts as absent.
        rule: for the message.
        remedy: for the message.
    """
    stored_sizes = {}
    files_of_folders = Counter(path.rpartition("/")[0] for path in files)
    for folder, num_files in files_of_folders.items():
        if num_files > FEW_FILES:
            for entry in location.files(folder):
                stored_sizes[f"{folder}/{entry.name}"] = entry.size

    absent = []
    for path, size in files.items():
        if stored_sizes.get(path) == size:
            continue
        # Not listed: the listing may be older than the file, or there was none.
        if _size_if_present(location, path) != size:
            absent.append(path)

    if absent:
        counts = f"{len(absent)} of its {len(files)} files missing or of another size"
        text = sentence(
            where=location.display,
            rule=rule,
            found=f"{counts} (first: {absent[0]})",
            remedy=remedy,
        )
        raise MissingFilesError(text)


def require_committed(
    location: Location, files: Mapping[str, int], version: int
) -> None:
    """Raise MissingFilesError if a version lacks files right after its commit."""
    require_files(
        location,
        files,
        rule=f"version {version}, which was just committed, must have all its files",
        remedy=(
            "Somebody removed them meanwhile: make it again with overwrite=True "
            "(--overwrite)"
        ),
    )


def _size_if_present(location: Location, path: str) -> int | None:
    try:
        return location.size(path)
    except StorageError as error:
        if error.is_missing:
            return None
        raise


# The hash of a manifest


def with_hash(text: bytes) -> bytes:
    """Append the hash of canonical JSON as its last field, to detect flipped bits."""
    body = text.removesuffix(_END)
    return body + b',\n "%s": %s%s' % (_HASH_FIELD.encode(), _quoted_sha256(body), _END)


def _remove_hash(data: bytes, where: str, remedy: str) -> bytes:
    """Verify and remove the hash; return `data` as it is if it has none."""
    comma = data.rfind(b",")
    last_field = _LAST_FIELD.fullmatch(data, comma) if comma >= 0 else None
    if last_field is None:
        return data

    name = last_field[1]
    is_named_hash = name == _HASH_FIELD.encode()
    hash_matches = last_field[2] == _quoted_sha256(memoryview(data)[:comma])
    if is_named_hash and hash_matches:
        return data[:comma] + _END
    if is_named_hash:
        text = sentence(
            where=where,
            rule=(
                f"the text before field {_HASH_FIELD!r} must have the sha256 that it "
                "names"
            ),
            found="another: the file is damaged",
            remedy=remedy,
        )
        raise IntegrityError(text)
    if hash_matches:
        # A flipped bit in the name of the hash would make it an unknown field, which
        # readers ignore, and the manifest one without a hash. As the value is the hash,
        # this is no field of another writer.
        text = sentence(
            where=where,
            rule=(
                f"the field with the hash of the manifest must be named {_HASH_FIELD!r}"
            ),
            found=quote(name),
            remedy=remedy,
        )
        raise IntegrityError(text)
    return data


def _quoted_sha256(text: bytes | memoryview) -> bytes:
    return b'"%s"' % hashlib.sha256(text).hexdigest().encode()
