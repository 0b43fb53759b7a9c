"""Reads a record of a named shape: it becomes one with our own fields (`prompt`, `chosen` …)."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from packstore.config import TokenizeConfig
from packstore.config.record_shapes import known
from packstore.errors import quote
from packstore.tokenizer.dialogue.messages import is_empty, normalize_messages, text_as_messages
from packstore.tokenizer.records.entries import OPTIONAL
from packstore.tokenizer.records.fields import check_mapped, is_number
from packstore.tokenizer.records.old_forms import FORMS, is_text, role_at
from packstore.tokenizer.records.paths import follow, missing, parse_path
from packstore.tokenizer.records.shapes import Shape, named_shape, written
from packstore.tokenizer.refusals import Refused, wrong_type


def canonical(
    record: Any,
    config: TokenizeConfig,
    kind: str,
    is_turn: Callable[[str], bool],
    ids: bool = False,
) -> tuple[Any, Shape | None]:
    """Returns a record with our own field names, and its named shape, if it has one.

    `kind`: of the job; `is_turn`: whether the tokenizer's chat template makes a turn of the text of
    a prompt, so that texts of a set for instruct models are chats by default; `ids`: of a record
    that holds texts and ids, the ids.
    """
    shape = named_shape(record, config, kind, ids)
    if shape is None:
        return record, None
    if shape.refuse:
        raise Refused("wrong_type", shape.refusal)
    try:
        found = _read(shape, record, config, is_turn)
        return {config.fields.get(name, name): value for name, value in found.items()}, shape
    except Refused as error:
        if error.reason == "wrong_type":
            error.detail = f"{shape.name}: {error.detail}"
        raise


def used_fields(
    shape: Shape, fields: tuple[str, ...], names: tuple[str, ...], mapped: Mapping[str, str]
) -> tuple[str, ...]:
    """Returns those of a record's `names` of which our own fields that were used are made."""
    beside = {*fields} & {*mapped.values()}
    fields = tuple(name for name in fields if name not in beside)
    of_turns = ("prompt", "response") if "messages" in fields else ()
    ours = known().field_names
    keys = [key for key in shape.reads if key in (*fields, *of_turns) or key not in ours]
    used = {str(path[0]) for key in keys for path in shape.reads[key]}
    used |= ({*fields} & known().beside) - shape.reads.keys() | beside
    return tuple(name for name in names if name in used)


def _read(
    shape: Shape, record: dict[str, Any], config: TokenizeConfig, is_turn: Callable[[str], bool]
) -> dict[str, Any]:
    """Returns a record of a shape with our own field names, also of fields that are mapped."""
    for text, values in shape.entry.get("drops", {}).items():
        if (value := follow(record, parse_path(text))) in values:
            raise Refused("tie", f"{text} {quote(value)}")
    found = {n: v for n, v in record.items() if n in known().beside and not shape.passes(n)}
    for name, paths in shape.reads.items():
        parts = [v for path in paths if (v := follow(record, path)) is not None]
        if (keys := shape.entry.get("turns")) or shape.entry.get("roles"):
            parts = [_with_keys(part, keys or {}, shape.entry.get("roles", {})) for part in parts]
        if parts:
            is_list = name == "votes"
            found[name] = parts if is_list else parts[0] if len(parts) == 1 else _joined(parts)
    mapped = {n: record[at] for n, at in config.fields.items() if record.get(at) is not None}
    found |= mapped
    lacking = shape.reads.keys() - found.keys() - known().beside.union(OPTIONAL)
    for name in sorted(lacking):
        told = "; ".join(f"{written(at)}: {missing(record, at)}" for at in shape.reads[name])
        remedy = "Correct the paths that the shape reads"
        raise Refused("missing_field", f"{shape.name} reads {name} of {told}", remedy)
    if "good" in found:
        good, bad = found.pop("good"), found.pop("bad")
        found |= {"responses": [*good, *bad], "scores": [1] * len(good) + [0] * len(bad)}
    if "first" in found or "options" in found:
        _choose(shape, found)
    if "ranks" in found:
        found["scores"] = [-_number(rank) for rank in found.pop("ranks")]
    kept = {name for name, value in mapped.items() if found.get(name) is value}
    check_mapped(record, kept, config, str(shape))
    if isinstance(found.get("system"), list):
        found["system"] = _joined(found["system"])
    if isinstance(scores := found.get("scores"), list):
        found["scores"] = [_number(score) for score in scores]
    if FORMS["numeral"].fits(score := found.get("score")):
        found["score"] = _number(score)
    history = found.pop("history", None)
    prompt: Any = found.get("prompt")
    as_chat = config.as_chat
    if as_chat is None and (as_chat := bool(shape.entry.get("as_chat"))):
        as_chat = is_turn(prompt if is_text(prompt) else "")
    if as_chat and "splits" in shape.entry and is_text(prompt):
        *history, found["prompt"] = re.split(shape.entry["splits"], prompt)
    if as_chat:
        _render(shape, found, _rounds(history or [], shape.entry.get("rounds", (0, 1))))
    elif not is_empty(history) or "reasoning" in found:
        remedy = "Make chats of text (--as-chat)"
        raise Refused("unread_field", "earlier turns or reasoning beside plain text", remedy)
    return found


def _choose(shape: Shape, found: dict[str, Any]) -> None:
    """Turns two answers and a verdict, votes or scores into the chosen and the rejected one."""
    entry, keys = shape.entry, ("first", "second")
    sides = found.pop("options") if "options" in found else [found.pop(key) for key in keys]
    if "judged" in found:
        judged = found.pop("judged")
        sides = [_until(side, judged) for side in sides]
    rounds, order = found.pop("earlier", None), _number(found.pop("order", 1))
    if rounds or order > 1:
        sides = _after(rounds or [], entry["rounds"], sides, order)
    if "questions" in found:
        asked = found.pop("questions")
        sides = [_dialogue(asked, answers) for answers in sides]
    scores: list[float] = []
    if votes := found.pop("votes", None):
        verdict: Any = votes
        scores = [sum(vote in entry[key] for vote in votes) for key in keys]
    elif "verdict" in found:
        verdict = found.pop("verdict")
        if entry.get("signed"):
            gap = _number(verdict)
            scores = [max(-gap, 0), max(gap, 0)]
    else:
        verdict = found.pop("scores", None)
        if verdict is None:
            verdict = [found.pop(f"{key}_score") for key in keys]
        scores = [_number(score) for score in verdict]
    if len(sides) != 2 or len(scores) not in (0, 2):
        raise Refused("wrong_type", f"there must be two answers, found {len(sides)}")
    if scores:
        second = None if scores[0] == scores[1] else int(scores[1] > scores[0])
    else:
        said = [any(verdict == value for value in entry.get(key, ())) for key in keys]
        second = said.index(True) if True in said else None
        if second is None and verdict not in entry.get("tie", ()):
            rule = f"the verdict must be one of {entry['first']} or {entry['second']}"
            raise wrong_type(rule, verdict)
    if second is None:
        raise Refused("tie", f"verdict {quote(verdict)}")
    found["chosen"], found["rejected"] = sides[second], sides[1 - second]
    if scores:
        found["chosen_reward"], found["rejected_reward"] = scores[second], scores[1 - second]


def _until(messages: list[Any], judged: Any) -> list[Any]:
    """Returns a dialogue up to the answer of the round that is judged, counted from 1."""
    asked = [i for i in range(len(messages)) if role_at(messages, i) == "user"]
    if judged not in range(1, len(asked) + 1):
        raise wrong_type(f"the round that is judged must be one of {len(asked)}", judged)
    return messages[: [*asked, len(messages)][judged]]


def _after(rounds: Any, names: Sequence[str], sides: list[Any], order: float) -> list[Any]:
    """Returns both sides after the rounds before them, of which each names a question and answers.

    `rounds` may end with those of the sides; `order`: above 1 there must be others.
    """
    asked, *answers = names
    earlier = []
    for side, answer in zip(sides, answers, strict=True):
        try:
            given = [each[name] for each in rounds for name in (asked, answer)]
        except (KeyError, TypeError):
            raise wrong_type(f"rounds must be a list of {', '.join(names)}", rounds) from None
        turns, judged = normalize_messages(given, set()), normalize_messages(side, set())
        has_judged = turns[-len(judged) :] == judged
        if not has_judged and judged[0] in turns:
            raise wrong_type("earlier rounds must end with those that are judged", given[-1])
        earlier.append(turns[: -len(judged)] if has_judged else turns)
    if not any(earlier) and order > 1:
        raise Refused("missing_field", f"vote {order:g} without the rounds before it")
    if earlier[0] != earlier[1]:
        raise Refused("different_contexts", "rounds before the judged ones, with other answers")
    return [[*earlier[0], *side] for side in sides]


def _rounds(history: Any, names: Sequence[str | int] = (0, 1)) -> list[dict[str, Any]]:
    """Returns rounds as messages: lists of two texts, objects of two, or texts by turns."""
    try:
        texts = [item[name] for item in history for name in names] if names else [*history]
    except (KeyError, IndexError, TypeError):
        texts = [None]
    if not all(map(is_text, texts)):
        raise wrong_type("rounds must be a list of a question and an answer each", history)
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def _dialogue(questions: Any, answers: Any) -> list[dict[str, Any]]:
    """Returns as many questions and answers, lists or their JSON text, as messages."""
    try:
        lists = [json.loads(v) if is_text(v) else v for v in (questions, answers)]
        return _rounds([*zip(*lists, strict=True)])
    except (ValueError, TypeError):
        rule = "questions and answers must be lists of as many texts"
        raise wrong_type(rule, [questions, answers]) from None


def _with_keys(value: Any, keys: Mapping[str, str | None], roles: Mapping[str, str]) -> Any:
    """Returns turns with other keys, null: without this key, and other names of roles."""
    if isinstance(value, list):
        return [_with_keys(item, keys, roles) for item in value]
    if not isinstance(value, dict):
        return value
    turn = {new: item for key, item in value.items() if (new := keys.get(key, key)) is not None}
    return {
        key: roles.get(item, item) if key in ("role", "from") and is_text(item) else item
        for key, item in turn.items()
    }


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
    if "reasoning" in found:
        thought = {"role": "assistant_reasoning", "content": found.pop("reasoning")}
        said = [[{"role": "assistant", "content": a}] if is_text(a) else a for a in answers]
        answers = [[thought, *turns] for turns in said]
    if prompt is not None:
        found["prompt"] = [*earlier, *prompt]
    if earlier and shape.kind == "sft":  # the earlier answers are learned, too
        del found["response"]
        found["messages"] = [*found.pop("prompt"), *answers[0]]
    elif answers:
        found |= zip(names, answers, strict=True) if names else {"responses": answers}


def _joined(parts: list[Any]) -> Any:
    """Returns texts joined by a line break each, without the empty ones."""
    parts = [part for part in parts if part == part]  # NaN, which pandas writes for none
    if not all(map(is_text, parts)):
        raise wrong_type("parts of a prompt must be text", parts)
    return "\n".join(filter(None, parts))


def _number(value: Any) -> float:
    """Returns a number, which text may spell."""
    try:
        return value if is_number(value) else float(value)
    except (TypeError, ValueError):
        raise wrong_type("a score must be a number", value) from None
