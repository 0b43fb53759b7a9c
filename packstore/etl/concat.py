"""Concatenates datasets: a new manifest names their shards, which are copied as they
are.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from packstore.config import fingerprint
from packstore.errors import ConfigError, IntegrityError, sentence
from packstore.etl.provenance import without_paths
from packstore.etl.rejects import real_place
from packstore.io.dataset.dataset import Dataset, find_dataset
from packstore.io.dataset.dataset import open as open_dataset
from packstore.io.dataset.pack_index import put_index
from packstore.io.manifest.commit import DATA, FOLDER, lost_commit_race
from packstore.io.manifest.manifest import Manifest
from packstore.io.manifest.merge import Member, check_members, merge, origins
from packstore.io.manifest.stored_file import StoredFile
from packstore.io.shards.shard import ShardInfo
from packstore.io.store.location import Location
from packstore.io.store.operations import copy_file, run_parallel
from packstore.io.store.staging import Staging
from packstore.io.versions.write_job import WriteJob, writing
from packstore.progress import Progress

log = logging.getLogger("packstore")

_CHUNK_BYTES = 1 << 20

COPIES_AT_ONCE = 4
"""Shards copied concurrently; each may take space on the local disk meanwhile."""


def concat(
    datasets: Sequence[str | Dataset],
    out: str,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Concatenate datasets; their shards are copied as they are, in order.

    Shards of other places are copied: by hard link on the same disk, inside the same
    object store, else through this machine, where their hashes are checked. Nothing is
    decoded.

    Args:
        datasets: the datasets, or their paths or URLs; one may be `out` itself.
        out: folder or fsspec URL of the new dataset.
        overwrite: replace an existing dataset.
        storage_options: passed to the fsspec filesystems of `out`, and of `datasets`
            given as text.
        progress: see :func:`packstore.pack`.

    Raises:
        CompatibilityError: the datasets were packed differently; names the differences.
        UnsupportedFormatError: only a later release can extend one of them.
        DatasetExistsError: a dataset is there, and `overwrite` is False.
        PackstoreError: as :func:`packstore.pack`; `out` keeps its versions.
    """
    if isinstance(datasets, str | Dataset):
        raise ConfigError("concat takes a list of datasets; found one.")
    loaded_datasets = [
        dataset
        if isinstance(dataset, Dataset)
        else open_dataset(dataset, storage_options)
        for dataset in datasets
    ]
    for dataset in loaded_datasets:
        dataset.require_whole("whole datasets are combined")
    members = [Member(dataset.url, dataset.manifest) for dataset in loaded_datasets]
    check_members(members)
    location = Location(out, storage_options or {})
    if not overwrite:
        existing = _find_concatenation(location, members)
        if existing is not None:
            log.info("%s: already there, of the same datasets", existing.url)
            return existing

    for dataset in loaded_datasets:
        dataset.require_files()
    with writing(location, overwrite, call="concat") as job:
        for argument, dataset in zip(datasets, loaded_datasets, strict=True):
            is_newest = dataset.version == job.version - 1
            is_at_out = _is_same_place(dataset.location, location)
            if is_at_out and not is_newest and not isinstance(argument, Dataset):
                # A path stands for the newest version, and another job has committed
                # a newer one since it was opened.
                raise lost_commit_race(location)
        manifest = _copy_shards(job, loaded_datasets, progress)
        job.require_shards(manifest.shards)
        job.commit(manifest)
    return job.committed


def _find_concatenation(
    location: Location, members: Sequence[Member]
) -> Dataset | None:
    """Return the dataset at a location if it was made of the same datasets."""
    existing = find_dataset(location.url, location.storage_options)
    if existing is None:
        return None
    recorded = existing.manifest.provenance.get("combined_from")
    requested = [origin for member in members for origin in origins(member)]
    if without_paths(recorded) != without_paths(requested):
        return None
    existing.require_files()
    return existing


def _copy_shards(
    job: WriteJob, datasets: Sequence[Dataset], progress: Progress | None
) -> Manifest:
    """Copy the shards of all datasets, put the pack index, and return the manifest.

    Shards of a dataset at `job.location` stay, and keep their names.
    """
    run = fingerprint([dataset.manifest.fingerprint for dataset in datasets])[:12]
    members: list[Member] = []
    files: list[_FileToCopy] = []
    num_shards = 0
    for dataset in datasets:
        manifest = dataset.manifest
        if not _is_same_place(dataset.location, job.location):
            for file in manifest.further_files:
                files.append(_FileToCopy(dataset.location, file, file.path))
            shards = []
            for number, shard in enumerate(manifest.shards, start=num_shards):
                name = f"{run}-{number:05d}-{shard.sha256[:16]}.{manifest.file_format}"
                new_path = f"{DATA}/{name}"
                files.append(_FileToCopy(dataset.location, shard, new_path))
                shards.append(replace(shard, path=new_path))
            manifest = replace(manifest, shards=tuple(shards))
        num_shards += len(manifest.shards)
        members.append(Member(dataset.url, manifest))

    _copy_files(files, job.location, progress)
    merged = merge(members)
    if not merged.shards:
        return merged
    sizes = (
        dataset.shard_sizes(number)
        for dataset in datasets
        for number in range(len(dataset.manifest.shards))
    )
    return replace(merged, pack_index=put_index(job.location, sizes, job.version))


@dataclass(frozen=True)
class _FileToCopy:
    """A file of a dataset, and its path in the new one."""

    source: Location
    file: ShardInfo | StoredFile
    new_path: str


def _copy_files(
    files: Sequence[_FileToCopy], target: Location, progress: Progress | None
) -> None:
    """Copy files into `target`."""
    # Files of a later release (`further_files`) have one content per path, and several
    # datasets may have them.
    distinct_files = list({file.new_path: file for file in files}.values())
    num_copied = itertools.count(1)
    with Staging(target, (FOLDER, DATA)) as staging:

        def copy(file: _FileToCopy) -> None:
            _copy(file, target, staging)
            if progress is not None:
                progress("copy", next(num_copied), len(distinct_files), "files")

        run_parallel((partial(copy, file) for file in distinct_files), COPIES_AT_ONCE)


def _copy(item: _FileToCopy, target: Location, staging: Staging) -> None:
    """Copy a file, inside the store if possible.

    Its hash is checked only if its bytes pass through this machine, else its size.

    Raises:
        IntegrityError: its bytes are not the recorded ones.
    """
    if copy_file(item.source, item.file.path, target, item.new_path):
        if target.size(item.new_path) != item.file.bytes:
            raise _damaged_file_error(item)
        return

    digest = hashlib.sha256()
    with item.source.open_read(item.file.path) as reader, staging.file() as file:
        chunk = reader.read(_CHUNK_BYTES)
        while chunk:
            digest.update(chunk)
            file.write(chunk)
            chunk = reader.read(_CHUNK_BYTES)
    if digest.hexdigest() != item.file.sha256:
        raise _damaged_file_error(item)
    staging.store(file.name, item.new_path)


def _damaged_file_error(item: _FileToCopy) -> IntegrityError:
    return IntegrityError(
        sentence(
            where=item.source.join(item.file.path).display,
            rule="its bytes must be those that were written",
            found="others",
            remedy="Copy it again from a good one",
        )
    )


def _is_same_place(a: Location, b: Location) -> bool:
    """Return True if both are one place; local ones may be links to it."""
    if a == b:
        return True
    return a.local_path is not None and real_place(a) == real_place(b)
