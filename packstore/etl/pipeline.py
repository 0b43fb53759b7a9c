"""Packs records into a committed dataset, in a straight line:

    input -> partitions, each: read -> tokenize -> spill -> plan -> fill -> write -> note -> commit

A small input is one partition. Nothing is visible to a reader before the one commit. Shards and
notes that a job put before it failed stay for its rerun, or until ``packstore clean`` removes them.

Duplicates may lie in different partitions. To drop them (`dedup`), all partitions are read once
before, only for the keys of their examples.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from packstore.config import PackConfig
from packstore.errors import ConfigError, WrongEngineError
from packstore.etl.background import beside
from packstore.etl.dedup_and_split import Selection, duplicates
from packstore.etl.engines import ENGINES
from packstore.etl.finished import finished_before
from packstore.etl.partitions.resume import Partition, Written
from packstore.etl.partitions.scale import check_growth, warn_of_reads
from packstore.etl.partitions.slices import ReadKeys, split
from packstore.etl.partitions.work import InTask, PackPartitions
from packstore.etl.provenance import Counting, RecordTotals, commit, run_of, shape_of
from packstore.etl.rejects import RejectsFile
from packstore.etl.sources import ExampleReader, RecordExampleReader, open_examples
from packstore.etl.warm_up import warm_up
from packstore.format.arrays import Int64
from packstore.io.dataset.dataset import Dataset
from packstore.io.manifest.partition_notes import PartitionNotes
from packstore.io.store.location import Location
from packstore.io.write.write_job import WriteJob, writing
from packstore.pack.algorithms import STRATEGIES
from packstore.pack.plan import merged_statistics
from packstore.progress import Progress
from packstore.tokenizer.fastest import misread

WARNED = ("reward_reversed", "reward_default")
"""Events that usually mean a mistake in the data; logged as warnings."""

log = logging.getLogger("packstore")


def pack(
    source: Any,
    out: str,
    tokenizer: Any = None,
    *,
    config: PackConfig | None = None,
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
        source: path, glob, URL, folder, or a list of them (``.jsonl .json .parquet .arrow .csv``,
            also ``.gz`` and ``.zst``); an Arrow table, a Polars frame, an iterable of dicts; or a
            packstore dataset, which is packed again without tokenizing.
        out: folder or any fsspec URL that will hold the dataset.
        tokenizer: ``tokenizer.json``, a Hugging Face folder, a SentencePiece ``.model``, or a
            ``tokenizers.Tokenizer``. Not for a packstore dataset.
        config: all settings as one object.
        storage_options: passed to the fsspec filesystems of `out` and `source`.
        source_storage_options: passed to those of `source` instead, if it lies elsewhere.
        progress: called with stage, done, total and unit, often.
        settings: fields of :class:`packstore.PackConfig`; they override `config`.

    Returns:
        The committed dataset. ``manifest.records`` counts every record that was read. With
        `validation_fraction` it is the dataset in ``OUT/train``; the other one is in
        ``OUT/validation``.

    Raises:
        DatasetExistsError: a dataset of other input or settings is at `out`, and `overwrite` is
            False. One of the same input and settings is returned as it is, so a call may be
            repeated.
        PackstoreError: see :mod:`packstore.errors`; `out` keeps the versions that it had.
    """
    config = PackConfig.of(config, **settings)
    STRATEGIES.check(config.strategy)
    ENGINES.check(config.engine)
    options = dict(storage_options or {})
    of_source = options if source_storage_options is None else dict(source_storage_options)
    places: dict[str | None, Location] = {None: Location(out, options)}
    if len(parts := Selection(config, config.seed).parts) > 1:
        places = {part: places[None].join(part) for part in parts}
    there: dict[str | None, Dataset] = {}
    if not config.overwrite:
        opening = partial(open_examples, source, tokenizer, config, of_source)
        there = finished_before(places, opening, config)
    if there and len(there) == len(places):
        log.info("%s: already there, same input and settings", Location(out, options).display)
        return next(iter(there.values()))
    with contextlib.ExitStack() as stack:
        jobs = [
            stack.enter_context(writing(place, config.overwrite or part in there))
            for part, place in places.items()
        ]
        work = partial(_pack, jobs, source, of_source, tokenizer, config, progress)
        _falling_back(work, source)
    for job in jobs:
        _log_result(job.committed)
    return jobs[0].committed


def pack_into(
    job: WriteJob,
    source: Any,
    source_options: Mapping[str, Any],
    tokenizer: Any,
    config: PackConfig,
    progress: Progress | None = None,
) -> None:
    """Packs like :func:`pack`, into an open job; see :mod:`packstore.io.write.write_job`."""
    if config.validation_fraction:
        raise ConfigError("validation_fraction makes two datasets of its own: set it for pack().")
    work = partial(_pack, [job], source, source_options, tokenizer, config, progress)
    _falling_back(work, source)


def _falling_back(work: Callable[[], None], source: Any) -> None:
    """Runs `work`; if a faster way to encode gives wrong ids, again with the reference."""
    try:
        work()
    except WrongEngineError as error:
        if isinstance(source, Iterator):  # read only once
            raise
        log.warning("%s All records are tokenized again, with the reference.", error)
        misread(error.tokenizer)
        work()


def _pack(
    jobs: Sequence[WriteJob],
    source: Any,
    source_options: Mapping[str, Any],
    tokenizer: Any,
    config: PackConfig,
    progress: Progress | None,
) -> None:
    """Packs and commits the dataset of each part (train, and validation if set)."""
    beside(partial(warm_up, config))
    reader = open_examples(source, tokenizer, config, dict(source_options))
    config = replace(config, partitions=reader.partitions)
    for job in jobs:
        job.check_fits(reader.kind, reader.carry, reader.provenance)
    names = Selection(config, config.seed).parts
    parts = dict(zip(names if len(names) > 1 else (None,), jobs, strict=True))
    notes = [
        PartitionNotes(_absolute(job.location), run_of(reader, part)) for part, job in parts.items()
    ]
    counting = Counting(progress)
    inputs = [item.location for item in reader.inputs]
    options = jobs[0].location.storage_options
    with RejectsFile(config.rejects, options, inputs) as rejects:
        totals = RecordTotals(parts, reader, config, rejects, counting)
        made = _partitions(reader, notes, config, totals, counting)
        with contextlib.closing(made):
            written: list[list[Written]] = []
            places = [job.location for job in jobs]
            for partition in made:
                if not written:  # the job would fail at its end
                    check_growth(partition, config.partitions or 1, places)
                written.append(partition.written)
    for number, (part, job) in enumerate(parts.items()):
        own = [one[number] for one in written]
        known = totals.of_part(names[number]), _planning(own, config), totals.provenance(part)
        shards = [shard for one in own for shard in one.shards]
        commit(job, shape_of(reader, config), config, shards, known)
    for one in notes:
        one.remove()


def _partitions(
    reader: ExampleReader,
    notes: Sequence[PartitionNotes],
    config: PackConfig,
    totals: RecordTotals,
    counting: Counting,
) -> Generator[Partition, None, None]:
    """Yields all partitions in order, each packed and written, or taken over from a note."""
    counting.read(0)
    for other in notes:
        if others := other.of_others():
            text = "%d finished partitions of other jobs are there: see `packstore clean`"
            log.info(text, others)
    number = config.partitions or 1
    on_cluster = number > 1 and config.engine != "local"
    engine = ENGINES.load(config.engine)

    def run(work: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        return engine(work, items, config.num_workers)

    tokenize = reader.tokenize() if isinstance(reader, RecordExampleReader) else None
    work = PackPartitions(tokenize, notes, shape_of(reader, config), config, reader.paths)
    if not isinstance(reader, RecordExampleReader) or not reader.inputs:
        yield from work.of_parts(reader, counting, totals.add)
        return
    inputs = [replace(i, location=_absolute(i.location)) for i in reader.inputs]
    slices = split(list(zip(inputs, reader.sizes, strict=True)), number)
    if on_cluster:
        warn_of_reads(slices, len(inputs))
    repeated: list[Int64 | None] = [None] * number
    if config.dedup != "none" and number > 1:
        keys = ReadKeys(reader.tokenize(), config)
        found = run(InTask(keys), slices) if on_cluster else keys(slices, run, counting.keyed)
        known = list(found)
        repeated = [*duplicates([k for k, _ in known], [ids for _, ids in known])]
    items = list(zip(range(number), slices, repeated, strict=True))
    taken = 0
    made = run(InTask(work), items) if on_cluster else work(items, run, counting, totals.add)
    for partition in made:
        if on_cluster:
            counting.read(partition.contents.tally.read)
            totals.add(partition.contents)
            counting.wrote(partition.packs)
        taken += partition.resumed
        yield partition
    counting.wrote(0, 0)
    if taken:
        log.info("took over %d of %d partitions of an interrupted run", taken, number)


def _planning(written: Sequence[Written], config: PackConfig) -> dict[str, Any]:
    """Merges the statistics of all plans."""
    planned = [w.planning for w in written if w.planning]
    return {**merged_statistics(planned), "partitions": config.partitions}


def _absolute(location: Location) -> Location:
    """Returns the location with an absolute path, for processes in other folders."""
    path = location.local_path
    return location if path is None else Location(path)


def _log_result(dataset: Dataset) -> None:
    m = dataset.manifest
    log.info(
        "packed %s of %s records into %s packs: %s tokens, fill rate %.2f %%",
        *(f"{n:,}" for n in (m.records.packed, m.records.read, m.num_packs, m.totals.tokens)),
        100 * m.fill_rate,
    )
    if not m.statistics.planning.get("shuffle", True):
        log.info("kept the order of the input (shuffle=False): packs hold neighbours of the input")
    for event, count in m.records.noted.items():
        level = logging.WARNING if event in WARNED else logging.INFO
        log.log(level, "noted in %s records: %s", f"{count:,}", event)
