"""Columns that nothing reads: which of them stop a job, and the ways out.

A column that nothing reads may change what should be learned: a score of the answer,
a system prompt, earlier rounds. A *rule* names one such meaning (`NOUNS`), and holds
for a column by its exact name or by its value, in one record alone; see
``judgements.py`` for the lists of names and ``docs/records.md`` for the contract. A
column for which a rule holds is a *finding*, and refuses the record, unless it copies
a field that is read, or a form *leaves* it, that is, does not read it on purpose. Any
other column is announced with its value, and stops nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from packstore.config import TokenizeConfig
from packstore.config.remedies import current_door, spell
from packstore.errors import ConfigError, quote
from packstore.format.schema import COLUMN_NAME
from packstore.tokenizer.dialogue.messages import is_empty
from packstore.tokenizer.dialogue.template import as_json
from packstore.tokenizer.records.copies import Dialogues
from packstore.tokenizer.records.judgements import (
    HISTORIES,
    JUDGEMENTS,
    LABELS,
    LONGEST_WORD,
    MASKS,
    MEDIA,
    PLACES,
    SYSTEM_PROMPTS,
    VARIABLES,
    VERDICTS,
    WEIGHTS,
    fold,
    names_of,
    spellings,
    verdict_of,
)
from packstore.tokenizer.records.own import score_of
from packstore.tokenizer.records.parsed import Parsed
from packstore.tokenizer.records.paths import EACH, Path, is_path, parse_path
from packstore.tokenizer.records.read import (
    ReadRecord,
    RecordReader,
    without_columns,
)
from packstore.tokenizer.records.sequences import unwrapped
from packstore.tokenizer.records.siblings import (
    Siblings,
    advise_siblings,
    find_siblings,
    is_id_or_source,
    spell_verdict,
    verdict_column,
)
from packstore.tokenizer.records.types import is_score
from packstore.tokenizer.records.values import (
    ROLE_KEYS,
    SCHEMA_KEYS,
    begins_json,
    has_other_than_ones,
    is_absent,
    is_messages,
    is_numeric,
    is_one_sequence,
    is_rounds,
    is_tools,
    parse_json,
)
from packstore.tokenizer.refusals import ADAPTER, Refused
from packstore.tokenizer.tally import MAX_FIELDS, Tally

SHOWN = 200
"""Characters of a value in an announcement."""

MAX_DEPTH = 9
"""Objects inside objects that are looked into."""

MAX_PARTS = 3
"""Parts of a column that a refusal names; a column with more is named as a whole."""

MAX_FINDINGS = 40
"""Columns that a refusal names."""

MAX_LAYOUTS = 1000
"""Sets of columns that are remembered: names may be data that differ in each record."""

NOUNS = {
    "judges": "a judgement of the answer",
    "word": "a word of judgement",
    "messages": "messages",
    "tools": "tool schemas or calls",
    "history": "earlier rounds",
    "system": "a system prompt",
    "weighs": "the weight of an example",
    "media": "media",
    "masks": "a mask of learned tokens or turns",
    "places": "padding, or several sequences",
    "changes": "a variable of the chat template",
}
"""Rule -> the noun for its columns, in messages."""

HINTS = {
    "media": "leave out such records, as packstore packs text alone",
    "masks": 'say it of turns ("loss": false), or give input_ids with a mask',
    "places": "make a record of each sequence, without padding",
}
"""Rule -> advice for its columns, where no setting helps."""

RULES: Mapping[str, str] = {
    **dict.fromkeys(names_of(JUDGEMENTS), "judges"),
    **dict.fromkeys(names_of(WEIGHTS), "weighs"),
    **dict.fromkeys(names_of(MEDIA), "media"),
    **dict.fromkeys(names_of(HISTORIES), "history"),
    **dict.fromkeys(names_of(SYSTEM_PROMPTS), "system"),
    **dict.fromkeys(MASKS, "masks"),
    **dict.fromkeys(PLACES, "places"),
    **dict.fromkeys(VARIABLES, "changes"),
}
"""Folded name of a column -> the rule that holds for it."""

INSIDE = frozenset(("judges", "history"))
"""Rules by names that also hold for names inside a column that is not read."""

JUDGING = frozenset(("judges", "word"))
"""Rules of judgements of an answer."""

OF_TEXT = frozenset(("messages", "tools", "history", "system", "changes"))
"""Rules for input beside a text, such as tools. They hold for no record of token ids:
the ids have all input in them.
"""

OF_IDS = frozenset(("places",))
"""Rules that hold only for records of token ids."""

_PLAIN_TYPES = frozenset((int, float, bool))


def _quoted_tokens(names: frozenset[str]) -> frozenset[str]:
    """Return names as they stand between quotes in JSON text, and in JSON text that is
    a value in it, where a backslash precedes the quote.
    """
    return names | {f"{name}\\" for name in names}


_SCHEMA_TOKENS = {key.lower() for key in SCHEMA_KEYS} | {"function"}
_TEXT_TOKENS = _quoted_tokens(
    spellings(names_of(HISTORIES)).union(ROLE_KEYS, _SCHEMA_TOKENS)
)
_ALL_TOKENS = _TEXT_TOKENS | _quoted_tokens(
    spellings(names_of(JUDGEMENTS)).union(VERDICTS)
)


ROLES_OF_TEXT = {"system": "system", "messages": "user", "judges": "assistant"}
"""Rule -> the role of the turns that a column with this meaning may copy."""


class Finding(NamedTuple):
    """A column, or a part of one, that must not stay unread."""

    rule: str
    path: str
    value: Any


class Column(NamedTuple):
    """A column that is not read, or in part, for all records with the same columns.

    Attributes:
        name: its name.
        path: its name as a path; a name with a dot, for example, is quoted.
        rule: rule that holds for its name, if any.
        skipped: paths inside of it that are read or ignored.
        above: paths above those that are read. With ``meta.answer`` read, ``meta`` is
            above it, and ``meta.score`` is looked at like a column.
    """

    name: str
    path: str
    rule: str | None
    skipped: frozenset[str]
    above: frozenset[str]


class UnreadRules:
    """The rules for columns that nothing reads, for one job.

    Args:
        config: `fields` names columns that are read, `ignore` columns that count as
            absent.
        kind: of the job.
        carried: names of columns that are carried.
        has_adapter: whether a user's function reads the records; it has judged the
            answers.
    """

    def __init__(
        self,
        config: TokenizeConfig,
        kind: str,
        *,
        carried: Collection[str],
        has_adapter: bool,
    ) -> None:
        self._fields = config.fields
        values = config.token_values.values()
        self._absent = frozenset((*config.ignore, *values, *carried))
        self._door = current_door()
        self._are_single = kind == "sft" and not has_adapter
        self._siblings = None if has_adapter else mapped_siblings(config.fields)
        self._columns: dict[Any, list[Column]] = {}

    def check(
        self, record: Mapping[str, Any], read: ReadRecord, parsed: Parsed
    ) -> None:
        """Raise if a record has a column that must not stay unread.

        Args:
            record: its columns, without those that are ignored.
            read: the record as it is read.
            parsed: its text, messages or ids.

        Raises:
            Refused: names all such columns, with the ways out (``unpaired_feedback`` if
                all of them judge a single answer, else ``unread_field``).
        """
        columns = self._columns_of(record, read)
        if not columns:
            return
        findings = self._find(record, columns)
        if self._siblings is not None:
            self._check_siblings(self._siblings, record, columns)
        if findings:
            self._refuse(findings, record, read, parsed)

    def judging_columns(self, record: Mapping[str, Any]) -> list[str]:
        """Return the columns, or paths inside them, that judge a single answer, as the
        setting ``ignore`` takes them.

        Args:
            record: its columns, without those that are ignored.
        """
        columns = list(self._compute_columns(record, frozenset()))
        findings = self._find(record, columns)
        judgements = [finding for finding in findings if finding.rule in JUDGING]
        bare_names = {write_path((name,)): name for name in record}
        paths = [finding.path for finding in _summarized(judgements, record)]
        return [bare_names.get(path, path) for path in paths]

    def _find(
        self, record: Mapping[str, Any], columns: Iterable[Column]
    ) -> list[Finding]:
        """Return the findings in some columns of a record."""
        findings: list[Finding] = []
        for column in columns:
            value = record[column.name]
            if column.rule is not None or may_matter(value, self._are_single):
                search = _Search(column, self._are_single, findings)
                search.look(value, column.path, column.rule)
        return findings

    def _columns_of(self, record: Mapping[str, Any], read: ReadRecord) -> list[Column]:
        """Return the columns that are not read, or only in part; computed once for all
        records with the same columns.
        """
        read_columns = frozenset((*read.columns.values(), *read.further_columns))
        key = (tuple(record), read_columns)
        columns = self._columns.get(key)
        if columns is None:
            if len(self._columns) >= MAX_LAYOUTS:
                self._columns.clear()
            columns = [*self._compute_columns(record, read_columns)]
            self._columns[key] = columns
        return columns

    def _compute_columns(
        self, names: Iterable[Any], read: frozenset[str]
    ) -> Iterator[Column]:
        read_parts = _parts_by_column(read)
        absent_parts = _parts_by_column(self._absent)
        for name in names:
            if not isinstance(name, str) or name in read or name in self._absent:
                continue
            path = write_path((name,))
            parts = read_parts.get(name, frozenset())
            skipped = parts | absent_parts.get(name, frozenset())
            if path not in skipped:
                yield Column(
                    name, path, RULES.get(fold(name)), skipped, paths_above(parts)
                )

    def _refuse(
        self,
        findings: Sequence[Finding],
        record: Mapping[str, Any],
        read: ReadRecord,
        parsed: Parsed,
    ) -> None:
        """Raise for findings, except those that may stay unread and copies of fields
        that are read.
        """
        dialogues = Dialogues(parsed)
        remaining: dict[str, Finding] = {}
        for finding in findings:
            if _may_stay_unread(finding, read, parsed) or _is_copy(finding, dialogues):
                continue
            remaining.setdefault(finding.path, finding)
        if not remaining:
            return

        summary = _summarized(remaining.values(), record)
        detail = ", ".join(
            f"{f.path} {quote(f.value, 40)} ({NOUNS[f.rule]})" for f in summary
        )
        ways_in = "; ".join(self._ways_in(summary, read, parsed, dialogues))
        ignores = self._spell_ignored(record, [finding.path for finding in summary])
        ignorable = "it if it changes" if len(summary) == 1 else "those that change"
        remedy = f"ignore {ignorable} nothing ({ignores})"
        if ways_in:
            remedy = f"{ways_in}, or {remedy}"
        is_feedback = JUDGING.issuperset(finding.rule for finding in summary)
        reason = "unpaired_feedback" if is_feedback else "unread_field"
        raise Refused(reason, detail, remedy[0].upper() + remedy[1:])

    def _spell_ignored(self, record: Mapping[str, Any], paths: Iterable[str]) -> str:
        """Return the setting that ignores columns and paths; a column by its
        bare name.
        """
        bare_names = {write_path((name,)): name for name in record}
        return spell(
            self._door, {"ignore": [bare_names.get(path, path) for path in paths]}
        )

    def _ways_in(
        self,
        findings: Sequence[Finding],
        read: ReadRecord,
        parsed: Parsed,
        dialogues: Dialogues,
    ) -> Iterator[str]:
        """Yield how the columns can be read, where that is possible."""
        rules = {finding.rule for finding in findings}
        scores = [finding for finding in findings if may_be_score(finding)]
        if scores and not read.source and not parsed.is_ids:
            settings = {
                "kind": "scored",
                "fields": self._with_fields(score=scores[0].path),
            }
            yield (
                "pack good and bad answers with their scores "
                f"({spell(self._door, settings)})"
            )
        yield from [hint for rule, hint in HINTS.items() if rule in rules]
        for finding in findings:
            way = self._way_to_read(finding, read, parsed, dialogues)
            if way:
                yield way
        if rules & {"messages", "history"}:
            how = spell(self._door, ADAPTER)
            yield f"join rounds to the prompt in a function of yours ({how})"

    def _way_to_read(
        self, finding: Finding, read: ReadRecord, parsed: Parsed, dialogues: Dialogues
    ) -> str:
        """Return how one column can be read by a setting, or an empty text."""
        if EACH_MARK in finding.path:
            return ""
        match finding.rule:
            case "system" if not dialogues.has_system:
                return self._map("system", finding, read, parsed)
            case "tools" if parsed.tools is None:
                return self._map("tools", finding, read, parsed)
            case "weighs" if _may_be_carried(finding):
                how = spell(self._door, {"carry": [f"{finding.path}:float64"]})
                return f"carry {finding.path} ({how}), the weight_field of a loss"
            case "changes" if finding.path != "chat_template":
                return self._set_variable(finding)
            case _:
                return ""

    def _with_fields(self, **fields: str) -> dict[str, str]:
        """Return a value of the setting `fields` with these added: flags add to the
        job's fields, while in Python a mapping replaces them, and must repeat them.
        """
        return fields if self._door == "shell" else {**self._fields, **fields}

    def _map(
        self, role: str, finding: Finding, read: ReadRecord, parsed: Parsed
    ) -> str:
        """Return the settings that read a column as a role beside the other fields."""
        settings: dict[str, Any] = {"fields": self._with_fields(**{role: finding.path})}
        if read.structure is not None:
            # With `fields` alone, the record would be read by packstore's own names.
            settings["form"] = read.source
        if not parsed.is_chat:
            settings["as_chat"] = True
        return f"read {finding.path} ({spell(self._door, settings)})"

    def _set_variable(self, finding: Finding) -> str:
        """Return how to give a variable of the chat template to all records."""
        value = finding.value if self._door == "python" else json.dumps(finding.value)
        settings = {
            "template_variables": {finding.path: value},
            "ignore": [finding.path],
        }
        return f"set {finding.path} for all records ({spell(self._door, settings)})"

    def _check_siblings(
        self, siblings: Siblings, record: Mapping[str, Any], columns: Iterable[Column]
    ) -> None:
        """Raise if `chosen` and `rejected` were mapped to siblings, such as
        ``response_a`` and ``response_b``, beside a column that may be their verdict.
        """
        values: dict[str, Any] = {}
        for column in columns:
            for path, value in _leaf_values(
                record[column.name], column.path, column.skipped
            ):
                if not is_id_or_source(path, siblings):
                    values.setdefault(path, value)
        if not values:
            return
        paths = [*values][:MAX_FINDINGS]
        verdict = verdict_column(values, siblings)
        unread = ", ".join(f"{path} {quote(values[path], 40)}" for path in paths)
        detail = (
            f"the sides {siblings.first!r} and {siblings.second!r}, of which no name "
            f"says that it is the better one, beside {unread}"
        )
        value = None if verdict is None else values[verdict]
        decides = spell_verdict(siblings, verdict or "NAME", value, self._door)
        remedy = (
            "In place of your mapping of the sides, name the column that decides and "
            f"its values ({decides}), or ignore columns that do not "
            f"({self._spell_ignored(record, paths)})"
        )
        raise Refused("unread_field", detail, remedy)


def judgements_to_ignore(
    record: dict[str, Any], config: TokenizeConfig, carried: Collection[str]
) -> list[str]:
    """Return the columns, and paths inside them, that judge the answer of a record, if
    the answer can be learned once they are ignored (kind ``sft``); else an empty list.

    Args:
        record: its columns, without those that are ignored.
        config: of the job, of any kind.
        carried: names of columns that are carried.
    """
    rules = UnreadRules(config, "sft", carried=carried, has_adapter=False)
    names = rules.judging_columns(record)
    try:
        RecordReader(config, "sft").read(without_columns(record, names))
    except Refused:
        return []
    return names


EACH_MARK = "[]"
"""Part of a path that stands for all items of a list."""


class _Search:
    """Collects the findings in one column."""

    def __init__(
        self, column: Column, is_single: bool, findings: list[Finding]
    ) -> None:
        self._column = column
        self._is_single = is_single
        self._findings = findings

    def look(self, value: Any, path: str, rule: str | None, depth: int = 0) -> None:
        """Look at a value: by the rule of its name, by its own form, and inside
        of it.
        """
        value = unwrapped(value)
        if is_absent(value) or path in self._column.skipped:
            return
        if path in self._column.above:
            # Parts beside a field that is read count as columns.
            for part_path, name, part in _parts_of(parse_json(value), path):
                self.look(part, part_path, RULES.get(fold(name)))
            return
        if rule is not None and self._holds(rule, depth) and fits_rule(rule, value):
            self._findings.append(Finding(rule, path, value))
            return
        parsed = self._parse(value)
        rule_of_value = self._rule_of_value(parsed)
        if rule_of_value is not None:
            self._findings.append(Finding(rule_of_value, path, value))
        elif depth < MAX_DEPTH:
            for part_path, name, part in _parts_of(parsed, path):
                self.look(part, part_path, RULES.get(fold(name)), depth + 1)

    def _holds(self, rule: str, depth: int) -> bool:
        """Return True if a rule of a name holds for this job, at this depth."""
        if rule == "judges" and not self._is_single:
            return False
        return depth == 0 or rule in INSIDE

    def _rule_of_value(self, value: Any) -> str | None:
        """Return the rule that holds for a value under any name."""
        match value:
            case str():
                is_word = self._is_single and verdict_of(value) is not None
                return "word" if is_word else None
            case bytes() | bytearray() | memoryview():
                return "media" if len(value) else None
        if is_messages(value):
            return "messages"
        return "tools" if is_tools(value) else None

    def _parse(self, value: Any) -> Any:
        """Return JSON text as its value, or None if no rule can hold for anything in
        it.
        """
        if not begins_json(value):
            return value
        tokens = _ALL_TOKENS if self._is_single else _TEXT_TOKENS
        # To split it at its quotes takes less time than to parse it.
        if tokens.isdisjoint(value.lower().split('"')):
            return None
        return parse_json(value)


def _parts_of(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    """Yield path, name and value of all parts of an object, or of the items of
    a list.
    """
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str) and item is not None:
                yield f"{path}.{write_path((key,))}", key, item
    elif isinstance(value, list) and value and type(value[0]) not in _PLAIN_TYPES:
        for item in value:
            # A text in a list is no judgement as a whole; it may be JSON.
            if not isinstance(item, str) or begins_json(item):
                yield f"{path}[]", "", item


def may_matter(value: Any, is_single: bool) -> bool:
    """Return False if only the name of a column could make a rule hold for it: a quick
    test of its value.
    """
    kind = type(value)
    if kind is str:
        if is_single and len(value) <= LONGEST_WORD:
            return verdict_of(value) is not None or begins_json(value)
        return begins_json(value)
    if kind is list:
        return bool(value) and type(value[0]) not in _PLAIN_TYPES
    return value is not None and kind not in _PLAIN_TYPES


def fits_rule(rule: str, value: Any) -> bool:
    """Return True if a value is of the kind that the rule of its name is about."""
    test = TESTS.get(rule)
    return test is None or test(value)


def _is_media(value: Any) -> bool:
    return isinstance(value, str | list | dict | np.ndarray | bytes)


def _is_system(value: Any) -> bool:
    return isinstance(value, str | list | dict)


def _are_places(value: Any) -> bool:
    return has_other_than_ones(value) and not is_one_sequence(value)


TESTS: Mapping[str, Callable[[Any], bool]] = {
    "weighs": is_numeric,
    "media": _is_media,
    "history": is_rounds,
    "system": _is_system,
    "masks": has_other_than_ones,
    "places": _are_places,
}
"""Rule of a name -> the test of values; any value fits another rule."""


def mapped_siblings(fields: Mapping[str, str]) -> Siblings | None:
    """Return the columns of `chosen` and `rejected` if the user mapped both, to
    siblings, and mapped no verdict.
    """
    if "verdict" in fields or not fields.keys() >= {"chosen", "rejected"}:
        return None
    return find_siblings(fields["chosen"], fields["rejected"])


def may_be_score(finding: Finding) -> bool:
    """Return True for a judgement that the role `score` reads."""
    if finding.rule not in JUDGING or EACH_MARK in finding.path:
        return False
    return is_score(finding.value)


def _may_stay_unread(finding: Finding, read: ReadRecord, parsed: Parsed) -> bool:
    """Return True if a form leaves a finding, or if its rule does not matter for this
    record.
    """
    if _is_left(read, finding.path):
        return True
    if finding.rule in (OF_TEXT if parsed.is_ids else OF_IDS):
        return True
    return not read.source and _calls_good(finding)


def _calls_good(finding: Finding) -> bool:
    """Return True for a `label` (a name of packstore's own) of an answer that is good.

    It is right to learn such an answer: so ``--kind sft --on unpaired_feedback=drop``
    packs the good ones among judged answers.
    """
    is_label = finding.path in LABELS and may_be_score(finding)
    return is_label and score_of(finding.value, finding.path) == 1


def _may_be_carried(finding: Finding) -> bool:
    is_number = isinstance(finding.value, int | float) and not isinstance(
        finding.value, bool
    )
    return is_number and COLUMN_NAME.fullmatch(finding.path) is not None


def _is_copy(finding: Finding, dialogues: Dialogues) -> bool:
    """Return True if a finding is a copy of fields that are read."""
    match finding.rule:
        case "tools":
            return dialogues.hold_tools(finding.value)
        case "history":
            return dialogues.hold_rounds(finding.value)
        case "system" | "messages" | "judges":
            return dialogues.hold_messages(finding.value, ROLES_OF_TEXT[finding.rule])
        case _:
            return False


def _leaf_values(
    value: Any, path: str, skipped: frozenset[str], depth: int = 0
) -> Iterator[tuple[str, Any]]:
    """Yield path and value of all parts of a column that are not empty or skipped."""
    if path in skipped or is_absent(unwrapped(value)):
        return
    parts = [*_parts_of(parse_json(value), path)] if depth < MAX_DEPTH else []
    if not parts:
        yield path, value
    for part_path, _, part in parts:
        yield from _leaf_values(part, part_path, skipped, depth + 1)


def _parts_by_column(paths: Iterable[str]) -> dict[str, frozenset[str]]:
    """Return the paths that lead into a column, by its name."""
    parts: dict[str, frozenset[str]] = {}
    for path in paths:
        if not is_path(path):
            continue
        try:
            steps = parse_path(path)
        except ConfigError:  # the name of a column, and no path
            continue
        root = str(steps[0])
        parts[root] = parts.get(root, frozenset()) | {write_path(steps)}
    return parts


def paths_above(paths: Iterable[str]) -> frozenset[str]:
    """Return all paths above some: ``a`` and ``a.b`` for ``a.b.c``."""
    steps = [parse_path(path) for path in paths]
    return frozenset(
        write_path(path[:i]) for path in steps for i in range(1, len(path))
    )


def write_path(steps: Path) -> str:
    """Return a path as users write it, with odd names in quotes."""
    text = ""
    for step in steps:
        if step is EACH:
            text += EACH_MARK
            continue
        name = as_json(step) if not step or is_path(step) else step
        text += f".{name}" if text else name
    return text


def _is_left(read: ReadRecord, path: str) -> bool:
    """Return True if a form leaves a path, or something above it."""
    if read.structure is None:
        return False
    return any(
        read.structure.leaves_out(part) for part in (path, *paths_above((path,)))
    )


def _summarized(
    findings: Iterable[Finding], record: Mapping[str, Any]
) -> list[Finding]:
    """Return findings for a message: a column with more than `MAX_PARTS` is one
    finding, and there are at most `MAX_FINDINGS`.
    """
    by_column: dict[str, list[Finding]] = {}
    for finding in findings:
        root = str(parse_path(finding.path)[0])
        by_column.setdefault(root, []).append(finding)
    summary: list[Finding] = []
    for root, inside in by_column.items():
        if len(inside) > MAX_PARTS:
            summary.append(Finding(inside[0].rule, write_path((root,)), record[root]))
        else:
            summary += inside
    return summary[:MAX_FINDINGS]


def sibling_remedy(record: Mapping[str, Any]) -> str:
    """Return how to read a record with two sibling answers; empty for any other
    record.
    """
    return advise_siblings(record, current_door())


def count_unread(
    tally: Tally, records: Sequence[Mapping[str, Any]], read_columns: Mapping[str, int]
) -> None:
    """Count by column the records with a value that was not read, not even in part.

    Args:
        read_columns: column -> number of the records where it was read.
    """
    names = {name for name in set[Any]().union(*records) if isinstance(name, str)}
    if len(names) > MAX_FIELDS:  # they may be data that differ in each record
        frequencies = Counter[str]()
        for record in records:
            frequencies.update(names.intersection(record))
        names = {name for name, _ in frequencies.most_common(MAX_FIELDS)}
    for name in sorted(names):
        number = sum(not is_empty(record.get(name)) for record in records)
        number -= read_columns.get(name, 0)
        if number > 0:
            # A name may hold a surrogate, which no file or terminal accepts.
            valid_name = name.encode(errors="backslashreplace").decode()
            tally.unused[valid_name] += number


def first_values(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, str]:
    """Return the values of columns as texts of at most :data:`SHOWN` characters, to
    announce.
    """
    return {name: show_value(record.get(name)) for name in names}


def _as_text(value: Any) -> str:
    try:
        return as_json(value)
    except (TypeError, ValueError):  # records made in Python may hold any object
        return repr(value)


def show_value(value: Any) -> str:
    """Return a value as one line of at most :data:`SHOWN` characters."""
    value = unwrapped(value)
    match value:
        case bytes() | bytearray() | memoryview():
            return f"{len(value):,} bytes"
        case str():
            text = value[: 2 * SHOWN]
        case np.ndarray():
            text = str(value[:SHOWN].tolist())
        case _:
            text = _as_text(value)
    text = " ".join(text.split())
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
