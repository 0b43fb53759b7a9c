"""Fields of records: by canonical name, with counts of the names used; and carried as columns."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from packstore.config import TokenizeConfig
from packstore.config.fields import FEEDBACK, LIKELY, MEANINGFUL, SPELLINGS
from packstore.errors import ConfigError, quote, sentence
from packstore.format.arrays import MAX_FIELDS, Column
from packstore.format.schema import COLUMNS
from packstore.tokenizer.chat.messages import is_empty
from packstore.tokenizer.records.sequences import unwrapped
from packstore.tokenizer.refusals import Refused

TYPES: dict[str, tuple[type, Any]] = {
    "string": (str, np.object_),
    "int64": (int, np.int64),
    "float64": (float, np.float64),
    "bool": (bool, np.bool_),
}
"""Type name -> its Python class and its numpy type."""

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Rewards are stored as float32."""

_TRUE: tuple[object, ...] = (True, "1", "true", "True")
_FALSE: tuple[object, ...] = (False, "0", "false", "False")
"""Values of a label; the numbers 1 and 0 equal the booleans, and CSV has text only."""


class Fields:
    """Looks up fields of one record by canonical name; null counts as absent.

    Args:
        record: the record.
        config: the settings.

    Attributes:
        used: the record's names of the fields that were returned.
        unknown: keys of its messages that are not read.
    """

    def __init__(self, record: Mapping[str, Any], config: TokenizeConfig) -> None:
        self._record, self.config = record, config
        self.used: set[str] = set()
        self.unknown: set[str] = set()

    def spellings(self, name: str) -> tuple[str, ...]:
        """Returns the names that a field may have: the mapped one, or all synonyms."""
        mapped = self.config.fields.get(name)
        return (mapped,) if mapped else SPELLINGS.get(name, (name,))

    def get(self, name: str) -> Any:
        """Returns the value, or None; a tensor as an array."""
        for spelling in self.spellings(name):
            if (value := self._record.get(spelling)) is not None:
                self.used.add(spelling)
                return unwrapped(value)
        return None

    def need(self, name: str) -> Any:
        """Returns the value."""
        if (value := self.get(name)) is None:
            raise self.missing(name)
        return value

    def missing(self, name: str) -> Refused:
        """Returns the refusal of a record that lacks a field, with a field to map."""
        names = self.spellings(name)
        detail = f"no field {names[0]!r} among {', '.join(map(repr, self._record)) or 'none'}"
        if null := next((n for n in names if n in self._record), None):
            detail = f"field {null!r} is null"
        if likely := self.likely(name):
            remedy = f"Name the field that holds it (--field {name}={likely})"
            return Refused("missing_field", detail, remedy)
        return Refused("missing_field", detail)

    def likely(self, name: str) -> str | None:
        """Returns a field of the record that is probably the canonical one under another name."""
        known = {n for names in (SPELLINGS, LIKELY) for c in names for n in self.spellings(c)}
        free = [n for n, v in self._record.items() if n not in known and not is_empty(v)]
        for wanted in LIKELY.get(name, ()):
            if wanted in free:
                return wanted
        near = difflib.get_close_matches(self.spellings(name)[0], free, 1, 0.75)
        return near[0] if near else None

    def reward(self, name: str) -> float | None:
        """Returns the reward of a side, or None.

        A field under a synonym is a reward only if it holds a number.
        """
        for place, spelling in enumerate(self.spellings(name)):
            if (value := self._record.get(spelling)) is None:
                continue
            value = unwrapped(value)
            if value is not None and (not place or _is_number(value)):
                self.used.add(spelling)
                return number(value, spelling)
        return None

    def rewards(self) -> tuple[float, float] | None:
        """Returns the rewards of the chosen and the rejected side, or None."""
        chosen, rejected = self.reward("chosen_reward"), self.reward("rejected_reward")
        if chosen is not None and rejected is not None:
            return chosen, rejected
        if chosen is None and rejected is None:
            return None
        have, lack = ("chosen", "rejected") if rejected is None else ("rejected", "chosen")
        has = next(n for n in self.spellings(f"{have}_reward") if n in self.used)
        remedy = f"Name the field of the other side, {lack}_reward, or leave both out"
        raise Refused("one_reward", f"{has!r} alone, and nothing for {lack}", remedy)


def number(value: object, name: str) -> float:
    """Returns `value`; an integer stays one, as a float could be another number."""
    if not _is_number(value) or not abs(value) <= LARGEST_REWARD:  # type: ignore[arg-type]
        must = f"{name} must be a finite number, as a float32"
        raise Refused("wrong_type", f"{must}, found {quote(value)}")
    return value  # type: ignore[return-value]


def names_of(values: Iterable[object]) -> set[str]:
    """Returns the field names of records."""
    return set().union(*(value for value in values if type(value) is dict))


def unused(records: Sequence[Any], names: Collection[str], used: Counter[str]) -> Counter[str]:
    """Counts by field the records with a non-empty value that was not used; `used` were."""
    counts: Counter[str] = Counter()
    # Field names may be data that differ in each record; meaningful ones come first.
    for name in sorted(names, key=lambda name: (name not in MEANINGFUL, name))[:MAX_FIELDS]:
        if used[name]:
            count = sum(record.get(name) is not None for record in records) - used[name]
        else:
            count = sum(not is_empty(record.get(name)) for record in records)
        if count > 0:
            counts[name.encode(errors="replace").decode()] += count
    return counts


def feedback_field(values: Iterable[object], names: Collection[str]) -> str | None:
    """Returns the name of the field that labels each answer as good or bad, if there is one."""
    for name in FEEDBACK:
        if name not in names:
            continue
        labels = [v[name] for v in values if type(v) is dict and v.get(name) is not None]
        if labels and all(label in _TRUE or label in _FALSE for label in labels):
            return name
    return None


def check_feedback(record: object, name: str) -> None:
    """Refuses a record whose label says that its answer is bad."""
    if isinstance(record, Mapping) and record.get(name) in _FALSE:
        remedy = "Pair good and bad answers by their prompt (kind preference)"
        raise Refused("unpaired_feedback", f"{name} {record[name]!r}", remedy)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def typed_carry(config: TokenizeConfig, records: Sequence[object]) -> tuple[str, ...]:
    """Returns the setting `carry` with a type for every column, inferred from the first records.

    Mixed integers and floats are ``float64``; a column without values is ``string``.
    """
    parse_carry(config)
    typed = []
    for entry in config.carry:
        kinds = {type(record.get(entry)) for record in records if isinstance(record, Mapping)}
        inferred = "bool" if bool in kinds else "string"
        if kinds & {int, float} and bool not in kinds:
            inferred = "float64" if float in kinds else "int64"
        typed.append(entry if ":" in entry else f"{entry}:{inferred}")
    return tuple(typed)


def parse_carry(config: TokenizeConfig) -> dict[str, str]:
    """Returns the names of carried columns and their types, by default ``string``."""
    types: dict[str, str] = {}
    for entry in config.carry:
        name, _, written = entry.rpartition(":") if ":" in entry else (entry, "", "string")
        if written not in TYPES:
            must = f"a type must be one of: {', '.join(TYPES)}"
            raise ConfigError(sentence("setting carry", must, quote(written)))
        if name in COLUMNS or name in types or not name:
            must = "a name must not be empty, named twice, or a column of the format"
            raise ConfigError(sentence("setting carry", must, quote(name)))
        types[name] = written
    return types


def to_columns(rows: Sequence[Sequence[Any]], types: Mapping[str, str]) -> dict[str, Column]:
    """Converts the values of all records to columns."""
    columns: dict[str, Column] = {}
    for i, (name, type_name) in enumerate(types.items()):
        column = np.empty(len(rows), TYPES[type_name][1])
        column[:] = [row[i] for row in rows]
        columns[name] = column
    return columns


def carried(record: Mapping[str, Any], name: str, type_name: str) -> Any:
    """Returns a carried value of a record."""
    value: Any = record.get(name)
    if value is None:
        raise Refused("missing_field", f"no field {name!r} to carry")
    if type_name == "float64" and type(value) is int and abs(value) <= 1 << 53:  # all are exact
        value = float(value)
    if type(value) is not TYPES[type_name][0] or (
        isinstance(value, int) and not -(1 << 63) <= value < 1 << 63
    ):
        detail = f"field {name!r} must be {type_name}, found {quote(value)}"
        kinds = [t for t, (kind, _) in TYPES.items() if type(value) is kind and t != type_name]
        raise Refused("wrong_type", detail + "".join(f" (carry {name}:{t})" for t in kinds))
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise Refused("invalid_unicode", f"field {name!r}: {error.reason}") from error
    return value
