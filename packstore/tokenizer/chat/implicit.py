"""Finds implicit prompts: the common prefix of whole dialogues on all sides."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from packstore.tokenizer.chat.template import Message
from packstore.tokenizer.control import shared_characters
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
    """Splits whole texts into their common prompt and the rest of each side.

    Dialogues of the HH form are split into turns: the prompt is the longest common prefix of turns,
    with the header of the assistant turn that follows. Other texts are split after the last common
    word.

    Raises:
        Refused: ``no_common_prompt``.
    """
    if is_hh(texts):
        turns = [_hh_turns(text) for text in texts]
        cut = _common_turns(turns, lambda turn: turn.startswith(ASSISTANT))
        size = len("".join(turns[0][:cut])) + len(ASSISTANT)
    else:
        size = _common_words(texts)
    if size == 0:
        raise Refused("no_common_prompt", "the sides share no beginning")
    return texts[0][:size], [text[size:] for text in texts]


def is_hh(texts: Sequence[str]) -> bool:
    """Returns True if all texts are dialogues of the Anthropic HH form."""
    return all(
        ASSISTANT in text and (HUMAN in text or text.startswith(HUMAN.lstrip())) for text in texts
    )


def _hh_turns(text: str) -> list[str]:
    """Splits a dialogue into turns with their headers; their concatenation is `text`."""
    return re.split(f"(?={HUMAN}|{ASSISTANT})", text)


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


def _common_words(texts: Sequence[str]) -> int:
    size = min(shared_characters(texts[0], other) for other in texts[1:])
    while size and any(text[size - 1 : size + 1].isalnum() and len(text) > size for text in texts):
        size -= 1
    # Tokens include the space before a word, so a space belongs to the following word.
    return len(texts[0][:size].rstrip(" "))
