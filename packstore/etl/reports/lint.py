"""Checks records for errors that harm training.

Texts are checked in the workers, and token ids in this process, once the workers return
examples.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

import numpy as np

from packstore.config import PackConfig
from packstore.errors import ConfigError, PackstoreError, quote
from packstore.etl.dedup_and_split import Seen, pair_keys
from packstore.etl.events import PROBLEMS, meaning_of
from packstore.etl.reports.place import Finding
from packstore.etl.sources import ExampleReader, RecordExampleReader
from packstore.etl.tokenize import TokenizedBlock
from packstore.etl.totals import absent_fields
from packstore.format.arrays import SOURCE_SHIFT, Bool, Examples
from packstore.io.inputs.formats import place_of
from packstore.tokenizer import Tokenizer
from packstore.tokenizer.dialogue.template import Message, limited
from packstore.tokenizer.records.carry import parse_carry
from packstore.tokenizer.records.parsed import Parsed
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.tally import Tally

_SENTENCE_ENDS = frozenset(".,;:!?\"'’”)…")
"""Characters at the end of sentences, besides letters and digits.

``>`` and ``]`` are left out: a prompt that ends with them ends with a turn marker.
"""


def lint_blocks(reader: ExampleReader) -> Iterator[TokenizedBlock]:
    """Yield the blocks of a reader: examples, and a tally that notes the findings.

    Raises:
        ConfigError: the source is a packed dataset, or there is no tokenizer.
    """
    if not isinstance(reader, RecordExampleReader) or reader.tokenizer is None:
        raise ConfigError(
            "lint needs records and a tokenizer; check a dataset with verify."
        )
    seen_prompts = Seen()
    seen_records = Seen()
    lint_texts = _TextLint(reader.tokenizer, reader.kind)
    block_tokenizer = reader.block_tokenizer(lint_texts)
    for examples, tally in reader.tokenize_with(block_tokenizer):
        if examples.num_examples:
            flags = _flag_tokens(examples, reader.tokenizer)
            assert examples.keys is not None  # hashes of the prompts
            is_new_prompt = seen_prompts.add(examples.keys)
            is_new_record = seen_records.add(pair_keys(examples))
            flags["duplicate_prompts"] = ~is_new_prompt
            flags["duplicate_records"] = ~is_new_record
            for check, is_flagged in flags.items():
                for example_id in examples.example_ids[is_flagged].tolist():
                    source, ordinal = divmod(example_id, 1 << SOURCE_SHIFT)
                    tally.note(check, place_of(reader.paths[source], ordinal))
        yield examples, tally


def find_in_tally(tally: Tally, config: PackConfig) -> Iterator[Finding]:
    """Yield a finding for each reason and event of a tally, and for unused fields.

    Problems come before remarks: absent fields, then reasons to drop records, then
    events, the most frequent of each first.
    """
    places = defaultdict[str, list[str]](list)
    for sample in tally.samples:
        place = sample.where
        if sample.detail:
            place += f": {sample.detail}"
        places[sample.reason].append(place)

    for name, input_name in absent_fields(tally, config):
        check = f"mapped_field_absent: {name}={input_name}"
        yield Finding(check, "problem", records=tally.read)

    events = tally.events.most_common()
    problems = tally.dropped.most_common()
    problems += [(event, count) for event, count in events if event in PROBLEMS]
    remarks = [(event, count) for event, count in events if event not in PROBLEMS]
    for check, count in problems:
        yield Finding(
            check,
            level="problem",
            text=meaning_of(check),
            records=count,
            examples=tuple(places[check]),
        )
    for check, count in remarks:
        yield Finding(
            check,
            level="remark",
            text=meaning_of(check),
            records=count,
            examples=tuple(places[check]),
        )

    for name in sorted(tally.unused.keys() - set(parse_carry(config))):
        check = f"field_not_used: {name}"
        yield Finding(check, "remark", records=tally.unused[name])


def _flag_tokens(examples: Examples, tokenizer: Tokenizer) -> dict[str, Bool]:
    """Check token ids.

    Returns:
        Check -> bool `[E]`, one for each example: True if one of its sequences has the
        error.
    """
    ids = examples.input_ids
    starts = examples.sequence_offsets[:-1]
    sequence_lengths = examples.lengths
    sequence_flags: dict[str, Bool] = {}

    if tokenizer.bos_id is not None:
        # The last sequence may have one token only, and no second position.
        second_positions = np.minimum(starts + 1, len(ids) - 1)
        is_first_bos = ids[starts] == tokenizer.bos_id
        is_second_bos = ids[second_positions] == tokenizer.bos_id
        has_second = sequence_lengths > 1
        sequence_flags["double_bos"] = is_first_bos & is_second_bos & has_second
        if tokenizer.adds_bos:
            sequence_flags["no_bos"] = ~is_first_bos
    if tokenizer.eos_id is not None:
        sequence_flags["no_eos"] = ~_ends_with(examples, tokenizer.eos_id)
    if tokenizer.unk_id is not None:
        is_unknown = ids == tokenizer.unk_id
        sequence_flags["unknown_tokens"] = np.logical_or.reduceat(is_unknown, starts)

    first_sequences = examples.example_offsets[:-1]
    return {
        check: np.logical_or.reduceat(flags, first_sequences)
        for check, flags in sequence_flags.items()
    }


def _ends_with(examples: Examples, eos_id: int) -> Bool:
    """Return bool `[S]`, one for each sequence: True if a supervised EOS is its last
    supervised token, or the token before that.

    Many templates write a line break behind EOS.
    """
    positions = np.arange(len(examples.input_ids))
    starts = examples.sequence_offsets[:-1]
    is_eos = (examples.input_ids == eos_id) & examples.supervised
    last_eos = np.maximum.reduceat(np.where(is_eos, positions, -1), starts)
    supervised_positions = np.where(examples.supervised, positions, -1)
    last_supervised = np.maximum.reduceat(supervised_positions, starts)
    return (last_eos >= starts) & (last_supervised - last_eos <= 1)


class _TextLint:
    """Checks a record before it is tokenized, for errors that its examples do not show.

    It runs in the workers. The tokenizer itself notes empty prompts of text.
    """

    def __init__(self, tokenizer: Tokenizer, kind: str) -> None:
        self._tokenizer = tokenizer
        self._kind = kind

    def __call__(self, record: Parsed) -> Iterator[tuple[str, str]]:
        """Yield the name of each check that finds an error, and a detail."""
        prompt = record.prompt
        # In records of ids of kind sft, the response holds the prompt, too.
        if isinstance(prompt, np.ndarray) and self._kind != "sft" and not len(prompt):
            yield "empty_prompt", ""
        if isinstance(prompt, str):
            responses = [str(response) for response in record.responses]
            if any(_is_glued(prompt, response) for response in responses):
                detail = f"{quote(prompt[-20:])} and {quote(responses[0][:20])}"
                yield "glued_prompt", detail
        if isinstance(prompt, list) and self._split_markers:
            yield "marker_no_token", " ".join(self._split_markers)

    @cached_property
    def _split_markers(self) -> list[str]:
        """Markers that the chat template writes around turns, and that are not tokens:
        the tokenizer splits them.
        """
        tokenizer = self._tokenizer
        if tokenizer.template is None:
            return []
        turns: list[Message] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "a"},
        ]
        try:
            with limited():  # in time and memory
                text = tokenizer.template.render(turns, None)
        except (Refused, PackstoreError):  # the template refuses this dialogue
            return []
        markers = dict.fromkeys(re.findall(r"<[^<>\s]{1,40}>", text))
        return [
            marker for marker in markers if tokenizer.engine.token_to_id(marker) is None
        ]


def _is_glued(prompt: str, response: str) -> bool:
    """Return True if no white space separates a prompt from a word of the response.

    False for scripts without spaces, such as Chinese.
    """
    last = prompt[-1:]
    first = response[:1]
    for character in last + first:
        if unicodedata.east_asian_width(character) in "WF":  # wide or full width
            return False
    return (last.isalnum() or last in _SENTENCE_ENDS) and first.isalnum()
