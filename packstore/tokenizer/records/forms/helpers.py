"""Shared steps of forms: turn verdicts, votes and scores into pairs; join texts; make
turns.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from packstore.errors import quote
from packstore.tokenizer.records.reading import Drop, Pair
from packstore.tokenizer.records.types import LABEL_SCORES, is_number, role_at
from packstore.tokenizer.refusals import Refused, wrong_type

Message = dict[str, Any]


def by_score(
    prompt: Any,
    first: Any,
    second: Any,
    first_score: Any,
    second_score: Any,
    **arguments: Any,
) -> Pair | Drop:
    """Return the answer with the higher score as chosen, with both scores as rewards.

    Args:
        arguments: of :class:`Pair`, such as `system`.
    """
    first_number = to_number(first_score)
    second_number = to_number(second_score)
    if first_number == second_number:
        return Drop("tie", f"both answers have the score {quote(first_score)}")
    if first_number > second_number:
        return Pair(prompt, first, second, first_number, second_number, **arguments)
    return Pair(prompt, second, first, second_number, first_number, **arguments)


def by_scores(prompt: Any, answers: Any, scores: Any, **arguments: Any) -> Pair | Drop:
    """Return a pair of two listed answers by their listed scores.

    Raises:
        Refused: there are not two (``wrong_type``).
    """
    if len(answers) != 2 or len(scores) != 2:
        raise wrong_type("there must be two answers with a score each", scores)
    return by_score(prompt, answers[0], answers[1], scores[0], scores[1], **arguments)


def by_sign(
    prompt: Any, first: Any, second: Any, preference: Any, **arguments: Any
) -> Pair | Drop:
    """Return a pair by a preference that is negative if the first answer is better.

    Its size becomes the reward of the better answer: -2 gives the rewards 2 and 0.
    """
    strength = to_number(preference)
    return by_score(
        prompt, first, second, max(-strength, 0), max(strength, 0), **arguments
    )


def by_word(
    prompt: Any,
    first: Any,
    second: Any,
    verdict: Any,
    *,
    first_is: Iterable[Any],
    second_is: Iterable[Any],
    tie_is: Iterable[Any] = (),
    **arguments: Any,
) -> Pair | Drop:
    """Return a pair by a verdict.

    Args:
        prompt: of the pair.
        first: the first answer.
        second: the second answer.
        verdict: the value that decides.
        first_is: verdicts for the first answer.
        second_is: verdicts for the second answer.
        tie_is: verdicts that name neither.
        arguments: of :class:`Pair`, such as `system`.

    Raises:
        Refused: the verdict is none of the listed values (``wrong_type``).
    """
    if verdict in first_is:
        return Pair(prompt, first, second, **arguments)
    if verdict in second_is:
        return Pair(prompt, second, first, **arguments)
    if verdict in tie_is:
        return Drop("tie", f"verdict {quote(verdict)}")
    listed = ", ".join(quote(value) for value in (*first_is, *second_is, *tie_is))
    raise wrong_type(f"the verdict must be one of {listed}", verdict)


def by_votes(
    prompt: Any,
    first: Any,
    second: Any,
    votes: Sequence[Any],
    *,
    first_is: Iterable[Any],
    second_is: Iterable[Any],
    **arguments: Any,
) -> Pair | Drop:
    """Return the answer with more votes as chosen, with the numbers of votes as
    rewards.
    """
    first_votes = sum(vote in first_is for vote in votes)
    second_votes = sum(vote in second_is for vote in votes)
    return by_score(prompt, first, second, first_votes, second_votes, **arguments)


def to_number(value: Any) -> float:
    """Return a number, which text may spell.

    Raises:
        Refused: it is none (``wrong_type``).
    """
    if value != value:  # NaN: pandas writes it for null
        raise wrong_type("a score must be a number", value)
    if is_number(value):
        return value  # type: ignore[no-any-return]
    try:
        return float(value)
    except (TypeError, ValueError):
        raise wrong_type("a score must be a number", value) from None


def to_score(judgement: Any) -> float:
    """Return the score of a single answer: a number, or 1 for good and 0 for bad.

    Raises:
        Refused: it is neither a number nor one of the words (``wrong_type``).
    """
    if isinstance(judgement, str) and judgement.lower() in LABEL_SCORES:
        return LABEL_SCORES[judgement.lower()]
    return to_number(judgement)


def first_present(fields: Mapping[str, Any], *names: str) -> Any:
    """Return the first field that is there, or None."""
    for name in names:
        if name in fields:
            return fields[name]
    return None


def join_texts(*parts: Any) -> str:
    """Return texts joined by a line break each, without those that are absent or empty.

    Raises:
        Refused: a part is no text (``wrong_type``).
    """
    texts = []
    for part in parts:
        if part is None or part == "" or part != part:  # NaN: pandas writes it for null
            continue
        if not isinstance(part, str):
            raise wrong_type("parts of a prompt must be text", part)
        texts.append(part)
    return "\n".join(texts)


def rounds_as_messages(
    rounds: Any, names: Sequence[str | int] = (0, 1)
) -> list[Message]:
    """Return rounds of a question and an answer as messages.

    Args:
        rounds: a list of lists of two texts, or of objects.
        names: indices or keys of the question and the answer.
    """
    try:
        texts = [item[name] for item in rounds for name in names]
    except (KeyError, IndexError, TypeError):
        texts = [None]
    return texts_as_messages(texts)


def texts_as_messages(texts: Any) -> list[Message]:
    """Return texts as turns of the user and the assistant, in alternation."""
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise wrong_type(
            "rounds must be texts, a question and an answer in turn", texts
        )
    messages = []
    for i, text in enumerate(texts):
        role = "assistant" if i % 2 else "user"
        messages.append({"role": role, "content": text})
    return messages


def split_rounds(prompt: str, separator: str) -> Any:
    """Return a prompt that holds earlier rounds as messages, any other as the text it
    is.

    Args:
        separator: pattern of the text between turns.
    """
    texts = re.split(separator, prompt)
    return texts_as_messages(texts) if len(texts) > 1 else prompt


def after_rounds(history: Any, prompt: Any, names: Sequence[str | int] = (0, 1)) -> Any:
    """Return a prompt with the rounds before it, as messages; without any, as it is."""
    if not history:
        return prompt
    return [*rounds_as_messages(history, names), {"role": "user", "content": prompt}]


def questions_and_answers(questions: Any, answers: Any) -> list[Message]:
    """Return questions and answers as messages, in turn.

    Args:
        questions: a list of texts, or its JSON text.
        answers: the same, one for each question.

    Raises:
        Refused: they are not lists of as many texts (``wrong_type``).
    """
    try:
        question_list = _parse_text(questions)
        answer_list = _parse_text(answers)
        rounds = list(zip(question_list, answer_list, strict=True))
    except (ValueError, TypeError):
        rule = "questions and answers must be lists of as many texts"
        raise wrong_type(rule, [questions, answers]) from None
    return rounds_as_messages(rounds)


def _parse_text(value: Any) -> Any:
    """Return JSON text parsed, and any other value as it is."""
    return json.loads(value) if isinstance(value, str) else value


def as_turns(value: Any, role: str) -> list[Message]:
    """Return text, or one message, as a list of messages; a list as it is."""
    match value:
        case str():
            return [{"role": role, "content": value}]
        case list():
            return value
        case _:
            return [value]


def with_reasoning(thoughts: str, answer: Any) -> list[Message]:
    """Return an answer with the reasoning before it, as messages."""
    turns = as_turns(answer, "assistant")
    return [{"role": "assistant_reasoning", "content": thoughts}, *turns]


def cut_at(messages: list[Message], answer_number: Any) -> list[Message]:
    """Return a dialogue up to its n-th answer, counted from 1.

    Raises:
        Refused: the dialogue has not so many (``wrong_type``).
    """
    questions = [i for i in range(len(messages)) if role_at(messages, i) == "user"]
    if answer_number not in range(1, len(questions) + 1):
        rule = f"the number of the judged round must be from 1 to {len(questions)}"
        raise wrong_type(rule, answer_number)
    ends = [*questions, len(messages)]
    return messages[: ends[answer_number]]


def split_at_first_answer(
    messages: list[Message],
) -> tuple[list[Message], list[Message]]:
    """Split a dialogue behind its first question: return the turns up to it, and the
    turns from there to the last answer.

    Raises:
        Refused: no answer follows a question (``wrong_type``).
    """
    roles = [role_at(messages, i) for i in range(len(messages))]
    start = roles.index("user") + 1 if "user" in roles else len(roles)
    answers = [i for i in range(start, len(roles)) if roles[i] in ("assistant", "call")]
    if not answers:
        raise wrong_type("messages must hold a question and an answer", messages)
    return messages[:start], messages[start : answers[-1] + 1]


def with_roles(messages: Any, roles: Mapping[str, str]) -> Any:
    """Return messages with some roles renamed."""
    renamed = []
    for message in messages:
        key = "role" if "role" in message else "from"
        renamed.append({**message, key: roles.get(message.get(key), message.get(key))})
    return renamed


def refuse(reason: str, detail: str) -> Refused:
    """Return the refusal of a record, to raise."""
    return Refused(reason, detail)
