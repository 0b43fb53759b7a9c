"""Tries a job before it packs: lints its records, plans a sample, and looks at its destination.

Counts records that the policies of packing would drop or note, and checks texts and tokenized
sequences (BOS, EOS, unknown tokens). Duplicates are the examples that `dedup` would drop.
"""

from __future__ import annotations

import contextlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from packstore.config import CHECK_RETRIES, PackConfig
from packstore.errors import ConfigError, PackstoreError, quote
from packstore.etl.dedup_and_split import Seen, pair_keys
from packstore.etl.notes import PROBLEMS
from packstore.etl.reports import preflight
from packstore.etl.reports.estimate import SAMPLE, Estimate, Measured, estimate, estimate_of
from packstore.etl.sources import RecordExampleReader, open_examples
from packstore.etl.tokenize import Part, Tokenize
from packstore.etl.totals import absent_fields, count_unrequested_drops
from packstore.format.arrays import SOURCE_SHIFT, Bool, Examples, Sample, Tally, example_id
from packstore.io.dataset.dataset import Dataset, find_dataset
from packstore.io.inputs.files import BLOCK_BYTES, Block
from packstore.io.inputs.pieces import place_of
from packstore.io.inputs.sampling import SAMPLE_BLOCK_BYTES, Sampling
from packstore.io.store.location import Location
from packstore.progress import Progress
from packstore.tokenizer import Tokenizer
from packstore.tokenizer.chat.limits import limited
from packstore.tokenizer.chat.template import Message
from packstore.tokenizer.record_tokenizer import Encoded
from packstore.tokenizer.records.fields import unexplained, verdicts
from packstore.tokenizer.records.parse import Parsed, parse_record
from packstore.tokenizer.refusals import Refused


@dataclass(frozen=True)
class Finding:
    """A check with hits: a `problem` harms training or drops records, a `remark` may be fine."""

    check: str
    level: Literal["problem", "remark"]
    records: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """All findings, problems first."""

    kind: str
    records: int
    findings: tuple[Finding, ...]
    shapes: Mapping[str, int] = field(default_factory=dict)  # shape -> records that have it

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return all(finding.level == "remark" for finding in self.findings)


@dataclass(frozen=True)
class DryRun:
    """Result of :func:`dry_run`."""

    diagnosis: Diagnosis | None  # of a sample of the records; None for a packed dataset
    estimate: Estimate  # with the settings of the job
    findings: tuple[preflight.Trial, ...]  # at its destination, and the share of dropped records

    @property
    def ok(self) -> bool:
        """True if the job can be expected to commit; `diagnosis` may have problems."""
        return all(finding.ok is not False for finding in self.findings)


def doctor(
    source: Any,
    tokenizer: Any,
    *,
    sample: int | None = None,
    config: PackConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
    **settings: Any,
) -> Diagnosis:
    """Tokenizes all records like ``packstore.pack`` and counts their errors.

    Policies set to ``error`` count here instead of stopping. Memory: 16 bytes for every record.

    Args:
        source, tokenizer, config, storage_options, progress, settings: see :func:`packstore.pack`.
        sample: most records to tokenize, from all over the input; None: all.

    Raises:
        PackstoreError: the input cannot be read, or the tokenizer does not load.
    """
    config = PackConfig.of(config, **settings)
    return _examined(source, tokenizer, sample, config, storage_options or {}, progress)[0]


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
    """Lints and plans a sample of the records, in one pass, and tries the destination of a job.

    At most `sample` records are tokenized. All others: see :func:`packstore.pack`.
    """
    config = PackConfig.of(config, **settings)
    options = dict(storage_options or {})
    given = options if source_storage_options is None else dict(source_storage_options)
    diagnosis = None
    if isinstance(source, Dataset) or find_dataset(source, given) is not None:
        planned = estimate(
            source,
            tokenizer,
            sample=sample,
            storage_options=given,
            progress=progress,
            **{name: getattr(config, name) for name in PackConfig.names()},
        )
    else:
        diagnosis, measured, drawn = _examined(source, tokenizer, sample, config, given, progress)
        assert drawn is not None
        total = max(drawn.records, drawn.total or 0)
        planned = estimate_of(diagnosis.kind, measured, drawn, [(config, measured)], total=total)
    place = Location(out, {**CHECK_RETRIES, **options})
    findings = [*preflight.preflight(place), *_version(place, config), _drops(planned, config)]
    return DryRun(diagnosis, planned, tuple(findings))


def _examined(
    source: Any,
    tokenizer: Any,
    sample: int | None,
    config: PackConfig,
    storage_options: Mapping[str, Any],
    progress: Progress | None,
) -> tuple[Diagnosis, Measured, Sampling | None]:
    """Lints and measures the records, or a sample of them, in one pass."""
    on = {reason: "drop" if answer == "error" else answer for reason, answer in config.on.items()}
    config = PackConfig.of(config, dedup="pair", on=on)
    block_bytes = BLOCK_BYTES if sample is None else SAMPLE_BLOCK_BYTES
    reader = open_examples(source, tokenizer, config, dict(storage_options), block_bytes)
    if not isinstance(reader, RecordExampleReader) or reader.tokenizer is None:
        raise ConfigError("doctor needs records and a tokenizer; check a dataset with verify.")
    drawn = None if sample is None else reader.sample(sample, config.seed)
    lint, tally = _TokenLint(reader.tokenizer), Tally()
    measured = Measured(("concat", config.layout), config.pad_to_multiple)
    for examples, part in reader.each(TextLint(reader.tokenize(), reader.kind, config)):
        tally.add(part)
        lint.look(examples)
        if drawn is not None:
            measured.add(examples, part)
        if progress is not None:
            progress("read", tally.read, None, "records")
    for check, example_ids in lint.hits.items():
        tally.noted[check] = len(example_ids)
        for i in example_ids[: Tally.SAMPLES_PER_REASON]:
            ordinal, record = divmod(i, 1 << SOURCE_SHIFT)
            tally.samples.append(Sample(check, place_of(reader.paths[ordinal], record), ""))
    findings, shapes = _findings(tally, reader.kind, config), dict(tally.shapes.most_common())
    diagnosis = Diagnosis(reader.kind, tally.read, tuple(findings), shapes)
    return diagnosis, measured, drawn


def _findings(tally: Tally, kind: str, config: PackConfig) -> Iterator[Finding]:
    """Yields what was found, problems first, the frequent first."""
    examples = defaultdict(list)
    for s in tally.samples:
        examples[s.reason].append(f"{s.where}: {s.detail}" if s.detail else s.where)
    for name, written in absent_fields(tally, config):
        yield Finding(f"mapped_field_absent: {name}={written}", "problem", tally.read, ())
    noted = tally.events.most_common()
    problems = [*tally.dropped.most_common(), *((c, n) for c, n in noted if c in PROBLEMS)]
    for check, count in problems:
        yield Finding(check, "problem", count, tuple(examples[check]))
    for check, count in noted:
        if check not in PROBLEMS:
            yield Finding(check, "remark", count, tuple(examples[check]))
    if kind == "sft" and config.on["unpaired_feedback"] != "keep":
        for name in verdicts(tally):
            yield Finding(f"unpaired_feedback: {name}", "problem", tally.unused[name], ())
    for name in unexplained(tally):
        yield Finding(f"field_not_used: {name}", "remark", tally.unused[name], ())


def _version(place: Location, config: PackConfig) -> Iterator[preflight.Trial]:
    there = find_dataset(place.url, place.storage_options)
    if there is not None:
        then = "the job replaces it" if config.overwrite else "another job needs --overwrite"
        text = f"version {there.version} is there; {then}"
        yield preflight.Trial("version", True if config.overwrite else None, text)


def _drops(planned: Estimate, config: PackConfig) -> preflight.Trial:
    """Compares the share of dropped records with `max_drop_rate`."""
    tally, (choice,) = planned.tally, planned.choices
    overlong = choice.overlong / max(choice.overlong + choice.examples, 1)
    rate = (count_unrequested_drops(tally) + overlong * tally.kept) / max(tally.read, 1)
    text = f"{100 * rate:.3g}% are dropped; max_drop_rate allows {100 * config.max_drop_rate:g}%"
    return preflight.Trial("records", rate <= config.max_drop_rate, text)


class _TokenLint:
    """Checks tokenized sequences, block by block; `hits` has the ids of the examples of a check."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.hits: defaultdict[str, list[int]] = defaultdict(list)
        self._tokenizer = tokenizer
        self._prompts, self._records = Seen(), Seen()

    def look(self, examples: Examples) -> None:
        """Runs all checks on some examples."""
        if not examples.num_examples:
            return
        starts, tokenizer = examples.sequence_offsets[:-1], self._tokenizer
        ids, bos, unk = examples.input_ids, tokenizer.bos_id, tokenizer.unk_id
        sequences: dict[str, Bool] = {}
        if bos is not None:
            first = ids[starts] == bos
            second = ids[np.minimum(starts + 1, len(ids) - 1)] == bos
            sequences["double_bos"] = first & second & (examples.lengths > 1)
            if tokenizer.adds_bos:
                sequences["no_bos"] = ~first
        if tokenizer.eos_id is not None:
            sequences["no_eos"] = ~_ends_with(examples, tokenizer.eos_id)
        if unk is not None:
            sequences["unknown_tokens"] = np.add.reduceat(ids == unk, starts) > 0
        first_sequences = examples.example_offsets[:-1]
        flags = {c: np.logical_or.reduceat(s, first_sequences) for c, s in sequences.items()}
        assert examples.keys is not None
        flags["duplicate_prompts"] = ~self._prompts.add(examples.keys)
        flags["duplicate_records"] = ~self._records.add(pair_keys(examples))
        for check, flagged in flags.items():
            if flagged.any():
                self.hits[check] += examples.example_ids[flagged].tolist()


def _ends_with(examples: Examples, eos: int) -> Bool:
    """Returns True for sequences with EOS as last or second to last supervised token."""
    hit = (examples.input_ids == eos) & examples.supervised
    position = np.arange(len(hit))
    starts = examples.sequence_offsets[:-1]
    last_eos = np.maximum.reduceat(np.where(hit, position, -1), starts)
    last = np.maximum.reduceat(np.where(examples.supervised, position, -1), starts)
    return (last_eos >= starts) & (last - last_eos <= 1)


_ENDS = frozenset(".,;:!?\"'’”)…")
"""Characters at the end of sentences, besides letters and digits. Turn markers end with > or ]."""


class TextLint:
    """Tokenizes a block in a worker, and checks its texts for errors that ids do not show."""

    def __init__(self, tokenize: Tokenize, kind: str, config: PackConfig) -> None:
        self._tokenize, self._kind, self._config = tokenize, kind, config
        self.alone, self.load = tokenize.alone, tokenize.load

    def __call__(self, block: Block) -> Part:
        """Returns the examples of a block, and the tally of its records with the findings."""
        return self.check_result(self.run_in_worker(block))

    def check_result(self, unchecked: tuple[Part, list[Encoded]]) -> Part:
        """Compares a sample with the reference; returns the result."""
        return self._tokenize.check_result(unchecked)

    @cached_property
    def _markers(self) -> list[str]:
        """Texts that the chat template writes around turns, and that are no tokens."""
        tokenizer = self._tokenize.tokenizer
        if tokenizer is None or tokenizer.template is None:
            return []
        turns: list[Message] = [{"role": role, "content": "a"} for role in ("user", "assistant")]
        try:
            with limited():
                text = tokenizer.template.render(turns, None)
        except (Refused, PackstoreError):  # the template refuses this dialogue
            return []
        markers = dict.fromkeys(re.findall(r"<[^<>\s]{1,40}>", text))
        return [m for m in markers if tokenizer.engine.token_to_id(m) is None]

    def run_in_worker(self, block: Block) -> tuple[Part, list[Encoded]]:
        """Returns the result for a block, and the sample of it to compare."""
        rows = block.parse()
        (examples, tally), sample = self._tokenize.run_in_worker(rows)
        kept = set(examples.example_ids.tolist())
        # Tokenizing may already have counted the same findings.
        known = set(tally.noted)
        for i, value in enumerate(rows.values):
            if example_id(rows.source, rows.ordinals[i]) not in kept:
                continue
            with contextlib.suppress(Refused):  # settings may have changed it before tokenizing
                tokenizer = self._tokenize.tokenizer
                templated = tokenizer is not None and tokenizer.chat_template is not None
                found = parse_record(value, self._kind, self._config, templated=templated)
                for check, detail in self._errors(found):
                    if check not in known:
                        tally.note(check, rows.where(i), detail)
        return (examples, tally), sample

    def _errors(self, parsed: Parsed) -> Iterator[tuple[str, str]]:
        prompt, responses = parsed.prompt, parsed.responses
        # Messages and ids of kind sft are all response, prompts included.
        if (isinstance(prompt, str) or self._kind != "sft") and not _says(prompt):
            yield "empty_prompt", ""
        if isinstance(prompt, str) and any(_glued(prompt, str(r)) for r in responses):
            yield "glued_prompt", f"{quote(prompt[-20:])} and {quote(str(responses[0])[:20])}"
        if isinstance(prompt, list) and self._markers:
            yield "marker_no_token", " ".join(self._markers)


def _says(prompt: Any) -> bool:
    """Returns True if a prompt is not only white space."""
    if isinstance(prompt, str):
        return bool(prompt.strip())
    if isinstance(prompt, list):
        return any(str(m.get("content") or "").strip() for m in prompt if m["role"] != "system")
    return len(prompt) > 0


def _glued(prompt: str, response: str) -> bool:
    """Returns True if prompt and response join without a space, in a script with spaces."""
    last, first = prompt[-1:], response[:1]
    if any(unicodedata.east_asian_width(c) in "WF" for c in last + first):
        return False
    return (last.isalnum() or last in _ENDS) and first.isalnum()
