"""Finds implicit prompts: the common prefix of whole dialogues on all sides."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from packstore.tokenizer.chat.template import Message
from packstore.tokenizer.refusals import Refused

T = TypeVar("T")

HUMAN, ASSISTANT = "\n\nHuman:", "\n\nAssistant:"
"""Headers of the turns in text dialogues of the Anthropic HH form."""


def split_messages(dialogues: Sequence[list[Message]]) -> tuple[list[Message], list[list[Message]]]:
    """Splits off the longest common prefix of messages that all sides follow by the assistant.

    Raises:
        Refused: ``no_common_prompt``.
    """
    cut = _common_turns(dialogues, lambda message: bool(message["role"] == "assistant"))
    return dialogues[0][:cut], [dialogue[cut:] for dialogue in dialogues]


def split_texts(texts: Sequence[str]) -> tuple[str, list[str]]:
    """Splits dialogues of the Anthropic HH form into their common prompt and the rest of each side.

    The prompt is the longest common prefix of turns, with the header of the assistant turn that
    follows.

    Raises:
        Refused: ``no_common_prompt``.
    """
    turns = [re.split(f"(?={HUMAN}|{ASSISTANT})", text) for text in texts]
    cut = _common_turns(turns, lambda turn: turn.startswith(ASSISTANT))
    size = len("".join(turns[0][:cut])) + len(ASSISTANT)
    return texts[0][:size], [text[size:] for text in texts]


def is_hh(texts: Sequence[str]) -> bool:
    """Returns True if all texts are dialogues of the Anthropic HH form."""
    return all(
        ASSISTANT in text and (HUMAN in text or text.startswith(HUMAN.lstrip())) for text in texts
    )


def _common_turns(dialogues: Sequence[Sequence[T]], is_assistant: Callable[[T], bool]) -> int:
    """Number of common turns that all dialogues follow by an assistant turn."""
    shortest = min(len(dialogue) for dialogue in dialogues)
    first = dialogues[0]
    cut = 0
    while cut < shortest - 1 and all(d[cut] == first[cut] for d in dialogues):
        cut += 1
    while cut >= 0 and not all(is_assistant(d[cut]) for d in dialogues):
        cut -= 1
    if cut <= 0:
        raise Refused("no_common_prompt", "the sides share no turn before an answer")
    return cut
