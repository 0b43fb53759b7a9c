"""The tokenization stage: converts parsed records to examples and a tally."""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from packstore.config import RunConfig, SelectConfig, TokenizeConfig
from packstore.config.record_shapes import FEEDBACK, REWARD_FIELDS
from packstore.errors import TokenizerError, sentence
from packstore.format.arrays import Examples, Int64, Rows, Tally, example_id, to_offsets
from packstore.tokenizer.encode import assemble
from packstore.tokenizer.records.fields import (
    carried,
    check_feedback,
    names_of,
    parse_carry,
    to_columns,
    unused,
)
from packstore.tokenizer.records.overlong import fit
from packstore.tokenizer.records.sequences import Draft, Mode, Sequences, Tokens, id_sequences
from packstore.tokenizer.records.shapes import DEFAULT_REWARDS, Parsed, parse_record, prompt_key
from packstore.tokenizer.refusals import Refused, raise_if_error
from packstore.tokenizer.rendered import (
    PLAIN_FIELDS,
    check_responses,
    check_separable,
    draft_plain,
    draft_record,
)
from packstore.tokenizer.renderer import Drafted, Renderer
from packstore.tokenizer.tokenizer import FAST, Tokenizer

STRICT = ("tokenizers", FAST)
"""Engines that raise an error for text with lone surrogates."""


@dataclass
class _Block:
    """The records of a block in the stage, with their sequences; `plain` counts the fast path."""

    records: list[int] = field(default_factory=list)  # in the block, of each not refused so far
    counts: list[int] = field(default_factory=list)  # sequences of each of these
    rewards: list[float] = field(default_factory=list)  # of each sequence
    carried: list[list[Any]] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)  # hashes of the prompts
    drafts: list[Draft] = field(default_factory=list)  # the sequences that are text
    ids: dict[int, Tokens] = field(default_factory=dict)  # the others, by number
    refused: dict[int, Refused] = field(default_factory=dict)  # by index in the block
    events: dict[int, list[str]] = field(default_factory=dict)  # by index in the block
    used: Counter[str] = field(default_factory=Counter)  # field -> records, without plain pairs
    plain: int = 0
    scored: set[int] = field(default_factory=set)  # records with rewards
    chats: set[int] = field(default_factory=set)  # records of messages
    of_ids: set[int] = field(default_factory=set)  # records of token ids

    def add_pair(self, i: int, drafts: tuple[Draft, Draft]) -> None:
        """Adds record `i`, which has no carried values and no rewards."""
        self.records.append(i)
        self.counts.append(2)
        self.rewards += DEFAULT_REWARDS
        self.carried.append([])
        self.drafts += drafts
        self.plain += 1


class RecordTokenizer:
    """Converts records to examples, deterministically. Picklable.

    Args:
        tokenizer: the tokenizer; None only if all records are token ids.
        config: the settings.
        kind: ``preference``, ``sft`` or ``ranked``.
    """

    def __init__(self, tokenizer: Tokenizer | None, config: TokenizeConfig, kind: str) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.kind = kind
        self.carry = parse_carry(config)
        self._keeps_rejects = isinstance(config, RunConfig) and config.rejects is not None
        self._wants_keys = isinstance(config, SelectConfig) and config.selects
        self._mode: Mode = "literal" if config.on["special_tokens"] == "keep" else "control"
        self._judges = kind == "sft" and config.on["unpaired_feedback"] != "keep"
        self._renderer: Renderer | None = None
        self._hint = ""
        changed = config.fields or config.thinking == "strip" or config.as_chat
        plain = not (self._wants_keys or self.carry or changed)
        templated = tokenizer is not None and tokenizer.chat_template is not None
        self._is_raw = templated and config.as_chat is None
        if tokenizer and kind == "preference" and plain:
            self._hint = tokenizer.control_hint
        # These refuse invalid Unicode, so that no check is needed before.
        self._trusting = tokenizer is not None and tokenizer.engine_name in STRICT
        for role, asked in (("bos", config.add_bos), ("eos", config.append_eos)):
            if asked and tokenizer and getattr(tokenizer, f"{role}_id") is None:
                must = f"it must name its {role.upper()} token, as the settings ask for one"
                raise TokenizerError(sentence(f"tokenizer {tokenizer.name}", must, "none"))

    def __call__(self, rows: Rows) -> tuple[Examples, Tally]:
        """Returns the examples of `rows`, in order, and the tally of all records."""
        block, trusting = _Block(), self._trusting
        names = names_of(rows.values)
        hint = self._hint if REWARD_FIELDS.isdisjoint(names) else ""
        judged = names.intersection(FEEDBACK) if self._judges else set()
        found: dict[int, Parsed | tuple[Draft, Draft]] = {}
        for i, value in enumerate(rows.values):
            try:
                if hint and (drafts := draft_plain(value, hint, self._mode, not trusting)):
                    found[i] = drafts
                    continue
                if judged:
                    check_feedback(value)
                found[i] = self._parsed(value)
            except Refused as error:
                # Its traceback references the block: a cycle that would leak memory in long jobs.
                block.refused[i] = error.with_traceback(None)
        chats = {i: x for i, x in found.items() if isinstance(x, Parsed) and x.is_chat}
        rendered = dict(zip(chats, self._render([*chats.values()]), strict=True))
        for i, parsed in found.items():
            try:
                if isinstance(parsed, Parsed):
                    self._add(block, i, rows.values[i], parsed, rendered.get(i))
                else:
                    block.add_pair(i, parsed)
            except Refused as error:
                block.refused[i] = error.with_traceback(None)
        sequences = Sequences.of([])
        try:
            if self.tokenizer is not None and block.drafts:
                sequences = assemble(self.tokenizer, block.drafts, self.config)
        except TokenizerError:
            if not trusting:
                raise
            self._trusting = False
            return self(rows)
        firsts = to_offsets(np.array(block.counts, np.int64))
        sequences = self._judge(block, sequences.with_rows(block.ids, insert=True), firsts)
        tally = Tally(read=len(rows.values), rejected=[] if self._keeps_rejects else None)
        for i in sorted({*block.refused, *block.events}):
            if refused := block.refused.get(i):
                raise_if_error(refused, rows.where(i), self.config)
                tally.drop(refused.reason, rows.where(i), refused.detail)
                continue
            for event in dict.fromkeys(block.events[i]):
                tally.note(event, rows.where(i))
        block.used.update(dict.fromkeys(PLAIN_FIELDS, block.plain) if block.plain else {})
        tally.used = block.used
        records = [rows.values[i] for i in block.records]
        tally.unused = unused(records, names - judged, block.used)
        tally.chats = len(block.chats - block.refused.keys())
        tally.texts = tally.kept - tally.chats - len(block.of_ids - block.refused.keys())
        if self._is_raw and tally.texts:
            tally.noted["raw_text"] += tally.texts
        if self.kind == "preference":
            tally.scored = len(block.scored - block.refused.keys())
            tally.unscored = tally.kept - tally.scored
        return self._examples(rows, block, sequences, firsts), tally

    def _parsed(self, value: object) -> Parsed:
        ids = self.tokenizer is None
        return check_responses(parse_record(value, self.kind, self.config, ids=ids), self.config)

    def _render(self, chats: list[Parsed]) -> list[Drafted | Refused]:
        if not chats:
            return []
        if self._renderer is None:
            self._renderer = Renderer(self._needed(), self.config)
        return self._renderer(chats)

    def _needed(self) -> Tokenizer:
        """The tokenizer, which records of text need."""
        if self.tokenizer is None:
            must = "it must be given, as the records hold text"
            raise TokenizerError(sentence("setting tokenizer", must, "none"))
        return self.tokenizer

    def _add(
        self, block: _Block, i: int, value: Any, parsed: Parsed, chat: Drafted | Refused | None
    ) -> None:
        """Adds record `i` to the block; `chat` is what rendering it gave."""
        if isinstance(chat, Refused):
            raise chat
        values = []
        if isinstance(value, dict):
            values = [carried(value, name, type_name) for name, type_name in self.carry.items()]
        if isinstance(parsed.prompt, np.ndarray):
            events: list[str] = []
            block.of_ids.add(i)
            sides = (parsed.prompt, parsed.responses, parsed.supervised)
            block.ids.update(enumerate(id_sequences(*sides, self.tokenizer), len(block.rewards)))
        else:
            drafts, events = chat or draft_record(parsed, self._needed(), self.config)
            check_separable(drafts, self._needed())
            block.drafts += drafts
            if isinstance(parsed.prompt, list):
                block.chats.add(i)
        if _rounded(parsed.rewards):
            events = [*events, "reward_rounded"]
        if events or parsed.events:
            block.events[i] = [*parsed.events, *events]
        block.used.update({*parsed.fields, *self.carry})
        if parsed.scored:
            block.scored.add(i)
        if self._wants_keys:
            block.keys.append(prompt_key(parsed))
        block.records.append(i)
        block.counts.append(len(parsed.responses))
        block.rewards += parsed.rewards
        block.carried.append(values)

    def _judge(self, block: _Block, sequences: Sequences, firsts: Int64) -> Sequences:
        """Refuses records by the policies, and truncates overlong ones if set."""
        if not block.records:
            return sequences
        record = np.repeat(block.records, block.counts)
        for i, refused in sorted(sequences.refused.items()):
            block.refused.setdefault(int(record[i]), refused)
        lengths = np.diff(sequences.offsets)
        learned = np.diff(np.append(0, np.cumsum(sequences.supervised))[sequences.offsets])
        for i in np.flatnonzero(learned == 0).tolist():
            response = i - int(firsts[np.searchsorted(firsts, i, "right") - 1]) + 1
            detail = f"response {response} has no supervised token"
            block.refused.setdefault(int(record[i]), Refused("unsupervised", detail))
        # Shared prefixes only shorten an example: one that fits without them needs no check.
        multiple = self.config.pad_to_multiple
        total = np.add.reduceat(-(-lengths // multiple) * multiple, firsts[:-1])
        longest = np.maximum.reduceat(lengths, firsts[:-1])
        large = (total > self.config.pack_size) | (longest > self.config.sequence_limit)
        specials = self.tokenizer.special_ids if self.tokenizer else frozenset()
        changed: dict[int, Tokens] = {}
        for j in np.flatnonzero(large).tolist():
            i, (first, last) = block.records[j], firsts[j : j + 2].tolist()
            if i in block.refused:
                continue
            try:
                tokens = fit([sequences.row(k) for k in range(first, last)], self.config, specials)
            except Refused as error:
                block.refused[i] = error.with_traceback(None)
                continue
            rows = dict(zip(range(first, last), tokens, strict=True))
            changed |= {k: t for k, t in rows.items() if len(t.ids) != lengths[k]}
        sequences = sequences.with_rows(changed)
        for k, events in sorted(sequences.events.items()):
            noted = block.events.setdefault(int(record[k]), [])
            block.events[int(record[k])] = [*noted, *events]
        return sequences

    def _examples(self, rows: Rows, block: _Block, sequences: Sequences, firsts: Int64) -> Examples:
        """The examples of the records not refused."""
        records = np.array(block.records, np.int64)
        keep = np.ones(len(records), np.bool_)
        if block.refused:
            keep = ~np.isin(records, list(block.refused))
        kept = np.flatnonzero(keep).tolist()
        columns = to_columns([block.carried[j] for j in kept], self.carry)
        if not kept:
            return Examples.empty(columns)
        counts = np.array(block.counts, np.int64)
        of_kept = np.repeat(keep, counts)
        ids, supervised, lengths = sequences.kept(of_kept)
        ordinals = np.array(rows.ordinals, np.int64)[records[keep]]
        return Examples(
            input_ids=ids,
            supervised=supervised,
            sequence_offsets=to_offsets(lengths),
            example_offsets=to_offsets(counts[keep]),
            reward=np.array(block.rewards, np.float32)[of_kept],
            example_ids=example_id(rows.source, 0) + ordinals,
            columns=columns,
            keys=np.array(block.keys, np.uint64)[keep] if self._wants_keys else None,
        )


def _rounded(rewards: list[float]) -> bool:
    """Returns True if different rewards become one when they are stored, as float32."""
    stored = {struct.pack("<f", reward) for reward in rewards}
    return len(stored) < len(set(rewards))
