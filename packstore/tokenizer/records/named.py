"""The named shapes: other sets' and trainers' records, read by a table of data.

A record of a named shape becomes one with our own fields (`prompt`, `chosen`, `rejected` …), which
is then parsed like any other.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from packstore.config import TokenizeConfig
from packstore.config.names import meant
from packstore.config.record_shapes import FORMS, SPELLINGS
from packstore.errors import ConfigError, quote, sentence
from packstore.tokenizer.chat.messages import is_empty, text_as_messages
from packstore.tokenizer.records.fields import is_number
from packstore.tokenizer.records.forms import FITS, is_text
from packstore.tokenizer.records.paths import follow, missing, parse_path
from packstore.tokenizer.refusals import Refused

_VARIABLES = "chat_template_kwargs"

NONE = "none"
"""Value of the setting `shape` for records with our own field names."""

_FITS = {**FITS, "number": is_number}

_KEYS = frozenset(
    {
        *("source", "sets", "tried", "note", "example", "shows", "refuse"),
        *("kind", "fields", "without", "reads", "passes", "drops", "as_chat", "role", "rounds"),
        *("signed", "first", "second", "tie"),
    }
)
"""Keys of an entry."""


_BESIDE = {
    spelling
    for name in ("chosen_reward", "rejected_reward", "margin", "system", "tools", _VARIABLES)
    for spelling in SPELLINGS[name]
}
"""Names of fields that have our meaning beside those of any shape."""


class Canonical(NamedTuple):
    """A record with our own field names."""

    record: Any
    shape: Named | None = None


class Named:
    """A named shape; its attributes are the keys of its entry in ``shapes.yaml``."""

    def __init__(self, name: str, entry: Mapping[str, Any]) -> None:
        if unknown := entry.keys() - _KEYS:
            raise ConfigError(
                sentence(f"shape {name}", f"its keys must be of {sorted(_KEYS)}", quote(unknown))
            )
        self.name, self.entry = name, entry
        self.kind: str = entry.get("kind", "")
        self.refuse: str = entry.get("refuse", "")
        self.fields = {parse_path(path): form for path, form in entry["fields"].items()}
        self.roots = frozenset(str(path[0]) for path in self.fields)
        self.without = frozenset(entry.get("without", ()))
        self.reads = {
            name: [parse_path(path) for path in ([paths] if isinstance(paths, str) else paths)]
            for name, paths in entry.get("reads", {}).items()
        }
        self.read = frozenset(str(path[0]) for paths in self.reads.values() for path in paths)
        self.passes = frozenset(entry.get("passes", ()))

    def __str__(self) -> str:
        return f"{self.name} ({', '.join(dict.fromkeys(str(path[0]) for path in self.fields))})"

    @property
    def refusal(self) -> str:
        """Why a record of this shape cannot be read."""
        return f"a record of {self}: {self.refuse}"

    def differences(self, record: Mapping[str, Any]) -> list[str]:
        """Returns how a record differs from this shape."""
        found = []
        for path, form in self.fields.items():
            value = follow(record, path)
            if value is None:
                found.append(missing(record, path))
            elif form in _FITS and not _FITS[form](value):
                name = next(text for text in self.entry["fields"] if parse_path(text) == path)
                found.append(f"{name} must be {FORMS.get(form, form)}, found {quote(value)}")
        found += [f"{n!r} beside it" for n in self.without if not is_empty(record.get(n))]
        return found

    def canonical(self, record: dict[str, Any], as_chat: bool) -> dict[str, Any]:
        """Returns a record of this shape with our own field names."""
        if self.refuse:
            raise Refused("wrong_type", self.refusal)
        found = {n: v for n, v in record.items() if n in _BESIDE and n not in self.passes}
        found |= {
            name: parts[0] if len(parts) == 1 else _joined(parts)
            for name, paths in self.reads.items()
            if (parts := [v for path in paths if (v := follow(record, path)) is not None])
        }
        for path, values in self.entry.get("drops", {}).items():
            if (value := follow(record, parse_path(path))) in values:
                raise Refused("tie", f"{path} {quote(value)}")
        if "ranks" in found:
            found["scores"] = [-_number(rank) for rank in found.pop("ranks")]
        if (options := found.pop("options", None)) is not None:
            if len(options) != 2:
                raise Refused("wrong_type", f"there must be two answers, found {len(options)}")
            found["first"], found["second"] = options
        if "first" in found:
            self._choose(found)
        if isinstance(scores := found.get("scores"), list):
            found["scores"] = [_number(score) for score in scores]
        history = found.pop("history", None)
        if as_chat or not is_empty(history):
            if not as_chat:
                remedy = "Make chats of text (--as-chat)"
                raise Refused("unread_field", "earlier turns beside plain text", remedy)
            self._render(found, self._turns(history or []))
        return found

    def _choose(self, found: dict[str, Any]) -> None:
        """Turns two answers and a verdict into the chosen and the rejected one."""
        sides = [found.pop("first"), found.pop("second")]
        if "first_score" in found:
            scores = [_number(found.pop("first_score")), _number(found.pop("second_score"))]
            verdict: Any = scores[1] - scores[0]
        else:
            verdict, scores = found.pop("verdict"), []
        if self.entry.get("signed") or scores:
            gap = _number(verdict)
            second: int | None = int(gap > 0) if gap else None
            scores = scores or [max(-gap, 0), max(gap, 0)]
        else:
            named = ("first", "second")
            second = next((i for i, key in enumerate(named) if self._is(key, verdict)), None)
            if second is None and not self._is("tie", verdict):
                must = f"the verdict must be one of {self.entry['first']} or {self.entry['second']}"
                raise Refused("wrong_type", f"{must}, found {quote(verdict)}")
        if second is None:
            raise Refused("tie", f"verdict {quote(verdict)}")
        found["chosen"], found["rejected"] = sides[second], sides[1 - second]
        if scores:
            found["chosen_reward"], found["rejected_reward"] = scores[second], scores[1 - second]

    def _is(self, key: str, verdict: object) -> bool:
        return any(verdict == value for value in self.entry.get(key, ()))

    def _turns(self, history: Any) -> list[dict[str, Any]]:
        """Returns earlier rounds, lists of two texts or objects of two, as messages."""
        names = self.entry.get("rounds", (0, 1))
        try:
            pairs = [(item[names[0]], item[names[1]]) for item in history]
        except (KeyError, IndexError, TypeError):
            pairs = [(None, None)]
        if not all(is_text(text) for pair in pairs for text in pair):
            must = "earlier turns must be a list of a question and an answer each"
            raise Refused("wrong_type", f"{must}, found {quote(history)}")
        return [
            {"role": role, "content": text}
            for pair in pairs
            for role, text in zip(("user", "assistant"), pair, strict=True)
        ]

    def _render(self, found: dict[str, Any], earlier: list[dict[str, Any]]) -> None:
        """Makes messages of texts."""
        one = "response" if "response" in found else "responses"
        if "chosen" in found:
            answers = [found["chosen"], found["rejected"]]
        else:
            answers = [found[one]] if "response" in found else found.get(one, [])
        prompt: Any = found.get("prompt")
        if prompt is None and not answers:
            found["messages"] = earlier or found.get("messages")
            return
        if is_text(prompt) and answers and all(map(is_text, answers)):
            prompt, answers = text_as_messages(prompt, answers)
            for answer in answers if (role := self.entry.get("role")) else ():
                answer[0]["role"] = role
        elif is_text(prompt):
            prompt = [{"role": "user", "content": prompt}]
        if prompt is not None:
            found["prompt"] = [*earlier, *prompt]
        if "chosen" in found:
            found["chosen"], found["rejected"] = answers
        elif earlier and self.kind == "sft":  # the earlier answers are learned, too
            del found["response"]
            found["messages"] = [*found.pop("prompt"), *answers[0]]
        elif answers:
            found[one] = answers[0] if one == "response" else answers


def _joined(parts: list[Any]) -> Any:
    """Returns texts joined by a line break each, without the empty ones."""
    if not all(map(is_text, parts)):
        raise Refused("wrong_type", f"parts of a prompt must be text, found {quote(parts)}")
    return "\n".join(part for part in parts if part)


def _number(value: Any) -> float:
    """Returns a number, which text may spell."""
    try:
        if is_number(value):
            return value  # type: ignore[no-any-return]
        return float(value)
    except (TypeError, ValueError):
        raise Refused("wrong_type", f"a score must be a number, found {quote(value)}") from None


class Table:
    """The named shapes of a job."""

    def __init__(self, shapes: Iterable[Named], insists: str = "") -> None:
        self.shapes, self.insists = [*shapes], insists
        self._candidates: dict[tuple[str, ...], list[Named]] = {}

    def shape_of(self, record: dict[str, Any], kind: str | None = None) -> Named | None:
        """Returns the one shape that a record fits whole, or None."""
        names = tuple(record)
        if (found := self._candidates.get(names)) is None:
            found = [shape for shape in self.shapes if shape.roots.issubset(names)]
            if len(self._candidates) < 1000:
                self._candidates[names] = found
        if not found:
            return None
        fits = [
            shape
            for shape in found
            if (kind in (None, shape.kind) or shape.refuse) and not shape.differences(record)
        ]
        fits = [s for s in fits if not any(s.roots < other.roots for other in fits)]
        if len(fits) > 1:
            fits = [shape for shape in fits if not shape.refuse]
        if len(fits) > 1:
            both = " and ".join(map(str, fits))
            raise Refused("wrong_type", f"a record of {both}", "Choose one (--shape NAME)")
        return fits[0] if fits else None

    def nearest(self, record: Mapping[str, Any]) -> str:
        """Returns a sentence on the shape that a record nearly has; empty: none is near."""

        def distance(shape: Named) -> tuple[float, int]:
            return len(shape.differences(record)) / len(shape.fields), -len(shape.fields)

        near = [s for s in self.shapes if 2 * len(s.roots & record.keys()) > len(s.roots)]
        if self.insists:
            near = self.shapes
        if not near:
            return ""
        shape = min(near, key=distance)
        differs = "; ".join(shape.differences(record)) or "another kind"
        return f"nearest shape: {shape}, but {differs}"


def table(shape: str | None = None) -> Table:
    """Returns the named shapes, the one of a name, or those of a file of the user's own.

    Raises:
        ConfigError: no shape has this name, or the file cannot be read.
    """
    if not shape or not shape.endswith((".yaml", ".yml")):
        return _named(shape)
    try:
        return _own(shape, os.stat(shape).st_mtime_ns)
    except OSError as error:
        rule = "it must be a file of shapes that can be read"
        raise ConfigError(sentence(f"setting shape, {shape}", rule, str(error))) from None


@functools.lru_cache(maxsize=8)
def _own(path: str, changed: int) -> Table:
    """Returns the shapes of a file that was `changed` at a time."""
    return Table(_load(Path(path).read_text(encoding="utf-8"), path), path)


@functools.cache
def _named(name: str | None) -> Table:
    if name == NONE:
        return Table([])
    named = _load(files("packstore.config").joinpath("shapes.yaml").read_text("utf-8"), "")
    if name is None:
        return Table(named)
    chosen = [shape for shape in named if shape.name == name]
    if not chosen:
        rule = "it must be a named shape (docs/records.md), none, or a YAML file of your own"
        hint = meant(name, [shape.name for shape in named])
        raise ConfigError(sentence("setting shape", rule, quote(name)) + hint)
    return Table(chosen, name)


def _load(text: str, path: str) -> list[Named]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        entries = yaml.load(text, loader)
        return [Named(name, entry) for name, entry in entries.items()]
    except (yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        rule = "it must be YAML: name of a shape -> its fields, kind, reads"
        raise ConfigError(sentence(f"setting shape, {path}", rule, str(error))) from None


def shape_of(record: Any, config: TokenizeConfig, kind: str | None = None) -> Named | None:
    """Returns the named shape of a record, or None; `kind`: of the job."""
    if type(record) is not dict or (config.fields and not config.shape):
        return None
    shapes = table(config.shape)
    shape = shapes.shape_of(record, kind)
    if shape is None and shapes.insists:
        raise Refused("wrong_type", shapes.nearest(record), "Name another shape (--shape NAME)")
    return shape


def canonical(
    record: Any, config: TokenizeConfig, kind: str | None = None, *, templated: bool = True
) -> Canonical:
    """Returns a record with our own field names.

    `kind`: of the job; `templated`: the tokenizer has a chat template, so that texts of a set for
    instruct models are chats by default.
    """
    shape = shape_of(record, config, kind)
    if shape is None:
        return Canonical(record)
    as_chat = config.as_chat
    if as_chat is None:
        as_chat = templated and bool(shape.entry.get("as_chat"))
    return Canonical(shape.canonical(record, as_chat), shape)


_VIA = {
    "chosen": ("first", "second", "options", "verdict", "first_score", "second_score"),
    "scores": ("ranks",),
    "prompt": ("history",),
    "messages": ("history", "prompt", "response"),
}
"""Field of ours -> other keys of `reads` that it is made of."""


@functools.cache
def used_fields(shape: Named, fields: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of a record's `names` of which our own fields that were used are made."""
    used: list[str] = []
    for name in fields:
        keys = [key for key in (name, *_VIA.get(name, ())) if key in shape.reads]
        used += [str(path[0]) for key in keys for path in shape.reads[key]]
        used += [name] if not keys and name in _BESIDE else []
    return tuple(name for name in dict.fromkeys(used) if name in names)
