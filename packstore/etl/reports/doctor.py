"""Lints records with tokenizer and template before packing.

Counts records that the policies of packing would drop or note, and checks texts and tokenized
sequences (BOS, EOS, unknown tokens). Duplicates are the examples that `dedup` would drop.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from packstore.config import MEANINGFUL, REASONS, PackConfig
from packstore.errors import ConfigError
from packstore.etl.dedup_and_split import Seen
from packstore.etl.provenance import absent_fields
from packstore.etl.reports.lint import TextLint
from packstore.etl.sources import RecordExampleReader, open_examples
from packstore.format.arrays import SOURCE_SHIFT, Bool, Examples, Sample, Tally
from packstore.io.inputs.pieces import place_of
from packstore.progress import Progress
from packstore.tokenizer import Tokenizer

MEANING: dict[str, str] = {
    "double_bos": "a sequence begins with BOS twice",
    "no_bos": "the tokenizer begins texts with BOS, a sequence does not",
    "no_eos": "a response does not end with EOS, so the model is not taught to stop",
    "marker_no_token": "a marker of the chat template is no token, but split into several",
    "unknown_tokens": "text that the vocabulary cannot spell",
    "generation_prompt_always": "the chat template writes the generation prompt even where it is "
    "not asked for; behind the last turn it is stored, and not supervised",
    "empty_thinking": "a turn begins with an empty thinking block, which is not supervised",
    "arguments_quoted": "arguments of tool calls that are JSON text, quoted by the chat template",
    "reasoning_unrendered": "the chat template leaves out the reasoning of a supervised turn",
    "empty_prompt": "the prompt is empty, or only white space",
    "glued_prompt": "no white space separates the prompt from its answer",
    "duplicate_prompts": "the prompt of an earlier record again (dedup=prompt leaves it out)",
    "duplicate_records": "an earlier record again, rewards apart (dedup=pair leaves it out)",
    "reward_default": "no rewards, while other records have some: 1 and 0 are taken",
}
"""Checks of texts and tokenized sequences, and notes of packing that need an explanation."""


def meaning(check: str) -> str:
    """Returns what a check finds, with the setting that decides what then happens, if any."""
    if check in MEANING:
        return MEANING[check]
    if check not in REASONS:
        return ""
    rule, answers = REASONS[check]
    return f"{rule} (--on {check}={'|'.join(answers)})" if answers else f"{rule} (setting {check})"


PROBLEMS = ("double_bos", "no_bos", "no_eos", "marker_no_token", "reward_reversed")


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

    @property
    def ok(self) -> bool:
        """True if there are no problems."""
        return all(finding.level == "remark" for finding in self.findings)


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

    Policies set to ``error`` count here instead of stopping. Memory: 16 bytes (two hashes) for
    every record.

    Args:
        source, tokenizer, config, storage_options, settings: see :func:`packstore.pack`.
        sample: most records to tokenize, from all over the input; None: all.
        progress: called with the number of records read.

    Raises:
        PackstoreError: the input cannot be read, or the tokenizer does not load.
    """
    config = _counting(PackConfig.of(config, **settings))
    reader = open_examples(source, tokenizer, config, dict(storage_options or {}))
    if not isinstance(reader, RecordExampleReader) or reader.tokenizer is None:
        raise ConfigError("doctor needs records and a tokenizer; check a dataset with verify.")
    if sample is not None:
        reader.sample(sample, config.seed)
    tally, lint = Tally(), _Lint(reader.tokenizer)
    for examples, part in reader.each(TextLint(reader.tokenize(), reader.kind, config)):
        tally.add(part)
        lint.look(examples)
        if progress is not None:
            progress("read", tally.read, None, "records")
    for check, example_ids in lint.found.items():
        tally.noted[check] = len(example_ids)
        for i in example_ids[: Tally.SAMPLES_PER_REASON]:
            source, ordinal = divmod(i, 1 << SOURCE_SHIFT)
            where = place_of(reader.paths[source], ordinal)
            tally.samples.append(Sample(check, where, ""))
    findings = [*_absent(tally, config), *_findings(tally)]
    return Diagnosis(reader.kind, tally.read, tuple(findings))


def _absent(tally: Tally, config: PackConfig) -> Iterator[Finding]:
    for name, written in absent_fields(tally, config):
        yield Finding(f"mapped_field_absent: {name}={written}", "problem", tally.read, ())


def _counting(config: PackConfig) -> PackConfig:
    """Returns `config` with ``drop`` in place of ``error``, and with hashes of records."""
    on = {reason: "drop" if answer == "error" else answer for reason, answer in config.on.items()}
    overlong = "drop" if config.overlong == "error" else config.overlong
    return PackConfig.of(config, dedup="pair", on=on, overlong=overlong)


def _findings(tally: Tally) -> list[Finding]:
    def finding(check: str, level: Literal["problem", "remark"], count: int) -> Finding:
        samples = (s for s in tally.samples if s.reason == check)
        return Finding(check, level, count, tuple(_spell(s.where, s.detail) for s in samples))

    dropped = tally.dropped.most_common()
    problems = [finding(c, "problem", n) for c, n in dropped]
    noted = tally.events.most_common()
    problems += [finding(c, "problem", n) for c, n in noted if c in PROBLEMS]
    remarks = [finding(c, "remark", n) for c, n in noted if c not in PROBLEMS]
    unused = [(name, n) for name, n in tally.unused.most_common() if name in MEANINGFUL]
    remarks += [finding(f"field_not_used: {name}", "remark", n) for name, n in unused]
    return problems + remarks


def _spell(where: str, detail: str) -> str:
    return f"{where}: {detail}" if detail else where


class _Lint:
    """Checks tokenized sequences, block by block.

    Attributes:
        found: check -> ids of the examples found.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.found: defaultdict[str, list[int]] = defaultdict(list)
        self._tokenizer = tokenizer
        self._prompts, self._records = Seen(), Seen()

    def look(self, examples: Examples) -> None:
        """Runs all checks on some examples."""
        if not examples.num_examples:
            return
        starts, ends = examples.sequence_offsets[:-1], examples.sequence_offsets[1:]
        ids, bos, eos = examples.input_ids, self._tokenizer.bos_id, self._tokenizer.eos_id
        if bos is not None:
            first = ids[starts] == bos
            second = ids[np.minimum(starts + 1, len(ids) - 1)] == bos
            self._note("double_bos", examples, first & second & (ends - starts > 1))
            if self._tokenizer.adds_bos:
                self._note("no_bos", examples, ~first)
        if eos is not None:
            self._note("no_eos", examples, ~self._ends_with(examples, eos))
        unk = self._tokenizer.unk_id
        if unk is not None:
            self._note("unknown_tokens", examples, np.add.reduceat(ids == unk, starts) > 0)
        self._look_for_duplicates(examples)

    def _ends_with(self, examples: Examples, eos: int) -> Bool:
        """Returns True for sequences with EOS as last or second to last supervised token."""
        hit = (examples.input_ids == eos) & examples.supervised
        position = np.arange(len(hit))
        starts = examples.sequence_offsets[:-1]
        last_eos = np.maximum.reduceat(np.where(hit, position, -1), starts)
        last = np.maximum.reduceat(np.where(examples.supervised, position, -1), starts)
        return (last_eos >= starts) & (last - last_eos <= 1)

    def _look_for_duplicates(self, examples: Examples) -> None:
        assert examples.keys is not None
        prompts, records = examples.keys.T
        self._note_examples("duplicate_prompts", examples, ~self._prompts.add(prompts))
        self._note_examples("duplicate_records", examples, ~self._records.add(records))

    def _note(self, check: str, examples: Examples, sequences: Bool) -> None:
        """Counts the examples with a flagged sequence; `sequences`: bool `[S]`."""
        flagged = np.logical_or.reduceat(sequences, examples.example_offsets[:-1])
        self._note_examples(check, examples, flagged)

    def _note_examples(self, check: str, examples: Examples, flagged: Bool) -> None:
        if flagged.any():
            self.found[check] += examples.example_ids[flagged].tolist()
