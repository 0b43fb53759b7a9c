"""Columns that are named alike but for one part, such as ``response_a`` and
``response_b``.

Names of siblings do not decide which answer is better, so another column must: the
*verdict*. Its value may name a side (``a``, ``model_b``, ``left``); for other values
the settings state the value of each side.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from packstore.config.record_fields import SPELLINGS
from packstore.config.remedies import Door, spell
from packstore.tokenizer.records.judgements import (
    IDS_AND_SOURCES,
    JUDGEMENTS,
    fold,
    names_of,
)

_PART = re.compile(
    r"""
    \d+(?:st|nd|rd|th)(?![a-z])  # an ordinal: 1st
    | \d+                        # a number
    | [A-Z]+(?![a-z])            # capitals: A, LLM
    | [A-Z]?[a-z]+               # a word: answer, Answer
    | [^\W\d_]+                  # letters of other scripts
    """,
    re.VERBOSE,
)
"""A part of a column's name: ``firstAnswer`` has ``first`` and ``Answer``."""

_FAMILIES = (
    ("one", "two", "three", "four", "five", "six"),
    ("first", "second", "third", "fourth", "fifth", "sixth"),
    ("1st", "2nd", "3rd", "4th", "5th", "6th"),
    ("left", "right"),
    ("lhs", "rhs"),
)
"""Groups of words that number the sides or name them; each group in counting order."""

_FAMILY_OF = {word: family for family in _FAMILIES for word in family}

_SIDE_NOUNS = (
    "model",
    "response",
    "answer",
    "assistant",
    "output",
    "candidate",
    "option",
)
"""Words before the part that names a side in the value of a verdict: ``model_a``."""

LONGEST_VERDICT = 20
"""Characters of a text that may be a verdict."""

_JUDGEMENT_NAMES = names_of(JUDGEMENTS)
"""Names of columns that judge an answer, such as ``label`` or ``score``."""


class Siblings(NamedTuple):
    """Two columns that are siblings, and the part of each name that differs.

    They stand in counting order: ``a`` before ``b``, 1 before 2, first before second.
    """

    first: str
    second: str
    parts: tuple[str, str]


@functools.lru_cache(maxsize=1000)
def find_siblings(first: str, second: str) -> Siblings | None:
    """Return two names or paths as siblings if exactly one part of them differs, else
    None.

    The part is a letter, a number, or a word such as one, first or left, in any case
    and at any place: ``response_a`` and ``response_b``, ``firstAnswer`` and
    ``secondAnswer``. It may be absent from one name: ``answer`` and ``answer2``.
    """
    parts = _differing_parts(_split(first), _split(second))
    if parts is None:
        return None
    if _counting_key(parts[0]) <= _counting_key(parts[1]):
        return Siblings(first, second, parts)
    return Siblings(second, first, (parts[1], parts[0]))


def _differing_parts(first: list[str], second: list[str]) -> tuple[str, str] | None:
    """Return the only part that differs between two names, as it stands in each."""
    if len(first) == len(second):
        pairs = [pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]]
        return pairs[0] if len(pairs) == 1 and _are_alike(*pairs[0]) else None
    if first and first == second[:-1] and _kind_of(second[-1]):
        return "", second[-1]
    if second and second == first[:-1] and _kind_of(first[-1]):
        return first[-1], ""
    return None


def _counting_key(part: str) -> tuple[int, str]:
    """Return a key that sorts parts as they count: 2 before 10, two before three.

    All other parts, also an absent one (an empty text), count as 0.
    """
    if part.isdecimal():
        return int(part), ""
    if part in _FAMILY_OF:
        return _FAMILY_OF[part].index(part), ""
    return 0, part


def _split(name: str) -> list[str]:
    """Return the parts of a name in small letters."""
    return [part.casefold() for part in _PART.findall(name)]


def _are_alike(first: str, second: str) -> bool:
    """Return True for two parts that may name two sides."""
    kind = _kind_of(first)
    if kind and kind == _kind_of(second):
        return True
    # A letter without a separator: answera, answerb.
    return first[:-1] == second[:-1] and {first[-1], second[-1]} == {"a", "b"}


def _kind_of(part: str) -> object:
    """Return the kind of a part that counts or names a side, such as ``letter`` or the
    family of a word; None for other parts.
    """
    if len(part) == 1 and part.isalpha():
        return "letter"
    if part.isdecimal():
        return "number"
    return _FAMILY_OF.get(part)


def side_names(first: str, second: str) -> dict[str, set[str]]:
    """Return the texts, in small letters, that name each of two columns.

    The column's own name, the part that differs from the other one, and this part
    behind a word such as ``model`` or ``response``. A number alone names no side.
    """
    names = {"first": {first.casefold()}, "second": {second.casefold()}}
    parts = _differing_parts(_split(first), _split(second))
    if parts is None:
        # No siblings: the settings may name any two columns.
        parts = (_differing_text(first, second), _differing_text(second, first))
    for side, part in zip(names, parts, strict=True):
        if not part:
            continue
        if not part.isdecimal():
            names[side].add(part.casefold())
        for noun in _SIDE_NOUNS:
            names[side].update(
                f"{noun}{separator}{part}".casefold() for separator in "_ -"
            )
    return names


def _differing_text(name: str, sibling: str) -> str:
    """Return the characters of a name between the beginning and the end that both names
    share.
    """
    start = _shared_length(name, sibling)
    remainder = name[start:]
    end = _shared_length(remainder[::-1], sibling[start:][::-1])
    return remainder[: len(remainder) - end].strip("_-. []")


def _shared_length(first: str, second: str) -> int:
    """Return the length of the beginning that two texts share."""
    return len(os.path.commonprefix((first, second)))  # noqa: RUF071  (not of paths)


def side_named(value: Any, siblings: Siblings) -> str | None:
    """Return first or second for a text that names this sibling, None for anything
    else.
    """
    if not isinstance(value, str):
        return None
    text = value.strip().casefold()
    for side, names in side_names(siblings.first, siblings.second).items():
        if text in names:
            return side
    return None


def is_id_or_source(path: str, siblings: Siblings | None = None) -> bool:
    """Return True for a column that cannot decide between two answers, by its last
    name.

    A name with the part of one sibling counts, too: ``model_a`` is a source of side a.
    """
    name = _last_name(path)
    if name in IDS_AND_SOURCES:
        return True
    if siblings is None:
        return False
    common_parts = [part for part in name.split("_") if part not in siblings.parts]
    return "_".join(common_parts) in IDS_AND_SOURCES


def _last_name(path: str) -> str:
    """Return the last name of a path in snake case: ``votes[].modelName`` gives
    ``model_name``.
    """
    names = re.split(r"[.\[\]]+", path.rstrip("[]"))
    return fold(names[-1])


def verdict_column(values: Mapping[str, Any], siblings: Siblings) -> str | None:
    """Return the column that decides between two siblings, or None if none is clear.

    It is the first with a value that names a side, else the first with the name of a
    judgement, else the only one with a short value. Ids, sources and packstore's own
    fields do not count.

    Args:
        values: column or path -> value, without the two sides.
        siblings: the two sides.
    """
    candidates = {
        path: value
        for path, value in values.items()
        if _may_be_verdict(path, value, siblings)
    }
    for path, value in candidates.items():
        if side_named(value, siblings) is not None:
            return path
    for path in candidates:
        if _last_name(path) in _JUDGEMENT_NAMES:
            return path
    return next(iter(candidates)) if len(candidates) == 1 else None


def _may_be_verdict(path: str, value: Any, siblings: Siblings) -> bool:
    is_own_field = path in SPELLINGS
    if is_own_field or is_id_or_source(path, siblings):
        return False
    return _is_short(value)


def _is_short(value: Any) -> bool:
    if isinstance(value, str):
        return 0 < len(value) <= LONGEST_VERDICT
    return isinstance(value, int | float)


def spell_verdict(
    siblings: Siblings, verdict: str, value: Any, door: Door, needs_prompt: bool = False
) -> str:
    """Return the text of the settings that read pairs by their verdict.

    Unless the verdict's value names a side, the settings state the usual values of each
    side, or placeholders, for the user to check.

    Args:
        siblings: the columns of the two sides.
        verdict: name of the column that decides.
        value: a value of this column.
        door: syntax of the settings: ``shell`` or ``python``.
        needs_prompt: add a placeholder for the column of the prompt.
    """
    fields = {"first": siblings.first, "second": siblings.second, "verdict": verdict}
    if needs_prompt:
        fields["prompt"] = "NAME"
    settings: dict[str, Any] = {"fields": fields}
    if side_named(value, siblings) is None:
        settings["verdict"] = _usual_values(siblings, value)
    return spell(door, settings)


def _usual_values(siblings: Siblings, value: Any) -> dict[str, Any]:
    """Return the values that a verdict usually has for each side and for a tie.

    For 0 there is no usual meaning: it may be a tie, or the first side.
    """
    parts = siblings.parts
    has_numbers = all(part.isdecimal() for part in parts)
    if has_numbers and type(value) is int and str(value) in parts:
        return {"first": int(parts[0]), "second": int(parts[1])}
    if value in (1, 2) and type(value) in (int, float):
        return {"first": 1, "second": 2, "tie": 0}
    return {"first": "VALUE", "second": "VALUE", "tie": "VALUE"}


def sibling_columns(record: Mapping[str, Any]) -> Siblings | None:
    """Return the two columns of a record that are sibling answers; None if there are
    not two.

    Answers are texts, messages or objects. Of several couples, the one with the longest
    texts is returned.
    """
    candidates = [name for name, value in record.items() if _may_be_answer(name, value)]
    couples: dict[frozenset[str], Siblings] = {}
    for first, second in itertools.combinations(candidates, 2):
        siblings = find_siblings(first, second)
        if siblings is not None and not is_id_or_source(first, siblings):
            couples[frozenset((first, second))] = siblings
    separate_couples = {
        names: couple
        for names, couple in couples.items()
        if _stands_alone(names, couples)
    }
    if not separate_couples:
        return None

    def length(names: Iterable[str]) -> int:
        return sum(len(str(record[name])) for name in names)

    return separate_couples[max(separate_couples, key=length)]


def _may_be_answer(name: str, value: Any) -> bool:
    return bool(name) and isinstance(value, str | list | dict) and bool(value)


def _stands_alone(names: frozenset[str], couples: Iterable[frozenset[str]]) -> bool:
    """Return True unless a third column is a sibling of the two: three answers are no
    pair.
    """
    return all(names == couple or names.isdisjoint(couple) for couple in couples)


def advise_siblings(record: Mapping[str, Any], door: Door) -> str:
    """Return how to read a record with two sibling answers, or an empty text for any
    other record.

    For the refusal of a record of unknown form. `door` is the syntax of settings in the
    text: ``shell`` or ``python``.
    """
    siblings = sibling_columns(record)
    if siblings is None:
        return ""
    sides = (siblings.first, siblings.second)
    remaining = {name: value for name, value in record.items() if name not in sides}
    if not remaining:
        fields = {"first": siblings.first, "second": siblings.second}
        how = spell(door, {"fields": fields})
        return f"Add a column that says which one is better ({how}, and verdict)"
    verdict = verdict_column(remaining, siblings)
    needs_prompt = "prompt" not in record
    if verdict is not None:
        how = spell_verdict(siblings, verdict, record[verdict], door, needs_prompt)
        return f"Name both answers and the column that says which one is better ({how})"
    how = spell_verdict(siblings, "NAME", None, door, needs_prompt)
    return (
        "Name both answers, the column that says which one is better, and its values "
        f"({how}); a value that names a side, as left or a, needs no listing"
    )
