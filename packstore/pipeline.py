"""From records to a committed dataset, in a straight line:

    read -> tokenize -> spill -> plan -> fill -> write -> commit

Tokenizing runs in workers, the rest in this process. Nothing is visible to a reader before the last
step, and nothing stays behind of a job that fails.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import version
from typing import Any, Protocol

from packstore.config import PackConfig, fingerprint
from packstore.engines import ENGINES
from packstore.errors import DropRateError, sentence
from packstore.intake import Intake, open_intake
from packstore.io.dataset import Dataset
from packstore.io.dataset import open as open_dataset
from packstore.io.job import WriteJob, writing
from packstore.io.manifest import build_manifest, commit_manifest
from packstore.io.shard import PackShape
from packstore.io.storage import Location
from packstore.io.writer import ShardWriter
from packstore.overlap import ahead
from packstore.pack.algorithms import STRATEGIES
from packstore.pack.fill import fill
from packstore.pack.layout import sizes
from packstore.pack.plan import Plan, plan
from packstore.records import Packs, Tally
from packstore.spill import Spill
from packstore.version import VERSION

log = logging.getLogger("packstore")

_DECIDING_TOKENIZER = (
    "vocab_sha256",
    "probe_sha256",
    "bos_id",
    "eos_id",
    "adds_bos",
    "chat_template_sha256",
    "chat_template_date",
)
_DECIDING_SETTINGS = (
    "fields",
    "append_eos",
    "add_bos",
    "thinking",
    "special_tokens",
    "invalid_unicode",
)
"""What changes the tokens of an example, beside truncation."""


class Progress(Protocol):
    """Told how far a stage is; called often, so it decides itself when to draw."""

    def __call__(self, stage: str, done: int, total: int | None, unit: str) -> None:
        """`done` of `total` (None: unknown) `unit` of `stage` are finished."""


def pack(
    source: Any,
    out: str,
    tokenizer: Any = None,
    *,
    config: PackConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Dataset:
    """Tokenizes records, packs them, and commits them as a dataset.

    Args:
        source: path, glob, URL, folder, or a list of them (``.jsonl .json .parquet .arrow .csv``,
            also ``.gz`` and ``.zst``); an Arrow table, a Polars frame, an iterable of dicts; or a
            packstore dataset, which is packed anew without tokenizing.
        out: folder or any fsspec URL that will hold the dataset.
        tokenizer: ``tokenizer.json``, a Hugging Face folder, a SentencePiece ``.model``, or a
            ``tokenizers.Tokenizer``. Not for a packstore dataset.
        config: all settings as one object.
        storage_options: passed to the fsspec filesystems of `source` and `out`.
        progress: told how far each stage is.
        settings: fields of :class:`packstore.PackConfig`, over `config`.

    Returns:
        The committed dataset. ``manifest.records`` says what became of every record.

    Raises:
        PackstoreError: see :mod:`packstore.errors`; `out` is then as it was before.
    """
    config = PackConfig.of(config, **settings)
    STRATEGIES.check(config.strategy)
    ENGINES.check(config.engine)
    location = Location(out, storage_options or {})
    with writing(location, config.overwrite, config.fresh) as job:
        pack_into(job, source, tokenizer, config, progress)
    dataset = open_dataset(out, storage_options=storage_options)
    _log_result(dataset)
    return dataset


def pack_into(
    job: WriteJob, source: Any, tokenizer: Any, config: PackConfig, progress: Progress | None = None
) -> None:
    """What :func:`pack` does at a place that is its own for now; see :mod:`packstore.io.job`."""
    report = progress or _no_progress
    job.compare(_begun_with(config, job))
    intake = open_intake(source, tokenizer, config, dict(job.location.storage_options))
    job.check_fits(intake.kind, intake.carry, intake.provenance)
    with Spill(config.spill_dir) as spill:
        tally = _read(intake, spill, config, report)
        _check_drops(tally, config)
        packing = plan(spill.lengths(), config=config)
        _write(intake, spill, packing, tally, job, config, report)


def _no_progress(stage: str, done: int, total: int | None, unit: str) -> None:
    """Nobody is listening."""


def _read(intake: Intake, spill: Spill, config: PackConfig, report: Progress) -> Tally:
    """All examples to the spill; returns what became of the records."""
    tally = Tally()
    report("read", 0, None, "records")
    with contextlib.closing(ahead(intake)) as parts:
        for examples, part in parts:
            tally.add(part)
            spill.append(examples, sizes(examples, config.layout, config.pad_to_multiple))
            report("read", tally.read, None, "records")
    report("read", tally.read, tally.read, "records")
    return tally


def _check_drops(tally: Tally, config: PackConfig) -> None:
    """Raises :class:`DropRateError` if nothing, or too little, is left."""
    dropped = tally.read - tally.kept
    if tally.kept and dropped <= config.max_drop_rate * tally.read:
        return
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in tally.dropped.most_common())
    example = next((s for s in tally.samples if s.reason in tally.dropped), None)
    where = f" (first: {example.where}: {example.detail})" if example else ""
    allowed = f"at most {config.max_drop_rate:.0%} of the records may be dropped"
    must = allowed if tally.kept else "at least one record must remain"
    found = f"{dropped:,} of {tally.read:,} dropped: {reasons}{where}"
    remedy = "Run `packstore doctor` on the input"
    if tally.dropped["overlong"] == max(tally.dropped.values(), default=0):
        remedy = "Raise pack_size or max_length, or set overlong to truncate_prompt"
    if tally.kept:
        remedy += ", or allow more with max_drop_rate"
    raise DropRateError(sentence("input", must, found, remedy))


def _write(
    intake: Intake,
    spill: Spill,
    packing: Plan,
    tally: Tally,
    job: WriteJob,
    config: PackConfig,
    report: Progress,
) -> None:
    """Fills the packs that no interrupted run had finished, writes the shards, and commits."""
    provenance = _with_lineage(intake.provenance(), intake.kind, config)
    shape = PackShape(
        kind=intake.kind,
        layout=config.layout,
        pack_size=config.pack_size,
        carry=intake.carry,
        vocab_size=intake.vocab_size,
    )
    about = _without_paths(provenance)
    run = fingerprint(about)[:12]
    job.begin(run, {**about, **_begun_with(config, job), "plan": packing.sha256})
    with ShardWriter(job.location, shape, config, run, config.spill_dir, job) as writer:
        done = writer.resumed
        with contextlib.closing(ahead(_fill(spill, packing, config, done), 2)) as filled:
            for packs in filled:
                writer.write(packs)
                done += len(packs)
                report("write", done, packing.num_packs, "packs")
        shards = writer.close()
        # The plan knows lengths as they will be padded; the writer has seen the tokens.
        planning = replace(packing, tokens=writer.counter.tokens).statistics()
        manifest = build_manifest(
            shape, config, shards, writer.counter, tally, planning, provenance
        )
        manifest = replace(manifest, pack_index=writer.pack_index)
        job.confirm(shards)
        commit_manifest(job.location, job.whole(manifest), version=job.version)
        job.done()


def _begun_with(config: PackConfig, job: WriteJob) -> dict[str, Any]:
    """What an interrupted run must have been begun with, as far as it is known beforehand."""
    libraries = {"packstore": VERSION, "pyarrow": version("pyarrow"), "numpy": version("numpy")}
    call = "pack" if job.extends is None else "append"
    return {"call": call, "settings": config.recorded(), "libraries": libraries}


def _with_lineage(provenance: Mapping[str, Any], kind: str, config: PackConfig) -> dict[str, Any]:
    """`provenance` with `lineage`: what decides the ids of the examples, and their tokens.

    Not which examples are in, and not which tokens are supervised. Of a dataset that is packed anew
    it is that of the dataset.
    """
    if "repacked_from" in provenance:
        return {"lineage": provenance["repacked_from"]["fingerprint"], **provenance}
    tokenizer = provenance["tokenizer"] or {}
    parts = {
        "kind": kind,
        "sources": [[s["sha256"], s["records"]] for s in provenance["sources"]],
        "tokenizer": [tokenizer.get(name) for name in _DECIDING_TOKENIZER],
        "settings": {name: config.recorded()[name] for name in _DECIDING_SETTINGS},
    }
    if config.overlong.startswith("truncate"):
        parts["truncated"] = [config.overlong, config.sequence_limit]
    return {**provenance, "lineage": fingerprint(parts)}


def _without_paths(value: Any) -> Any:
    """`value` without what names a place: the same input elsewhere is still the same input."""
    if isinstance(value, Mapping):
        return {name: _without_paths(v) for name, v in value.items() if name != "path"}
    return [_without_paths(v) for v in value] if isinstance(value, list) else value


def _fill(spill: Spill, packing: Plan, config: PackConfig, start: int) -> Iterator[Packs]:
    """The packs in plan order from `start` on, about a row group at a time."""
    step = max(1, config.row_group_tokens // config.pack_size)
    for examples, order, offsets in spill.parts(packing.order, packing.offsets, start):
        for first in range(0, len(offsets) - 1, step):
            cut = offsets[first : first + step + 1]
            part = examples.take(order[cut[0] : cut[-1]])
            yield fill(part, cut - cut[0], config.layout)


def _log_result(dataset: Dataset) -> None:
    m = dataset.manifest
    log.info(
        "packed %s of %s records into %s packs: %s tokens, fill rate %.2f %%",
        *(f"{n:,}" for n in (m.records.packed, m.records.read, m.num_packs, m.totals.tokens)),
        100 * m.fill_rate,
    )
    for reason, count in m.records.dropped.items():
        log.warning("dropped %s records: %s", f"{count:,}", reason)
    for event, count in m.records.noted.items():
        log.info("noted in %s records: %s", f"{count:,}", event)
