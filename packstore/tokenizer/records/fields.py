"""Fields of records: by canonical name, with counts of the names used; and carried as columns."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from packstore.config import TokenizeConfig
from packstore.config.record_shapes import HARMLESS, known
from packstore.errors import ConfigError, RecordError, quote, sentence
from packstore.format.arrays import FEW_VALUES, MAX_FIELDS, Tally
from packstore.format.schema import COLUMN_NAME, COLUMNS
from packstore.tokenizer.dialogue.messages import is_empty, parsed_json
from packstore.tokenizer.dialogue.sandbox import as_json
from packstore.tokenizer.records.paths import parse_json_text
from packstore.tokenizer.records.sequences import unwrapped
from packstore.tokenizer.refusals import Refused, wrong_type

TYPES: dict[str, tuple[type, Any]] = {
    "string": (str, np.object_),
    "int64": (int, np.int64),
    "float64": (float, np.float64),
    "bool": (bool, np.bool_),
}
"""Type name -> its Python class and its numpy type."""

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Rewards are stored as float32."""

SHORT = 40
"""Characters above which a value is no verdict."""

SETTLED = 4096
"""Records, twice, that tell which values a field takes."""

_IGNORE = 'say that it means something else (on={"unpaired_feedback": "keep"})'

_CHANGES_NOTHING = 'say that it changes nothing (on={"unread_field": "keep"})'

_PLACEHOLDER = re.compile(r"(?:<(image|video|audio)>)+(?=\n|[^\s<]|\Z)")


class Fields:
    """Looks up fields of one record by canonical name; null counts as absent."""

    def __init__(self, record: Mapping[str, Any], config: TokenizeConfig) -> None:
        self.record, self.config = record, config
        self.used: dict[str, None] = {}  # the record's names of the fields returned, in order
        self.roles: set[str] = set()  # the canonical names of the fields returned
        self.unknown: set[str] = set()  # keys of its messages that are not read
        self._found: dict[tuple[str, bool], tuple[str, Any]] = {}

    def spellings(self, name: str, ids: bool = False) -> tuple[str, ...]:
        """Returns the names that a field may have: the mapped one, or all synonyms.

        What is mapped to another may be text here as well, such as a prompt, but judges no answer.
        """
        mapped = self.config.fields
        if name in mapped:
            return (mapped[name],)
        names = (ids and known().id_spellings.get(name)) or known().spellings[name]
        if not mapped or name in known().turns:
            return names
        return tuple(n for n in names if n not in mapped.values())

    def has(self, name: str, ids: bool = False) -> bool:
        """Returns True if the record has a field; `ids`: under the names of token ids as well."""
        return any(self.record.get(n) is not None for n in self.spellings(name, ids))

    def find(self, name: str, ids: bool = False) -> tuple[str, Any]:
        """Returns the record's name of a field and its value, or None; `ids`: of token ids.

        A tensor is an array, JSON text of messages a list.
        """
        found = self._found.get((name, ids))
        if found is None:
            spellings = self.spellings(name, ids)
            for at in spellings:
                if (value := unwrapped(self.record.get(at))) is not None:
                    break
            else:
                at = spellings[0] if spellings else name
            if name in known().lists and isinstance(value, list | np.ndarray):
                value = [parsed_json(unwrapped(item)) for item in value]
            elif name in known().turns:
                value = parsed_json(value)
            found = self._found[name, ids] = at, value
        return found

    def get(self, name: str, ids: bool = False) -> Any:
        """Returns the value, which is used, or None."""
        at, value = self.find(name, ids)
        if value is not None:
            self.used[at] = None
            self.roles.add(name)
        return value

    def score(self) -> float:
        """Returns the reward of the only answer."""
        value = self.get("score")
        verdict = _verdict(value)
        return number(value, self.find("score")[0]) if verdict is None else verdict

    def reward(self, name: str) -> float | None:
        """Returns the reward of a side, or None.

        A field under a synonym is a reward only if it holds a number.
        """
        for place, spelling in enumerate(self.spellings(name)):
            value = unwrapped(self.record.get(spelling))
            if value is not None and (not place or is_number(value)):
                self.used[spelling] = None
                self.roles.add(name)
                return number(value, spelling)
        return None

    def rewards(self) -> tuple[float, float] | None:
        """Returns the rewards of the chosen and the rejected side, or None."""
        chosen, rejected = self.reward("chosen_reward"), self.reward("rejected_reward")
        margin = self.reward("margin")
        if chosen is not None and rejected is not None:
            if margin is not None and not math.isclose(chosen - rejected, margin, rel_tol=1e-3):
                detail = f"margin {quote(margin)} beside rewards {chosen} and {rejected}"
                raise Refused("unread_field", detail, known().remedies["margin"])
            return chosen, rejected
        if chosen is None and rejected is None:
            return None if margin is None else (margin, 0.0)
        have, lack = ("chosen", "rejected") if rejected is None else ("rejected", "chosen")
        has = next(n for n in self.spellings(f"{have}_reward") if n in self.used)
        remedy = f"Name the field of the other side (--field {lack}_reward=NAME)"
        raise Refused("one_reward", f"{has!r} alone, and nothing for {lack}", remedy)


def number(value: object, name: str) -> float:
    """Returns `value`; an integer stays one, as a float could be another number."""
    if not is_number(value) or not abs(value) <= LARGEST_REWARD:  # type: ignore[arg-type]
        raise wrong_type(f"{name} must be a finite number, as a float32", value)
    return value  # type: ignore[return-value]


def parts_of(record: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Returns what stands in the objects of the fields `names` of a record, by its paths."""
    inner: dict[str, list[Any]] = {}
    for name in names:
        _open(record[name], name, inner)
    return {at: values[0] if len(values) == 1 else values for at, values in inner.items()}


def parts_beside(
    record: Mapping[str, Any], gone: Iterable[str], read: Collection[str]
) -> dict[str, Any]:
    """Returns what stands in the fields `gone` of a record beside the paths that are `read`."""
    inside = tuple(path + mark for path in read for mark in ".[")
    parts = parts_of(record, gone).items()
    return {at: v for at, v in parts if at not in read and not at.startswith(inside)}


def _open(value: Any, path: str, inner: dict[str, list[Any]], depth: int = 9) -> None:
    """Collects the values that stand in one, by path, but for what is harmless."""
    value = parse_json_text(value)
    if type(value) is list and isinstance(parse_json_text((*value, 0)[0]), dict | list):
        for item in value:
            _open(item, f"{path}[]", inner, depth)
    for key, item in value.items() if type(value) is dict else ():
        at, held = f"{path}.{key}", parse_json_text(item) if depth else None
        if isinstance(held, dict) or (isinstance(held, list) and not known().group(at)):
            _open(held, at, inner, depth - 1)
        elif known().group(at) != HARMLESS and len(inner) < MAX_FIELDS and not is_empty(item):
            inner.setdefault(at, []).append(item)


def count_unused(tally: Tally, records: Sequence[Any], names: Collection[str]) -> None:
    """Counts by field the records with a non-empty value that was not used, and their values."""
    # Field names may be data that differ in each record; those with a meaning come first.
    groups = known().remedies
    for name in sorted(names, key=lambda n: (known().group(n) not in groups, n))[:MAX_FIELDS]:
        count = sum(not is_empty(record.get(name)) for record in records) - tally.used[name]
        if count > 0:
            told = name.encode(errors="replace").decode()
            tally.unused[told] += count
            tally.values.setdefault(told, set()).update(_values(records, name))


def _values(records: Sequence[Any], name: str) -> set[str]:
    """Returns the values of a field as short texts; above :data:`FEW_VALUES`, some of them."""
    values: set[str] = set()
    for record in records:
        text = _as_text(record.get(name))
        if len(text) > SHORT:
            digest = hashlib.blake2b(text.encode(errors="replace"), digest_size=8).hexdigest()
            text = f"{text[:SHORT]}…{digest}"
        values.add(text)
        if len(values) > FEW_VALUES:
            break
    return values


def _as_text(value: object) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    try:
        return as_json(value, sort_keys=True)
    except (TypeError, ValueError):  # records made in Python may hold any object
        return quote(value)


def unexplained(tally: Tally) -> list[str]:
    """Returns the unused fields that are not harmless by name, and not the same in every record.

    Fields that a named shape passes over have no values in the tally.
    """
    few = {name: values for name, values in tally.values.items() if values and tally.unused[name]}
    return sorted(
        name
        for name, values in few.items()
        if known().group(name) in known().remedies.keys() - {"masks", "places"}
        or (known().group(name) != HARMLESS and len(values) > 1)
    )


def verdicts(tally: Tally) -> dict[str, list[str]]:
    """Returns the unexplained fields that may say how good an answer is, with their few values."""
    few = {name: sorted(tally.values.get(name, ())) for name in unexplained(tally)}
    return {
        name: values
        for name, values in few.items()
        if 1 < len(values) <= FEW_VALUES and all(len(value) <= SHORT for value in values)
    }


def check_verdicts(tally: Tally, kind: str, config: TokenizeConfig) -> None:
    """Refuses single answers beside a field that may say how good they are."""
    if kind == "sft" and config.on["unpaired_feedback"] != "keep":
        for name, values in verdicts(tally).items():
            raise _judged(tally, name, values)


def _judged(tally: Tally, name: str, values: list[str]) -> RecordError:
    found = f"{name!r} takes {len(values)} values over {tally.read:,} records: "
    remedy = f"Pack good and bad ones (--kind scored --field score={name}), carry it as a "
    remedy += f"column (--carry {name}), or {_IGNORE}"
    rule = "a field beside single answers must not judge them"
    return RecordError(sentence("input", rule, found + ", ".join(map(quote, values)), remedy))


class VerdictWatch:
    """Applies :func:`check_verdicts` while records are read, so that a long job stops at its start.

    Neighbours may have fewer values than the whole input, which may be sorted. A field is refused
    once as many records as were read before, at least :data:`SETTLED`, take two or more values, and
    no new one.
    """

    def __init__(self, kind: str, config: TokenizeConfig) -> None:
        self._applies = kind == "sft" and config.on["unpaired_feedback"] != "keep"
        self._before, self._since = Tally(), Tally()

    def add(self, tally: Tally) -> None:
        """Adds the tally of the next block of the input."""
        if not self._applies:
            return
        before, since = self._before, self._since
        since.add(tally)
        if since.read < max(SETTLED, before.read):
            return
        settled = [n for n, v in verdicts(since).items() if before.values.get(n, set()) >= {*v}]
        before.add(since)
        self._since = Tally()
        for name, values in verdicts(before).items():
            if name in settled:
                raise _judged(before, name, values)


def check_mapped(
    record: Mapping[str, Any], roles: Collection[str], config: TokenizeConfig, shape: str
) -> None:
    """Refuses a record of a `shape` with a mapped field of which nothing is made.

    `roles`: our own names of the fields that are read.
    """
    if config.on["unread_field"] == "keep":
        return
    for role, name in config.fields.items():
        value = unwrapped(record.get(name))
        if role not in roles and not is_null(value):
            detail = f"{name} {quote(value)}, and {shape} does not read --field {role}={name}"
            remedy = f"Map it to what is read, not to {role}, or {_CHANGES_NOTHING}"
            raise Refused("unread_field", detail, remedy)


def is_null(value: object) -> bool:
    """Returns True for what is empty, also in frames of pandas, which write NaN for null."""
    return is_empty(value) or (isinstance(value, float) and value != value)


def check_read(
    record: Any, groups: Mapping[str, str], kind: str, is_ids: bool, passes: bool = False
) -> None:
    """Refuses a record with a field that changes its meaning: name of such a field -> its group.

    Beside a single answer, a verdict that says that it is good changes nothing; nor do texts and
    labels that ids may stand for. `passes`: of a shape of the user's own, which may pass over it.
    """
    for name, group in groups.items():
        value = unwrapped(record.get(name))
        if is_null(value):
            continue
        if group == "masks" and _is_flat(value):
            continue
        if group == "places" and (not is_ids or _is_flat(value) or _is_whole(value)):
            continue
        if is_ids and group == "adds" and isinstance(value, str):
            continue
        if name == "labels" and record.get("input_ids") is not None:
            continue
        feedback = kind == "sft" and group in known().feedback
        labels = name in known().labels or group == "weighs"
        if value == 1 if group == "weighs" and not feedback else labels and _verdict(value) == 1.0:
            continue
        remedy = known().remedies[group].format(name)
        if feedback:
            remedy = f"Pack good and bad ones (--kind scored --field score={name})"
        if COLUMN_NAME.fullmatch(name) and (feedback or group != "weighs"):
            remedy += f", carry it (--carry {name})"
        if passes:
            remedy += f", let your shape pass over it (passes: [{json.dumps(name)}])"
        remedy += f", {_IGNORE if feedback else _CHANGES_NOTHING}"
        reason = "unpaired_feedback" if feedback else "unread_field"
        raise Refused(reason, f"{name} {quote(value)}", remedy)


def check_placeholders(questions: Iterable[str]) -> None:
    """Refuses a question that begins or ends with what stands for an image, a video or a sound.

    So LLaMA-Factory, ms-swift and LLaVA write it. A tag that is closed, or a word in a sentence, is
    text.
    """
    for text in questions:
        begins = _PLACEHOLDER.match(text)
        name = begins[1] if begins else "image" if text.endswith("\n<image>") else ""
        if name and f"</{name}>" not in text:
            remedy = f"{known().remedies['media']}, or {_CHANGES_NOTHING}"
            raise Refused("unread_field", f"the place of a missing {name} in {quote(text)}", remedy)


def _is_flat(mask: object) -> bool:
    """Returns True for a mask that leaves nothing out, one number, and for what is none."""
    return not isinstance(mask, list | np.ndarray) or all(item in (1, True) for item in mask)


def _is_whole(places: Any) -> bool:
    """Returns True for the length of one sequence, or the positions in one."""
    return len(places) == 1 or (len(places) > 2 and [*places] == [*range(len(places))])


def is_score(value: object) -> bool:
    """Returns True for a number, and for what says whether an answer is good."""
    return isinstance(value, int | float) or _verdict(value) is not None


def _verdict(value: object) -> float | None:
    """Returns 1 for what calls an answer good, 0 for bad, None for anything else."""
    written = value.lower() if isinstance(value, str) else value
    if not isinstance(written, str | int | float):
        return None
    return 1.0 if written in known().good else 0.0 if written in known().bad else None


def is_number(value: object) -> bool:
    """Returns True for a whole or floating number, not for a boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def typed_carry(config: TokenizeConfig, records: Sequence[object]) -> tuple[str, ...]:
    """Returns the setting `carry` with a type for every column, inferred from the first records."""
    return tuple(f"{name}:{kind}" for name, kind in parse_carry(config, records).items())


def parse_carry(config: TokenizeConfig, records: Sequence[object] = ()) -> dict[str, str]:
    """Returns the names of carried columns and their types: as set, else by values of `records`.

    Mixed integers and floats are ``float64``; a column without values is ``string``.
    """
    types: dict[str, str] = {}
    for entry in config.carry:
        name, colon, written = entry.partition(":")
        if not colon:
            kinds = {type(record.get(name)) for record in records if isinstance(record, Mapping)}
            order = ("bool", "float64", "int64")
            written = next((kind for kind in order if TYPES[kind][0] in kinds), "string")
        if written not in TYPES:
            rule = f"a type must be one of: {', '.join(TYPES)}"
            raise ConfigError(sentence("setting carry", rule, quote(written)))
        if name in COLUMNS or name in types:
            rule = "a name must not be named twice, or a column of the format"
            raise ConfigError(sentence("setting carry", rule, quote(name)))
        if not COLUMN_NAME.fullmatch(name):
            rule = "a name must be letters a to z, digits and _, and begin with a letter"
            remedy = "Rename the field in the input"
            raise ConfigError(sentence("setting carry", rule, quote(name), remedy))
        types[name] = written
    return types


def check_carried(record: Mapping[str, Any], types: Mapping[str, str]) -> None:
    """Refuses a record that lacks a value to carry, or has one of another type."""
    for name, written in types.items():
        value: Any = record.get(name)
        if value is None:
            raise Refused("missing_field", f"no field {name!r} to carry")
        is_exact = written == "float64" and type(value) is int and abs(value) <= 1 << 53
        fits = type(value) is TYPES[written][0]
        if isinstance(value, int):
            fits &= -(1 << 63) <= value < 1 << 63
        if not (fits or is_exact):
            detail = f"field {name!r} must be {written}, found {quote(value)}"
            kinds = [t for t, (kind, _) in TYPES.items() if type(value) is kind and t != written]
            raise Refused("wrong_type", detail + "".join(f" (carry {name}:{t})" for t in kinds))
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError as error:
                raise Refused("invalid_unicode", f"field {name!r}: {error.reason}") from error
