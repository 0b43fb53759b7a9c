"""Converts records to examples, a block at a time, in four steps.

1. Read: an adapter, a form or packstore's field names turn a record into a *reading*
   (:mod:`packstore.tokenizer.records.reading`), and this is *parsed* into a prompt and
   responses of one type: text, messages or ids.
2. Render: messages become text, with the spans that are learned.
3. Encode: the texts of all records become ids, at once.
4. Judge: records are refused by their ids, or truncated.

Each step may refuse a record, for a reason that the settings drop or that stops the
job.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from packstore.config import RunConfig, SelectConfig, TokenizeConfig
from packstore.config.remedies import current_door, spell
from packstore.errors import TokenizerError, quote, sentence
from packstore.format.arrays import (
    Column,
    Examples,
    Int64,
    Rows,
    example_id,
    to_offsets,
)
from packstore.tokenizer.control import TEMPLATE_PATTERNS
from packstore.tokenizer.dialogue.template import limited, restart_clock
from packstore.tokenizer.encode import assemble
from packstore.tokenizer.records.adapters import AdaptedRecord, Adapter
from packstore.tokenizer.records.carry import TYPES, check_carried, parse_carry
from packstore.tokenizer.records.overlong import fit
from packstore.tokenizer.records.parsed import (
    Parsed,
    check_placeholders,
    check_responses,
    parse,
    prompt_key,
)
from packstore.tokenizer.records.read import (
    OtherKind,
    ReadRecord,
    RecordReader,
    columns_of,
    require_object,
)
from packstore.tokenizer.records.sequences import (
    Draft,
    Mode,
    Sequences,
    Tokens,
    id_sequences,
)
from packstore.tokenizer.records.token_values import check_numbers, find_value
from packstore.tokenizer.records.unread import (
    UnreadRules,
    count_unread,
    judgements_to_ignore,
)
from packstore.tokenizer.refusals import Refused, Stop
from packstore.tokenizer.render import is_rendered_prompt, render_record
from packstore.tokenizer.tally import Tally
from packstore.tokenizer.tokenizer import Tokenizer

Lint = Callable[[Parsed], Iterable[tuple[str, str]]]
"""Return the events of a record, each with a detail. Picklable."""


@dataclass(slots=True)
class Record:
    """One record of a block on its way to an example."""

    index: int  # in the block
    value: Any
    read: ReadRecord = field(init=False)
    parsed: Parsed = field(init=False)
    sequences: Sequence[Draft | Tokens] = ()  # text before it is encoded, or ids
    token_values: dict[str, Any] = field(default_factory=dict)  # by field
    events: list[str] = field(default_factory=list)
    refusal: Refused | None = None

    @property
    def has_unread_columns(self) -> bool:
        """False if every column is read as a whole: so it is in most records."""
        columns = self.read.columns.values()
        return not self.value.keys() <= set(columns)


class Encoded(NamedTuple):
    """A text, its tokens, and the place of its record."""

    where: str
    draft: Draft
    tokens: Tokens


class RecordTokenizer:
    """Converts records to examples, deterministically. Picklable.

    Args:
        tokenizer: may be None only if all records are token ids.
        config: settings of the job.
        kind: of all records: ``preference``, ``sft`` or ``scored``.
        lint: sees every record that becomes an example.
        adapter: the user's own function that reads records.
        first_place: of the record that decides the kind, for the error of one of
            another kind.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        config: TokenizeConfig,
        kind: str,
        lint: Lint | None = None,
        adapter: Adapter | None = None,
        *,
        first_place: str = "",
    ) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.kind = kind
        self.carry = parse_carry(config)
        self._lint = lint
        self._door = current_door()
        self._adapter = adapter
        self._sequence_limit = config.sequence_limit
        prefers_ids = tokenizer is None
        self._reader = RecordReader(config, kind, adapter, prefers_ids, first_place)
        self._rules = UnreadRules(
            config, kind, carried=self.carry, has_adapter=adapter is not None
        )
        self._collects_rejects = (
            isinstance(config, RunConfig) and config.rejects is not None
        )
        self._wants_keys = isinstance(config, SelectConfig) and config.selects
        self._has_template = (
            tokenizer is not None and tokenizer.chat_template is not None
        )
        _require_special_tokens(tokenizer, config)

    def __call__(
        self, rows: Rows, sampled: Collection[int] = ()
    ) -> tuple[Examples, Tally, list[Encoded]]:
        """Return the examples of `rows`, in order, the tally of all records, and the
        texts and tokens of sampled ones.

        Args:
            rows: a block of records.
            sampled: indices of the records in it to return texts and tokens of.
        """
        records = [Record(index, value) for index, value in enumerate(rows.values)]
        remaining = _apply(self._read, records)
        remaining = self._render(remaining)
        sequences = self._encode(remaining)
        encoded = _encodings(rows, remaining, sequences, sampled)
        sequences = self._judge(remaining, sequences)
        tally = self._tally(rows, records)
        return self._examples(rows, remaining, sequences), tally, encoded

    def read(self, value: Any) -> tuple[ReadRecord, Parsed]:
        """Return a record as it is read, and as text, messages or ids.

        Raises:
            Refused: for a reason of :data:`packstore.config.REASONS`.
        """
        record = Record(0, value)
        self._read(record)
        return record.read, record.parsed

    @property
    def applies_adapter_here(self) -> bool:
        """True if worker processes cannot load the adapter: then it is applied before
        records are sent to them.
        """
        return self._adapter is not None and not self._adapter.is_importable

    def adapted(self, rows: Rows) -> Rows:
        """Return records with the results of the adapter."""
        assert self._adapter is not None
        values: list[object] = []
        for value in rows.values:
            if isinstance(value, dict):
                token_values = self._token_values(value)
                value = self._adapter.apply(self._reader.without_ignored(value))
                value.token_values = token_values
            values.append(value)
        return replace(rows, values=values)

    # Read.

    def _read(self, record: Record) -> None:
        """Set the reading of a record and its text, messages or ids."""
        full_record = require_object(record.value)
        record.token_values = self._token_values(full_record)
        value = self._reader.without_ignored(full_record)
        record.value = value
        if self.carry:
            check_carried(value, self.carry)
        record.read = self._read_columns(value)
        parsed = parse(
            record.read.reading,
            self.config,
            as_chat=self._renders_text(record.read),
            roles=self.config.roles,
            columns=record.read.columns.values(),
        )
        check_placeholders(parsed.questions)
        if record.has_unread_columns:
            self._rules.check(value, record.read, parsed)
        record.parsed = check_responses(parsed, self.config)

    def _read_columns(self, value: dict[str, Any]) -> ReadRecord:
        """Return the reading of a record without ignored columns."""
        try:
            return self._reader.read(value)
        except OtherKind as refusal:
            if self.kind == "sft" and self._adapter is None:
                self._advise_to_ignore(refusal, value)
            raise

    def _advise_to_ignore(self, refusal: OtherKind, value: dict[str, Any]) -> None:
        """Add the way out for answers that only columns of judgements keep from being
        learned: to ignore these.
        """
        names = judgements_to_ignore(value, self.config, self.carry)
        if not names:
            return
        refusal.detail += f", because of {', '.join(quote(name, 40) for name in names)}"
        refusal.remedy = (
            "Pack such records apart, or learn all answers, good and bad ({})"
        )
        refusal.settings = ({"ignore": names},)

    def _token_values(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the values of the fields that the setting `token_values` names."""
        if isinstance(record, AdaptedRecord):
            return record.token_values
        fields = self.config.token_values.values()
        return {name: find_value(record, name) for name in fields}

    def _renders_text(self, read: ReadRecord) -> bool:
        """Return True if the texts of a record are to become turns."""
        if self.config.as_chat is not None:
            return self.config.as_chat
        if not (read.as_chat and self._has_template):
            return False
        prompt = getattr(read.reading, "prompt", None)
        if not isinstance(prompt, str):
            return True
        return not is_rendered_prompt(prompt, self._required_tokenizer())

    # Render.

    def _render(self, records: list[Record]) -> list[Record]:
        """Set the texts or ids of each record's sequences; return the records not
        refused.
        """
        self._set_plain_texts(records)
        is_any_chat = any(record.parsed.is_chat for record in records)
        if not is_any_chat:
            return _apply(self._render_one, records)
        # Raises without a tokenizer, before a worker process is started for rendering.
        self._required_tokenizer()
        with limited():
            return _apply(self._render_one, records)

    def _set_plain_texts(self, records: list[Record]) -> None:
        """Set the sequences of text records that need no setting about control strings
        or Unicode.

        Text without the beginning of any control string, and of valid Unicode, only has
        to be encoded. One test of all such texts of a block costs less than one for
        each.
        """
        if self.tokenizer is None:
            return
        hint = self.tokenizer.control_hint
        mode: Mode = (
            "literal" if self.config.on["special_tokens"] == "keep" else "control"
        )
        plain_records = []
        plain_texts: list[str] = []
        for record in records:
            if type(record.parsed.prompt) is not str:
                continue
            prompt = record.parsed.prompt
            texts = [prompt + response for response in record.parsed.responses]  # type: ignore[operator]
            if not any(hint in text for text in texts):
                plain_records.append((record, len(prompt), texts))
                plain_texts += texts
        all_text = "".join(plain_texts)
        try:
            all_text.encode()
        except UnicodeEncodeError:
            return

        has_template_control = _holds_template_control(all_text)
        for record, start, texts in plain_records:
            if has_template_control and any(
                _holds_template_control(text) for text in texts
            ):
                continue
            record.sequences = [
                Draft(text, ((start, len(text)),), mode) for text in texts
            ]

    def _render_one(self, record: Record) -> None:
        """Set the sequences of a record, and the events to note."""
        parsed = record.parsed
        record.events.extend(parsed.events)
        if parsed.is_ids:
            prompt: Any = parsed.prompt
            responses: Any = parsed.responses
            record.sequences = id_sequences(
                prompt, responses, parsed.supervised, self.tokenizer
            )
        elif not record.sequences:
            if parsed.is_chat:
                restart_clock()
            rendered = render_record(parsed, self._required_tokenizer(), self.config)
            record.parsed = rendered.parsed
            record.sequences = rendered.drafts
            record.events.extend(rendered.events)
        if parsed.asks_nothing:
            record.events.append("empty_prompt")
        if parsed.has_close_rewards:
            record.events.append("reward_rounded")

    # Encode.

    def _encode(self, records: list[Record]) -> Sequences:
        """Return the sequences of all records, in order, as ids."""
        sequences = [sequence for record in records for sequence in record.sequences]
        drafts = [sequence for sequence in sequences if isinstance(sequence, Draft)]
        ids = {i: s for i, s in enumerate(sequences) if isinstance(s, Tokens)}
        if not drafts:
            return Sequences.of(list(ids.values()))
        encoded = assemble(self._required_tokenizer(), drafts, self.config)
        return encoded.with_rows(ids, insert=True) if ids else encoded

    # Judge.

    def _judge(self, records: list[Record], sequences: Sequences) -> Sequences:
        """Refuse records by their ids, and truncate overlong ones, if so configured."""
        if not records:
            return sequences
        # The record of each sequence, and the number of the response in it, from 1.
        owners = [
            (record, i + 1) for record in records for i in range(len(record.sequences))
        ]
        first_rows = to_offsets(np.array([len(record.sequences) for record in records]))
        for row, refusal in sorted(sequences.refusals.items()):
            _refuse(owners[row][0], refusal)
        for row in _unsupervised_rows(sequences):
            record, number = owners[row]
            _refuse(
                record,
                Refused("unsupervised", f"response {number} has no supervised token"),
            )
        sequences = self._truncate(records, sequences, first_rows)
        if self.config.on["identical_sides"] != "keep":
            _refuse_identical_sides(records, sequences, first_rows)
        for row, events in sorted(sequences.events.items()):
            owners[row][0].events.extend(events)
        if self.config.token_values:
            columns_of_fields: dict[str, list[str]] = {}
            for column, name in self.config.token_values.items():
                columns_of_fields.setdefault(name, []).append(column)
            _check_token_values(records, sequences, first_rows, columns_of_fields)
        return sequences

    def _truncate(
        self, records: list[Record], sequences: Sequences, first_rows: Int64
    ) -> Sequences:
        """Return the sequences with overlong ones truncated, or their records
        refused.
        """
        specials = self.tokenizer.special_ids if self.tokenizer else frozenset()
        changed: dict[int, Tokens] = {}
        for index in self._overlong_records(sequences, first_rows):
            record = records[index]
            if record.refusal:
                continue
            rows = range(first_rows[index], first_rows[index + 1])
            full_sequences = [sequences.row(row) for row in rows]
            try:
                fitted = fit(full_sequences, self.config, specials)
            except Refused as error:
                _refuse(record, error.with_traceback(None))
                continue
            for row, before, after in zip(rows, full_sequences, fitted, strict=True):
                if len(after.ids) != len(before.ids):
                    changed[row] = after
        return sequences.with_rows(changed) if changed else sequences

    def _overlong_records(self, sequences: Sequences, first_rows: Int64) -> list[int]:
        """Return the indices of records that may be too long, or have too many keys.

        Layout ``shared_prefix`` only shortens an example: one that fits in layout
        ``concat`` needs no check.

        Args:
            sequences: of all records.
            first_rows: int64 `[records + 1]`, the first sequence of each record.
        """
        lengths = np.diff(sequences.offsets)
        multiple = self.config.pad_to_multiple
        padded = -(-lengths // multiple) * multiple  # rounded up
        totals = np.add.reduceat(padded, first_rows[:-1])
        longest = np.maximum.reduceat(lengths, first_rows[:-1])
        keys = np.add.reduceat(lengths, first_rows[:-1])
        is_large = totals > self.config.pack_size
        is_large |= longest > self._sequence_limit
        is_large |= keys > self.config.key_limit
        return [int(index) for index in np.flatnonzero(is_large)]

    # Count.

    def _tally(self, rows: Rows, records: list[Record]) -> Tally:
        """Return the counts of a block.

        Raises:
            RecordError: the first record, in input order, that stops the job.
        """
        tally = Tally(
            read=len(records), rejected=[] if self._collects_rejects else None
        )
        for record in records:
            where = rows.where(record.index)
            if record.refusal is not None:
                self._count_refusal(tally, record.refusal, where)
                continue
            for event in dict.fromkeys(record.events):
                tally.note(event, where)
        examples = [record for record in records if record.refusal is None]
        self._count_columns(tally, examples)
        if self._lint is not None:
            for record in examples:
                for event, detail in self._lint(record.parsed):
                    tally.note(event, rows.where(record.index), detail)
        self._count_contents(tally, examples)
        return tally

    def _count_refusal(self, tally: Tally, refusal: Refused, where: str) -> None:
        """Count a refused record.

        Raises:
            RecordError: its refusal stops the job.
        """
        if isinstance(refusal, Stop) or self.config.on[refusal.reason] == "error":
            raise refusal.as_error(where, self._door, self.config) from None
        tally.drop(refusal.reason, where, refusal.summary(self._door, self.config))

    def _count_contents(self, tally: Tally, examples: list[Record]) -> None:
        """Count records by form, chats and texts, and pairs with and without
        rewards.
        """
        notes_raw_text = self._has_template and self.config.as_chat is None
        for record in examples:
            tally.forms[record.read.source] += 1
            tally.chats += record.parsed.is_chat
            tally.texts += type(record.parsed.prompt) is str
            tally.scored += record.parsed.has_rewards
            if notes_raw_text and _is_raw_text(record):
                tally.noted["raw_text"] += 1
        if self.kind == "preference":
            tally.unscored = len(examples) - tally.scored

    def _count_columns(self, tally: Tally, examples: list[Record]) -> None:
        """Count the records that were read from each column, or have a value there
        unread.
        """
        # Sets of columns are counted, as most records are read from the same ones.
        column_sets = Counter(
            (*record.read.columns.values(), *record.read.further_columns)
            for record in examples
        )
        for names, num_records in column_sets.items():
            fields = (*names, *self.carry, *self.config.token_values.values())
            tally.used.update(dict.fromkeys(fields, num_records))
        if not any(record.has_unread_columns for record in examples):
            return
        read_columns = Counter[str]()
        for names, num_records in column_sets.items():
            columns = (*columns_of(names), *self.carry)
            read_columns.update(dict.fromkeys(columns, num_records))
        count_unread(tally, [record.value for record in examples], read_columns)

    def _required_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            TokenizerError: there is none.
        """
        if self.tokenizer is None:
            rule = "records of text need a tokenizer"
            remedy = f"Give the tokenizer ({spell(self._door, {'tokenizer': 'PATH'})})"
            raise TokenizerError(sentence("setting tokenizer", rule, "none", remedy))
        return self.tokenizer

    def _examples(
        self, rows: Rows, records: list[Record], sequences: Sequences
    ) -> Examples:
        """Return the examples of the records that are not refused."""
        remaining = [record for record in records if not record.refusal]
        columns: dict[str, Column] = {}
        for name, type_name in self.carry.items():
            _, dtype = TYPES[type_name]
            values = [record.value[name] for record in remaining]
            columns[name] = np.array(values, dtype)
        if not remaining:
            return Examples.empty(columns)
        arrays = (sequences.ids, sequences.supervised, np.diff(sequences.offsets))
        if len(remaining) < len(records):
            is_example = [
                not record.refusal for record in records for _ in record.sequences
            ]
            arrays = sequences.select(np.array(is_example))
        ids, supervised, lengths = arrays
        counts = np.array([len(record.sequences) for record in remaining])
        ordinals = np.array(
            [rows.ordinals[record.index] for record in remaining], np.int64
        )
        rewards = [reward for record in remaining for reward in record.parsed.rewards]
        keys = None
        if self._wants_keys:
            keys = np.array(
                [prompt_key(record.parsed) for record in remaining], np.uint64
            )
        return Examples(
            input_ids=ids,
            supervised=supervised,
            sequence_offsets=to_offsets(lengths),
            example_offsets=to_offsets(counts),
            reward=np.array(rewards, np.float32),
            example_ids=example_id(rows.source, 0) + ordinals,
            columns=columns,
            keys=keys,
        )


def _is_raw_text(record: Record) -> bool:
    """Return True for text that no chat template, of this or another model, has
    rendered.
    """
    if type(record.parsed.prompt) is not str:
        return False
    return (
        "rendered_text" not in record.events and "foreign_template" not in record.events
    )


def _holds_template_control(text: str) -> bool:
    """Return True if a text holds a control string of a well-known chat template."""
    return any(pattern.search(text) for pattern in TEMPLATE_PATTERNS)


def _apply(step: Callable[[Record], None], records: list[Record]) -> list[Record]:
    """Take a step of each record; return the records that it does not refuse."""
    remaining = []
    for record in records:
        try:
            step(record)
        except Refused as error:
            # Its traceback references the block: a cycle that would leak memory in long
            # jobs.
            record.refusal = error.with_traceback(None)
        else:
            remaining.append(record)
    return remaining


def _refuse(record: Record, refusal: Refused) -> None:
    """Refuse a record, unless it is refused already."""
    if record.refusal is None:
        record.refusal = refusal


def _count_supervised(sequences: Sequences) -> Int64:
    """Return the number of supervised tokens of each sequence, int64 `[S]`."""
    running_count = np.append(0, np.cumsum(sequences.supervised))
    return np.diff(running_count[sequences.offsets])


def _unsupervised_rows(sequences: Sequences) -> list[int]:
    """Return the indices of sequences without a supervised token."""
    counts = _count_supervised(sequences)
    return [int(row) for row in np.flatnonzero(counts == 0)]


def _check_token_values(
    records: list[Record],
    sequences: Sequences,
    first_rows: Int64,
    columns_of_fields: Mapping[str, list[str]],
) -> None:
    """Refuse records without a number for each supervised token."""
    counts = np.split(_count_supervised(sequences), first_rows[1:-1])
    for record, counts_of_responses in zip(records, counts, strict=True):
        for name, value in record.token_values.items():
            try:
                check_numbers(value, name, counts_of_responses, columns_of_fields[name])
            except Refused as refusal:
                _refuse(record, refusal.with_traceback(None))


def _refuse_identical_sides(
    records: list[Record], sequences: Sequences, first_rows: Int64
) -> None:
    """Refuse records of several responses, all with the same ids.

    Texts that differ may still give equal ids: after a truncation, the normalization of
    the tokenizer, or a chat template that drops text. Such a pair has no gradient, but
    counts in every divisor.
    """
    lengths = np.diff(sequences.offsets)
    shortest = np.minimum.reduceat(lengths, first_rows[:-1])
    longest = np.maximum.reduceat(lengths, first_rows[:-1])
    counts = np.diff(first_rows)
    candidates = np.flatnonzero((counts > 1) & (shortest == longest))
    for index in candidates.tolist():
        begin, end = sequences.offsets[first_rows[index : index + 2]]
        sides = sequences.ids[begin:end].reshape(counts[index], -1)
        if (sides == sides[0]).all():
            detail = "all responses have the same token ids"
            _refuse(records[index], Refused("identical_sides", detail))


def _encodings(
    rows: Rows, records: list[Record], sequences: Sequences, sampled: Collection[int]
) -> list[Encoded]:
    """Return the texts of the sampled records, and their tokens."""
    if not sampled:
        return []
    encoded = []
    row = 0
    for record in records:
        for sequence in record.sequences:
            if record.index in sampled and isinstance(sequence, Draft):
                encoded.append(
                    Encoded(rows.where(record.index), sequence, sequences.row(row))
                )
            row += 1
    return encoded


def _require_special_tokens(
    tokenizer: Tokenizer | None, config: TokenizeConfig
) -> None:
    """Raise if the settings ask for a BOS or EOS token that the tokenizer does not
    have.
    """
    if tokenizer is None:
        return
    requests = (
        ("bos", config.add_bos, tokenizer.bos_id),
        ("eos", config.append_eos, tokenizer.eos_id),
    )
    for role, is_requested, token_id in requests:
        if is_requested and token_id is None:
            rule = f"it must name its {role.upper()} token, as the settings ask for one"
            raise TokenizerError(sentence(f"tokenizer {tokenizer.name}", rule, "none"))
