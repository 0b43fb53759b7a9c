"""Packs records into a committed dataset, in a straight line:

    input -> partitions, each: read -> tokenize -> spill -> plan -> fill -> write ->
    note -> commit

A small input is one partition. Nothing is visible to a reader before the one commit.
Shards and notes that a job put before it failed stay for its rerun, or until
``packstore clean`` removes them.

Duplicates may lie in different partitions. To drop them (`dedup`), all partitions are
read once before, only for the keys of their examples.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from packstore.config import PackConfig
from packstore.errors import ConfigError, DatasetExistsError, WrongEngineError, sentence
from packstore.etl.dedup_and_split import duplicates, split_names, stored_keys
from packstore.etl.engines import ENGINES, engine_with, local
from packstore.etl.partitions.resume import Partition, Written, check_growth
from packstore.etl.partitions.slices import MANY_READS, READERS, read_keys, split
from packstore.etl.partitions.work import PackPartitions, run_as_task
from packstore.etl.provenance import find_committed, run_name
from packstore.etl.rejects import RejectsFile, identity
from packstore.etl.sources import ExampleReader, RecordExampleReader, open_examples
from packstore.etl.totals import RecordTotals, count_records
from packstore.format.arrays import Int64
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.pack_index import put_index
from packstore.io.manifest.manifest import build_manifest
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

TASKS, TASK_BYTES = 4, 1 << 28
"""Partitions, and workers of this machine, from which on each worker process makes
partitions on its own, like a task of a cluster, and their least mean size. One process
that reads and writes for all workers is never faster than about three cores
(``benchmarks/scale.py``).
"""


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
    """Tokenizes records, packs them, and commits them as a dataset.

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
            transformers. Not for a
            packstore dataset.
        config: all settings as one object.
        adapter: a function from a record to a :class:`packstore.Pair`,
            :class:`packstore.Answers`, :class:`packstore.Chat` or
            :class:`packstore.Drop`, or its name, ``module:function`` or
            ``file.py:function``.
        storage_options: passed to the fsspec filesystems of `out` and `source`.
        source_storage_options: passed to those of `source` instead, if it lies
            elsewhere.
        progress: called with stage, done, total and unit, often.
        settings: fields of :class:`packstore.PackConfig`; they override `config`.

    Returns:
        The committed dataset. ``manifest.records`` counts every record that was read.
        With `validation_fraction` it is the dataset in ``OUT/train``; the other one is
        in ``OUT/validation``.
    """
    config, loaded = with_adapter(PackConfig.of(config, **settings), adapter)
    require_path(
        out,
        "out",
        "must be the place of the new dataset, which comes after the records",
    )
    STRATEGIES.check(config.strategy)
    ENGINES.check(config.engine)
    options = dict(storage_options or {})
    source_options = (
        options if source_storage_options is None else dict(source_storage_options)
    )
    place = Location(out, options)
    places = {
        part: place if part is None else place.join(part)
        for part in split_names(config)
    }
    existing: dict[str | None, Dataset] = {}
    if not config.overwrite:
        reopen = partial(
            open_examples, source, tokenizer, config, source_options, adapter=loaded
        )
        existing = find_committed(places, reopen, config)
    if existing and len(existing) == len(places):
        log.info("%s: already there, same input and settings", place.display)
        return next(iter(existing.values()))
    with contextlib.ExitStack() as stack:
        jobs = {
            part: stack.enter_context(
                writing(place, config.overwrite or part in existing)
            )
            for part, place in places.items()
        }
        pack_into(jobs, source, source_options, tokenizer, config, progress, loaded)
    committed = [job.committed for job in jobs.values()]
    for dataset in committed:
        _log_result(dataset)
    return committed[0]


def with_adapter(
    config: PackConfig, adapter: Callable[[dict[str, Any]], Any] | str | None
) -> tuple[PackConfig, Adapter | None]:
    """Return the settings with the name of an adapter, and the adapter itself, if there
    is one.
    """
    if adapter is None and config.adapter is None:
        return config, None
    if callable(adapter):
        loaded = adapter_of(adapter)
    else:
        loaded = load_adapter(str(adapter if adapter is not None else config.adapter))
    if not loaded.is_importable:
        log.info("the adapter %s runs in this process alone", loaded.name)
    return replace(config, adapter=loaded.name), loaded


def require_path(value: object, where: str, rule: str) -> None:
    """Raises ConfigError for what is no path or URL: arguments may be in the wrong
    order.
    """
    if not isinstance(value, str | os.PathLike):
        raise ConfigError(sentence(where, rule, type(value).__name__, "Swap them"))


def pack_into(
    jobs: Mapping[str | None, WriteJob],
    source: Any,
    source_options: Mapping[str, Any],
    tokenizer: Any,
    config: PackConfig,
    progress: Progress | None,
    adapter: Adapter | None = None,
) -> None:
    """Packs into open jobs; again with the reference if a faster way to encode gives
    wrong ids.
    """
    reopen = partial(
        open_examples, source, tokenizer, config, dict(source_options), adapter=adapter
    )
    try:
        _pack(jobs, reopen(), config, progress)
    except WrongEngineError as error:
        if isinstance(source, Iterator):  # read only once
            raise
        log.warning("%s All records are tokenized again, with the reference.", error)
        force_reference_engine(error.tokenizer)
        _pack(jobs, reopen(), config, progress)


def _pack(
    jobs: Mapping[str | None, WriteJob],
    reader: ExampleReader,
    config: PackConfig,
    progress: Progress | None,
) -> None:
    """Packs and commits the dataset of each part, see :func:`split_names`."""
    if isinstance(reader, RecordExampleReader):
        reader.announce()
    config = replace(config, partitions=reader.partitions)
    for job in jobs.values():
        job.check_fits(reader.kind, reader.carry, reader.provenance)
    # No job that extends a dataset has parts.
    base = next(iter(jobs.values())).extends if config.dedup != "none" else None
    after = None if base is None else base.manifest.fingerprint
    notes = [
        PartitionNotes(_absolute(job.location), run_name(reader, part, after))
        for part, job in jobs.items()
    ]
    for others in filter(None, (note.count_other_runs() for note in notes)):
        log.info(
            "%d finished partitions of other jobs are there: see `packstore clean`",
            others,
        )
    locations = [job.location for job in jobs.values()]
    shape = PackShape(
        kind=reader.kind,
        layout=config.layout,
        pack_size=config.pack_size,
        carry=reader.carry,
        vocab_size=reader.vocab_size,
    )
    inputs = [item.location for item in reader.inputs]
    for job in jobs.values():
        _refuse_among_inputs(job, inputs)
    with RejectsFile(config.rejects, locations[0].storage_options, inputs) as rejects:
        totals = RecordTotals(jobs, reader, config, rejects, progress)
        known = None if base is None else stored_keys(base)
        packing = PackPartitions(notes, shape, config, reader.paths, known)
        written: list[list[Written]] = []
        with contextlib.closing(_partitions(packing, reader, totals)) as partitions:
            for partition in partitions:
                if not written:  # the job would fail at its end
                    check_growth(partition, config.partitions or 1, locations)
                written.append(partition.written)
    for (part, job), packs in zip(
        jobs.items(), zip(*written, strict=True), strict=True
    ):
        planning = merged_statistics([w.planning for w in packs if w.planning])
        planning["partitions"] = config.partitions
        shards = [shard for w in packs for shard in w.shards]
        records = count_records(totals.tally_for_split(part))
        provenance = totals.provenance(part)
        manifest = build_manifest(shape, config, shards, records, planning, provenance)
        sizes = itertools.chain(job.base_sizes(), (shard.sizes for shard in shards))
        index = put_index(job.location, sizes, job.version)
        job.require_shards(manifest.shards)
        job.commit(job.extended_manifest(replace(manifest, pack_index=index)))
    for note in notes:
        note.remove()


def _refuse_among_inputs(job: WriteJob, inputs: Iterable[Location]) -> None:
    """Refuses a new dataset in the very folder of an input: that could not be read as
    one again.
    """
    place = identity(job.location).rstrip("/")
    beside = [i.display for i in inputs if os.path.dirname(identity(i)) == place]
    if beside and job.version == 1:
        rule = "a dataset needs a folder without its inputs"
        remedy = "Name another folder for it, e.g. one below this one"
        raise DatasetExistsError(
            sentence(job.location.display, rule, beside[0], remedy)
        )


def _partitions(
    packing: PackPartitions, reader: ExampleReader, totals: RecordTotals
) -> Generator[Partition, None, None]:
    """Yields all partitions in order, each packed and written, or taken over from a
    note.
    """
    totals.add_records(0)
    config, known = packing.config, packing.known
    if not isinstance(reader, RecordExampleReader) or not reader.inputs:
        yield from packing.pack_examples(reader, totals)
        return
    number = config.partitions or 1
    workers = config.num_workers
    inputs = [replace(i, location=_absolute(i.location)) for i in reader.inputs]
    slices = split(list(zip(inputs, reader.sizes, strict=True)), number)
    reads = sum(map(len, slices)) / len(inputs)
    in_tasks = number > 1 and config.engine != "local" and reader.can_run_in_tasks
    large = sum(reader.sizes) >= number * TASK_BYTES and reads <= MANY_READS
    large = large and reader.can_run_in_tasks
    if not in_tasks and large and min(number, workers or local.cores()) >= TASKS:
        in_tasks, workers = True, workers or local.cores()
    run = engine_with(config.engine, workers)
    if in_tasks and reads > MANY_READS:
        log.warning(
            "%d partitions take blocks of %d files, so each file is read %.0f times: "
            "reading may "
            "take longer than packing. With %d files it would be read %d times",
            *(number, len(inputs), reads, 4 * number, READERS),
        )
    repeated: list[Int64 | None] = [None] * number
    if config.dedup != "none" and number > 1:
        read = partial(read_keys, reader.tokenize(), config)
        reading = partial(run_as_task, read)
        keyed = run(reading, slices) if in_tasks else read(slices, run, totals.add_keys)
        keys, ids = zip(*keyed, strict=True)
        totals.add_keys(sum(map(len, keys)) if in_tasks else 0, 0, last=True)
        stored = np.empty(0, np.uint64) if known is None else known
        before = np.full(len(stored), -1)
        repeated = list(duplicates([stored, *keys], [before, *ids])[1:])
        packing = replace(packing, known=None)
    items = list(zip(range(number), slices, repeated, strict=True))
    work, reused = partial(packing.pack_files, reader.tokenize()), 0
    done = (
        run(partial(run_as_task, work), items) if in_tasks else work(items, run, totals)
    )
    for partition in done:
        if in_tasks:
            totals.add_finished(partition.contents, partition.packs)
        reused += partition.resumed
        yield partition
    totals.add_packs(0, 0)
    if reused:
        log.info("took over %d of %d partitions of an interrupted run", reused, number)


def _absolute(location: Location) -> Location:
    """Returns the location with an absolute path, for processes in other folders."""
    path = location.local_path
    return location if path is None else Location(path)


def _log_result(dataset: Dataset) -> None:
    m = dataset.manifest
    log.info(
        "packed %s of %s records into %s packs: %s tokens, fill rate %.2f %%",
        *(
            f"{n:,}"
            for n in (m.records.packed, m.records.read, m.num_packs, m.totals.tokens)
        ),
        100 * m.fill_rate,
    )
    if not m.statistics.planning.get("shuffle", True):
        log.info(
            "kept the order of the input (shuffle=False): packs hold neighbours of the "
            "input"
        )
