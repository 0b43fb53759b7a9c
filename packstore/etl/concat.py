"""Appends records to a dataset, and concatenates datasets.

Existing shards are not rewritten: a new manifest names them. :func:`append` packs with
the settings that the manifest of the dataset records, so that new packs are like the
old ones. An *answer* is the value of the setting `on` for one reason to refuse a
record, e.g. ``drop`` for ``overlong``.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from packstore.etl.rejects import real_place
from packstore.etl.sources import open_examples
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
from packstore.tokenizer.records.forms import load as load_forms

log = logging.getLogger("packstore")

_ADJUSTABLE = {*RunConfig.names(), "dedup", "fields", "on", "partitions"}
"""Settings of :func:`append`; the dataset decides all others."""

_CHUNK_BYTES = 1 << 20

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
    """Pack more records with the settings of a dataset, and commit its next version.

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
        settings: fields of ``RunConfig``, `partitions` (of the new records), `fields`,
            `dedup` and `on`; the dataset decides all others. Answers of `on` are added
            to the dataset's answers. ``dedup="pair"`` reads the packs of the dataset,
            and leaves out records that it has.

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
        base = _open_base(base, more, storage_options)
    base.require_whole("records are appended to a whole dataset")
    base.manifest.require_writable(base.url)
    base.manifest.require_readable(base.url)
    source_options = base.location.storage_options
    if source_storage_options is not None:
        source_options = source_storage_options
    is_packed = (
        isinstance(more, Dataset) or find_dataset(more, source_options) is not None
    )

    config = _settings_for_append(base, settings, is_packed)
    loaded_adapter = None
    if not is_packed:
        config, loaded_adapter = with_adapter(config, adapter)
        _check_reading(base, loaded_adapter)
    with writing(base.location, overwrite=True, call="append") as job:
        if job.version != base.version + 1:
            raise ConfigError(
                sentence(
                    where=base.url,
                    rule=f"only its newest version, {job.version - 1}, can be extended",
                    found=f"version {base.version}",
                    remedy="Open it again",
                )
            )
        base.require_files()
        job.extends = base
        if tokenizer is None and not is_packed:
            tokenizer = _recorded_tokenizer(base)
        open_source = partial(
            open_examples,
            more,
            tokenizer,
            config,
            dict(source_options),
            adapter=loaded_adapter,
        )
        try:
            jobs: dict[str | None, WriteJob] = {None: job}  # no split
            pack_into(jobs, more, open_source, config, progress)
        except AppendedBefore as reason:
            log.info("%s: already there, %s", base.url, reason)
            return base

    _log_appended(base, job.committed)
    return job.committed


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


# Append.


def _open_base(
    dataset: str, more: Any, storage_options: Mapping[str, Any] | None
) -> Dataset:
    """Open the dataset of :func:`append`.

    Raises:
        ConfigError: the arguments are swapped: `more` is a dataset, or a list that ends
            with one, as in ``packstore append a.jsonl b.jsonl DATASET``.
    """
    rule = "must be the dataset, which comes before the records"
    require_path(dataset, "dataset", rule)
    try:
        return open_dataset(dataset, storage_options)
    except DatasetNotFoundError:
        last_source = more[-1] if isinstance(more, list | tuple) and more else more
        swapped = last_source if isinstance(last_source, Dataset) else None
        if swapped is None:
            with contextlib.suppress(PackstoreError):
                swapped = find_dataset(last_source, storage_options)
        if swapped is None:
            raise
        place = display(os.fspath(dataset))
        raise ConfigError(
            sentence(
                where=place,
                rule=rule,
                found=f"one in {swapped.url}",
                remedy="Swap them",
            )
        ) from None


def _recorded_tokenizer(base: Dataset) -> str | None:
    """Return the path of the tokenizer that a dataset records, if it had one.

    Raises:
        TokenizerError: the path does not exist.
    """
    recorded = base.manifest.provenance.get("tokenizer")
    if recorded is None:
        return None
    path = recorded.get("path")
    if not path or not os.path.exists(path):
        rule = "its tokenizer must be named: its manifest has no path that exists here"
        remedy = "Give the tokenizer (--tokenizer PATH)"
        raise TokenizerError(sentence(base.url, rule, remedy=remedy))
    return str(path)


def _settings_for_append(
    base: Dataset, settings: Mapping[str, Any], is_packed: bool
) -> PackConfig:
    """Return the settings of a dataset, with `settings` for this run.

    Args:
        base: the dataset.
        settings: arguments of :func:`append`.
        is_packed: True if a packed dataset is appended, which needs fewer settings.

    Raises:
        ConfigError: a setting that the dataset decides, or of another release.
    """
    _check_adjustable(base, settings)
    values = _recorded_settings(base)
    answers = dict(base.manifest.provenance["settings"].get("on", {}))
    if is_packed:
        # All other reasons to refuse were applied when its records were packed, and
        # examples without their texts cannot be truncated.
        stops_at_overlong = answers.get("overlong") == "error"
        answers = {"overlong": "error"} if stops_at_overlong else {}
        for name in PackConfig.of(**values, on=answers).needing_records:
            del values[name]
    answers |= settings.get("on", {})

    config = PackConfig.of(**{**values, **settings, "on": answers})
    if config.dedup == "prompt":
        raise ConfigError(
            sentence(
                where=base.url,
                rule="dedup must be pair or none on append: the words of prompts are "
                "not stored",
                found="prompt",
                remedy="Set it, or pack all records again",
            )
        )
    if config.validation_fraction:
        raise ConfigError(
            "validation_fraction makes two datasets of its own: set it for pack()."
        )
    return config


def _check_adjustable(base: Dataset, settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that the dataset decides."""
    for name in settings:
        if name in PackConfig.names() and name not in _ADJUSTABLE:
            rule = "append packs with the settings of the dataset, "
            rule += f"so {name} must be left out"
            raise ConfigError(sentence(base.url, rule))
    # Any other answer, e.g. to truncate, packs records unlike the dataset's.
    for reason, answer in settings.get("on", {}).items():
        if answer not in ("drop", "error"):
            rule = "append packs as the dataset does: "
            rule += f"on, {reason}, may be drop or error"
            raise ConfigError(sentence(where=base.url, rule=rule, found=quote(answer)))


def _recorded_settings(base: Dataset) -> dict[str, Any]:
    """Return the settings that a dataset records and decides, except `on`.

    Raises:
        ConfigError: another release recorded a setting that this one does not have.
    """
    manifest = base.manifest
    recorded = manifest.provenance["settings"]
    unknown_names = sorted(recorded.keys() - set(PackConfig.names()))
    if unknown_names:
        rule = "append packs with the settings of the dataset, so all must be known"
        names = ", ".join(repr(name) for name in unknown_names)
        remedy = "Append with the version of packstore that made it"
        raise ConfigError(
            sentence(where=base.url, rule=rule, found=names, remedy=remedy)
        )

    # The number of partitions follows from the bytes of the new records. The name of an
    # adapter is not taken from a manifest, because a forged one would make append run
    # code.
    undecided = {*RunConfig.names(), "partitions", "adapter", "on"}
    values: dict[str, Any] = {}
    for name, value in recorded.items():
        if name not in undecided:
            # Settings hold tuples, which JSON has as lists.
            values[name] = tuple(value) if isinstance(value, list) else value
    if values.get("chat_template") not in (None, "chatml", "plain"):
        # The path of a template may have changed: the manifest has its text.
        tokenizer = manifest.provenance.get("tokenizer") or {}
        values["chat_template"] = tokenizer.get("chat_template")
    values |= {
        "kind": manifest.kind,
        "layout": manifest.layout,
        "pack_size": manifest.pack_size,
        "strategy": manifest.strategy,
        "seed": manifest.seed,
        "format": manifest.file_format,
        "carry": tuple(f"{name}:{type_}" for name, type_ in manifest.carry.items()),
    }
    return values


def _check_reading(base: Dataset, adapter: Adapter | None) -> None:
    """Raise ConfigError if the form or adapter that read a dataset's records has
    changed, so that new records would be read in another way.
    """
    recorded = base.manifest.provenance.get("reading", {})
    if "form" in recorded:
        _check_form(base, recorded["form"], recorded.get("form_version"))
    if "adapter" in recorded:
        sha256 = recorded.get("adapter_sha256")
        _check_adapter(base, recorded["adapter"], sha256, adapter)


_READING_RULE = "append reads records as the dataset was read"


def _check_form(base: Dataset, name: str, recorded_version: int | None) -> None:
    """Raise ConfigError if this release has another version of a form."""
    form = load_forms().get(name)
    version = form.version if form is not None else None
    if version != recorded_version:
        raise ConfigError(
            sentence(
                where=base.url,
                rule=_READING_RULE,
                found=f"the form {name} of version {recorded_version}, now {version}",
                remedy="Append with the version of packstore that made it, or pack "
                "anew",
            )
        )


def _check_adapter(
    base: Dataset, name: str, sha256: str | None, adapter: Adapter | None
) -> None:
    """Raise ConfigError if the adapter that read a dataset is not passed, or has
    changed.
    """
    if adapter is None:
        argument = "adapter=FUNCTION"
        if ":" in name:  # it can be loaded by its name
            argument = spell(current_door(), {"adapter": name})
        raise ConfigError(
            sentence(
                where=base.url,
                rule=_READING_RULE,
                found=f"no adapter {quote(name)}",
                remedy="Give the function that reads them, if you trust it "
                f"({argument})",
            )
        )
    if adapter.sha256 != sha256:
        raise ConfigError(
            sentence(
                where=base.url,
                rule=_READING_RULE,
                found=f"{adapter.name}, whose file has changed",
                remedy="Restore it, or pack anew",
            )
        )


def _log_appended(base: Dataset, extended: Dataset) -> None:
    added = extended.manifest.records.packed - base.manifest.records.packed
    log.info(
        "appended %s records: version %d of %s",
        f"{added:,}",
        extended.version,
        extended.url,
    )


# Concatenate.


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
