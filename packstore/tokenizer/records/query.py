"""Conditions and new fields in SQL: the settings ``where`` and ``select``, computed by Polars.

The result of a record depends on this record alone, never on its neighbours, the block or the
worker: records are computed in groups whose fields have the same types, so JSON's 1 stays an
integer beside 1.5, and functions that would compare records (``AVG``, ``OVER``) are refused. As in
SQL, a condition that is null does not hold; fields that are absent, null or NaN are null.
"""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from packstore.config import TokenizeConfig
from packstore.errors import ConfigError, quote, sentence
from packstore.tokenizer.records.sql import Expression, parse_sql, polars
from packstore.tokenizer.refusals import Refused

_NULLS = ("Null", "String", "Float64", "Boolean", "List")
"""Types that a null is given, in order, until the expression takes it."""

_NULL = "where is null"

_SCALARS = {str: "String", int: "Int64", float: "Float64", bool: "Boolean"}

_ROW = "\0"
"""Name of a column that gives constants as many rows as there are records."""

MOST_NULLS = 3
"""Null fields of a record whose types are tried on their own; of more, all have the same."""

Signature = tuple[Any, ...]


class Query:
    """The settings `where` and `select`, for records as they are read. Picklable.

    Args:
        config: the settings.

    Attributes:
        names: fields that the expressions use, as they write them.

    Raises:
        ConfigError: an expression is not SQL of one record, or `select` and `fields` name the same
            field.
    """

    def __init__(self, config: TokenizeConfig) -> None:
        self._config = config
        if twice := sorted(config.select.keys() & config.fields.keys()):
            must = "it must not make a field that is mapped"
            raise ConfigError(sentence("setting select", must, f"{twice[0]!r} in `fields` too"))
        self.names = tuple(self._parts)

    @staticmethod
    def of(config: TokenizeConfig) -> Query | None:
        """Returns the query of the settings; None if they set neither."""
        return Query(config) if config.where is not None or config.select else None

    def __call__(self, records: Sequence[object]) -> tuple[list[object], dict[int, Refused]]:
        """Returns the records with their new fields, and the refusals by index.

        A record that does not meet the condition is refused as ``filtered``, one whose fields do
        not fit an expression as ``wrong_type``. What is not a dict is returned as it is.
        """
        refused: dict[int, Refused] = {}
        made: list[Any] = list(records)
        kept = [i for i, record in enumerate(records) if type(record) is dict]
        for name, expression in self._where.items():
            found, failed = self._computed({name: expression}, records, kept)
            refused.update(failed)
            for i, value in zip(kept, found[name], strict=True):
                if i not in failed and value is not True:
                    refused[i] = Refused("filtered", _NULL if value is None else "where is false")
            kept = [i for i in kept if i not in refused]
        if self._select and kept:
            found, failed = self._computed(self._select, records, kept)
            refused.update(failed)
            for i, *values in zip(kept, *found.values(), strict=True):
                made[i] = {**made[i], **dict(zip(found, values, strict=True))}
        return made, refused

    def absent(self, records: Sequence[object]) -> list[str]:
        """Returns the fields of the expressions that none of the records has, not even as null."""
        seen = [record for record in records if type(record) is dict]
        return [
            name
            for name, parts in self._parts.items()
            if not any(name in record or _has(record, parts) for record in seen)
        ]

    def unknown(self, name: str, known: Sequence[str]) -> ConfigError:
        """Returns the error for a field that no record has.

        Args:
            name: as :meth:`absent` returned it.
            known: names of the fields of the records.
        """
        expressions = (*self._where.values(), *self._select.values())
        one = next(e for e in expressions if name in e.fields)
        near = difflib.get_close_matches(name.split(".")[0], known, 1)
        do = f"Did you mean {near[0]!r}? " if near else ""
        do += f"The records have: {', '.join(known)}; text is written in single quotes"
        found = f"{name!r} at character {one.places[name] + 1}, which no record has"
        return ConfigError(sentence(one.where, "its fields must be in the records", found, do))

    def used(self, records: Sequence[object]) -> dict[str, int]:
        """Counts the records in which a field is not null, by its outermost name."""
        found: dict[str, int] = {}
        for name, parts in self._parts.items():
            count = sum(_value(record, name, parts) is not None for record in records)
            whole = name if len(parts) < 2 else parts[0]
            found[whole] = max(found.get(whole, 0), count)
        return {name: count for name, count in found.items() if count}

    def check(self, refused: Mapping[int, Refused], records: Sequence[object]) -> None:
        """Refuses expressions that fit none of the first records.

        Args:
            refused: what :meth:`__call__` returned for the records.
            records: the first records of the input.

        Raises:
            ConfigError: the types of all records, but those with null, were refused.
        """
        typed = {i: r for i, r in refused.items() if r.detail != _NULL}
        reasons = {refusal.reason for refusal in typed.values()}
        if reasons == {"wrong_type"} and len(refused) == len(records):
            first = typed[min(typed)]
            do = "Convert a field, as in CAST(score AS DOUBLE); TRY_CAST makes null of what fails"
            where, _, found = first.detail.partition(": ")
            raise ConfigError(sentence(where, "it must fit the fields of the records", found, do))

    def __reduce__(self) -> tuple[Any, ...]:
        return Query, (self._config,)

    @cached_property
    def _where(self) -> dict[str, Expression]:
        text = self._config.where
        return {} if text is None else {"where": parse_sql(text, "setting where")}

    @cached_property
    def _select(self) -> dict[str, Expression]:
        return {
            name: parse_sql(text, f"setting select, {name}")
            for name, text in self._config.select.items()
        }

    @cached_property
    def _parts(self) -> dict[str, tuple[str, ...]]:
        """Field as written -> the names that lead to it, from the outermost."""
        found: dict[str, tuple[str, ...]] = {}
        for expression in (*self._where.values(), *self._select.values()):
            found |= expression.fields
        return found

    def _computed(
        self, expressions: Mapping[str, Expression], records: Sequence[Any], at: Sequence[int]
    ) -> tuple[dict[str, list[Any]], dict[int, Refused]]:
        """Returns the values of all expressions for the records `at`, and refusals by index."""
        names = list(dict.fromkeys(n for e in expressions.values() for n in e.fields))
        rows = [[_value(records[i], n, self._parts[n]) for n in names] for i in at]
        groups: dict[Signature, list[int]] = {}
        for number, row in enumerate(rows):
            groups.setdefault(tuple(map(_signature, row)), []).append(number)
        found: dict[str, list[Any]] = {name: [None] * len(at) for name in expressions}
        refused: dict[int, Refused] = {}
        for signature, numbers in groups.items():
            group = _Group(names, signature, expressions, self._config.invalid_unicode)
            for some, result in group.computed(numbers, rows):
                if isinstance(result, Refused):
                    refused.update(dict.fromkeys((at[n] for n in some), result))
                    continue
                for name, values in result.items():
                    for n, value in zip(some, values, strict=True):
                        found[name][n] = value
        return found, refused


class _Group:
    """Computes records whose fields have the types of one signature."""

    def __init__(
        self,
        names: Sequence[str],
        signature: Signature,
        expressions: Mapping[str, Expression],
        invalid_unicode: str,
    ) -> None:
        self._names, self._signature = names, signature
        self._expressions, self._invalid_unicode = expressions, invalid_unicode
        self._nulls: tuple[str, ...] | None = None

    def computed(
        self, numbers: Sequence[int], rows: Sequence[Sequence[Any]]
    ) -> Iterator[tuple[Sequence[int], dict[str, list[Any]] | Refused]]:
        """Yields indices of `rows` with their values, or with the reason why they have none."""
        result = _tried(lambda: self._run([rows[n] for n in numbers]))
        if isinstance(result, dict):
            yield numbers, result
        elif len(numbers) == 1 or self._fails_on_types(rows[numbers[0]], self._nulls):
            yield numbers, self._refusal(result)
        else:
            half = len(numbers) // 2
            yield from self.computed(numbers[:half], rows)
            yield from self.computed(numbers[half:], rows)

    def _run(self, rows: Sequence[Sequence[Any]]) -> dict[str, list[Any]]:
        if self._nulls is None and None in self._signature:
            fitting = (c for c in self._choices() if not self._fails_on_types(rows[0], c))
            self._nulls = next(fitting, None)
        return self._select(self._frame(rows, self._nulls))

    def _fails_on_types(self, row: Sequence[Any], nulls: Sequence[str] | None) -> bool:
        """Returns True if the types of a row alone fail, whatever its values."""
        # Polars infers the types of lists and objects from values.
        rows = [row] if any(isinstance(kind, tuple) for kind in self._signature) else []
        return not isinstance(_tried(lambda: self._select(self._frame(rows, nulls))), dict)

    def _frame(self, rows: Sequence[Sequence[Any]], nulls: Sequence[str] | None) -> Any:
        """Returns the fields of some rows as columns; `nulls` are the types of null fields."""
        pl = polars()
        types = iter(nulls or itertools.repeat("Null"))
        columns = {_ROW: pl.Series(range(len(rows)), dtype=pl.Int64)}
        for number, (name, kind) in enumerate(zip(self._names, self._signature, strict=True)):
            values = [row[number] for row in rows]
            if kind is str and self._invalid_unicode == "replace":
                values = [value.encode(errors="replace").decode() for value in values]
            written = next(types) if kind is None else _SCALARS.get(kind)
            dtype = pl.List(pl.Null) if written == "List" else getattr(pl, written or "", None)
            columns[name] = pl.Series(values, dtype=dtype, strict=True)
        return pl.DataFrame(columns)

    def _select(self, frame: Any) -> dict[str, list[Any]]:
        named = {f"{_ROW}{name}": e for name, e in self._expressions.items()}
        made = frame.select(_ROW, *(e.polars.alias(name) for name, e in named.items()))
        return {name[1:]: e.checked(made[name]) for name, e in named.items()}

    def _choices(self) -> Iterator[tuple[str, ...]]:
        """Yields the types that the nulls of the signature may be given."""
        number = self._signature.count(None)
        if number <= MOST_NULLS:
            return itertools.product(_NULLS, repeat=number)
        return ((type_,) * number for type_ in _NULLS)

    def _refusal(self, error: BaseException) -> Refused:
        first = next(iter(self._expressions.values()))
        where = first.where if len(self._expressions) == 1 else "setting select"
        if isinstance(error, UnicodeEncodeError):
            return Refused("invalid_unicode", f"{where}: {error.reason}")
        kinds = zip(self._names, map(_spell, self._signature), strict=True)
        types = ", ".join(f"{name} {kind}" for name, kind in kinds)
        text = str(error).strip().split("\n", 1)[0]
        return Refused("wrong_type", f"{where}: {text} ({types})")


def _tried(work: Callable[[], dict[str, list[Any]]]) -> dict[str, list[Any]] | BaseException:
    """Returns the result of `work`, or its error; a panic of Polars is not an Exception."""
    try:
        return work()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        return error.with_traceback(None)


def _value(record: Any, name: str, parts: tuple[str, ...]) -> Any:
    """Returns the value of a field, or of a part of one; NaN as None."""
    value = record.get(parts[0])
    if len(parts) > 1:
        for part in parts[1:]:
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is None:  # as in tables whose columns are named by their path
            value = record.get(name)
    return None if type(value) is float and math.isnan(value) else value


def _has(record: Mapping[str, Any], parts: tuple[str, ...]) -> bool:
    value: Any = record
    for part in parts:
        if not isinstance(value, Mapping) or part not in value:
            return False
        value = value[part]
    return True


def _signature(value: Any) -> Any:
    """Returns the type of a value, with those of its parts; None for null."""
    if value is None or type(value) in _SCALARS:
        return None if value is None else type(value)
    if isinstance(value, list):
        return list, frozenset(map(_signature, value))
    if isinstance(value, Mapping):
        return dict, tuple((name, _signature(inner)) for name, inner in value.items())
    return type(value)


def _spell(kind: Any) -> str:
    words = {None: "null", str: "text", int: "integer", float: "float", bool: "boolean"}
    if isinstance(kind, tuple):
        return "list" if kind[0] is list else "object"
    return words.get(kind, quote(kind))
