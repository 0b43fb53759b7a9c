"""The shapes of records, by the table ``shapes.yaml``: which one a record has, or nearly has."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from packstore.config import TokenizeConfig
from packstore.config.record_shapes import known, read_yaml
from packstore.errors import ConfigError, RecordError, quote, sentence
from packstore.registry import meant
from packstore.tokenizer.dialogue.messages import is_empty
from packstore.tokenizer.dialogue.sandbox import as_json
from packstore.tokenizer.records.entries import check_entry
from packstore.tokenizer.records.fields import Fields, is_score
from packstore.tokenizer.records.forms import FORMS
from packstore.tokenizer.records.paths import Path, follow, missing, parse_path, with_paths
from packstore.tokenizer.refusals import Refused

_TOLD = ("source", "seen", "sets", "tried", "note", "example", "shows", "refuse")
"""Keys of an entry that do not change what becomes of a record."""

_ANSWERS = ("messages", "response", "responses", "chosen", "rejected", "input_ids")

NONE = "none"
"""Value of the setting `shape` for records with our own field names."""


class Shape:
    """A shape; the keys of its `entry` are those of ``shapes.yaml``, whose head explains them."""

    def __init__(self, name: str, entry: Mapping[str, Any], file: str = "shapes.yaml") -> None:
        check_entry(f"{file}, shape {name}", entry)
        self.name, self.entry = name, entry
        self.is_own = "becomes" in entry  # of packstore's own field names, under all spellings
        self.kind: str = entry.get("kind", "")
        self.refuse: str = entry.get("refuse", "")
        self.fields = {parse_path(path): FORMS[form] for path, form in entry["fields"].items()}
        self.takes = {parse_path(path): FORMS[f] for path, f in entry.get("takes", {}).items()}
        self.roots = {str(path[0]): None for path in self.fields}.keys()
        self._title = f"{name} ({', '.join(self.roots)})"
        self.without = [parse_path(path) for path in entry.get("without", ())]
        self.holds_ids = "token ids" in entry["fields"].values()
        self.reads = {
            name: [parse_path(path) for path in ([paths] if isinstance(paths, str) else paths)]
            for name, paths in entry.get("reads", {}).items()
        }
        drops = entry.get("drops", {}).items()
        self._nullable = {parse_path(path) for path, values in drops if None in values}
        self._passes = {*entry.get("passes", ())}
        self._patterns = [name for name in self._passes if "*" in name]
        read = [path for paths in self.reads.values() for path in paths]
        paths = [*read, *self.fields, *self.takes]
        self.known = {str(path[0]) for path in paths}
        inner = {written(path) for path in paths if len(path) > 1}
        self.opens = {str(path[0]) for path in paths if len(path) > 1}  # of these, parts are read
        self._passes |= inner
        self._inside = tuple(path + mark for path in inner for mark in ".[")

    def __str__(self) -> str:
        return self._title

    @property
    def refusal(self) -> str:
        """Why a record of this shape cannot be read."""
        return f"a record of {self}: {self.refuse}"

    def passes(self, name: str) -> bool:
        """Returns True if a field is rightly left, or a part of an object that is read."""
        if name in self._passes or name.startswith(self._inside):
            return True
        return any(fnmatchcase(name, text) for text in self._patterns)

    @property
    def digest(self) -> str:
        """A sha256 of how it is recognised and read."""
        entry = {key: value for key, value in self.entry.items() if key not in _TOLD}
        return hashlib.sha256(as_json(entry, sort_keys=True).encode()).hexdigest()

    def is_told_by(self, fields: Fields) -> bool:
        """Returns True if a field of a record tells that it is of the kind of this shape."""
        names = ("rejected_messages",) if "rejected_messages" in self.roots else _ANSWERS
        told = any(self.has(fields, name) for name in names if name in self.roots)
        if not told or "score" not in self.roots:
            return told
        score = fields.find("score")[1]  # what is mapped must be one, and is refused if it is none
        return is_score(score) or ("score" in fields.config.fields and not is_empty(score))

    def has(self, fields: Fields, name: str) -> bool:
        """Returns True if a record has a field, under any of its names if these are our own."""
        if self.is_own:
            return fields.has(name, self.holds_ids)
        return name in fields.record

    def value(self, fields: Fields, path: Path) -> Any:
        """Returns what a record has at a path, or None."""
        if self.is_own:
            return fields.find(str(path[0]), self.holds_ids)[1]
        return follow(fields.record, path)

    def misfits(self, fields: Fields) -> Iterator[Path]:
        """Yields the paths at which a record differs from this shape."""
        fits = True
        for path, form in self.fields.items():
            try:
                value = self.value(fields, path)
            except Refused:  # what is no JSON, of which the refusal tells
                value = None
            if value is None and path in self._nullable and path[0] in fields.record:
                continue  # such a record is dropped
            if value is None or not form.fits(value):
                fits = False
                yield path
        for path in self.without if fits else ():
            value = self.value(fields, path)
            if value is not None and (self.is_own or not is_empty(value)):
                yield path
        for path, form in self.takes.items() if fits else ():
            value = self.value(fields, path)
            if value is not None and not form.fits(value):
                yield path

    def difference(self, fields: Fields, path: Path) -> str:
        """Returns how a record differs at a path."""
        value, own = self.value(fields, path), self.is_own
        at = fields.find(str(path[0]), self.holds_ids)[0] if own else written(path)
        form = self.fields.get(path) or self.takes.get(path)
        if value is None:
            return missing(fields.record, parse_path(at) if at not in fields.record else (at,))
        if form is None:
            return f"{at!r} beside {', '.join(map(repr, self.roots))}"
        alone = isinstance(value, list) and len(value) == 1 and form.fits(value[0])
        listed = ", a list of one" if alone else ""
        return f"{at} must be {form.described}, found {quote(value)}{listed}"


class Table:
    """The shapes of a job.

    Attributes:
        own: packstore's own, in order; named: the others.
        insists: the setting `shape`, if records must have one of these; digest: sha256 of its file.
    """

    def __init__(self, shapes: Iterable[Shape], insists: str = "", digest: str = "") -> None:
        shapes = [*shapes]
        self.named = [shape for shape in shapes if not shape.is_own]
        self.own: list[Shape] = [shape for shape in shapes if shape.is_own] or table().own
        self.insists, self.digest = insists, digest
        self.candidates = functools.lru_cache(1000)(self._candidates)
        self.own_of = functools.cache(self._own_of)
        ids = {n for names in known().id_spellings.values() for n in names if n.endswith("_ids")}
        self._ids = {*ids, "input_ids"}

    def _candidates(self, *names: str) -> list[Shape]:
        """Returns the named shapes that a record with these fields may have."""
        return [shape for shape in self.named if shape.roots <= {*names}]

    def shape_of(self, fields: Fields, kind: str | None, ids: bool) -> Shape | None:
        """Returns the one named shape that a record fits whole, or None; `ids`: ids are wanted."""
        names = fields.record.keys()
        fits = [
            shape
            for shape in self.candidates(*fields.record)
            if (kind in (None, shape.kind) or shape.refuse) and not any(shape.misfits(fields))
        ]
        if not fits:
            if self.insists and self.named:
                raise self.refusal(fields, kind)
            return None
        fits = [s for s in fits if not any(s.roots < other.roots for other in fits)]
        if len(fits) > 1:
            fits = [shape for shape in fits if not shape.refuse] or fits[:1]
            fullest = [s for s in fits if not any(s.roots < o.known for o in fits if o is not s)]
            fits = fullest or fits  # the one that reads what the others have
        if not (self._ids.isdisjoint(names) or self.insists):
            of_ids = [shape for shape in self.own_of(kind, ids=True) if shape.holds_ids]
            fits += [shape for shape in of_ids if not any(shape.misfits(fields))][:1]
            if ids and fits[-1].is_own:
                return None
        if len(fits) > 1:
            both = " and ".join(map(str, fits))
            raise Refused("wrong_type", f"a record of {both}", "Choose one (--shape NAME)")
        return fits[0]

    def _own_of(self, kind: str | None, ids: bool = False) -> list[Shape]:
        """Returns packstore's own shapes of a kind, in order; `ids`: those of ids first."""
        found = [shape for shape in self.own if kind in (None, shape.kind)]
        return sorted(found, key=lambda shape: ids and not shape.holds_ids)

    def own_shape(self, fields: Fields, kind: str, ids: bool) -> Shape:
        """Returns packstore's own shape that a record has, or refuses it by the nearest."""
        if kind == "preference" and "prompt" in fields.config.fields and not fields.has("prompt"):
            detail = missing(fields.record, parse_path(fields.config.fields["prompt"]))
            raise Refused("missing_field", detail)  # only without a mapping may it be implicit
        for shape in self.own_of(kind, ids):
            if next(shape.misfits(fields), None) is None:
                return shape
        raise self.refusal(fields, kind, ids, is_read=bool(self.insists and self.named))

    def near(self, fields: Fields) -> list[Shape]:
        """Returns the named shapes that a record shares half of the fields with."""
        keys = fields.record.keys()
        return [s for s in self.named if 2 * len(s.roots & keys) >= len(s.roots) or self.insists]

    def refusal(
        self, fields: Fields, kind: str | None = None, ids: bool = False, *, is_read: bool = False
    ) -> Refused:
        """Returns the refusal of a record without a shape: the nearest one, and what differs.

        Nearest is the shape that has most fields of the record and must change fewest of them.
        `is_read`: of a record that was read by a named shape, and has our own names.
        """
        near = [] if is_read else self.near(fields)
        shapes = [s for s in near if self.insists or kind in (None, s.kind)]
        remedy = "Name another shape (--shape NAME), or none and its fields (--field)"
        if is_read or not (self.insists and self.named):
            shapes = [*(self.own_of(kind, ids) or self.own), *shapes]
            remedy = "Write it so, or name its fields (--field FIELD=NAME)"
        misfits = {shape: [*shape.misfits(fields)] for shape in shapes}
        # Refuses what is no JSON.
        absent = {s: [p for p in misfits[s] if s.value(fields, p) is None] for s in shapes}

        def distance(shape: Shape) -> tuple[int, bool, int, bool]:
            differing = {path[0] for path in misfits[shape]}
            far = len(differing) - sum(shape.has(fields, name) for name in shape.roots)
            known = sum(name in shape.known or shape.passes(name) for name in fields.record)
            return far, not shape.is_own, len(misfits[shape]) - known, bool(absent[shape])

        # One of our own may fit, where another is named.
        shape = min([s for s in shapes if misfits[s] or not s.is_own] or shapes, key=distance)
        paths, lacking = misfits[shape], absent[shape]
        told = "; ".join(dict.fromkeys(shape.difference(fields, path) for path in paths))
        told = told or f"it is of kind {shape.kind}"
        if shape.is_own and lacking:
            form = shape.fields[lacking[0]].described
            remedy = f"Name the field that holds {form} (--field {lacking[0][0]}=NAME)"
        elif shape.is_own and paths:
            remedy = "Leave one of them out" if paths[0] in shape.without else "Correct it"
        has_all = bool(paths) and not lacking and kind in (None, shape.kind)
        reason = "wrong_type" if has_all else "missing_field"
        return Refused(reason, f"nearest shape: {shape}, but {told}", remedy)


def written(path: Path) -> str:
    """Returns a path as text."""
    return ".".join("[]" if part is None else part for part in path).replace(".[]", "[]")


def table(shape: str | None = None) -> Table:
    """Returns the shapes, the one of a name, or those of a file of the user's own.

    Raises:
        ConfigError: no shape has this name, or the file cannot be read.
    """
    if not shape or not shape.endswith((".yaml", ".yml")):
        return _named(shape)
    try:
        return _own(shape, os.stat(shape).st_mtime_ns)
    except (OSError, UnicodeDecodeError) as error:
        rule = "it must be a file of shapes that can be read"
        found = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ConfigError(sentence(f"setting shape, {shape}", rule, found)) from None


MAX_BYTES = 1 << 24
"""Maximum bytes of a file of shapes."""


@functools.lru_cache(maxsize=8)
def _own(path: str, changed: int) -> Table:
    """Returns the shapes of a file that was `changed` at a time."""
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)  # a pipe or a device has no size
    if len(data) > MAX_BYTES:
        raise OSError(f"more than {MAX_BYTES:,} bytes")
    text = data.decode()
    documents = read_yaml(text, path)
    shapes = [Shape(str(name), of, path) for part in documents for name, of in part.items()]
    return Table(shapes, path, hashlib.sha256(text.encode()).hexdigest())


@functools.cache
def _named(name: str | None) -> Table:
    shapes = [Shape(*item) for item in known().entries.items()]
    if name is None:
        return Table(shapes)
    if name == NONE:
        return Table(shape for shape in shapes if shape.is_own)
    if not (chosen := [shape for shape in shapes if shape.name == name]):
        rule = "it must be a named shape (docs/records.md), none, or a YAML file of your own"
        names = [shape.name for shape in shapes]
        alike = [each for each in names if name.lower() in each.lower()]
        hint = f" Names like it: {', '.join(alike)}." if alike else meant(name, names)
        raise ConfigError(sentence("setting shape", rule, quote(name)) + hint)
    return Table(chosen, name)


def named_shape(
    record: Any, config: TokenizeConfig, kind: str | None = None, ids: bool = False
) -> Shape | None:
    """Returns the named shape of a record, or None; see :meth:`Table.shape_of`."""
    if type(record) is not dict or (config.fields and not config.shape):
        return None
    shapes = table(config.shape)
    if not (shapes.insists or shapes.candidates(*record)):
        return None
    return shapes.shape_of(Fields(record, config), kind, ids)


def detect_kind(record: Any, config: TokenizeConfig, where: str = "the first record") -> str:
    """Returns the kind of the settings, or else of the shape that a record has or tells of."""
    if config.kind != "auto":
        return config.kind
    told = quote(record)
    if isinstance(record, dict):
        given, shapes = with_paths(record, config), table(config.shape)
        fields = Fields(given, config)
        try:
            named = named_shape(given, config, ids=True)
            if named is not None and named.refuse:
                rule = "packstore must be able to read it"
                raise RecordError(sentence(where, rule, named.refusal))
            told_by = named or next((s for s in shapes.own if s.is_told_by(fields)), None)
            if told_by is not None:
                return told_by.kind
            told = f"fields {', '.join(map(repr, record))}"
            if shapes.near(fields) or any(map(fields.has, known().field_names)):
                told += f" ({shapes.refusal(fields).detail})"
        except Refused as error:
            raise error.as_error(where) from None
    rule = "it must have chosen and rejected, or messages, or prompt and response, or "
    rule += "responses and scores, or input_ids"
    remedy = "Name the fields (--field chosen=NAME --field rejected=NAME)"
    raise RecordError(sentence(where, rule, told, remedy))
