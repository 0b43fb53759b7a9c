"""Lints records against tokenizer and template, before anything is packed.

What the packing policies would drop or note is counted; the texts are looked at, and the tokenized
sequences as a model would see them: BOS, EOS, unknown tokens. Duplicates are those that `dedup`
would leave out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np

from packstore.config import MEANINGFUL, PackConfig
from packstore.errors import ConfigError
from packstore.intake import RecordIntake, open_intake
from packstore.io.record_places import place_of
from packstore.lint import TextLint
from packstore.records import SOURCE_SHIFT, Bool, Examples, Sample, Tally
from packstore.runs import absent_fields
from packstore.selection import Seen
from packstore.tokenizer import Tokenizer

MEANING: dict[str, str] = {
    "double_bos": "a sequence begins with BOS twice",
    "no_bos": "the tokenizer begins texts with BOS, a sequence does not",
    "no_eos": "a response does not end with EOS, so the model is not taught to stop",
    "marker_no_token": "a marker of the chat template is no token, but text in pieces",
    "unknown_tokens": "text that the vocabulary cannot spell",
    "generation_prompt_always": "the chat template writes the generation prompt even where it is "
    "not asked for; behind the last turn it is stored, and not supervised",
    "empty_thinking": "a turn begins with an empty thinking block, which is not supervised",
    "arguments_quoted": "arguments of tool calls that are JSON text, quoted by the chat template; "
    "tool_arguments=object parses them first",
    "reasoning_unrendered": "thoughts of a supervised turn that the chat template leaves out",
    "empty_prompt": "nothing is asked, so the answers stand for themselves",
    "glued_prompt": "no white space parts the prompt from its answer",
    "duplicate_prompts": "the prompt of an earlier record again (dedup=prompt leaves it out)",
    "duplicate_records": "an earlier record again, rewards apart (dedup=pair leaves it out)",
    "reward_default": "no rewards, while other records have some: 1 and 0 are taken",
}
"""Checks on texts and on tokenized sequences, and notes of packing that need a word."""

PROBLEMS = ("double_bos", "no_bos", "no_eos", "marker_no_token", "reward_reversed")


@dataclass(frozen=True)
class Finding:
    """One check that hit. A `problem` harms training or loses records; a `remark` may be meant."""

    check: str
    level: Literal["problem", "remark"]
    records: int
    examples: tuple[str, ...]


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was found, problems first."""

    kind: str
    records: int
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether there are no problems."""
        return all(finding.level == "remark" for finding in self.findings)


def diagnose(
    source: Any,
    tokenizer: Any,
    *,
    config: PackConfig | None = None,
    storage_options: Mapping[str, Any] | None = None,
    progress: Any = None,
    **settings: Any,
) -> Diagnosis:
    """Tokenizes all records as ``packstore.pack`` would and counts what is wrong with them.

    Policies that say ``error`` count here instead of stopping. Keeps two hashes of every record in
    memory, 16 bytes.

    Raises:
        PackstoreError: the input cannot be read at all, or the tokenizer does not load.
    """
    config = _counting(PackConfig.of(config, **settings))
    intake = open_intake(source, tokenizer, config, dict(storage_options or {}))
    if not isinstance(intake, RecordIntake) or intake.tokenizer is None:
        raise ConfigError("doctor looks at records with a tokenizer; for datasets there is verify.")
    tally, lint = Tally(), _Lint(intake.tokenizer)
    for examples, part in intake.each(TextLint(intake.tokenize(), intake.kind, config)):
        tally.add(part)
        lint.look(examples)
        if progress is not None:
            progress("read", tally.read, None, "records")
    for check, example_ids in lint.found.items():
        tally.noted[check] = len(example_ids)
        for i in example_ids[: Tally.SAMPLES_PER_REASON]:
            source, ordinal = divmod(i, 1 << SOURCE_SHIFT)
            where = place_of(intake.paths[source], ordinal)
            tally.samples.append(Sample(check, where, ""))
    findings = [*_absent(tally, config), *_findings(tally)]
    return Diagnosis(intake.kind, tally.read, tuple(findings))


def _absent(tally: Tally, config: PackConfig) -> Iterator[Finding]:
    for name, written in absent_fields(tally, config):
        yield Finding(f"mapped_field_absent: {name}={written}", "problem", tally.read, ())


def _counting(config: PackConfig) -> PackConfig:
    """`config` with every policy ``error`` turned into ``drop``, and hashes of the records."""
    stopping = [f.name for f in fields(config) if getattr(config, f.name) == "error"]
    return PackConfig.of(config, dedup="pair", **dict.fromkeys(stopping, "drop"))


def _findings(tally: Tally) -> list[Finding]:
    def finding(check: str, level: Literal["problem", "remark"], count: int) -> Finding:
        samples = (s for s in tally.samples if s.reason == check)
        return Finding(check, level, count, tuple(_spell(s.where, s.detail) for s in samples))

    problems = [finding(c, "problem", n) for c, n in tally.dropped.most_common()]
    noted = tally.events.most_common()
    problems += [finding(c, "problem", n) for c, n in noted if c in PROBLEMS]
    remarks = [finding(c, "remark", n) for c, n in noted if c not in PROBLEMS]
    unused = [(name, n) for name, n in tally.unused.most_common() if name in MEANINGFUL]
    remarks += [finding(f"field_not_used: {name}", "remark", n) for name, n in unused]
    return problems + remarks


def _spell(where: str, detail: str) -> str:
    return f"{where}: {detail}" if detail else where


class _Lint:
    """Looks at tokenized sequences, block by block.

    Attributes:
        found: check -> ids of the examples that it hit.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.found: defaultdict[str, list[int]] = defaultdict(list)
        self._tokenizer = tokenizer
        self._prompts, self._records = Seen(), Seen()

    def look(self, examples: Examples) -> None:
        """Counts what is remarkable about some examples."""
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
        """Whether EOS is the last supervised token of each sequence, or the last but one."""
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
        """Counts the examples of which some sequence is flagged: bool `[S]`."""
        flagged = np.logical_or.reduceat(sequences, examples.example_offsets[:-1])
        self._note_examples(check, examples, flagged)

    def _note_examples(self, check: str, examples: Examples, flagged: Bool) -> None:
        if flagged.any():
            self.found[check] += examples.example_ids[flagged].tolist()
