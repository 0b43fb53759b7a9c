"""Adds up the records of all partitions, and checks them against the settings.

A :class:`Tally` counts records: read, dropped (by reason), or kept with a remark (by
event). A task of a cluster counts its own partition; the process of the job adds the
tallies up, logs them, and refuses to commit if too many records were dropped.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from packstore.config import PackConfig
from packstore.errors import ConfigError, DropRateError, InputError, sentence
from packstore.etl.dedup_and_split import DUPLICATES, OTHER_SPLIT
from packstore.etl.events import PROBLEMS, meaning_of
from packstore.etl.provenance import provenance_of
from packstore.etl.rejects import RejectsFile
from packstore.etl.repeated_files import find_repeated_files
from packstore.etl.sources import ExampleReader, RecordExampleReader
from packstore.io.manifest.manifest import Records
from packstore.io.versions.write_job import AppendedBefore, WriteJob
from packstore.progress import Progress
from packstore.tokenizer.tally import Tally

REQUESTED_DROPS = (
    *DUPLICATES.values(),
    "unpaired_feedback",
    "tie",
    "different_contexts",
)
"""Reasons to drop that a setting requests, or that a public set has many of; they do
not count against `max_drop_rate`.
"""

log = logging.getLogger("packstore")


@dataclass(frozen=True, eq=False)
class Contents:
    """The records of a partition.

    Attributes:
        examples: number of examples in each dataset, in the order of `split_names`.
        tally: counts of the records.
        sources: ordinal of a file -> its path, bytes, hash and records.
        rejects: the dropped records, compressed; empty without the setting `rejects`.
    """

    examples: list[int]
    tally: Tally
    sources: dict[int, dict[str, Any]]
    rejects: bytes


class ProgressCounter:
    """Reports the progress over all partitions: records read, packs written.

    A *size* is in bytes of the input, or in records if the input is not files. The
    total number of records is estimated from the share of the size that was read.

    Args:
        report: called with the progress.
        size: size of the input, if known.
        num_partitions: number of partitions; each has about the same size.
    """

    def __init__(
        self,
        report: Progress | None = None,
        size: int | None = None,
        num_partitions: int = 1,
    ) -> None:
        self._report = report
        self._size = size or 0
        self._partition_size = self._size // num_partitions
        self._compared = _Count()
        self._read = _Count()
        self._packs_written = 0
        self._total_packs: int | None = None

    def add_keys(self, examples: int, size: int, last: bool = False) -> None:
        """Add examples of the first pass of `dedup`, which reads only keys.

        Arguments: see :meth:`add_records`.
        """
        self._compared.add(examples, size)
        self._report_count("compare", self._compared, last)

    def add_records(self, records: int, size: int = 0, last: bool = False) -> None:
        """Add records.

        Args:
            records: number of records.
            size: size of these records in the input.
            last: True if no more will follow.
        """
        self._read.add(records, size)
        self._report_count("read", self._read, last)

    def _report_count(self, stage: str, count: _Count, last: bool) -> None:
        if self._report is None:
            return
        total: int | None = None
        if last:
            total = count.records
        elif self._size and count.size:
            # More records may follow, so the estimate is above the number read.
            estimate = round(count.records * self._size / count.size)
            total = max(count.records + 1, estimate)
        self._report(stage, count.records, total, "records")

    def add_packs(self, packs: int, remaining: int | None = None) -> None:
        """Add packs that were written.

        Args:
            packs: number of packs.
            remaining: number of packs still to write, if known.
        """
        self._packs_written += packs
        total: int | None = None
        if remaining is not None:
            total = self._packs_written + remaining
        if self._report is not None and (packs or self._total_packs is None):
            self._report("write", self._packs_written, total, "packs")
        self._total_packs = total

    def add(self, contents: Contents) -> None:
        """Do nothing: in a task of a cluster, the process of the job adds them up."""

    def add_finished(self, contents: Contents, packs: int) -> None:
        """Add a partition that a task made, or an earlier run of the job."""
        self.add_records(contents.tally.read, self._partition_size)
        self.add(contents)
        self.add_packs(packs)


@dataclass
class _Count:
    """Records, and their size in the input."""

    records: int = 0
    size: int = 0

    def add(self, records: int, size: int) -> None:
        """Add records."""
        self.records += records
        self.size += size


class RecordTotals(ProgressCounter):
    """Adds up the records of all partitions, and checks them once all are read."""

    def __init__(
        self,
        jobs: Mapping[str | None, WriteJob],
        reader: ExampleReader,
        config: PackConfig,
        rejects: RejectsFile,
        progress: Progress | None,
    ) -> None:
        num_partitions = config.partitions or 1
        super().__init__(progress, reader.size, num_partitions)
        self._jobs = jobs
        self._reader = reader
        self._config = config
        self._rejects = rejects
        self._num_examples: dict[str | None, int] = dict.fromkeys(jobs, 0)
        self._tally = Tally()
        self._sources: dict[int, dict[str, Any]] = {}
        self._remaining_partitions = num_partitions
        self._provenances: dict[str | None, dict[str, Any]] = {}

    def add(self, contents: Contents) -> None:
        """Add the next partition, if possible before it is written.

        Raises:
            InputError: a file has changed since another partition read it.
            DropRateError: after the last partition: too many records were dropped.
            ConfigError: after the last partition: no record has a mapped field.
            AppendedBefore: after the last partition: the dataset has all records.
        """
        self._rejects.add_compressed(contents.rejects)
        self._tally.add(contents.tally)
        for split, num_examples in zip(
            self._num_examples, contents.examples, strict=True
        ):
            self._num_examples[split] += num_examples
        for ordinal, source in contents.sources.items():
            if self._sources.setdefault(ordinal, source) != source:
                rule = "must stay as it is while it is packed"
                raise InputError(
                    sentence(
                        where=source["path"],
                        rule=rule,
                        found="that it changed",
                        remedy="Run it again",
                    )
                )
        self._remaining_partitions -= 1
        if self._remaining_partitions == 0:
            self._finish()

    def _finish(self) -> None:
        """Log the totals, and raise if the job must not commit."""
        self.add_records(0, last=True)
        # If an earlier call appended these records, this one only returns the dataset,
        # and the rejects of the earlier call stay.
        is_repeated = any(
            job.has_inputs(self.provenance(split))
            for split, job in self._jobs.items()
            if not job.has_committed
        )
        if not is_repeated:
            self._rejects.publish()
        if self._config.dedup == "none":  # else duplicates are dropped, and counted
            _log_repeated_files(self._sources)
        log_forms(self._tally, self._reader.kind)
        _log_drops(self._tally)
        _log_events(self._tally)

        job = next(iter(self._jobs.values()))
        _check_drops(self._tally, self._config, self._reader.kind, job)
        if not self._tally.kept:
            # Of duplicates the first is kept, so all these are in the dataset already.
            raise AppendedBefore("every record to keep is a duplicate")
        _check_fields(self._tally, self._config, job)
        if isinstance(self._reader, RecordExampleReader):
            _log_later_columns(self._tally, self._reader.announced_columns)
        if job.extends is None:
            self._check_splits()
        for split, job in self._jobs.items():
            if job.extends is not None and job.has_committed:
                job.require_same_append(self.provenance(split))
            else:
                job.refuse_repeated_append(
                    self.provenance(split),
                    drops_duplicates=self._config.dedup != "none",
                )

    def _check_splits(self) -> None:
        """Raise DropRateError if a split of a new dataset has no example."""
        fraction = self._config.validation_fraction
        rule = f"both parts must get a record with validation_fraction {fraction}"
        total = sum(self._num_examples.values())
        for split, num_examples in self._num_examples.items():
            if num_examples == 0:
                raise DropRateError(
                    sentence(
                        where="input",
                        rule=rule,
                        found=f"none for {split}, of {total:,}",
                        remedy="Choose another fraction, or seed",
                    )
                )

    def tally_for_split(self, split: str | None) -> Tally:
        """Return the tally of a dataset, with the other split counted as dropped."""
        tally = Tally()
        tally.add(self._tally)
        if split in OTHER_SPLIT:
            total = sum(self._num_examples.values())
            num_others = total - self._num_examples[split]
            tally.dropped[OTHER_SPLIT[split]] += num_others
        return tally

    def provenance(self, split: str | None) -> dict[str, Any]:
        """Return the provenance of a dataset, after the last partition."""
        if split not in self._provenances:
            sources = None
            if self._reader.inputs:
                sources = [self._sources[item.ordinal] for item in self._reader.inputs]
            self._provenances[split] = provenance_of(
                self._reader, split, self._config, sources
            )
        return self._provenances[split]


# Logs.


def _log_repeated_files(sources: Mapping[int, Mapping[str, Any]]) -> None:
    """Warn once about files with the same bytes.

    Args:
        sources: ordinal of each input -> its path, bytes, sha256 and records.
    """
    in_input_order = [sources[ordinal] for ordinal in sorted(sources)]
    repeated = find_repeated_files(in_input_order)
    if repeated is not None:
        log.warning("%s: %s", repeated.text, ", ".join(repeated.examples))


def count_records(tally: Tally) -> Records:
    """Return the counts of a manifest, sorted by name."""
    return Records(
        read=tally.read,
        packed=tally.kept,
        dropped=_sorted_by_name(tally.dropped),
        noted=_sorted_by_name(tally.events),
        fields_used=_sorted_by_name(tally.used),
        fields_not_used=_sorted_by_name(tally.unused),
    )


def _sorted_by_name(counts: Mapping[str, int]) -> dict[str, int]:
    return dict(sorted(counts.items()))


def log_forms(tally: Tally, kind: str) -> None:
    """Log the number of records of each form, the number of chats, and the ties.

    Chats and ties are not counted by form: if there are several forms, they have a line
    of their own.
    """
    nouns = {"preference": "pairs", "scored": "records with scores"}
    noun = nouns.get(kind, "answers to learn")
    details = ""
    if tally.chats:
        details += f", {tally.chats:,} as chats"
    if tally.dropped["tie"]:
        details += f", {tally.dropped['tie']:,} ties dropped"

    is_mixed = len(tally.forms) > 1
    for name, count in tally.forms.most_common():
        label = name or "packstore's own field names"
        form_details = "" if is_mixed else details
        log.info("records: %s: %s %s%s", label, f"{count:,}", noun, form_details)
    if is_mixed and details:
        log.info("records of all forms: %s%s", f"{tally.kept:,}", details)


def _log_drops(tally: Tally) -> None:
    for reason, count in sorted(tally.dropped.items()):
        first = _first_drop(tally, [reason])
        example = f"; the first: {first}" if first else ""
        log.warning("dropped %s records: %s%s", f"{count:,}", reason, example)


def _log_events(tally: Tally) -> None:
    for event, count in tally.events.items():
        level = logging.WARNING if event in PROBLEMS else logging.INFO
        meaning = meaning_of(event)
        explanation = f" ({meaning})" if meaning else ""
        log.log(level, "noted in %s records: %s%s", f"{count:,}", event, explanation)


def _log_later_columns(tally: Tally, announced: Collection[str]) -> None:
    """Log the columns that nothing reads, and that the first record lacks.

    Unread columns of the first record are in the log before the work.
    """
    later_columns = sorted(tally.unused.keys() - set(announced))
    if later_columns:
        text = "columns not read that the first record lacks: %s"
        log.info(text, ", ".join(later_columns))


# Checks.


def count_unrequested_drops(tally: Tally) -> int:
    """Return the number of records dropped for reasons that no setting requests."""
    return _unrequested(tally.dropped).total()


def _unrequested(dropped: Counter[str]) -> Counter[str]:
    """Return the counts for reasons other than :data:`REQUESTED_DROPS`."""
    return Counter(
        {
            reason: count
            for reason, count in dropped.items()
            if reason not in REQUESTED_DROPS
        }
    )


def absent_fields(tally: Tally, config: PackConfig) -> list[tuple[str, str]]:
    """Return the mapped fields that no record has, with their names in the input."""
    if not tally.kept:
        return []
    return [
        (name, input_name)
        for name, input_name in config.fields.items()
        if not tally.used[input_name] and not tally.unused[input_name]
    ]


def _check_fields(tally: Tally, config: PackConfig, job: WriteJob) -> None:
    """Raise ConfigError if no record has a field that is mapped."""
    if job.extends is not None:
        return  # the mapped fields suited the first records of the dataset
    for name, input_name in absent_fields(tally, config):
        raise ConfigError(
            sentence(
                where=f"setting fields, {name}={input_name}",
                rule="a record must have the mapped field",
                found=f"none of {tally.read:,}",
                remedy="Correct its name, or map nothing",
            )
        )


def _check_drops(tally: Tally, config: PackConfig, kind: str, job: WriteJob) -> None:
    """Raise :class:`DropRateError` if no record remains, or too many were dropped.

    Duplicates do not count: if all records are in the dataset already, none may remain.
    """
    num_duplicates = sum(tally.dropped[reason] for reason in DUPLICATES.values())
    if not tally.kept and not num_duplicates:
        rule = "at least one record must remain"
        counted_drops = Counter(tally.dropped)
        remedy = _remedy_for_drops(counted_drops, kind, job)
    else:
        counted_drops = _unrequested(tally.dropped)
        if counted_drops.total() <= config.max_drop_rate * tally.read:
            return
        rule = f"at most {100 * config.max_drop_rate:g}% of the records may be dropped"
        remedy = _remedy_for_drops(counted_drops, kind, job)
        remedy += ", or allow more (max_drop_rate, --max-drop-rate)"

    drops = _describe(counted_drops, tally)
    other_drops = tally.dropped - counted_drops
    if other_drops:
        drops += f", beside {_listed(other_drops)}, which do not count"
    raise DropRateError(sentence(where="input", rule=rule, found=drops, remedy=remedy))


def _remedy_for_drops(dropped: Counter[str], kind: str, job: WriteJob) -> str:
    """Return a remedy for the most frequent reason."""
    if dropped["overlong"] != max(dropped.values(), default=0):
        return "List the dropped records in a file (rejects, --rejects FILE)"
    if job.extends is not None:
        return (
            "The dataset decides pack_size, max_length and max_keys: pack these "
            "records elsewhere"
        )
    remedy = (
        "Raise pack_size, max_length or max_keys (`packstore estimate` counts what "
        "each pack size drops), or truncate (--on overlong=truncate_prompt)"
    )
    if kind == "scored":
        remedy += ", or pack the answers of a group one by one (page Recipes)"
    return remedy


def describe_drops(tally: Tally) -> str:
    """Return the number of dropped records, the reasons, and the first place."""
    return _describe(tally.dropped, tally)


def _describe(dropped: Counter[str], tally: Tally) -> str:
    """Return :func:`describe_drops` for some of the reasons."""
    first = _first_drop(tally, dropped)
    example = f" (first: {first})" if first else ""
    return f"{dropped.total():,} of {tally.read:,} dropped: {_listed(dropped)}{example}"


def _first_drop(tally: Tally, reasons: Collection[str]) -> str:
    """Return place and detail of the first record dropped for one of the reasons."""
    for sample in tally.samples:
        if sample.reason in reasons:
            return f"{sample.where}: {sample.detail}"
    return ""


def _listed(dropped: Counter[str]) -> str:
    """Return e.g. ``12 overlong, 3 tie``, the most frequent reason first."""
    return ", ".join(f"{count:,} {reason}" for reason, count in dropped.most_common())
