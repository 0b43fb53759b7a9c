"""Tries a packing job without writing a dataset: its records, its plan, and its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from packstore.config import CHECK_RETRIES, PackConfig
from packstore.etl.provenance import ASKED_TO_GO
from packstore.etl.reports.doctor import Diagnosis, doctor
from packstore.etl.reports.estimate import SAMPLE, Estimate, estimate
from packstore.io.dataset.dataset import Dataset, find_dataset
from packstore.io.maintain.preflight import Finding, preflight
from packstore.io.store.location import Location
from packstore.progress import Progress


@dataclass(frozen=True)
class DryRun:
    """Result of :func:`dry_run`.

    Attributes:
        diagnosis: findings in a sample of the records; None for a packed dataset.
        estimate: packs and fill with the settings of the job.
        findings: of ``packstore.check`` at its destination, and on the share of dropped records.
    """

    diagnosis: Diagnosis | None
    estimate: Estimate
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if the job can be expected to commit; `diagnosis` may have problems."""
        return all(finding.ok is not False for finding in self.findings)


def dry_run(
    source: Any,
    out: str,
    tokenizer: Any = None,
    *,
    sample: int = SAMPLE,
    config: PackConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    source_storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> DryRun:
    """Lints and plans a sample of the records, and tries the destination of a job.

    Args:
        source, out, tokenizer, config, settings: see :func:`packstore.pack`. `source` is read
            twice, so it must be files or tables.
        sample: most records to tokenize.
        storage_options, source_storage_options: see :func:`packstore.pack`.
        progress: called with the number of records read.

    Raises:
        PackstoreError: the input cannot be read, or a setting or the tokenizer is wrong.
    """
    config = PackConfig.of(config, **settings)
    options = dict(storage_options or {})
    given = options if source_storage_options is None else dict(source_storage_options)
    packed = isinstance(source, Dataset) or find_dataset(source, given) is not None
    of_source: dict[str, Any] = {"storage_options": given, "progress": progress}
    diagnosis = None
    if not packed:
        diagnosis = doctor(source, tokenizer, sample=sample, config=config, **of_source)
    planned = estimate(
        source,
        tokenizer,
        pack_sizes=[config.pack_size],
        layouts=[config.layout],
        strategies=[config.strategy],
        sample=sample,
        config=replace(config, dedup="none", validation_fraction=0.0),
        **of_source,
    )
    place = Location(out, {**CHECK_RETRIES, **options})
    found = [*preflight(place), *_version(place, config), _drops(planned, config)]
    return DryRun(diagnosis, planned, tuple(found))


def _version(place: Location, config: PackConfig) -> Iterator[Finding]:
    there = find_dataset(place.url, place.storage_options)
    if there is not None:
        then = "the job replaces it" if config.overwrite else "another job needs --overwrite"
        ok = True if config.overwrite else None
        yield Finding("version", ok, f"version {there.version} is there; {then}")


def _drops(found: Estimate, config: PackConfig) -> Finding:
    """Compares the share of dropped records with `max_drop_rate`."""
    tally, (choice,) = found.tally, found.choices
    dropped = sum(n for reason, n in tally.dropped.items() if reason not in ASKED_TO_GO)
    rest = choice.overlong / max(choice.overlong + choice.examples, 1)
    rate = (dropped + rest * tally.kept) / max(tally.read, 1)
    text = f"{rate:.1%} are dropped; max_drop_rate allows {config.max_drop_rate:.0%}"
    return Finding("records", rate <= config.max_drop_rate, text)
