"""Checks records for what harms training: texts in the workers, token ids as they
return.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from packstore.config import REASONS, PackConfig
from packstore.errors import ConfigError, PackstoreError, quote
from packstore.etl.dedup_and_split import Seen, pair_keys
from packstore.etl.reports.place import Finding
from packstore.etl.sources import ExampleReader, RecordExampleReader
from packstore.etl.tokenize import Part
from packstore.etl.totals import PROBLEMS, absent_fields
from packstore.format.arrays import SOURCE_SHIFT, Bool, Examples, Tally
from packstore.io.inputs.formats import place_of
from packstore.tokenizer import Tokenizer
from packstore.tokenizer.dialogue.template import Message, limited
from packstore.tokenizer.records.parsed import Parsed
from packstore.tokenizer.refusals import Refused

_REMARKS = {
    "unknown_tokens": "text that the vocabulary cannot spell",
    "generation_prompt_always": "the chat template writes the generation prompt even "
    "where it is "
    "not asked for; behind the last turn it is stored, and not supervised",
    "rendered_text": "text that begins with a control string of the chat template, or "
    "whose "
    "answers end with EOS: taken as rendered, with its control strings as control ids",
    "empty_thinking": "a turn begins with an empty thinking block, which is not "
    "supervised",
    "tags_once": "a message stood in the tags that the chat template writes around its "
    "role, as in "
    "<tool_response>: they are written once",
    "arguments_quoted": "arguments of tool calls that are JSON text, quoted by the "
    "chat template",
    "reasoning_unrendered": "the chat template leaves out the reasoning of a turn",
    "empty_prompt": "the prompt, or every question, is empty, or only white space or a "
    "dash",
    "glued_prompt": "no white space separates the prompt from its answer",
    "duplicate_prompts": "the prompt of an earlier record again (dedup=prompt leaves "
    "it out)",
    "duplicate_records": "an earlier record again, rewards apart (dedup=pair leaves it "
    "out)",
}
"""Findings that may be fine, and need an explanation."""

_ENDS = frozenset(".,;:!?\"'’”)…")
"""Characters at the end of sentences, besides letters and digits. Turn markers end with
> or ].
"""


def linted(reader: ExampleReader) -> Iterator[Part]:
    """Yields examples and tallies like the reader, with what was found among
    the notes.
    """
    if not isinstance(reader, RecordExampleReader) or reader.tokenizer is None:
        raise ConfigError(
            "lint needs records and a tokenizer; check a dataset with verify."
        )
    prompts, records = Seen(), Seen()
    for examples, tally in reader.parts(
        reader.tokenize(_TextLint(reader.tokenizer, reader.kind))
    ):
        if examples.num_examples:
            flags = _flag_tokens(examples, reader.tokenizer)
            assert examples.keys is not None
            flags["duplicate_prompts"] = ~prompts.add(examples.keys)
            flags["duplicate_records"] = ~records.add(pair_keys(examples))
            for check, flagged in flags.items():
                for i in examples.example_ids[flagged].tolist():
                    source, ordinal = divmod(i, 1 << SOURCE_SHIFT)
                    tally.note(check, place_of(reader.paths[source], ordinal))
        yield examples, tally


def find(tally: Tally, kind: str, config: PackConfig) -> Iterator[Finding]:
    """Yields what was found, problems first, the frequent first."""
    examples = defaultdict[str, list[str]](list)
    for s in tally.samples:
        examples[s.reason].append(f"{s.where}: {s.detail}" if s.detail else s.where)
    for name, written in absent_fields(tally, config):
        yield Finding(
            f"mapped_field_absent: {name}={written}", "problem", records=tally.read
        )
    noted = tally.events.most_common()
    problems = [
        *tally.dropped.most_common(),
        *((c, n) for c, n in noted if c in PROBLEMS),
    ]
    for check, count in problems:
        yield Finding(check, "problem", _meaning(check), count, tuple(examples[check]))
    for check, count in noted:
        if check not in PROBLEMS:
            yield Finding(
                check, "remark", _meaning(check), count, tuple(examples[check])
            )
    for name in sorted(tally.unused):
        yield Finding(f"field_not_used: {name}", "remark", records=tally.unused[name])


def _meaning(check: str) -> str:
    """Returns what a check finds, with the setting that decides what then happens, if
    any.
    """
    known = PROBLEMS.get(check) or _REMARKS.get(check, "")
    if known or check not in REASONS:
        return known
    rule, answers = REASONS[check]
    return f"{rule} (--on {check}={'|'.join(answers)})"


def _flag_tokens(examples: Examples, tokenizer: Tokenizer) -> dict[str, Bool]:
    """Returns for each check bool `[E]`: True for examples with a sequence that it
    hits.
    """
    starts, ids, bos = (
        examples.sequence_offsets[:-1],
        examples.input_ids,
        tokenizer.bos_id,
    )
    flags: dict[str, Bool] = {}
    if bos is not None:
        first = ids[starts] == bos
        second = ids[np.minimum(starts + 1, len(ids) - 1)] == bos
        flags["double_bos"] = first & second & (examples.lengths > 1)
        if tokenizer.adds_bos:
            flags["no_bos"] = ~first
    if tokenizer.eos_id is not None:
        flags["no_eos"] = ~_ends_with(examples, tokenizer.eos_id)
    if tokenizer.unk_id is not None:
        flags["unknown_tokens"] = np.logical_or.reduceat(
            ids == tokenizer.unk_id, starts
        )
    first_sequences = examples.example_offsets[:-1]
    return {c: np.logical_or.reduceat(hit, first_sequences) for c, hit in flags.items()}


def _ends_with(examples: Examples, eos: int) -> Bool:
    """Returns True for sequences with EOS as last or second to last supervised
    token.
    """
    hit = (examples.input_ids == eos) & examples.supervised
    position = np.arange(len(hit))
    starts = examples.sequence_offsets[:-1]
    last_eos = np.maximum.reduceat(np.where(hit, position, -1), starts)
    last = np.maximum.reduceat(np.where(examples.supervised, position, -1), starts)
    return (last_eos >= starts) & (last - last_eos <= 1)


class _TextLint:
    """Checks the texts of a record, in a worker, for errors that its ids do not
    show.
    """

    def __init__(self, tokenizer: Tokenizer, kind: str) -> None:
        self._tokenizer, self._kind = tokenizer, kind

    def __call__(self, record: Parsed) -> Iterator[tuple[str, str]]:
        """Yields checks with a hit, each with a detail."""
        prompt, responses = record.prompt, record.responses
        # Ids of kind sft are all response, prompts included.
        if isinstance(prompt, np.ndarray) and self._kind != "sft" and not len(prompt):
            yield "empty_prompt", ""
        if isinstance(prompt, str) and any(_glued(prompt, str(r)) for r in responses):
            yield (
                "glued_prompt",
                f"{quote(prompt[-20:])} and {quote(str(responses[0])[:20])}",
            )
        if isinstance(prompt, list) and self._markers:
            yield "marker_no_token", " ".join(self._markers)

    @cached_property
    def _markers(self) -> list[str]:
        """Texts that the chat template writes around turns, and that are no tokens."""
        tokenizer = self._tokenizer
        if tokenizer.template is None:
            return []
        turns: list[Message] = [
            {"role": role, "content": "a"} for role in ("user", "assistant")
        ]
        try:
            with limited():
                text = tokenizer.template.render(turns, None)
        except (Refused, PackstoreError):  # the template refuses this dialogue
            return []
        markers = dict.fromkeys(re.findall(r"<[^<>\s]{1,40}>", text))
        return [m for m in markers if tokenizer.engine.token_to_id(m) is None]


def _glued(prompt: str, response: str) -> bool:
    """Returns True if prompt and response join without a space, in a script with
    spaces.
    """
    last, first = prompt[-1:], response[:1]
    if any(unicodedata.east_asian_width(c) in "WF" for c in last + first):
        return False
    return (last.isalnum() or last in _ENDS) and first.isalnum()
