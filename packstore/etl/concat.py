"""Appends records to a dataset, and concatenates datasets.

Existing shards are not rewritten; a new manifest names them.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from packstore.config import PackConfig, RunConfig, fingerprint
from packstore.config.remedies import current_door, spell
from packstore.errors import (
    ConfigError,
    DatasetNotFoundError,
    IntegrityError,
    PackstoreError,
    TokenizerError,
    display,
    quote,
    sentence,
)
from packstore.etl.pipeline import pack_into, require_path, with_adapter
from packstore.etl.provenance import without_paths
from packstore.etl.rejects import identity
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
from packstore.io.versions.write_job import AppendedBefore, WriteJob, writing
from packstore.progress import Progress
from packstore.tokenizer.records.adapters import Adapter
from packstore.tokenizer.records.forms import load

log = logging.getLogger("packstore")

_ADJUSTABLE = {*RunConfig.names(), "dedup", "fields", "on", "partitions"}
_CHUNK = 1 << 20

COPIES_AT_ONCE = 4
"""Shards copied concurrently; each may take space on the local disk meanwhile."""


def append(
    dataset: str | Dataset,
    more: Any,
    tokenizer: Any = None,
    *,
    adapter: Callable[[dict[str, Any]], Any] | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    source_storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Dataset:
    """Packs more records with the settings of a dataset, and commits its next version.

    Existing packs do not change, and readers of older versions continue. New examples
    get ids above all existing ones.

    Args:
        dataset: the dataset, or its path or URL.
        more: any source of :func:`packstore.pack`; a packed dataset is repacked.
        tokenizer: the tokenizer of the dataset; None: loaded from the path in its
            manifest.
        adapter: the function that read the dataset's records, or its name; never taken
            from the manifest, as whoever made that could name any function.
        storage_options, source_storage_options, progress: see :func:`packstore.pack`.
        settings: fields of ``RunConfig``, `partitions` of the new records, `fields`,
            `dedup`, and `on`, whose answers are added to those of the dataset. All
            others are its own. ``dedup="pair"`` leaves out records that the dataset
            has; its packs are read for that.

    Raises:
        CompatibilityError: another tokenizer, template or kind.
        ConfigError: a setting that the dataset decides; a dataset that is not the
            newest version.
        DatasetExistsError: the dataset already has these records. If they were appended
            last, the dataset is returned as it is, so that a finished call may be
            repeated.
        PackstoreError: as :func:`packstore.pack`; the dataset keeps its versions.
    """
    base = dataset
    if not isinstance(base, Dataset):
        base = _open_first(base, more, storage_options)
    base.manifest.require_writable(base.url)
    base.manifest.require_readable(base.url)
    options = base.location.storage_options
    if source_storage_options is not None:
        options = source_storage_options
    packed = isinstance(more, Dataset) or find_dataset(more, options) is not None
    config = _settings_of(base, settings, packed)
    loaded = None
    if not packed:
        config, loaded = with_adapter(config, adapter)
        _check_reading(base, loaded)
    with writing(base.location, True, "append") as job:
        if job.version != base.version + 1:
            rule = f"only its newest version, {job.version - 1}, can be extended"
            raise ConfigError(
                sentence(base.url, rule, f"version {base.version}", "Open it again")
            )
        base.require_files()
        job.extends = base
        recorded = base.manifest.provenance.get("tokenizer")
        if tokenizer is None and recorded is not None and not packed:
            tokenizer = recorded.get("path")
            if not tokenizer or not os.path.exists(tokenizer):
                rule = (
                    "its tokenizer must be named: its manifest has no path that "
                    "exists here"
                )
                remedy = "Give the tokenizer (--tokenizer PATH)"
                raise TokenizerError(sentence(base.url, rule, "", remedy))
        try:
            pack_into({None: job}, more, options, tokenizer, config, progress, loaded)
        except AppendedBefore as found:
            log.info("%s: already there, %s", base.url, found)
            return base
    extended = job.committed
    added = extended.manifest.records.packed - base.manifest.records.packed
    log.info(
        "appended %s records: version %d of %s",
        f"{added:,}",
        extended.version,
        extended.url,
    )
    return extended


def concat(
    datasets: Sequence[str | Dataset],
    out: str,
    *,
    overwrite: bool = False,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> Dataset:
    """Concatenates datasets; their shards are copied as they are, in order.

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
    opened = [
        d if isinstance(d, Dataset) else open_dataset(d, storage_options)
        for d in datasets
    ]
    members = [Member(d.url, d.manifest) for d in opened]
    check_members(members)
    location = Location(out, storage_options or {})
    existing = (
        None if overwrite else find_dataset(location.url, location.storage_options)
    )
    if existing is not None:
        before = existing.manifest.provenance.get("combined_from")
        now = [origin for member in members for origin in origins(member)]
        if without_paths(before) == without_paths(now):
            existing.require_files()
            log.info("%s: already there, of the same datasets", existing.url)
            return existing
    for dataset in opened:
        dataset.require_files()
    run = fingerprint([d.manifest.fingerprint for d in opened])[:12]
    with writing(location, overwrite, "concat") as job:
        for argument, dataset in zip(datasets, opened, strict=True):
            newest = isinstance(argument, Dataset) or dataset.version == job.version - 1
            if not newest and _is_same_place(dataset.location, location):
                # Its newest version is meant, and another was committed.
                raise lost_commit_race(location)
        manifest = _copy_shards(job, opened, run, progress)
        job.require_shards(manifest.shards)
        job.commit(manifest)
    return job.committed


def _open_first(
    dataset: str, more: Any, storage_options: Mapping[str, Any] | None
) -> Dataset:
    """Opens the dataset of :func:`append`; says so if it is `more` that is, or ends
    with, one.
    """
    rule = "must be the dataset, which comes before the records"
    require_path(dataset, "dataset", rule)
    try:
        return open_dataset(dataset, storage_options)
    except DatasetNotFoundError:
        last = more[-1] if isinstance(more, list | tuple) and more else more
        found = last if isinstance(last, Dataset) else None
        with contextlib.suppress(PackstoreError):
            found = found or find_dataset(last, storage_options)
        if found is None:
            raise
        place = display(os.fspath(dataset))
        raise ConfigError(
            sentence(place, rule, f"one in {found.url}", "Swap them")
        ) from None


def _settings_of(
    base: Dataset, settings: Mapping[str, Any], packed: bool
) -> PackConfig:
    """Returns the settings of a dataset, with `settings` for this run; fewer if it is
    `packed`.
    """
    for name in settings:
        if name not in _ADJUSTABLE and name in PackConfig.names():
            rule = (
                f"append packs with the settings of the dataset, so {name} must be "
                "left out"
            )
            raise ConfigError(sentence(base.url, rule))
    for reason, answer in settings.get("on", {}).items():
        if answer not in ("drop", "error"):
            rule = (
                f"append packs as the dataset does: on, {reason}, may be drop or error"
            )
            raise ConfigError(sentence(base.url, rule, quote(answer)))
    manifest = base.manifest
    recorded = manifest.provenance["settings"]
    if unknown := sorted(recorded.keys() - {*PackConfig.names()}):
        rule = "append packs with the settings of the dataset, so all must be known"
        remedy = "Append with the version of packstore that made it"
        raise ConfigError(
            sentence(base.url, rule, ", ".join(map(repr, unknown)), remedy)
        )
    # The number of partitions follows from the bytes of the new records. The name of an
    # adapter is not taken from a manifest, because a forged one would make append run
    # code.
    decided = {*PackConfig.names()} - {*RunConfig.names(), "partitions", "adapter"}
    values = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in recorded.items()
        if name in decided
    }
    if values.get("chat_template") not in (None, "chatml", "plain"):
        values["chat_template"] = (manifest.provenance.get("tokenizer") or {}).get(
            "chat_template"
        )
    values |= {
        "kind": manifest.kind,
        "layout": manifest.layout,
        "pack_size": manifest.pack_size,
        "strategy": manifest.strategy,
        "seed": manifest.seed,
        "format": manifest.file_format,
        "labels": "spans" if "label_spans" in manifest.features else "plain",
        "carry": tuple(f"{name}:{type_}" for name, type_ in manifest.carry.items()),
    }
    on = {**recorded.get("on", {})}
    if (
        packed
    ):  # its records were answered for; examples that do not fit cannot be truncated
        on = {"overlong": "error"} if on.get("overlong") == "error" else {}
        for name in PackConfig.of(**{**values, "on": on}).needing_records:
            del values[name]
    values["on"] = {**on, **settings.get("on", {})}
    config = PackConfig.of(**{**values, **settings, "on": values["on"]})
    if config.dedup == "prompt":
        rule = (
            "dedup must be pair or none on append: the words of prompts are not stored"
        )
        raise ConfigError(
            sentence(base.url, rule, "prompt", "Set it, or pack all records again")
        )
    if config.validation_fraction:
        raise ConfigError(
            "validation_fraction makes two datasets of its own: set it for pack()."
        )
    return config


def _check_reading(base: Dataset, adapter: Adapter | None) -> None:
    """Raise ConfigError if the form or adapter that read a dataset's records has
    changed.
    """
    recorded = base.manifest.provenance.get("reading", {})
    rule = "append reads records as the dataset was read"
    if "form" in recorded:
        form = load().get(recorded["form"])
        version = form.version if form is not None else None
        if version != recorded.get("form_version"):
            before = f"{recorded['form']} of version {recorded.get('form_version')}"
            change = f"the form {before}, now {version}"
            remedy = "Append with the version of packstore that made it, or pack anew"
            raise ConfigError(sentence(base.url, rule, change, remedy))
    if "adapter" in recorded:
        if adapter is None:
            name = recorded["adapter"]
            is_loadable = ":" in name
            how = (
                spell(current_door(), {"adapter": name})
                if is_loadable
                else "adapter=FUNCTION"
            )
            remedy = f"Give the function that reads them, if you trust it ({how})"
            raise ConfigError(
                sentence(base.url, rule, f"no adapter {quote(name)}", remedy)
            )
        if adapter.sha256 != recorded.get("adapter_sha256"):
            change = f"{adapter.name}, whose file has changed"
            raise ConfigError(
                sentence(base.url, rule, change, "Restore it, or pack anew")
            )


def _copy_shards(
    job: WriteJob, datasets: Sequence[Dataset], run: str, progress: Progress | None
) -> Manifest:
    """Copies the shards of all datasets, puts the pack index, and returns the
    manifest.
    """
    number, members = 0, list[Member]()
    files = dict[
        str, tuple[Location, ShardInfo | StoredFile]
    ]()  # new path -> what is copied there
    for dataset in datasets:
        source, manifest = dataset.location, dataset.manifest
        if not _is_same_place(source, job.location):
            files |= {file.path: (source, file) for file in manifest.further_files}
            shards = []
            for n, shard in enumerate(manifest.shards, number):
                path = (
                    f"{DATA}/{run}-{n:05d}-{shard.sha256[:16]}.{manifest.file_format}"
                )
                files[path] = source, shard
                shards.append(replace(shard, path=path))
            manifest = replace(manifest, shards=tuple(shards))
        number += len(manifest.shards)
        members.append(Member(dataset.url, manifest))
    _copy_files(files, job.location, progress)
    merged = merge(members)
    if not merged.shards:
        return merged
    sizes = (d.shard_sizes(i) for d in datasets for i in range(len(d.manifest.shards)))
    return replace(merged, pack_index=put_index(job.location, sizes, job.version))


def _copy_files(
    files: Mapping[str, tuple[Location, ShardInfo | StoredFile]],
    target: Location,
    progress: Progress | None,
) -> None:
    """Copies files from their places to these paths."""
    done = itertools.count(1)
    with Staging(target, (FOLDER, DATA)) as staging:

        def copy(path: str) -> None:
            source, file = files[path]
            _copy(source, file, target, path, staging)
            if progress is not None:
                progress("copy", next(done), len(files), "files")

        run_parallel((partial(copy, path) for path in files), COPIES_AT_ONCE)


def _is_same_place(a: Location, b: Location) -> bool:
    return a == b or (a.local_path is not None and identity(a) == identity(b))


def _copy(
    source: Location,
    shard: ShardInfo | StoredFile,
    target: Location,
    path: str,
    staging: Staging,
) -> None:
    """Copies a file to `path`, inside the store if possible."""
    if copy_file(source, shard.path, target, path):
        same, file = target.size(path) == shard.bytes, None
    else:
        digest = hashlib.sha256()
        with source.open_read(shard.path) as reader, staging.file() as file:
            while chunk := reader.read(_CHUNK):
                digest.update(chunk)
                file.write(chunk)
        same = digest.hexdigest() == shard.sha256
    if not same:
        where, rule = (
            source.join(shard.path).display,
            "its bytes must be those that were written",
        )
        raise IntegrityError(
            sentence(where, rule, "others", "Copy it again from a good one")
        )
    if file is not None:
        staging.store(file.name, path)
