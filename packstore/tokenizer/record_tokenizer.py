"""The tokenization stage: converts parsed records to examples and a tally."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from packstore.config import RunConfig, SelectConfig, TokenizeConfig
from packstore.config.record_shapes import known
from packstore.errors import TokenizerError, sentence
from packstore.format.arrays import Examples, Int64, Rows, Tally, example_id, to_offsets
from packstore.tokenizer.control import holds
from packstore.tokenizer.dialogue.limits import limited, restart_clock
from packstore.tokenizer.dialogue.messages import is_empty
from packstore.tokenizer.drafts import begins_rendered, check_responses, draft_record
from packstore.tokenizer.encode import assemble
from packstore.tokenizer.records.fast_path import parse_plain_texts
from packstore.tokenizer.records.fields import (
    carried,
    check_placeholders,
    check_read,
    count_unused,
    names_of,
    opened,
    parse_carry,
    parts_beside,
    to_columns,
)
from packstore.tokenizer.records.named import canonical, used_fields
from packstore.tokenizer.records.overlong import fit
from packstore.tokenizer.records.parse import Parsed, parse_canonical, prompt_key
from packstore.tokenizer.records.paths import parse_path, with_paths
from packstore.tokenizer.records.sequences import Draft, Sequences, Tokens, id_sequences
from packstore.tokenizer.records.shapes import NONE, Shape, written
from packstore.tokenizer.records.tags import without_tags
from packstore.tokenizer.refusals import Refused, raise_if_error
from packstore.tokenizer.tokenizer import Tokenizer

Lint = Callable[[Parsed], Iterable[tuple[str, str]]]
"""Returns the events of a record, each with a detail. Picklable."""


@dataclass
class _Block:
    """The records of a block that are not refused so far, with their sequences."""

    records: list[int] = field(default_factory=list)  # in the block
    parsed: list[Parsed] = field(default_factory=list)
    carried: list[list[Any]] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)  # the sequences that are text
    drafts_of: dict[int, range] = field(default_factory=dict)  # of sampled ones, by index
    ids: dict[int, Tokens] = field(default_factory=dict)  # the others, by number
    refused: dict[int, Refused] = field(default_factory=dict)  # by index in the block
    shapes: dict[int, Shape] = field(default_factory=dict)  # by index in the block
    events: dict[int, list[str]] = field(default_factory=dict)  # by index in the block


SCORES = ("score", "scores", "chosen_reward", "rejected_reward", "margin")
"""Roles of fields that judge an answer."""


class Encoded(NamedTuple):
    """A text, what it was encoded to, and the place of its record."""

    where: str
    draft: Draft
    tokens: Tokens


class RecordTokenizer:
    """Converts records to examples, deterministically. Picklable.

    `tokenizer` may be None only if all records are token ids. `lint` sees every record
    that is kept.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        config: TokenizeConfig,
        kind: str,
        lint: Lint | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._lint = lint
        self.config = config
        self.kind = kind
        self.carry = parse_carry(config)
        self._keeps_rejects = isinstance(config, RunConfig) and config.rejects is not None
        self._wants_keys = isinstance(config, SelectConfig) and config.selects
        names = known()
        feedback = names.feedback if kind == "sft" else frozenset[str]()
        checked = {*feedback} if config.on["unpaired_feedback"] != "keep" else set[str]()
        if config.on["unread_field"] != "keep":
            checked |= names.remedies.keys() - feedback
        says_answer = not config.fields.keys().isdisjoint(("response", "messages"))
        says_answer |= config.shape not in (None, NONE)
        self._checked = checked - ({"adds"} if kind == "sft" and says_answer else set())
        marked = [name for name in config.fields.values() if any(m in name for m in '.["')]
        paths = [parse_path(name) for name in marked]
        self._paths = set(map(written, paths))
        # Who maps the score of an answer has chosen it among those beside it.
        roots = paths if not config.fields.keys().isdisjoint(SCORES) else []
        self._beside = tuple(f"{root}{mark}" for root, *_ in roots for mark in ".[")
        self._mapped = {*self.carry, *config.fields.values()}
        self._mapped.update(*(names.spellings[name] for name in config.fields))
        spelled = itertools.chain(names.spellings.values(), names.id_spellings.values())
        self._own_names = self._mapped.union(*spelled)
        templated = tokenizer is not None and tokenizer.chat_template is not None
        self._is_raw = templated and config.as_chat is None
        for role, asked in (("bos", config.add_bos), ("eos", config.append_eos)):
            if asked and tokenizer and getattr(tokenizer, f"{role}_id") is None:
                rule = f"it must name its {role.upper()} token, as the settings ask for one"
                raise TokenizerError(sentence(f"tokenizer {tokenizer.name}", rule, "none"))

    def __call__(
        self, rows: Rows, sampled: Collection[int] = ()
    ) -> tuple[Examples, Tally, list[Encoded]]:
        """Returns the examples of `rows`, in order, the tally of all records, and what the texts of
        the records with indices `sampled` were encoded to."""
        block, config = _Block(), self.config
        given, values = self._canonical(rows.values, block)
        for i, fields in enumerate(given):
            shape, own = block.shapes.get(i), self._own_names
            if shape is not None:
                own = (own | shape.known) - shape.opens
            if type(fields) is dict and (others := fields.keys() - own):
                (fields,) = opened([fields], others)
                if shape is not None:
                    fields = {k: v for k, v in fields.items() if not self._leaves(shape, k)}
                given[i] = fields
        names = names_of(given)
        groups = {n: known().group(n) for n in sorted(names - self._mapped)}
        groups = {
            name: group
            for name, group in groups.items()
            if group in self._checked and not (group == "judges" and name.startswith(self._beside))
        }
        parsed: dict[int, Parsed] = {}
        if self.tokenizer is not None:
            hint = self.tokenizer.control_hint
            parsed = parse_plain_texts(values, self.kind, config, hint)
        for i, value in enumerate(values):
            try:
                if i in parsed or i in block.refused:
                    continue
                record = parse_canonical(value, self.kind, config, ids=self.tokenizer is None)
                parsed[i] = check_responses(record, config)
            except Refused as error:
                # Its traceback references the block: a cycle that would leak memory in long jobs.
                block.refused[i] = error.with_traceback(None)
        for i, shape in block.shapes.items():
            if i in parsed:
                fields = used_fields(shape, parsed[i].fields, (*given[i],), config.fields)
                parsed[i] = parsed[i]._replace(fields=fields)
        unread: dict[tuple[str, ...], dict[str, str]] = {}
        for i, record in [*parsed.items()]:
            if (left := unread.get(record.fields)) is None:
                left = {n: group for n, group in groups.items() if n not in record.fields}
                unread[record.fields] = left
            try:
                if left:
                    is_ids, own = isinstance(record.prompt, np.ndarray), i in block.shapes
                    passes = own and (config.shape or "").endswith((".yaml", ".yml"))
                    check_read(given[i], left, self.kind, is_ids, passes)
                if "media" in self._checked:
                    check_placeholders(record.questions)
            except Refused as error:
                block.refused[i] = error.with_traceback(None)
                del parsed[i]
        renders = any(record.is_chat for record in parsed.values())
        if renders:
            self._needed()  # else a process would be started only to say so
        with limited() if renders else contextlib.nullcontext():
            for i, record in sorted(parsed.items()):
                try:
                    self._add(block, i, rows.values[i], record, i in sampled)
                except Refused as error:
                    block.refused[i] = error.with_traceback(None)
        sequences = Sequences.of([])
        if self.tokenizer is not None and block.drafts:
            sequences = assemble(self.tokenizer, block.drafts, config)
        encoded = [
            Encoded(rows.where(i), block.drafts[j], sequences.row(j))
            for i in sampled
            for j in block.drafts_of.get(i, ())
        ]
        for j in _rounded([record.rewards for record in block.parsed]):
            block.events.setdefault(block.records[j], []).append("reward_rounded")
        counts = np.array([len(record.responses) for record in block.parsed], np.int64)
        firsts = to_offsets(counts)
        sequences = self._judge(block, sequences.with_rows(block.ids, insert=True), firsts)
        judged = {n for n, g in groups.items() if self.kind == "sft" and g in known().feedback}
        tally = self._tally(rows, given, block, names - judged)
        return self._examples(rows, block, sequences, counts), tally, encoded

    def _canonical(self, values: Sequence[Any], block: _Block) -> tuple[list[Any], list[Any]]:
        """Returns the records without the fields that their named shapes pass over, and the records
        with our own field names."""
        given, found = [], []
        for i, value in enumerate(values):
            record = shown = with_paths(value, self.config)
            try:
                ids = self.tokenizer is None
                record, shape = canonical(shown, self.config, self.kind, self._is_turn, ids)
                if shape is not None:
                    block.shapes[i] = shape
                    shown = {k: v for k, v in shown.items() if not self._leaves(shape, k)}
            except Refused as error:
                block.refused[i] = error.with_traceback(None)
                record = None
            if self._paths and type(value) is dict and i not in block.shapes:
                gone = [name for name in value if name not in shown]
                shown = {**shown, **parts_beside(value, gone, self._paths)}
            given.append(shown)
            found.append(record)
        return given, found

    def _leaves(self, shape: Shape, name: str) -> bool:
        """Returns True if a shape rightly leaves a field, or a mapped one takes its place."""
        if name in self._mapped:
            return False
        return shape.passes(name) or any(
            name == written(path)
            for role in self.config.fields
            for path in shape.reads.get(role, ())
        )

    def _is_turn(self, text: str) -> bool:
        """Returns True if there is a chat template, and a text is not rendered by it."""
        if not self._is_raw:
            return False
        tokenizer = self._needed()
        return not (holds(text, tokenizer.control_hint) and begins_rendered(text, tokenizer))

    def _tally(self, rows: Rows, given: list[Any], block: _Block, names: set[str]) -> Tally:
        """The tally of a block; of its fields, `names` are counted."""
        tally = Tally(read=len(rows.values), rejected=[] if self._keeps_rejects else None)
        for i in sorted({*block.refused, *block.events}):
            if refused := block.refused.get(i):
                raise_if_error(refused, rows.where(i), self.config)
                tally.drop(refused.reason, rows.where(i), refused.detail)
                continue
            for event in dict.fromkeys(block.events[i]):
                tally.note(event, rows.where(i))
        for fields, number in Counter(parsed.fields for parsed in block.parsed).items():
            tally.used.update(dict.fromkeys((*fields, *self.carry), number))
        count_unused(tally, [given[i] for i in block.records], names)
        for i, shape in block.shapes.items():  # also what judges, where the table says so
            full: Any = rows.values[i] if i not in block.refused else {}
            left = (n for n in full if self._leaves(shape, n) and not is_empty(full[n]))
            tally.unused.update(left)
        pairs = zip(block.records, block.parsed, strict=True)
        records = {i: parsed for i, parsed in pairs if i not in block.refused}
        for i, parsed in records.items():
            for event, detail in self._lint(parsed) if self._lint else ():
                tally.note(event, rows.where(i), detail)
        kept = [*records.values()]
        shapes = (block.shapes.get(i) for i in block.records if i not in block.refused)
        tally.shapes.update(str(s or p.shape) for s, p in zip(shapes, kept, strict=True))
        tally.chats = sum(parsed.is_chat for parsed in kept)
        tally.texts = sum(isinstance(parsed.prompt, str) for parsed in kept)
        if self._is_raw and (raw := tally.texts - tally.noted["rendered_text"]):
            tally.noted["raw_text"] += raw
        if self.kind == "preference":
            tally.scored = sum(parsed.scored for parsed in kept)
            tally.unscored = tally.kept - tally.scored
        return tally

    def _needed(self) -> Tokenizer:
        """The tokenizer, which records of text need."""
        if self.tokenizer is None:
            rule = "it must be given, as the records hold text"
            remedy = "Give the tokenizer (--tokenizer PATH)"
            raise TokenizerError(sentence("setting tokenizer", rule, "none", remedy))
        return self.tokenizer

    def _add(self, block: _Block, i: int, value: Any, parsed: Parsed, is_sampled: bool) -> None:
        """Adds record `i` to the block."""
        values = [carried(value, name, type_name) for name, type_name in self.carry.items()]
        if isinstance(parsed.prompt, np.ndarray):
            events: list[str] = []
            sides = (parsed.prompt, parsed.responses, parsed.supervised)
            first = len(block.drafts) + len(block.ids)
            block.ids.update(enumerate(id_sequences(*sides, self.tokenizer), first))
        else:
            if parsed.is_chat:
                restart_clock()
            drafts, events = draft_record(parsed, self._needed(), self.config)
            if parsed.is_chat:
                texts = [d.text.replace(d.guard, "") if d.guard else d.text for d in drafts]
                if (bare := without_tags(parsed, texts)) is not parsed:
                    drafts, events = draft_record(parsed := bare, self._needed(), self.config)
                    events.append("tags_once")
            if is_sampled:
                first = len(block.drafts)
                block.drafts_of[i] = range(first, first + len(drafts))
            block.drafts += drafts
        if events or parsed.events:
            block.events[i] = [*parsed.events, *events]
        block.records.append(i)
        block.parsed.append(parsed)
        block.carried.append(values)

    def _judge(self, block: _Block, sequences: Sequences, firsts: Int64) -> Sequences:
        """Refuses records by the policies, and truncates overlong ones if set."""
        if not block.records:
            return sequences
        record = np.repeat(block.records, np.diff(firsts))
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
        noted = dict[int, list[str]]()
        for k, events in sorted(sequences.events.items()):
            noted.setdefault(int(record[k]), []).extend(events)
        for i, events in noted.items():
            block.events[i] = [*block.events.get(i, ()), *events]
        return sequences

    def _examples(self, rows: Rows, block: _Block, sequences: Sequences, counts: Int64) -> Examples:
        """The examples of the records not refused."""
        records = np.array(block.records, np.int64)
        keep = np.ones(len(records), np.bool_)
        if block.refused:
            keep = ~np.isin(records, list(block.refused))
        kept = np.flatnonzero(keep).tolist()
        columns = to_columns([block.carried[j] for j in kept], self.carry)
        if not kept:
            return Examples.empty(columns)
        of_kept = np.repeat(keep, counts)
        ids, supervised, lengths = sequences.kept(of_kept)
        ordinals = np.array(rows.ordinals, np.int64)[records[keep]]
        parsed = [block.parsed[j] for j in kept]
        keys = np.array([*map(prompt_key, parsed)], np.uint64) if self._wants_keys else None
        return Examples(
            input_ids=ids,
            supervised=supervised,
            sequence_offsets=to_offsets(lengths),
            example_offsets=to_offsets(counts[keep]),
            reward=np.array([x for record in parsed for x in record.rewards], np.float32),
            example_ids=example_id(rows.source, 0) + ordinals,
            columns=columns,
            keys=keys,
        )


def _rounded(rewards: Sequence[Sequence[float]]) -> list[int]:
    """Returns the records of which different rewards become one as float32."""
    written = [*itertools.chain.from_iterable(rewards)]
    stored = np.array(written, np.float32).tolist()
    if stored == written:
        return []
    rows = iter(stored)
    fewer = (len({*itertools.islice(rows, len(row))}) < len({*row}) for row in rewards)
    return [i for i, is_fewer in enumerate(fewer) if is_fewer]
