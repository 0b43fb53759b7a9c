"""Reads a record of a named shape: it becomes one with our own fields (`prompt`, `chosen` …)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from packstore.config import TokenizeConfig
from packstore.config.record_shapes import known
from packstore.errors import quote
from packstore.tokenizer.chat.messages import is_empty, text_as_messages
from packstore.tokenizer.records.fields import Fields, is_number
from packstore.tokenizer.records.forms import is_text
from packstore.tokenizer.records.paths import follow, parse_path
from packstore.tokenizer.records.shapes import Shape, table
from packstore.tokenizer.refusals import Refused

_BESIDE = ("chosen_reward", "rejected_reward", "margin", "system", "tools", "chat_template_kwargs")
"""Fields that have our meaning beside those of any shape."""


class Canonical(NamedTuple):
    """A record with our own field names."""

    record: Any
    shape: Shape | None = None


def canonical(
    record: Any,
    config: TokenizeConfig,
    kind: str | None = None,
    *,
    templated: bool = True,
    ids: bool = False,
) -> Canonical:
    """Returns a record with our own field names.

    `kind`: of the job; `templated`: the tokenizer has a chat template, so that texts of a set for
    instruct models are chats by default; `ids`: of a record that holds texts and ids, the ids.
    """
    if type(record) is not dict or (config.fields and not config.shape):
        return Canonical(record)
    shape = table(config.shape).shape_of(Fields(record, config), kind, ids)
    if shape is None:
        return Canonical(record)
    as_chat = config.as_chat
    if as_chat is None:
        as_chat = templated and bool(shape.entry.get("as_chat"))
    return Canonical(_read(shape, record, as_chat), shape)


def used_fields(shape: Shape, fields: tuple[str, ...], names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of a record's `names` of which our own fields that were used are made."""
    of_turns = ("prompt", "response") if "messages" in fields else ()
    ours = known().field_names
    keys = [key for key in shape.reads if key in (*fields, *of_turns) or key not in ours]
    used = {str(path[0]) for key in keys for path in shape.reads[key]}
    used |= ({*fields} & _beside()) - shape.reads.keys()
    return tuple(name for name in names if name in used)


@functools.cache
def _beside() -> frozenset[str]:
    return frozenset(name for field in _BESIDE for name in known().spellings[field])


def _read(shape: Shape, record: dict[str, Any], as_chat: bool) -> dict[str, Any]:
    """Returns a record of a shape with our own field names."""
    if shape.refuse:
        raise Refused("wrong_type", shape.refusal)
    found = {n: v for n, v in record.items() if n in _beside() and n not in shape.passes}
    for name, paths in shape.reads.items():
        if parts := [v for path in paths if (v := follow(record, path)) is not None]:
            found[name] = parts[0] if len(parts) == 1 else _joined(parts)
    for path, values in shape.entry.get("drops", {}).items():
        if (value := follow(record, parse_path(path))) in values:
            raise Refused("tie", f"{path} {quote(value)}")
    if "ranks" in found:
        found["scores"] = [-_number(rank) for rank in found.pop("ranks")]
    if (options := found.pop("options", None)) is not None:
        if len(options) != 2:
            raise Refused("wrong_type", f"there must be two answers, found {len(options)}")
        found["first"], found["second"] = options
    if "first" in found:
        _choose(shape, found)
    if isinstance(scores := found.get("scores"), list):
        found["scores"] = [_number(score) for score in scores]
    history = found.pop("history", None)
    if as_chat:
        _render(shape, found, _rounds(shape, history or []))
    elif not is_empty(history):
        raise Refused(
            "unread_field", "earlier turns beside plain text", "Make chats of text (--as-chat)"
        )
    return found


def _choose(shape: Shape, found: dict[str, Any]) -> None:
    """Turns two answers and a verdict into the chosen and the rejected one."""
    sides, scores = [found.pop("first"), found.pop("second")], []
    if "first_score" in found:
        scores = [_number(found.pop("first_score")), _number(found.pop("second_score"))]
        verdict: Any = scores[1] - scores[0]
    else:
        verdict = found.pop("verdict")
    if shape.entry.get("signed") or scores:
        gap = _number(verdict)
        second: int | None = int(gap > 0) if gap else None
        scores = scores or [max(-gap, 0), max(gap, 0)]
    else:
        said = [any(verdict == v for v in shape.entry.get(k, ())) for k in ("first", "second")]
        second = said.index(True) if True in said else None
        if second is None and verdict not in shape.entry.get("tie", ()):
            must = f"the verdict must be one of {shape.entry['first']} or {shape.entry['second']}"
            raise Refused("wrong_type", f"{must}, found {quote(verdict)}")
    if second is None:
        raise Refused("tie", f"verdict {quote(verdict)}")
    found["chosen"], found["rejected"] = sides[second], sides[1 - second]
    if scores:
        found["chosen_reward"], found["rejected_reward"] = scores[second], scores[1 - second]


def _rounds(shape: Shape, history: Any) -> list[dict[str, Any]]:
    """Returns earlier rounds, lists of two texts or objects of two, as messages."""
    names = shape.entry.get("rounds", (0, 1))
    try:
        texts = [item[name] for item in history for name in names]
    except (KeyError, IndexError, TypeError):
        texts = [None]
    if not all(map(is_text, texts)):
        must = "earlier turns must be a list of a question and an answer each"
        raise Refused("wrong_type", f"{must}, found {quote(history)}")
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def _render(shape: Shape, found: dict[str, Any], earlier: list[dict[str, Any]]) -> None:
    """Makes messages of texts."""
    names = [name for name in ("response", "chosen", "rejected") if name in found]
    answers = [found[name] for name in names] or found.get("responses", [])
    prompt: Any = found.get("prompt")
    if prompt is None and not answers:
        found["messages"] = earlier or found.get("messages")
        return
    if is_text(prompt) and answers and all(map(is_text, answers)):
        prompt, answers = text_as_messages(prompt, answers)
        for answer in answers if (role := shape.entry.get("role")) else ():
            answer[0]["role"] = role
    elif is_text(prompt):
        prompt = [{"role": "user", "content": prompt}]
    if prompt is not None:
        found["prompt"] = [*earlier, *prompt]
    if earlier and shape.kind == "sft":  # the earlier answers are learned, too
        del found["response"]
        found["messages"] = [*found.pop("prompt"), *answers[0]]
    elif answers:
        found |= zip(names, answers, strict=True) if names else {"responses": answers}


def _joined(parts: list[Any]) -> Any:
    """Returns texts joined by a line break each, without the empty ones."""
    if not all(map(is_text, parts)):
        raise Refused("wrong_type", f"parts of a prompt must be text, found {quote(parts)}")
    return "\n".join(part for part in parts if part)


def _number(value: Any) -> float:
    """Returns a number, which text may spell."""
    try:
        return value if is_number(value) else float(value)
    except (TypeError, ValueError):
        raise Refused("wrong_type", f"a score must be a number, found {quote(value)}") from None
