"""Forms: the structures of public sets and of other trainers' records, each read by a
function.

A form is a plain function from the fields it declares to a *reading*: a `Pair`,
`Answers`, a `Chat`, or a `Drop`. Its decorator names the fields that a record must
have, with their types; a record has a form if all of them are there and fit::

    @form(
        "preference",
        {
            "context": turns,
            "response1": text,
            "response2": text,
            "overall_preference": number,
        },
        leaves=("domain", "language", "individual_preference"),
        as_chat=True,
        sets=("nvidia/HelpSteer3",),
        source="https://huggingface.co/datasets/nvidia/HelpSteer3",
    )
    def helpsteer3(fields: Fields) -> Pair | Drop:
        \"\"\"Two answers and a preference from -3 (the first) to 3 (the second).\"\"\"
        ...

Forms that differ in the names of their fields alone are one function with several
decorators.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, TypeAlias, TypeVar

from packstore.errors import quote
from packstore.tokenizer.dialogue.messages import is_empty
from packstore.tokenizer.records.paths import Path, follow, parse_path
from packstore.tokenizer.records.reading import Answers, Chat, Drop, Pair
from packstore.tokenizer.records.types import FieldType, anything, is_number, text
from packstore.tokenizer.refusals import wrong_type

FAMILIES = ("verdicts", "pairs", "scored", "chats", "instructions", "refused")
"""Modules of this package that hold forms."""

Fields: TypeAlias = dict[str, Any]
"""Declared path -> the value there; a field that is absent or null has no entry."""

Reader: TypeAlias = Callable[[Fields], Pair | Answers | Chat | Drop]

CHAT_FIELDS: Mapping[str, Mapping[str, FieldType]] = {
    "system": {"system": text, "system_prompt": text},
    "tools": {"tools": anything},
    "chat_template_kwargs": {"chat_template_kwargs": anything},
}
"""Attribute of a reading -> names and types of the fields that fill it, in records of
any form.
"""

# Not of type `number`: some sets use these names for other things, and their records
# must not be refused for it. `_first_value` chooses the numbers.
REWARDS: Mapping[str, Mapping[str, FieldType]] = {
    "chosen_reward": {
        "chosen_reward": anything,
        "reward_chosen": anything,
        "chosen_score": anything,
        "score_chosen": anything,
        "chosen_rating": anything,
        "rating_chosen": anything,
        "chosen-rating": anything,
    },
    "rejected_reward": {
        "rejected_reward": anything,
        "reward_rejected": anything,
        "rejected_score": anything,
        "score_rejected": anything,
        "rejected_rating": anything,
        "rating_rejected": anything,
        "rejected-rating": anything,
    },
    "margin": {"margin": anything},
}
"""The same, for forms of kind preference."""

R = TypeVar("R", bound=Reader)


@dataclass(frozen=True, eq=False)
class Structure:
    """The fields of a form, under the names that one set or trainer gives them.

    Attributes:
        kind: of the readings: preference, scored or sft; empty for a structure that is
            refused.
        required: path -> type; a record has the structure if all of them are there and
            fit.
        optional: path -> type of further fields that the function reads.
        without: paths that a record of this structure must not have.
        leaves: names and paths, also with ``*``, of fields that are ignored on purpose,
            such as notes, and details that a verdict sums up. Any other field that is
            not read is announced, or refuses the record; see ``unread.py``.
        as_chat: whether texts become user and assistant turns if the tokenizer has a
            chat template.
        turns: key of a message -> the key that it means, None to leave it out; applied
            to every declared value that is an object or a list of objects.
        sets: names of datasets on the Hugging Face hub.
        source: where the structure was read.
    """

    kind: str
    required: Mapping[str, FieldType]
    optional: Mapping[str, FieldType]
    without: tuple[str, ...] = ()
    leaves: tuple[str, ...] = ()
    as_chat: bool = False
    turns: Mapping[str, str | None] | None = None
    sets: tuple[str, ...] = ()
    source: str = ""

    @functools.cached_property
    def declared(self) -> dict[str, tuple[Path, FieldType]]:
        """Path of each declared field -> its parts, and its type."""
        fields: dict[str, FieldType] = {}
        for names in self.common_fields.values():
            fields |= names
        fields |= {**self.optional, **self.required}
        return {
            path: (parse_path(path), field_type) for path, field_type in fields.items()
        }

    @functools.cached_property
    def common_fields(self) -> dict[str, dict[str, FieldType]]:
        """Attribute of a reading -> the fields of :data:`CHAT_FIELDS` and
        :data:`REWARDS` that fill it, if the form's function does not set it.

        Fields in `optional`, `without` or `leaves` fill nothing: the form decides on
        them.
        """
        groups = dict(CHAT_FIELDS)
        if self.kind == "preference":
            groups |= REWARDS
        if not self.kind:
            groups = {}
        fields: dict[str, dict[str, FieldType]] = {}
        for attribute, names in groups.items():
            fields[attribute] = {
                name: field_type
                for name, field_type in names.items()
                if not self._decides_on(name)
            }
        return fields

    def _decides_on(self, name: str) -> bool:
        # A required field may also fill the reading.
        return name in self.optional or name in self.without or self.leaves_out(name)

    @functools.cached_property
    def roots(self) -> frozenset[str]:
        """Names of the columns that hold the required fields."""
        columns = set()
        for path in self.required:
            parts, _ = self.declared[path]
            columns.add(str(parts[0]))
        return frozenset(columns)

    @functools.cached_property
    def columns(self) -> frozenset[str]:
        """Names of all columns that are read."""
        return frozenset(str(parts[0]) for parts, _ in self.declared.values())

    def leaves_out(self, path: str) -> bool:
        """Return True if a column, or a path inside one, is ignored on purpose."""
        return any(fnmatchcase(path, pattern) for pattern in self.leaves)

    def read_required(self, record: Mapping[str, Any]) -> Fields | None:
        """Return the required fields of a record, or None if it has not this
        structure.
        """
        fields: Fields = {}
        for path in self.required:
            value = self.value_at(record, path)
            if value is None or not self.required[path].fits(value):
                return None
            fields[path] = value
        for path in self.without:
            if not is_empty(follow(record, parse_path(path))):
                return None
        return fields

    def read_optional(self, record: Mapping[str, Any]) -> Fields:
        """Return the optional fields that a record has, and those beside any form.

        Raises:
            Refused: one of them is not of its type.
        """
        fields: Fields = {}
        for path, (parts, field_type) in self.declared.items():
            if path in self.required or parts[0] not in record:
                continue
            value = self.value_at(record, path)
            if value is None:
                continue
            if not field_type.fits(value):
                raise wrong_type(f"{path} must be {field_type.description}", value)
            fields[path] = value
        return fields

    def declared_in(self, record: Mapping[str, Any]) -> list[str]:
        """Return the declared paths of the columns that a record has."""
        return [
            path for path, (parts, _) in self.declared.items() if parts[0] in record
        ]

    def value_at(self, record: Mapping[str, Any], path: str) -> Any:
        """Return the value at a declared path, parsed, or None."""
        parts, field_type = self.declared[path]
        value = follow(record, parts)
        if isinstance(value, float) and math.isnan(value):  # pandas writes it for null
            return None
        if field_type.convert is not None and value is not None:
            value = field_type.convert(value)
        if self.turns is not None:
            value = _rename_keys(value, self.turns)
        return value


class Form:
    """A form: the function that reads a record, and the structures it reads.

    Attributes:
        name: of the function; `--form` takes it.
        version: raised when a change of the function changes readings.
        refusal: the reason why records of this form cannot be read, or empty.
    """

    def __init__(
        self, name: str, function: Reader, version: int = 1, refusal: str = ""
    ) -> None:
        self.name = name
        self.function = function
        self.version = version
        self.refusal = refusal
        self.structures: list[Structure] = []

    @property
    def has_verdict(self) -> bool:
        """True if a value of the record decides which of two answers is chosen."""
        return self.function.__module__ == f"{__name__}.verdicts"

    @property
    def summary(self) -> str:
        """The first paragraph of the function's docstring, on one line."""
        return first_paragraph(self.function)


def first_paragraph(function: Callable[..., object]) -> str:
    """Return the first paragraph of a docstring, on one line; empty without one."""
    paragraph = (inspect.getdoc(function) or "").partition("\n\n")[0]
    return " ".join(paragraph.split())


FORMS: dict[str, Form] = {}
"""Name -> form; filled by :func:`form` and :func:`refused` when :func:`load` imports
families.
"""


def form(
    kind: str,
    required: Mapping[str, FieldType],
    *,
    optional: Mapping[str, FieldType] | None = None,
    without: Iterable[str] = (),
    leaves: Iterable[str] = (),
    as_chat: bool = False,
    turns: Mapping[str, str | None] | None = None,
    sets: Iterable[str] = (),
    source: str = "",
    version: int = 1,
) -> Callable[[R], R]:
    """Register a function as the reader of a structure; see :class:`Structure` for the
    arguments.

    System, tools, template variables and rewards under their usual names are read in
    records of any form (:data:`CHAT_FIELDS`, :data:`REWARDS`); a form declares them as
    optional only to use them otherwise. The function gets the declared fields by path
    and returns a :class:`Pair`, :class:`Answers`, :class:`Chat` or :class:`Drop`; it
    may raise :class:`Refused`.

    `version` is the form's, not the structure's: of several decorators, the one next to
    the function states it.
    """
    structure = Structure(
        kind=kind,
        required=required,
        optional=optional or {},
        without=tuple(without),
        leaves=tuple(leaves),
        as_chat=as_chat,
        turns=turns,
        sets=tuple(sets),
        source=source,
    )

    def register(function: R) -> R:
        name = function.__name__
        if name not in FORMS:
            FORMS[name] = Form(name, function, version)
        # Decorators apply from the bottom up; this keeps their order in the source.
        FORMS[name].structures.insert(0, structure)
        return function

    return register


def refused(
    name: str,
    required: Mapping[str, FieldType],
    why: str,
    *,
    without: Iterable[str] = (),
    sets: Iterable[str] = (),
    source: str = "",
) -> None:
    """Register a structure that cannot be read, even if another form, or packstore's
    own field names, would fit it.

    Args:
        why: completes "a record of this form cannot be read: ...", with the way out.
    """

    def unreadable(fields: Fields) -> Drop:
        raise AssertionError(f"records of {name} are refused before they are read")

    FORMS[name] = Form(name, unreadable, refusal=why)
    FORMS[name].structures.append(
        Structure(
            kind="",
            required=required,
            optional={},
            without=tuple(without),
            sets=tuple(sets),
            source=source,
        )
    )


@functools.cache
def load() -> dict[str, Form]:
    """Return all forms by name."""
    for family in FAMILIES:
        import_module(f"{__name__}.{family}")
    return FORMS


class Match:
    """A form that a record has, and the record's fields under the declared paths."""

    __slots__ = ("fields", "form", "structure")

    def __init__(self, form: Form, structure: Structure, fields: Fields) -> None:
        self.form = form
        self.structure = structure
        self.fields = fields

    def read(self, record: Mapping[str, Any]) -> Pair | Answers | Chat | Drop:
        """Return the reading by the form's function; common fields fill the attributes
        that the function does not set.

        Raises:
            Refused: the form cannot read it.
        """
        fields = {**self.fields, **self.structure.read_optional(record)}
        reading = self.form.function(fields)
        if isinstance(reading, Drop):
            return reading

        values = {}
        for attribute, names in self.structure.common_fields.items():
            value = _first_value(fields, names)
            if value is not None and getattr(reading, attribute) is None:
                values[attribute] = value
        return dataclasses.replace(reading, **values) if values else reading


def _first_value(fields: Fields, names: Iterable[str]) -> Any:
    """Return the first field that is there.

    A synonym of a reward, such as `score_chosen`, counts only if it is a number: under
    these names some sets have other things.
    """
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        is_synonym = name not in REWARDS and any(
            name in group for group in REWARDS.values()
        )
        if is_synonym and not is_number(value):
            continue
        return value
    return None


def match_forms(
    record: Mapping[str, Any], forms: Iterable[Form] | None = None
) -> list[Match]:
    """Return the forms that a record has: none, one, or several between which nothing
    decides.

    If two structures fit, and one requires all fields of the other and more, only this
    one is returned. Several may be structures of one form: for a record with
    `question`, `answer` and `response`, a form may have one for each of the last two.

    Args:
        record: the record.
        forms: the forms to look at; None: all.
    """
    if forms is None:
        candidates = _candidates(tuple(record))
    else:
        candidates = [
            (form, structure) for form in forms for structure in form.structures
        ]
    matches = []
    for form, structure in candidates:
        fields = structure.read_required(record)
        if fields is not None:
            matches.append(Match(form, structure, fields))
    if len(matches) > 1:
        matches = _most_specific(matches)
    return matches


def has_candidate_forms(record: Mapping[str, Any]) -> bool:
    """Return True if a record has all columns of a form."""
    return bool(_candidates(tuple(record)))


def _most_specific(matches: list[Match]) -> list[Match]:
    """Return the matches without those for which another one requires the same fields
    and more.
    """
    all_required = [match.structure.required.keys() for match in matches]
    specific = []
    for match, required in zip(matches, all_required, strict=True):
        if not any(required < more_required for more_required in all_required):
            specific.append(match)
    return specific


@functools.lru_cache(maxsize=1000)
def _candidates(names: tuple[str, ...]) -> list[tuple[Form, Structure]]:
    """Return the structures with columns that are all among `names`."""
    columns = frozenset(names)
    candidates = []
    for form in load().values():
        for structure in form.structures:
            if structure.roots <= columns:
                candidates.append((form, structure))
    return candidates


def _rename_keys(value: Any, new_keys: Mapping[str, str | None]) -> Any:
    """Return a message, or a list of them, with other keys; a key that maps to None is
    left out.
    """
    if isinstance(value, list):
        return [_rename_keys(item, new_keys) for item in value]
    if not isinstance(value, dict):
        return value
    message = {}
    for key, item in value.items():
        new_key = new_keys.get(key, key)
        if new_key is not None:
            message[new_key] = item
    return message


def describe_fields(form: Form) -> str:
    """Return the name of a form with the fields it declares, for messages."""
    paths = dict.fromkeys(
        path for structure in form.structures for path in structure.required
    )
    return f"{quote(form.name)} ({', '.join(paths)})"
