"""Readings: a record in packstore's own terms, as forms, adapters and own field names
give it.

A prompt or a response is text, a list of messages, or token ids. The three classes name
the three kinds of datasets; :class:`Drop` leaves a record out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt with two responses, the chosen one better than the rejected one.

    Args:
        prompt: text, messages or token ids; None if both sides are whole dialogues,
            which are split where they begin to differ.
        chosen: the better response, or a whole dialogue that ends with it.
        rejected: the worse one.
        chosen_reward: a finite number, given for both sides or for none.
        rejected_reward: a finite number.
        margin: the difference of the rewards, where these are not given.
        system: text of a system turn before the prompt.
        tools: tool schemas, a list of objects or its JSON text.
        chat_template_kwargs: variables of the chat template, an object or its JSON
            text.
        chosen_labels: of token ids: an id at each supervised place, -100 at the others.
        rejected_labels: the same of the rejected side.
    """

    prompt: Any
    chosen: Any
    rejected: Any
    chosen_reward: Any = None
    rejected_reward: Any = None
    margin: Any = None
    system: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None
    chosen_labels: Any = None
    rejected_labels: Any = None


@dataclass(frozen=True, slots=True)
class Answers:
    """A prompt with any number of responses, each with a score.

    Args:
        prompt: text, messages or token ids; None if the responses are whole dialogues.
        responses: a list of responses, of the types of the prompt.
        scores: a list of finite numbers, higher for better responses.
        system: text of a system turn before the prompt.
        tools: tool schemas, a list of objects or its JSON text.
        chat_template_kwargs: variables of the chat template, an object or its JSON
            text.
        response_labels: of token ids: for each response an id at each supervised place,
            -100 at the others.
    """

    prompt: Any
    responses: Any
    scores: Any
    system: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None
    response_labels: Any = None


@dataclass(frozen=True, slots=True)
class Chat:
    """Text to learn (SFT): a whole dialogue, a prompt with its response, or token ids.

    Args:
        messages: a whole dialogue, a list of messages or its JSON text.
        prompt: text, messages or token ids, with `response`; beside `messages`, their
            beginning.
        response: the answer to learn.
        system: text of a system turn before the first turn.
        tools: tool schemas, a list of objects or its JSON text.
        chat_template_kwargs: variables of the chat template, an object or its JSON
            text.
        input_ids: token ids of a whole sequence, with `labels` or `mask`.
        labels: an id at each supervised place, -100 at the others.
        mask: 1 at each supervised place, 0 at the others.
    """

    messages: Any = None
    prompt: Any = None
    response: Any = None
    system: Any = None
    tools: Any = None
    chat_template_kwargs: Any = None
    input_ids: Any = None
    labels: Any = None
    mask: Any = None


@dataclass(frozen=True, slots=True)
class Drop:
    """Leave a record out, and count it.

    Args:
        reason: a name of :data:`packstore.config.REASONS`, such as ``"tie"``.
        detail: the cause, for the file of rejects.
    """

    reason: str
    detail: str = ""


Reading: TypeAlias = Pair | Answers | Chat

KIND_OF: dict[type, str] = {Pair: "preference", Answers: "scored", Chat: "sft"}
"""Class of a reading -> the kind of its dataset."""
