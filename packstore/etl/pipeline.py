"""Packs records into a committed dataset, in a straight line:

    input -> partitions, each: read -> tokenize -> spill -> plan -> fill -> write ->
    note -> commit

A *partition* is a part of the input that is packed on its own; a small input is one.
*Spilling* keeps tokenized examples on the local disk until their packs are planned. A
*note* is a small file beside a finished partition's shards, by which a rerun of the job
finds and reuses them. Nothing is visible to a reader before the one commit. Shards and
notes that a job put before it failed stay for its rerun, or until ``packstore clean``
removes them.

Duplicates may lie in different partitions. To drop them (`dedup`), all partitions are
read once before, only for the keys of their examples.

With `validation_fraction` a job makes two datasets, the *splits* ``train`` and
``validation``; the only dataset of another job has the split None.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import (
    Callable,
    Generator,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from packstore.config import PackConfig
from packstore.errors import ConfigError, DatasetExistsError, WrongEngineError, sentence
from packstore.etl.dedup_and_split import find_duplicates, split_names, stored_keys
from packstore.etl.engines import ENGINES, Run, engine_with, local
from packstore.etl.partitions.resume import Partition, WrittenPacks
from packstore.etl.partitions.slices import (
    MANY_READS,
    READERS,
    Assignment,
    Slice,
    assign_slices,
    read_keys,
)
from packstore.etl.partitions.work import PartitionPacker, run_as_task
from packstore.etl.provenance import find_committed, run_name
from packstore.etl.rejects import RejectsFile, real_place
from packstore.etl.sources import (
    ExampleReader,
    RecordExampleReader,
    find_dataset_source,
    open_examples,
    packing_settings,
)
from packstore.etl.token_values import put_token_values, values_location
from packstore.etl.totals import RecordTotals, count_records
from packstore.format.arrays import Int64
from packstore.format.seeds import U64
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.pack_index import put_index
from packstore.io.manifest import commit
from packstore.io.manifest.manifest import build_manifest, manifest_bytes
from packstore.io.manifest.partition_notes import PartitionNotes
from packstore.io.shards.shard import PackShape
from packstore.io.store.location import Location
from packstore.io.versions.write_job import WriteJob, writing
from packstore.pack.algorithms import STRATEGIES
from packstore.pack.plan import merged_statistics
from packstore.progress import Progress
from packstore.tokenizer.fastest import force_reference_engine
from packstore.tokenizer.records.adapters import Adapter, adapter_of, load_adapter

log = logging.getLogger("packstore")

MIN_TASKS = 4
"""Minimum number of partitions, and of workers of this machine, for which each worker
process makes partitions on its own, like a task of a cluster. With fewer, one process
reads and writes for all workers; that is never faster than about three cores
(``benchmarks/scale.py``).
"""

MIN_TASK_BYTES = 1 << 28
"""Minimum mean bytes of a partition that a worker process of this machine makes."""


def pack(
    source: Any,
    out: str,
    tokenizer: Any = None,
    *,
    config: PackConfig | None = None,
    adapter: Callable[[dict[str, Any]], Any] | str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    source_storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Dataset:
    """Tokenize records, pack them, and commit them as a dataset.

        >>> dataset = packstore.pack(
        ...     "prefs.jsonl", "prefs-8k", tokenizer="tokenizer.json", pack_size=8192
        ... )
        >>> dataset.manifest.fill_rate, dataset.manifest.records

    Args:
        source: path, glob, URL, folder, or a list of them (``.jsonl .json .parquet
            .arrow .csv``, also ``.gz`` and ``.zst``, or of ``save_to_disk``); an Arrow
            table, a Polars frame, a Hugging Face ``Dataset``, an iterable of dicts; or
            a packstore dataset, which is packed again without tokenizing.
        out: folder or any fsspec URL that will hold the dataset.
        tokenizer: ``tokenizer.json``, a Hugging Face folder or name on the hub, a
            SentencePiece ``.model``, a ``tokenizers.Tokenizer``, or a fast tokenizer of
            transformers. Not for a packstore dataset.
        config: all settings as one object. Without it, a packstore dataset is packed
            again with its own settings, unless others are in `settings`.
        adapter: a function from a record to a :class:`packstore.Pair`,
            :class:`packstore.Answers`, :class:`packstore.Chat` or
            :class:`packstore.Drop`, or its name, ``module:function`` or
            ``file.py:function``.
        storage_options: passed to the fsspec filesystems of `out` and `source`.
        source_storage_options: passed to the filesystems of `source` instead, if it
            lies elsewhere.
        progress: called with stage, done, total and unit, often.
        settings: fields of :class:`packstore.PackConfig`; they override `config`.

    Returns:
        The committed dataset. ``manifest.records`` counts every record that was read.
        With `validation_fraction` it is the dataset in ``OUT/train``; the other one is
        in ``OUT/validation``.
    """
    require_path(
        out,
        where="out",
        rule="must be the place of the new dataset, which comes after the records",
    )
    options = dict(storage_options or {})
    source_options = options
    if source_storage_options is not None:
        source_options = dict(source_storage_options)
    source, config = resolve_settings(source, source_options, config, settings)
    config, loaded_adapter = with_adapter(config, adapter)
    STRATEGIES.check(config.strategy)
    ENGINES.check(config.engine)
    open_source = partial(
        open_examples,
        source,
        tokenizer,
        config,
        source_options,
        adapter=loaded_adapter,
    )

    location = Location(out, options)
    locations = locate_splits(location, config)
    existing: dict[str | None, Dataset] = {}
    if not config.overwrite:
        existing = find_committed(locations, open_source, config)
    if existing and len(existing) == len(locations):
        log.info("%s: already there, same input and settings", location.display)
        return next(iter(existing.values()))

    with contextlib.ExitStack() as stack:
        jobs: dict[str | None, WriteJob] = {}
        for split, split_location in locations.items():
            if split in existing:
                jobs[split] = WriteJob.of_committed(existing[split])
                continue
            job = stack.enter_context(writing(split_location, config.overwrite))
            jobs[split] = job
        pack_into(jobs, source, open_source, config, progress)
    datasets = [job.committed for job in jobs.values()]
    for dataset in datasets:
        _log_result(dataset)
    return datasets[0]


def locate_splits(location: Location, config: PackConfig) -> dict[str | None, Location]:
    """Return the location of each dataset that a job makes; None: it makes one."""
    return {
        split: location if split is None else location.join(split)
        for split in split_names(config)
    }


def resolve_settings(
    source: Any,
    storage_options: Mapping[str, Any],
    config: PackConfig | None,
    settings: Mapping[str, Any],
) -> tuple[Any, PackConfig]:
    """Return the source, opened if it is a packed dataset, and the settings of the job.

    Without `config`, a dataset that is packed again keeps its settings, except those in
    `settings`.
    """
    dataset = find_dataset_source(source, storage_options)
    if dataset is None:
        return source, PackConfig.of(config, **settings)
    if config is None:
        kept_settings = packing_settings(dataset.manifest)
        # The layout concat shares no prefixes, so only one of the two can be kept.
        if settings.get("layout") == "concat":
            kept_settings.pop("share_prefixes", None)
        if settings.get("share_prefixes") == "pack":
            kept_settings.pop("layout")
        settings = {**kept_settings, **settings}
    return dataset, PackConfig.of(config, **settings)


def with_adapter(
    config: PackConfig, adapter: Callable[[dict[str, Any]], Any] | str | None
) -> tuple[PackConfig, Adapter | None]:
    """Return the settings with the name of an adapter, and the adapter itself.

    Args:
        config: settings, which may name an adapter.
        adapter: a function or its name; it takes precedence over the settings.
    """
    if adapter is None:
        adapter = config.adapter
    if adapter is None:
        return config, None
    if callable(adapter):
        loaded_adapter = adapter_of(adapter)
    else:
        loaded_adapter = load_adapter(str(adapter))
    if not loaded_adapter.is_importable:  # such as a lambda, which has no pickle
        log.info("the adapter %s runs in this process alone", loaded_adapter.name)
    return replace(config, adapter=loaded_adapter.name), loaded_adapter


def require_path(value: object, where: str, rule: str) -> None:
    """Raise ConfigError if an argument is no path or URL, as arguments may be swapped.

    Args:
        value: the argument.
        where: its name in the message.
        rule: the rule of the message.
    """
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(
            sentence(
                where=where, rule=rule, found=type(value).__name__, remedy="Swap them"
            )
        )


def pack_into(
    jobs: Mapping[str | None, WriteJob],
    source: Any,
    open_source: Callable[[], ExampleReader],
    config: PackConfig,
    progress: Progress | None,
) -> None:
    """Pack a source, and commit the dataset of each job.

    If the faster engine of the tokenizer gives wrong ids, all records are tokenized
    again with the reference.

    Args:
        jobs: name of a dataset, see :func:`split_names`, -> the job that writes it.
        source: the records or the dataset.
        open_source: opens `source`.
        config: settings.
        progress: see :func:`pack`.
    """
    try:
        _pack(jobs, open_source(), config, progress)
    except WrongEngineError as error:
        if isinstance(source, Iterator):  # read only once
            raise
        log.warning("%s All records are tokenized again, with the reference.", error)
        force_reference_engine(error.tokenizer)
        _pack(jobs, open_source(), config, progress)


def _pack(
    jobs: Mapping[str | None, WriteJob],
    reader: ExampleReader,
    config: PackConfig,
    progress: Progress | None,
) -> None:
    """Pack the examples of a reader, and commit the dataset of each job."""
    if isinstance(reader, RecordExampleReader):
        reader.announce()
    config = replace(config, layout=reader.layout, partitions=reader.partitions)
    for job in jobs.values():
        job.check_fits(reader.kind, reader.carry, reader.provenance)

    # The datasets to append to, if new records are compared with their examples.
    bases: list[Dataset] = []
    if config.dedup != "none":
        bases = [job.extends for job in jobs.values() if job.extends is not None]
    notes = _open_notes(jobs, reader, bases)
    shape = PackShape(
        kind=reader.kind,
        layout=config.layout,
        pack_size=config.pack_size,
        carry=reader.carry,
        vocab_size=reader.vocab_size,
    )
    inputs = [item.location for item in reader.inputs]
    locations = [job.location for job in jobs.values()]
    for job in jobs.values():
        _refuse_among_inputs(job, inputs)

    with RejectsFile(config.rejects, locations[0].storage_options, inputs) as rejects:
        totals = RecordTotals(jobs, reader, config, rejects, progress)
        packing = PartitionPacker(
            notes=notes,
            shape=shape,
            config=config,
            paths=reader.paths,
            stored_keys=stored_keys(bases) if bases else None,
        )
        packs_of_datasets = _write_partitions(packing, reader, totals, locations)
    for (split, job), packs in zip(jobs.items(), packs_of_datasets, strict=True):
        if not job.has_committed:
            _commit(job, split, packs, packing, totals, reader, progress)
    for note in notes:
        note.remove()


def _open_notes(
    jobs: Mapping[str | None, WriteJob],
    reader: ExampleReader,
    bases: Sequence[Dataset],
) -> list[PartitionNotes]:
    """Open the notes of each job; log if there are notes of other runs.

    Args:
        jobs: split -> the job that writes its dataset.
        reader: the source of examples.
        bases: the datasets that new records are compared with, to find duplicates.
    """
    # The last one is the last to be extended. So it is the same for a rerun of a job
    # that was killed between two commits.
    base_fingerprint = bases[-1].manifest.fingerprint if bases else None
    notes = []
    for split, job in jobs.items():
        run = run_name(reader, split, base_fingerprint)
        notes.append(PartitionNotes(_absolute(job.location), run))
    for note in notes:
        num_others = note.count_other_runs()
        if num_others:
            log.info(
                "%d finished partitions of other jobs are there: see `packstore clean`",
                num_others,
            )
    return notes


def _refuse_among_inputs(job: WriteJob, inputs: Iterable[Location]) -> None:
    """Raise DatasetExistsError if a new dataset would lie in the folder of an input.

    The folder would then be read as a packed dataset, and no more as an input.
    """
    folder = real_place(job.location).rstrip("/")
    neighbours = [
        item.display for item in inputs if os.path.dirname(real_place(item)) == folder
    ]
    if neighbours and job.version == 1:
        rule = "a dataset needs a folder without its inputs"
        remedy = "Name another folder for it, e.g. one below this one"
        raise DatasetExistsError(
            sentence(
                where=job.location.display,
                rule=rule,
                found=neighbours[0],
                remedy=remedy,
            )
        )


def _write_partitions(
    packing: PartitionPacker,
    reader: ExampleReader,
    totals: RecordTotals,
    locations: Sequence[Location],
) -> list[list[WrittenPacks]]:
    """Pack and write all partitions.

    Returns:
        For each dataset, in the order of `locations`, its packs of each partition.
    """
    packs_of_datasets: list[list[WrittenPacks]] = [[] for _ in locations]
    with contextlib.closing(_partitions(packing, reader, totals)) as partitions:
        for number, partition in enumerate(partitions):
            if number == 0:  # now, not at the end of a long job
                _check_growth(partition, packing.config.partitions or 1, locations)
            for dataset_number, packs in enumerate(partition.packs):
                packs_of_datasets[dataset_number].append(packs)
    return packs_of_datasets


def _check_growth(
    first: Partition, num_partitions: int, locations: Sequence[Location]
) -> None:
    """Raise if the manifests would be larger than readers accept.

    The size is estimated from the first partition, with a margin of one half, as
    partitions differ.
    """
    for location, packs in zip(locations, first.packs, strict=True):
        shards = [shard.shard for shard in packs.shards]
        size = num_partitions * manifest_bytes(shards)
        if size > 1.5 * commit.MAX_MANIFEST_BYTES:
            estimate = f"about {size} from {num_partitions} partitions"
            raise commit.manifest_too_large(location.display, estimate)


def _partitions(
    packing: PartitionPacker, reader: ExampleReader, totals: RecordTotals
) -> Generator[Partition, None, None]:
    """Yield all partitions in order: packed and written, or reused from a note."""
    totals.add_records(0)  # shows the progress before the first block is read
    if isinstance(reader, RecordExampleReader) and reader.inputs:
        yield from _partitions_of_files(packing, reader, totals)
    else:
        yield from packing.pack_examples(reader, totals)


def _partitions_of_files(
    packing: PartitionPacker, reader: RecordExampleReader, totals: RecordTotals
) -> Iterator[Partition]:
    """Yield the partitions of files, made by tasks or by this process."""
    config = packing.config
    slices = _assign_slices(reader, config.partitions or 1)
    in_tasks = _should_run_in_tasks(reader, config, slices)
    num_workers = config.num_workers
    if in_tasks and config.engine == "local":
        num_workers = num_workers or local.cores()
    elif in_tasks:
        _warn_about_many_reads(reader, slices)
    run = engine_with(config.engine, num_workers)

    duplicate_ids: list[Int64 | None] = [None] * len(slices)
    if config.dedup != "none" and len(slices) > 1:
        duplicate_ids[:] = _find_duplicates(
            packing, reader, slices, run, in_tasks, totals
        )
        # The ids have the duplicates of stored examples: tasks need no stored keys.
        packing = replace(packing, stored_keys=None)
    assignments = [
        Assignment(number, slices[number], duplicate_ids[number])
        for number in range(len(slices))
    ]

    pack_files = partial(packing.pack_files, reader.block_tokenizer())
    if in_tasks:
        partitions = run(partial(run_as_task, pack_files), assignments)
    else:
        partitions = pack_files(assignments, run, totals)
    num_resumed = 0
    for partition in partitions:
        if in_tasks:  # it is added here, as a task does not see the totals
            totals.add_finished(partition.contents, partition.num_packs)
        num_resumed += partition.is_resumed
        yield partition
    totals.add_packs(packs=0, remaining=0)  # completes the progress
    if num_resumed:
        text = "took over %d of %d partitions of an interrupted run"
        log.info(text, num_resumed, len(slices))


def _assign_slices(
    reader: RecordExampleReader, num_partitions: int
) -> list[list[Slice]]:
    """Return the slices of each partition, that is, the blocks that it reads."""
    files_and_sizes = []
    for item, size in zip(reader.inputs, reader.file_sizes, strict=True):
        file = replace(item, location=_absolute(item.location))
        files_and_sizes.append((file, size))
    return assign_slices(files_and_sizes, num_partitions)


def _should_run_in_tasks(
    reader: RecordExampleReader, config: PackConfig, slices: Sequence[Sequence[Slice]]
) -> bool:
    """Return True if each worker makes partitions on its own, from reading to writing.

    Else this process reads and writes, and workers tokenize.
    """
    num_partitions = len(slices)
    if num_partitions == 1 or not reader.can_run_in_tasks:
        return False
    if config.engine != "local":
        return True
    num_workers = config.num_workers or local.cores()
    if min(num_partitions, num_workers) < MIN_TASKS:
        return False
    if sum(reader.file_sizes) < num_partitions * MIN_TASK_BYTES:
        return False
    return _reads_per_file(reader, slices) <= MANY_READS


def _reads_per_file(
    reader: RecordExampleReader, slices: Sequence[Sequence[Slice]]
) -> float:
    """Return the mean number of partitions that read a file, to take their blocks."""
    num_slices = sum(len(partition_slices) for partition_slices in slices)
    return num_slices / len(reader.inputs)


def _warn_about_many_reads(
    reader: RecordExampleReader, slices: Sequence[Sequence[Slice]]
) -> None:
    """Warn if the tasks of a cluster will mostly read."""
    reads_per_file = _reads_per_file(reader, slices)
    if reads_per_file > MANY_READS:
        log.warning(
            "%d partitions take blocks of %d files, so each file is read %.0f times: "
            "reading may take longer than packing. With %d files it would be read %d "
            "times",
            len(slices),
            len(reader.inputs),
            reads_per_file,
            4 * len(slices),
            READERS,
        )


def _find_duplicates(
    packing: PartitionPacker,
    reader: RecordExampleReader,
    slices: Sequence[Sequence[Slice]],
    run: Run,
    in_tasks: bool,
    totals: RecordTotals,
) -> list[Int64]:
    """Read all files for the keys of their examples.

    Returns:
        For each partition the sorted ids of its duplicates, int64 `[n]`.
    """
    read = partial(read_keys, reader.block_tokenizer(), packing.config)
    if in_tasks:
        results = run(partial(run_as_task, read), slices)
    else:
        results = read(slices, run, totals.add_keys)
    keys: list[U64] = []
    ids: list[Int64] = []
    for partition_keys, partition_ids in results:
        keys.append(partition_keys)
        ids.append(partition_ids)
    # Tasks do not see the totals.
    num_uncounted = sum(len(ids_) for ids_ in ids) if in_tasks else 0
    totals.add_keys(num_uncounted, size=0, last=True)

    if packing.stored_keys is None:
        return find_duplicates(keys, ids)
    # The examples of the dataset count as one more partition. With ids of -1 they come
    # before all others, so that new examples are the duplicates.
    stored_ids = np.full(len(packing.stored_keys), -1)
    duplicate_ids = find_duplicates(
        keys=[packing.stored_keys, *keys], ids=[stored_ids, *ids]
    )
    return duplicate_ids[1:]


def _commit(
    job: WriteJob,
    split: str | None,
    packs_of_partitions: Sequence[WrittenPacks],
    packing: PartitionPacker,
    totals: RecordTotals,
    reader: ExampleReader,
    progress: Progress | None,
) -> None:
    """Commit the packs of all partitions in one dataset, after the values of their
    tokens.
    """
    config = packing.config
    shards = [shard for packs in packs_of_partitions for shard in packs.shards]
    plans = [packs.planning for packs in packs_of_partitions if packs.planning]
    # An append may add no packs to one of two splits.
    planning = merged_statistics(plans) if plans else {}
    planning["partitions"] = config.partitions
    records = count_records(totals.tally_for_split(split))
    provenance = totals.provenance(split)
    manifest = build_manifest(
        packing.shape,
        config,
        shards,
        records=records,
        planning=planning,
        provenance=provenance,
    )

    new_sizes = (shard.sizes for shard in shards)
    extended = None if job.extends is None else job.extends.manifest
    pack_index = put_index(job.location, new_sizes, job.version, extended)
    if isinstance(reader, RecordExampleReader) and config.token_values:
        dataset = Dataset(job.location, manifest, job.version)
        values = values_location(job.location, config, split)
        put_token_values(dataset, values, reader, config, progress)
    job.require_shards(manifest.shards)
    job.commit(job.extended_manifest(replace(manifest, pack_index=pack_index)))


def _absolute(location: Location) -> Location:
    """Return the location with an absolute path, for processes in other folders."""
    path = location.local_path
    return location if path is None else Location(path)


def _log_result(dataset: Dataset) -> None:
    manifest = dataset.manifest
    log.info(
        "packed %s of %s records into %s packs: %s tokens, fill rate %.2f %%",
        f"{manifest.records.packed:,}",
        f"{manifest.records.read:,}",
        f"{manifest.num_packs:,}",
        f"{manifest.totals.tokens:,}",
        100 * manifest.fill_rate,
    )
    if not manifest.statistics.planning.get("shuffle", True):
        log.info(
            "kept the order of the input (shuffle=False): packs hold neighbours of the "
            "input"
        )
