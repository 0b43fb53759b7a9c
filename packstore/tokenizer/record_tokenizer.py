"""The tokenization stage: converts parsed records to examples and a tally."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from packstore.config import RunConfig, SelectConfig, TokenizeConfig
from packstore.config.record_shapes import known
from packstore.errors import TokenizerError, sentence
from packstore.format.arrays import (
    Column,
    Examples,
    Int64,
    Rows,
    Tally,
    example_id,
    to_offsets,
)
from packstore.tokenizer.control import holds
from packstore.tokenizer.dialogue.limits import limited, restart_clock
from packstore.tokenizer.dialogue.messages import is_empty
from packstore.tokenizer.drafts import begins_rendered, check_responses, draft_record
from packstore.tokenizer.encode import assemble
from packstore.tokenizer.records.fast_path import parse_plain_texts
from packstore.tokenizer.records.fields import (
    TYPES,
    check_carried,
    check_placeholders,
    check_read,
    count_unused,
    parse_carry,
    parts_beside,
    parts_of,
)
from packstore.tokenizer.records.named import canonical, used_fields
from packstore.tokenizer.records.overlong import fit
from packstore.tokenizer.records.parse import Parsed, parse_canonical, prompt_key
from packstore.tokenizer.records.paths import is_path, parse_path, with_paths
from packstore.tokenizer.records.sequences import Draft, Sequences, Tokens, id_sequences
from packstore.tokenizer.records.shapes import NONE, Shape, written
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.tokenizer import Tokenizer

Lint = Callable[[Parsed], Iterable[tuple[str, str]]]
"""Returns the events of a record, each with a detail. Picklable."""


@dataclass(slots=True)
class _Record:
    """A record of a block, and what has become of it so far."""

    place: int  # in the block
    value: Any
    given: Any = None  # with its paths, and without what its named shape passes over
    ours: Any = None  # with our own field names
    shape: Shape | None = None  # the named one
    plain: Parsed | None = None  # of text that only has to be encoded
    parsed: Parsed = field(init=False)
    sequences: Sequence[Draft | Tokens] = ()  # text, or ids
    events: list[str] = field(default_factory=list)
    refused: Refused | None = None


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
        self._feedback = names.feedback if kind == "sft" else frozenset[str]()
        reasons = dict.fromkeys(names.remedies, "unread_field")
        reasons |= dict.fromkeys(self._feedback, "unpaired_feedback")
        self._checked = {group for group, why in reasons.items() if config.on[why] != "keep"}
        says_answer = not config.fields.keys().isdisjoint(("response", "messages"))
        if kind == "sft" and (says_answer or config.shape not in (None, NONE)):
            self._checked.discard("adds")
        paths = [parse_path(name) for name in config.fields.values() if is_path(name)]
        self._paths = set(map(written, paths))
        # Who maps the score of an answer has chosen it among those beside it.
        roots = paths if not config.fields.keys().isdisjoint(SCORES) else []
        self._beside = tuple(f"{root}{mark}" for root, *_ in roots for mark in ".[")
        self._mapped = {*self.carry, *config.fields.values()}
        self._mapped.update(*(names.spellings[name] for name in config.fields))
        self._own_names = self._mapped | names.accepted
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
        config = self.config
        records = [_Record(i, value) for i, value in enumerate(rows.values)]
        left = _each(records, self._read)
        names = set[str]().union(*(r.given for r in left if type(r.given) is dict))
        groups = {n: known().group(n) for n in sorted(names - self._mapped)}
        groups = {
            name: group
            for name, group in groups.items()
            if group in self._checked and not (group == "judges" and name.startswith(self._beside))
        }
        if self.tokenizer is not None:
            hint = self.tokenizer.control_hint
            plain = parse_plain_texts([r.ours for r in left], self.kind, config, hint)
            for i, parsed in plain.items():
                left[i].plain = parsed
        left = _each(left, lambda record: self._parse(record, groups))
        renders = any(record.parsed.is_chat for record in left)
        if renders:
            self._needed()  # else a process would be started only to say so
        with limited() if renders else contextlib.nullcontext():
            left = _each(left, self._draft)
        numbered = [(record, sequence) for record in left for sequence in record.sequences]
        drafts = [sequence for _, sequence in numbered if isinstance(sequence, Draft)]
        of_ids = {j: s for j, (_, s) in enumerate(numbered) if isinstance(s, Tokens)}
        sequences = assemble(self._needed(), drafts, config) if drafts else Sequences.of([])
        sequences = sequences.with_rows(of_ids, insert=True)
        encoded = [
            Encoded(rows.where(record.place), sequence, sequences.row(j))
            for j, (record, sequence) in enumerate(numbered)
            if isinstance(sequence, Draft) and record.place in sampled
        ]
        sequences = self._judge(left, sequences)
        judged = {name for name, group in groups.items() if group in self._feedback}
        tally = self._tally(rows, records, left, names - judged)
        return self._examples(rows, left, sequences), tally, encoded

    def _read(self, record: _Record) -> None:
        """Finds the named shape of a record, and its fields under our own names."""
        given = record.given = with_paths(record.value, self.config)
        ids = self.tokenizer is None
        record.ours, shape = canonical(given, self.config, self.kind, self._is_turn, ids)
        record.shape = shape
        if type(given) is not dict:
            return
        if self._paths and shape is None:
            gone = [name for name in record.value if name not in given]
            given = given | parts_beside(record.value, gone, self._paths)
        if others := [name for name in given if self._is_opened(name, shape)]:
            given = given | parts_of(given, others)
        if shape is not None:
            given = {name: value for name, value in given.items() if not self._leaves(shape, name)}
        record.given = given

    def _is_opened(self, name: str, shape: Shape | None) -> bool:
        """Returns True for a field of which parts may change the meaning of a record."""
        if shape is None:
            return name not in self._own_names
        is_known = name in self._own_names or name in shape.known
        return (name in shape.opens or not is_known) and not self._leaves(shape, name)

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

    def _parse(self, record: _Record, groups: Mapping[str, str]) -> None:
        """Parses a record, unless it was plain text; checks that it has no field that is unread."""
        parsed, config = record.plain, self.config
        if parsed is None:
            ids = self.tokenizer is None
            parsed = parse_canonical(record.ours, self.kind, config, ids=ids)
            parsed = check_responses(parsed, config)
        if record.shape is not None:
            fields = used_fields(record.shape, parsed.fields, (*record.given,), config.fields)
            parsed = parsed._replace(fields=fields)
        record.parsed = parsed
        if unread := {name: g for name, g in groups.items() if name not in parsed.fields}:
            is_ids = isinstance(parsed.prompt, np.ndarray)
            own = record.shape is not None and (config.shape or "").endswith((".yaml", ".yml"))
            check_read(record.given, unread, self.kind, is_ids, own)
        if "media" in self._checked:
            check_placeholders(parsed.questions)

    def _draft(self, record: _Record) -> None:
        """Makes the sequences of a record: drafts of text, or ids."""
        parsed = record.parsed
        check_carried(record.value, self.carry)
        events: list[str] = []
        if isinstance(parsed.prompt, np.ndarray):
            sides = (parsed.prompt, parsed.responses, parsed.supervised)
            record.sequences = id_sequences(*sides, self.tokenizer)
        else:
            if parsed.is_chat:
                restart_clock()
            found = draft_record(parsed, self._needed(), self.config)
            record.parsed, record.sequences, events = found
        record.events = [*parsed.events, *events]
        if parsed.asks_nothing:
            record.events.append("empty_prompt")
        if len({*map(np.float32, parsed.rewards)}) < len({*parsed.rewards}):
            record.events.append("reward_rounded")

    def _judge(self, left: list[_Record], sequences: Sequences) -> Sequences:
        """Refuses records by the policies, and truncates overlong ones if set."""
        if not left:
            return sequences
        owners = [(record, i + 1) for record in left for i in range(len(record.sequences))]
        for j, refused in sorted(sequences.refused.items()):
            owners[j][0].refused = owners[j][0].refused or refused
        lengths = np.diff(sequences.offsets)
        learned = np.diff(np.append(0, np.cumsum(sequences.supervised))[sequences.offsets])
        for j in np.flatnonzero(learned == 0).tolist():
            record, number = owners[j]
            detail = f"response {number} has no supervised token"
            record.refused = record.refused or Refused("unsupervised", detail)
        # Shared prefixes only shorten an example: one that fits without them needs no check.
        firsts = to_offsets(np.array([len(record.sequences) for record in left]))
        multiple = self.config.pad_to_multiple
        total = np.add.reduceat(-(-lengths // multiple) * multiple, firsts[:-1])
        longest = np.maximum.reduceat(lengths, firsts[:-1])
        large = (total > self.config.pack_size) | (longest > self.config.sequence_limit)
        specials = self.tokenizer.special_ids if self.tokenizer else frozenset()
        changed: dict[int, Tokens] = {}
        for i in np.flatnonzero(large).tolist():
            record, rows = left[i], range(*firsts[i : i + 2].tolist())
            if record.refused:
                continue
            try:
                fitted = fit([sequences.row(j) for j in rows], self.config, specials)
            except Refused as error:
                record.refused = error.with_traceback(None)
                continue
            changed |= {j: t for j, t in zip(rows, fitted, strict=True) if len(t.ids) != lengths[j]}
        sequences = sequences.with_rows(changed)
        if self.config.on["identical_sides"] != "keep":
            _refuse_identical_sides(left, sequences, firsts)
        for j, events in sorted(sequences.events.items()):
            owners[j][0].events += events
        return sequences

    def _tally(
        self, rows: Rows, records: list[_Record], left: list[_Record], names: set[str]
    ) -> Tally:
        """The tally of a block; of its fields, `names` are counted, in the records `left`."""
        tally = Tally(read=len(records), rejected=[] if self._keeps_rejects else None)
        for record in records:
            if refused := record.refused:
                where = rows.where(record.place)
                if self.config.on[refused.reason] == "error":
                    raise refused.as_error(where) from None
                tally.drop(refused.reason, where, refused.detail)
                continue
            for event in dict.fromkeys(record.events):
                tally.note(event, rows.where(record.place))
        for fields, number in Counter(record.parsed.fields for record in left).items():
            tally.used.update(dict.fromkeys((*fields, *self.carry), number))
        count_unused(tally, [record.given for record in left], names)
        kept = [record for record in left if not record.refused]
        for record in kept:
            value, shape = record.value, record.shape
            if shape is not None:  # also what judges, where the table says so
                passed = (n for n in value if self._leaves(shape, n) and not is_empty(value[n]))
                tally.unused.update(passed)
            for event, detail in self._lint(record.parsed) if self._lint else ():
                tally.note(event, rows.where(record.place), detail)
        tally.shapes.update(str(record.shape or record.parsed.shape) for record in kept)
        tally.chats = sum(record.parsed.is_chat for record in kept)
        tally.texts = sum(isinstance(record.parsed.prompt, str) for record in kept)
        if self._is_raw and (raw := tally.texts - tally.noted["rendered_text"]):
            tally.noted["raw_text"] += raw
        if self.kind == "preference":
            tally.scored = sum(record.parsed.scored for record in kept)
            tally.unscored = tally.kept - tally.scored
        return tally

    def _needed(self) -> Tokenizer:
        """The tokenizer, which records of text need."""
        if self.tokenizer is None:
            rule = "it must be given, as the records hold text"
            remedy = "Give the tokenizer (--tokenizer PATH)"
            raise TokenizerError(sentence("setting tokenizer", rule, "none", remedy))
        return self.tokenizer

    def _examples(self, rows: Rows, left: list[_Record], sequences: Sequences) -> Examples:
        """The examples of the records that are not refused."""
        kept = [record for record in left if not record.refused]
        columns: dict[str, Column] = {
            name: np.array([record.value[name] for record in kept], TYPES[kind][1])
            for name, kind in self.carry.items()
        }
        if not kept:
            return Examples.empty(columns)
        keep = [not record.refused for record in left for _ in record.sequences]
        ids, supervised, lengths = sequences.kept(np.array(keep))
        counts = np.array([len(record.sequences) for record in kept])
        ordinals = np.array([rows.ordinals[record.place] for record in kept], np.int64)
        keys = [prompt_key(record.parsed) for record in kept] if self._wants_keys else None
        return Examples(
            input_ids=ids,
            supervised=supervised,
            sequence_offsets=to_offsets(lengths),
            example_offsets=to_offsets(counts),
            reward=np.array([x for record in kept for x in record.parsed.rewards], np.float32),
            example_ids=example_id(rows.source, 0) + ordinals,
            columns=columns,
            keys=None if keys is None else np.array(keys, np.uint64),
        )


def _refuse_identical_sides(
    records: list[_Record], sequences: Sequences, first_sequences: Int64
) -> None:
    """Refuse records whose sequences are all equal, as they will be stored.

    Texts that differ may still give equal ids: after a cut, the normalization of the tokenizer, or
    a chat template that drops text. Such a pair has no gradient, but counts in every divisor.
    """
    lengths = np.diff(sequences.offsets)
    shortest = np.minimum.reduceat(lengths, first_sequences[:-1])
    longest = np.maximum.reduceat(lengths, first_sequences[:-1])
    num_sequences = np.diff(first_sequences)
    candidates = np.flatnonzero((num_sequences > 1) & (shortest == longest))
    for i in candidates.tolist():
        begin, end = sequences.offsets[first_sequences[i : i + 2]]
        sides = sequences.ids[begin:end].reshape(num_sequences[i], -1)
        if records[i].refused is None and (sides == sides[0]).all():
            detail = "all responses have the same token ids"
            records[i].refused = Refused("identical_sides", detail)


def _each(records: list[_Record], step: Callable[[_Record], None]) -> list[_Record]:
    """Takes a step of each record; returns those that it does not refuse."""
    left = []
    for record in records:
        try:
            step(record)
            left.append(record)
        except Refused as error:
            # Its traceback references the block: a cycle that would leak memory in long jobs.
            record.refused = error.with_traceback(None)
    return left
