"""Parses an SQL expression about one record, and names the place of what it refuses."""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from packstore.errors import ConfigError, quote, sentence

FUNCTIONS = frozenset(
    (
        "abs",
        "ceil",
        "ceiling",
        "floor",
        "round",
        "sign",
        "sqrt",
        "cbrt",
        "exp",
        "ln",
        "log",
        "log2",
        "log10",
        "log1p",
        "pow",
        "power",
        "mod",
        "div",
        "greatest",
        "least",
        "coalesce",
        "nullif",
        "ifnull",
        "if",
        "cast",
        "try_cast",
        "length",
        "char_length",
        "character_length",
        "octet_length",
        "bit_length",
        "lower",
        "upper",
        "initcap",
        "left",
        "right",
        "substr",
        "substring",
        "trim",
        "ltrim",
        "rtrim",
        "lpad",
        "rpad",
        "replace",
        "reverse",
        "starts_with",
        "ends_with",
        "strpos",
        "position",
        "regexp_like",
        "regexp_replace",
        "concat",
        "concat_ws",
        "split_part",
        "string_to_array",
        "array_length",
        "array_contains",
        "array_get",
        "array_to_string",
        "array_sum",
        "array_mean",
        "date",
        "strptime",
        "strftime",
        "date_part",
        "extract",
    )
)
"""Functions of one record. Polars also knows ones that look at all records of a frame."""

_BEFORE_PARENTHESES = frozenset(
    (
        "and",
        "or",
        "not",
        "in",
        "when",
        "then",
        "else",
        "case",
        "between",
        "like",
        "ilike",
        "rlike",
        "regexp",
        "is",
        "from",
        "for",
        "on",
        "by",
        "as",
        "decimal",
        "numeric",
        "varchar",
        "char",
        "float",
        "timestamp",
    )
)
"""Words that stand before a parenthesis, and are no functions."""

_REFUSED = frozenset(
    (
        "over",
        "select",
        "exists",
        "union",
        "current_date",
        "current_time",
        "current_timestamp",
        "localtime",
        "localtimestamp",
    )
)
"""Words of queries of several records, and of values that change between two runs."""

_TOKEN = re.compile(
    r"""(?P<text>'(?:[^']|'')*') | (?P<comment>--|/\*)
      | (?P<name>(?:"(?:[^"]|"")*"|`[^`]*`|[^\W\d]\w*)(?:\s*\.\s*(?:"(?:[^"]|"")*"|[^\W\d]\w*))*)
      | (?P<other>[\d.]+(?:[eE][+-]?\d+)?|\s+|.)""",
    re.VERBOSE | re.DOTALL,
)
_PART = re.compile(r'"(?:[^"]|"")*"|`[^`]*`|[^\W\d]\w*')

_SHOWN = 100
"""Characters of an expression in an error."""


@dataclass(frozen=True, eq=False)
class Expression:
    """A parsed expression.

    Attributes:
        where: setting and text, for errors.
        fields: field as Polars names its column -> the names that lead to it.
        places: field -> its first place in the text, from 0.
        polars: the ``polars.Expr``.
        condition: True if it must be true or false.
    """

    where: str
    fields: dict[str, tuple[str, ...]]
    places: dict[str, int]
    polars: Any
    condition: bool

    def checked(self, column: Any) -> list[Any]:
        """Returns the values of its result as Python objects that JSON has.

        Raises:
            TypeError: it is a condition, and they are not true or false.
        """
        pl = polars()
        if self.condition and column.dtype not in (pl.Boolean, pl.Null):
            raise TypeError(f"a condition must be true or false, not {column.dtype}")
        if column.dtype.is_decimal():
            column = column.cast(pl.Float64)
        elif column.dtype.is_temporal():
            column = column.cast(pl.String)
        values: list[Any] = column.to_list()
        return values


def polars() -> ModuleType:
    """Imports Polars where it is first used, as that takes a third of a second."""
    import polars

    return polars


def parse_sql(text: str, setting: str) -> Expression:
    """Parses an expression.

    Dots lead into objects: ``meta.score`` is the field `score` of the field `meta`.

    Args:
        text: an SQL expression in Polars's dialect.
        setting: the setting that it is from; ``setting where`` must be a condition.

    Raises:
        ConfigError: it is not SQL, uses a function that is not one of a single record, or renames
            its result.
    """
    where = f"{setting}, {quote(text, _SHOWN)}"
    flat, fields, places = [], dict[str, tuple[str, ...]](), dict[str, int]()
    for token in _TOKEN.finditer(text):
        if token["comment"]:
            raise _refusal(where, "it must have no comment", text, token.start())
        written = token[0]
        if token["name"]:
            parts = tuple(map(_unquoted, _PART.findall(written)))
            followed = text[token.end() :].lstrip()[:1]
            word = written.lower()
            if word in _REFUSED or (
                followed == "(" and word not in FUNCTIONS and word not in _BEFORE_PARENTHESES
            ):
                must = "it must only use functions of one record, which two runs compute alike"
                raise _refusal(where, must, text, token.start(), f"{written!r}")
            if len(parts) > 1:
                written = '"' + ".".join(parts).replace('"', '""') + '"'
            fields[".".join(parts)] = parts
            places.setdefault(".".join(parts), token.start())
        flat.append(written)
    try:
        expression = polars().sql_expr("".join(flat))
        names = list(dict.fromkeys(expression.meta.root_names()))
    except Exception as error:
        must = "it must be one SQL expression"
        raise _refusal(where, must, text, *_problem(text, str(error))) from None
    if not expression.meta.eq(expression.meta.undo_aliases()):
        name = expression.meta.output_name()
        at = text.rfind(name)
        raise _refusal(where, "it must not rename its result", text, at, f"{name!r}")
    if expression.meta.has_multiple_outputs():
        raise _refusal(where, "it must have one result", text, 0)
    known = {name: fields.get(name, (name,)) for name in names}
    first = {name: places.get(name, 0) for name in names}
    return Expression(where, known, first, expression, condition=setting == "setting where")


def _unquoted(part: str) -> str:
    if part[0] not in '"`':
        return part
    return part[1:-1].replace('""', '"')


def _problem(text: str, error: str) -> tuple[int, str]:
    """Returns the place of a syntax error, and its description."""
    try:
        polars().SQLContext().execute(f"SELECT\n{text}\n")
    except Exception as refusal:
        found = re.search(r"sql parser error: (.*?) at Line: (\d+), Column: (\d+)", str(refusal))
        if found:
            lines = text.split("\n")
            before, line = lines[: int(found[2]) - 2], int(found[2]) - 2
            at = sum(len(one) + 1 for one in before) + int(found[3]) - 1
            return (at if line < len(lines) else len(text)), found[1]
    at = text.find(found[1]) if (found := re.search(r"unexpected token '(.)'", error)) else -1
    incomplete = error.startswith("unable to parse")
    return (at if at >= 0 else len(text)), "an incomplete one" if incomplete else error[:100]


def _refusal(where: str, must: str, text: str, at: int, found: str = "") -> ConfigError:
    place = f"at character {at + 1}" if at < len(text) else "at its end"
    near = f" ({text[at : at + 20]!r})" if at < len(text) and not found else ""
    return ConfigError(sentence(where, must, f"{found} {place}{near}".strip()))
