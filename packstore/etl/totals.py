"""Adds up the records of all partitions, and checks them against the settings."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from packstore.config import PackConfig
from packstore.errors import ConfigError, DropRateError, InputError, sentence
from packstore.etl.dedup_and_split import DUPLICATES, OTHER_PART
from packstore.etl.provenance import provenance_of
from packstore.etl.rejects import RejectsFile
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

PROBLEMS = {
    "double_bos": "a sequence begins with BOS twice",
    "no_bos": "the tokenizer begins texts with BOS, a sequence does not",
    "no_eos": "a response does not end with EOS, so the model is not taught to stop",
    "marker_no_token": "a marker of the chat template is no token, but split into "
    "several",
    "foreign_template": "text holds control strings of another model's chat template; "
    "they are "
    "learned as plain letters",
    "text_unrendered": "the chat template leaves out words of a message, beside its "
    "reasoning",
    "reward_reversed": "the rejected side has the higher reward",
    "reward_rounded": "rewards that differ are one number as float32",
    "reward_default": "no rewards, while other records have some: 1 and 0 are taken",
    "mixed_forms": "plain text, while other records are chats; as_chat (--as-chat) "
    "makes them "
    "chats",
    "raw_text": "plain text, though there is a chat template; as_chat (--as-chat) "
    "renders it as a "
    "chat, as_chat=False (--no-as-chat) says that it is right",
}
"""Findings that harm training: `pack` and `append` log them as warnings, and lint
reports them as problems.
"""

log = logging.getLogger("packstore")


@dataclass(frozen=True, eq=False)
class Contents:
    """The records of a partition."""

    examples: list[int]  # of each dataset, in the order of `split_names`
    tally: Tally
    sources: dict[
        int, dict[str, Any]
    ]  # ordinal of a file -> path, bytes, hash and records
    rejects: bytes  # the dropped records, compressed; empty without setting `rejects`


class ProgressCounter:
    """Reports the progress over all partitions: records read, packs written.

    `size`: bytes of the input, or its records, if known; each partition has about the
        same.
    """

    def __init__(
        self,
        report: Progress | None = None,
        size: int | None = None,
        partitions: int = 1,
    ) -> None:
        self._report: Progress = report or (lambda *_: None)
        self._size, self._each = size or 0, (size or 0) // partitions
        self._total: int | None = None
        self._keys = self._read = (0, 0)  # records, and their size
        self._written = 0

    def add_keys(self, examples: int, size: int, last: bool = False) -> None:
        """Adds examples of the pass that reads only keys, like :meth:`add_records`."""
        self._keys = self._sum("compare", self._keys, examples, size, last)

    def add_records(self, records: int, size: int = 0, last: bool = False) -> None:
        """Adds records, and their size in the input; `last`: no more will follow."""
        self._read = self._sum("read", self._read, records, size, last)

    def _sum(
        self,
        stage: str,
        before: tuple[int, int],
        records: int,
        size: int,
        last: bool = False,
    ) -> tuple[int, int]:
        records, size = before[0] + records, before[1] + size
        total = records if last else None
        if (
            not last and self._size and size
        ):  # an estimate never says that it is the end
            total = max(records + 1, round(records * self._size / size))
        self._report(stage, records, total, "records")
        return records, size

    def add_packs(self, packs: int, left: int | None = None) -> None:
        """Adds packs; `left`: number of packs still to write, if known."""
        self._written += packs
        total = None if left is None else self._written + left
        if packs or self._total is None:
            self._report("write", self._written, total, "packs")
        self._total = total

    def add(self, contents: Contents) -> None:
        """Does nothing: a task of a cluster leaves the sums to the job."""

    def add_finished(self, contents: Contents, packs: int) -> None:
        """Adds a partition that was made elsewhere, or before."""
        self.add_records(contents.tally.read, self._each)
        self.add(contents)
        self.add_packs(packs)


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
        super().__init__(progress, reader.size, config.partitions or 1)
        self._jobs, self._reader, self._config, self._rejects = (
            jobs,
            reader,
            config,
            rejects,
        )
        self._kept = dict.fromkeys(jobs, 0)
        self._tally = Tally()
        self._sources = dict[int, dict[str, Any]]()
        self._missing = config.partitions or 1

    def add(self, contents: Contents) -> None:
        """Adds the next partition, if possible before it is written."""
        self._rejects.add_compressed(contents.rejects)
        self._tally.add(contents.tally)
        for part, examples in zip(self._kept, contents.examples, strict=True):
            self._kept[part] += examples
        for ordinal, source in contents.sources.items():
            if self._sources.setdefault(ordinal, source) != source:
                rule = "must stay as it is while it is packed"
                raise InputError(
                    sentence(source["path"], rule, "that it changed", "Run it again")
                )
        self._missing -= 1
        if not self._missing:
            self._check()

    def _check(self) -> None:
        self.add_records(0, last=True)
        if not any(
            job.has_inputs(self.provenance(part)) for part, job in self._jobs.items()
        ):
            self._rejects.publish()  # else the report of the first append stays
        _log_copies(self._sources.values())
        log_forms(self._tally, self._reader.kind)
        for reason, count in sorted(self._tally.dropped.items()):
            first = next((s for s in self._tally.samples if s.reason == reason), None)
            text = (
                "" if first is None else f"; the first: {first.where}: {first.detail}"
            )
            log.warning("dropped %s records: %s%s", f"{count:,}", reason, text)
        for event, count in self._tally.events.items():
            level = logging.WARNING if event in PROBLEMS else logging.INFO
            text = f" ({PROBLEMS[event]})" if event in PROBLEMS else ""
            log.log(level, "noted in %s records: %s%s", f"{count:,}", event, text)
        job = next(iter(self._jobs.values()))
        _check_drops(self._tally, self._config, self._reader.kind, job)
        if (
            not self._tally.kept
        ):  # the first of two duplicates is: the dataset that grows has all
            raise AppendedBefore("every record to keep is a duplicate")
        _check_fields(self._tally, self._config, job)
        if isinstance(self._reader, RecordExampleReader):
            _log_later_columns(self._tally, self._reader.announced_columns)
        for part in self._jobs:
            if not self._kept[part]:
                fraction = self._config.validation_fraction
                rule = (
                    f"both parts must get a record with validation_fraction {fraction}"
                )
                found = f"none for {part}, of {sum(self._kept.values()):,}"
                raise DropRateError(
                    sentence("input", rule, found, "Choose another fraction, or seed")
                )
        for part, job in self._jobs.items():
            job.refuse_repeated_append(self.provenance(part))

    def tally_for_split(self, part: str | None) -> Tally:
        """Returns the tally of the dataset of a part; examples of the other count as
        dropped.
        """
        tally = Tally()
        tally.add(self._tally)
        if part in OTHER_PART:
            tally.dropped[OTHER_PART[part]] += (
                sum(self._kept.values()) - self._kept[part]
            )
        return tally

    def provenance(self, part: str | None) -> dict[str, Any]:
        """Returns the provenance of the dataset of a part, after the last partition."""
        inputs = self._reader.inputs
        sources = [self._sources[i.ordinal] for i in inputs] if inputs else None
        return provenance_of(self._reader, part, self._config, sources)


def _log_copies(sources: Collection[Mapping[str, Any]]) -> None:
    """Warns of files with the same bytes, such as one that two globs match, or a link
    and it.
    """
    text = (
        "files with the same bytes, whose records count for each (dedup=pair: once): %s"
    )
    for digest, times in Counter(s["sha256"] for s in sources if s["records"]).items():
        if times > 1:
            log.warning(
                text, ", ".join(s["path"] for s in sources if s["sha256"] == digest)
            )


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
    """Log the number of records of each form, and how many became chats."""
    noun = {"preference": "pairs", "scored": "records with scores"}.get(
        kind, "answers to learn"
    )
    details = f", {tally.chats:,} as chats" if tally.chats else ""
    if tally.dropped["tie"]:
        details += f", {tally.dropped['tie']:,} ties dropped"
    is_mixed = len(tally.forms) > 1
    for name, count in tally.forms.most_common():
        label = name or "packstore's own field names"
        log.info(
            "records: %s: %s %s%s",
            label,
            f"{count:,}",
            noun,
            "" if is_mixed else details,
        )
    if is_mixed and details:
        log.info("records of all forms: %s%s", f"{tally.kept:,}", details)


def count_unrequested_drops(tally: Tally) -> int:
    """Returns the number of records dropped for reasons that no setting requests."""
    return sum(
        n for reason, n in tally.dropped.items() if reason not in REQUESTED_DROPS
    )


def absent_fields(tally: Tally, config: PackConfig) -> list[tuple[str, str]]:
    """Returns the mapped fields that no record has, with their names in the input."""
    return [
        (name, written)
        for name, written in config.fields.items()
        if tally.kept and not tally.used[written] and not tally.unused[written]
    ]


def _check_fields(tally: Tally, config: PackConfig, job: WriteJob) -> None:
    """Raise ConfigError if no record has a field that is mapped."""
    # Not on append: the mapped fields suited the first records of the dataset.
    for name, written in absent_fields(tally, config) if job.extends is None else ():
        where, rule = (
            f"setting fields, {name}={written}",
            "a record must have the mapped field",
        )
        remedy = "Correct its name, or map nothing"
        raise ConfigError(sentence(where, rule, f"none of {tally.read:,}", remedy))


def _log_later_columns(tally: Tally, announced: Collection[str]) -> None:
    """Log the columns that nothing reads, and that the first record lacks."""
    later = sorted(tally.unused.keys() - set(announced))
    if later:
        log.info("columns not read that the first record lacks: %s", ", ".join(later))


def _check_drops(tally: Tally, config: PackConfig, kind: str, job: WriteJob) -> None:
    """Raises :class:`DropRateError` if too many records were dropped, or all but
    duplicates.
    """
    remain = tally.kept or any(tally.dropped[reason] for reason in DUPLICATES.values())
    counted = Counter(tally.dropped)
    if remain:
        counted = Counter(
            {r: n for r, n in counted.items() if r not in REQUESTED_DROPS}
        )
        if counted.total() <= config.max_drop_rate * tally.read:
            return
    first = next((s for s in tally.samples if s.reason in counted), None)
    where = f" (first: {first.where}: {first.detail})" if first else ""
    rule, remedy = (
        "at least one record must remain",
        "List the dropped records in a file (rejects, --rejects FILE)",
    )
    if counted["overlong"] == max(counted.values(), default=0):
        remedy = (
            "Raise pack_size or max_length, or truncate (--on overlong=truncate_prompt)"
        )
        if kind == "scored":
            remedy += ", or pack the answers of a group one by one (page Recipes)"
        if job.extends is not None:
            remedy = (
                "The dataset decides pack_size and max_length: pack these "
                "records "
                "elsewhere"
            )
    if remain:
        rule = f"at most {100 * config.max_drop_rate:g}% of the records may be dropped"
        remedy += ", or allow more (max_drop_rate, --max-drop-rate)"
    found = f"{counted.total():,} of {tally.read:,} dropped: {_listed(counted)}{where}"
    if others := tally.dropped - counted:
        found += f", beside {_listed(others)}, which do not count"
    raise DropRateError(sentence("input", rule, found, remedy))


def describe_drops(tally: Tally) -> str:
    """Return the number of dropped records, the reasons, and the first place."""
    text = f"{tally.dropped.total():,} of {tally.read:,} dropped"
    if tally.dropped:
        text += f": {_listed(tally.dropped)}"
    for sample in tally.samples:
        if sample.reason in tally.dropped:
            return f"{text} (first: {sample.where}: {sample.detail})"
    return text


def _listed(dropped: Counter[str]) -> str:
    return ", ".join(f"{n:,} {reason}" for reason, n in dropped.most_common())
