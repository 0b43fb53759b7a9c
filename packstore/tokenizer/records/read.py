"""Reads a record: by an adapter, by a form, or by packstore's own field names.

An adapter is the user's function. A form is a function of packstore that knows the
fields of a public data set or trainer, in one or more *structures*: sets of required
and optional columns. All return a reading: a Pair, Answers or a Chat. Adapters go
before forms, and forms before own field names (`prompt`, `chosen`, `messages` and so
on), some of which the user may map to columns of the record.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from packstore.config import REASONS, TokenizeConfig
from packstore.config.record_fields import VERDICT_ROLES
from packstore.errors import ConfigError, quote, sentence
from packstore.format.arrays import BrokenLine
from packstore.registry import suggest
from packstore.tokenizer.dialogue.messages import is_empty
from packstore.tokenizer.records.adapters import AdaptedRecord, Adapter
from packstore.tokenizer.records.forms import (
    Form,
    Match,
    Structure,
    has_candidate_forms,
    load,
    match_forms,
)
from packstore.tokenizer.records.own import OwnNames, OwnReader, own_kind, score_of
from packstore.tokenizer.records.paths import is_path, parse_json_text, parse_path
from packstore.tokenizer.records.reading import (
    KIND_OF,
    Answers,
    Chat,
    Drop,
    Pair,
    Reading,
)
from packstore.tokenizer.refusals import Refused, Stop

MAX_LAYOUTS = 1000
"""Sets of columns that are remembered: field names may be data that differ in each
record.
"""

ROLES_OF_KINDS = {
    "preference": ("prompt", "chosen", "rejected"),
    "scored": ("prompt", "response", "score"),
    "sft": ("prompt", "response"),
}
"""Kind -> the roles of its plainest record."""

OWN = "none"
"""Value of the setting `form` for records under packstore's own field names."""


@dataclass(slots=True)
class ReadRecord:
    """A record that was read.

    Attributes:
        reading: the record in packstore's own terms.
        source: name of the form or adapter; empty for own field names.
        columns: role (own field names), or path that a form declares, -> the column or
            path of the record that it was read from.
        structure: the form's structure, if it was read by one.
        as_chat: whether its texts are turns by default.
        further_columns: columns that an adapter looked at.
    """

    reading: Reading
    source: str
    columns: dict[str, str]
    structure: Structure | None = None
    as_chat: bool = False
    further_columns: set[str] = field(default_factory=set)

    @property
    def column_names(self) -> set[str]:
        """Names of the columns that are read, in part or whole."""
        return columns_of(self.columns.values()) | self.further_columns

    @property
    def kind(self) -> str:
        """The kind of the reading."""
        return KIND_OF[type(self.reading)]


class OtherKind(Stop):
    """A record is of another kind than the job."""


def columns_of(places: Iterable[str]) -> set[str]:
    """Return the names of the columns that names or paths lead to.

    For ``meta.score`` both ``meta`` and ``meta.score``: a column may have a dot in its
    name.
    """
    names = set(places)
    columns = {str(parse_path(name)[0]) for name in names if is_path(name)}
    return names | columns


def form_named(name: str) -> Form:
    """Return the form of a name.

    Raises:
        ConfigError: there is none; suggests names like it.
    """
    forms = load()
    if name in forms:
        return forms[name]
    rule = f"it must be a form (docs/adapters.md), or {OWN}"
    word = name.lower().replace("-", "_")
    similar_names = [form_name for form_name in forms if word in form_name]
    hint = suggest(name, forms)
    if similar_names:
        hint = f" Names like it: {', '.join(similar_names)}."
    raise ConfigError(sentence("setting form", rule, quote(name)) + hint)


class RecordReader:
    """Reads records for one job; how one is read depends on no other record.

    Args:
        config: `fields`, `form`, `ignore`, `verdict` and `adapter` decide how.
        kind: preference, scored or sft.
        adapter: the user's function, which goes before forms and own names.
        prefers_ids: whether token ids go before text where a record has both.
        first_place: place of the record that decides the kind, for messages.
    """

    def __init__(
        self,
        config: TokenizeConfig,
        kind: str,
        adapter: Adapter | None = None,
        prefers_ids: bool = False,
        first_place: str = "",
    ) -> None:
        self._kind = kind
        self._first_place = first_place
        self._adapter = adapter
        self._ignored = frozenset((*config.ignore, *config.token_values.values()))
        self._names = OwnNames(config.fields, prefers_ids)
        self._own = OwnReader(self._names, kind, config.verdicts)
        self._forms: Sequence[Form] | None = None
        if config.form == OWN or (config.fields and config.form is None):
            self._forms = ()
        elif config.form is not None:
            self._forms = (form_named(config.form),)
        # columns of a record -> whether they may have a form
        self._names_with_forms: dict[tuple[str, ...], bool] = {}
        self._requires_form = config.form not in (None, OWN)
        self._has_token_values = bool(config.token_values)

    def without_ignored(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return a record without the columns and paths to ignore, and without the
        values of tokens; whole names go before paths.
        """
        if not self._ignored or isinstance(record, AdaptedRecord):
            return record
        return _without(record, self._ignored, "")

    def read(self, record: dict[str, Any]) -> ReadRecord:
        """Return the reading of a record without ignored columns.

        Raises:
            Refused: for a reason of :data:`packstore.config.REASONS`.
            Stop: it has two forms, or one that cannot be read, or is of another kind.
        """
        if self._adapter is not None:
            result = self._read_by_adapter(record, self._adapter)
        else:
            match = self._match(record)
            if match is not None:
                result = self._read_by_form(record, match)
            else:
                result = self._read_own(record)
        if result.source and self._names.mapped:
            self._replace_mapped(record, result)
        if result.kind != self._kind:
            raise self._other_kind(result.kind)
        return result

    def kind_of(self, record: dict[str, Any]) -> str | None:
        """Return the kind that a record's form, adapter or own field names imply, or
        None.

        Raises:
            Refused: an adapter leaves the record out.
            Stop: it has two forms, or one that cannot be read.
        """
        if self._adapter is not None:
            return self._read_by_adapter(record, self._adapter).kind
        match = self._match(record)
        if match is not None:
            return match.structure.kind
        return own_kind(self._names.find(record))

    def _other_kind(self, kind: str) -> OtherKind:
        """Return the refusal of a record of another kind than the job's."""
        rule = f"records of one dataset must be of one kind, here {self._kind}"
        detail = f"a record of kind {kind}"
        if self._first_place:
            detail += f", while {self._first_place} is of kind {self._kind}"
        remedy = (
            "Pack such records apart, or name all fields of such a record yourself ({})"
        )
        fields = dict.fromkeys(ROLES_OF_KINDS.get(self._kind, ()), "NAME")
        return OtherKind(rule, detail, remedy, {"kind": self._kind, "fields": fields})

    def _match(self, record: dict[str, Any]) -> Match | None:
        """Return the form of a record, or None for own names."""
        if not self._may_have_form(record):
            return None
        matches = match_forms(record, self._forms)
        if not matches:
            if self._requires_form and self._forms:
                raise self._misfit(record, self._forms[0])
            return None
        if len(matches) > 1:
            raise self._ambiguity(matches)
        match = matches[0]
        if match.form.refusal:
            detail = f"a record of the form {match.form.name}: {match.form.refusal}"
            raise Stop("packstore must be able to read it", detail)
        if match.form.has_verdict and self._has_token_values:
            raise Stop(
                "values of tokens need answers in a known order: chosen, rejected",
                f"a record of the form {match.form.name}, where a verdict orders them",
                "Put chosen and rejected into the records",
            )
        return match

    def _may_have_form(self, record: dict[str, Any]) -> bool:
        """Return False if no form has all of its columns among the record's."""
        if self._forms is not None:
            return len(self._forms) > 0
        names = tuple(record)
        has_candidates = self._names_with_forms.get(names)
        if has_candidates is None:
            has_candidates = has_candidate_forms(record)
            if len(self._names_with_forms) < MAX_LAYOUTS:
                self._names_with_forms[names] = has_candidates
        return has_candidates

    def _ambiguity(self, matches: Sequence[Match]) -> Stop:
        """Return the refusal of a record with several forms, or several structures of
        one form.
        """
        descriptions = " and ".join(
            f"{match.form.name} ({', '.join(match.structure.required)})"
            for match in matches
        )
        names = list(dict.fromkeys(match.form.name for match in matches))
        choices: list[dict[str, Any]] = [{"form": name} for name in names]
        if len(names) == 1:
            required = [set(match.structure.required) for match in matches]
            shared = set.intersection(*required)
            own_paths = [sorted(paths - shared) for paths in required]
            choices = [{"ignore": paths} for paths in own_paths]
        return Stop(
            "a record must have one form",
            descriptions,
            f"Choose one ({' or '.join(['{}'] * len(choices))})",
            *choices,
        )

    def _misfit(self, record: Mapping[str, Any], form: Form) -> Refused:
        """Return the refusal of a record without the form that the settings name."""
        structure = _nearest_structure(form, record)
        for path, kind in structure.required.items():
            value = structure.value_at(record, path)
            if value is None:
                return Refused("missing_field", f"form {form.name} needs {path}")
            if not kind.fits(value):
                detail = f"form {form.name}: {path} must be {kind.description}"
                return Refused("wrong_type", f"{detail}, found {quote(value)}")
        columns = ", ".join(structure.without)
        return Refused("wrong_type", f"form {form.name} must stand without {columns}")

    def _read_by_form(self, record: dict[str, Any], match: Match) -> ReadRecord:
        name = match.form.name
        try:
            result = match.read(record)
        except Refused as refused:
            if refused.reason == "wrong_type":
                refused.detail = f"form {name}: {refused.detail}"
            raise
        return ReadRecord(
            reading=_reading_of(result, f"form {name}"),
            source=name,
            columns={path: path for path in match.structure.declared_in(record)},
            structure=match.structure,
            as_chat=match.structure.as_chat,
        )

    def _read_by_adapter(self, record: dict[str, Any], adapter: Adapter) -> ReadRecord:
        where = f"adapter {adapter.name}"
        adapted = record if isinstance(record, AdaptedRecord) else adapter.apply(record)
        if adapted.error:
            raise Stop(f"{where} must return a reading for every record", adapted.error)
        return ReadRecord(
            reading=_reading_of(adapted.result, where),
            source=adapter.name,
            columns={},
            as_chat=True,
            further_columns=adapted.columns & record.keys(),
        )

    def _read_own(self, record: dict[str, Any]) -> ReadRecord:
        try:
            reading, columns = self._own.read(record)
        except Refused as refused:
            if refused.reason == "missing_field" and not self._names.mapped:
                kind = own_kind(self._names.find(record))
                if kind is not None and kind != self._kind:
                    raise self._other_kind(kind) from None
            raise
        self._check_mapped(record, columns)
        return ReadRecord(reading=reading, source="", columns=columns)

    def _check_mapped(self, record: dict[str, Any], columns: Mapping[str, str]) -> None:
        """Raise for a column that the user mapped to a role that the record's reading
        lacks.
        """
        fields = None
        for role, name in self._names.mapped.items():
            if role in columns:
                continue
            fields = fields or self._names.find(record)
            value = fields.get(role)
            if is_empty(value):
                continue
            detail = f"{name} {quote(value)}, and a record of kind {self._kind} with "
            detail += f"{', '.join(columns)} has no field {role}"
            raise Refused("unread_field", detail, f"Map it to another role than {role}")

    def _replace_mapped(self, record: dict[str, Any], result: ReadRecord) -> None:
        """Replace fields of a form's or adapter's reading by those that the user
        mapped.
        """
        fields = self._names.find(record)
        values: dict[str, Any] = {}
        for role, column in fields.columns.items():
            if role not in self._names.mapped:
                continue
            if role in VERDICT_ROLES or not hasattr(result.reading, _attribute(role)):
                detail = f"the reading of {result.source} has no {role}"
                remedy = (
                    f"Name all fields of the record yourself, without {result.source}, "
                    f"or leave out the mapping of {role} to {column}"
                )
                raise Refused("unread_field", detail, remedy)
            value = fields.values[role]
            if role == "score":
                value = [score_of(value, column)]
            values[_attribute(role)] = value
            result.columns[role] = column
        result.reading = dataclasses.replace(result.reading, **values)


def _nearest_structure(form: Form, record: Mapping[str, Any]) -> Structure:
    """Return the structure with the largest share of its required columns in a
    record.
    """

    def share(structure: Structure) -> float:
        # `columns_of` also returns the paths themselves, which are no columns here.
        columns = columns_of(structure.required) - structure.required.keys()
        columns |= {path for path in structure.required if not is_path(path)}
        return sum(record.get(column) is not None for column in columns) / len(columns)

    return max(form.structures, key=share)


def _attribute(role: str) -> str:
    """Return the attribute of a reading that holds a role."""
    return "scores" if role == "score" else role


def _reading_of(result: object, where: str) -> Reading:
    """Return the result of a form or an adapter, if it is a reading.

    Raises:
        Refused: it leaves the record out.
        Stop: it is something else.
    """
    if isinstance(result, Pair | Answers | Chat):
        return result
    rule = f"{where} must return a Pair, Answers, a Chat, or a Drop with a known reason"
    if isinstance(result, Drop):
        if result.reason not in REASONS:
            raise Stop(rule, f"the reason {result.reason!r}")
        raise Refused(result.reason, result.detail)
    raise Stop(rule, quote(result))


def require_object(value: object) -> dict[str, Any]:
    """Return a record.

    Raises:
        Refused: its line is no JSON (``not_json``), or it is no object
            (``not_an_object``).
    """
    if isinstance(value, BrokenLine):
        raise Refused("not_json", value.detail, value.remedy)
    if not isinstance(value, dict):
        raise Refused(
            "not_an_object", f"a record must be an object, found {quote(value)}"
        )
    return value


def kind_of_record(
    record: dict[str, Any],
    config: TokenizeConfig,
    adapter: Adapter | None = None,
    prefers_ids: bool = False,
) -> str | None:
    """Return the kind of a record by its form, or by its own field names; None without
    either.

    Raises:
        Refused: an adapter leaves the record out.
        Stop: it has two forms, or one that cannot be read.
    """
    reader = RecordReader(config, "", adapter, prefers_ids)
    return reader.kind_of(reader.without_ignored(record))


def without_columns(record: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return a record without columns, or the members at paths; names go before
    paths.
    """
    return _without(record, frozenset(names), "")


def _without(
    record: dict[str, Any], paths: frozenset[str], prefix: str
) -> dict[str, Any]:
    """Return an object without the members at `paths`.

    Args:
        record: the record, or an object inside it.
        paths: from the record.
        prefix: path of the object, with a dot; empty for the record.
    """
    remaining = {}
    for name, value in record.items():
        path = f"{prefix}{name}"
        if path in paths:
            continue
        is_parent = any(inner.startswith((f"{path}.", f"{path}[]")) for inner in paths)
        remaining[name] = _without_inside(value, paths, path) if is_parent else value
    return remaining


def _without_inside(value: Any, paths: frozenset[str], path: str) -> Any:
    value = parse_json_text(value)
    if isinstance(value, dict):
        return _without(value, paths, f"{path}.")
    if isinstance(value, list):
        return [_without_inside(item, paths, f"{path}[]") for item in value]
    return value
