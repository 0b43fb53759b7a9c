"""Parsed records: readings with prompt and responses all text, all messages, or all
ids.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import UnionType
from typing import Any, NamedTuple

import numpy as np

from packstore.config import TokenizeConfig
from packstore.config.record_fields import SPELLINGS
from packstore.errors import quote
from packstore.format.arrays import Bool, Int32
from packstore.tokenizer.dialogue.messages import (
    HH_BEGINNING,
    SINGLE_BREAK_HEADERS,
    has_content,
    is_hh,
    normalize_messages,
    normalize_tools,
    normalize_variables,
    parsed_json,
    split_messages,
    split_texts,
    text_as_messages,
    turn_headers,
    without_thinking,
)
from packstore.tokenizer.dialogue.template import Message, Tools, as_json
from packstore.tokenizer.records.own import number_of
from packstore.tokenizer.records.reading import Answers, Chat, Pair, Reading
from packstore.tokenizer.records.sequences import (
    as_ids,
    holds_ids,
    masked_ids,
    supervised_ids,
)
from packstore.tokenizer.refusals import Refused, wrong_type

SYSTEM = ("system", "developer")
"""Roles of a system turn."""

DEFAULT_REWARDS = (1.0, 0.0)
"""Default rewards of chosen and rejected."""

NAME_PROMPT = {"fields": {"prompt": "NAME"}}
"""The setting for the column of the prompt, as a remedy shows it."""

LARGEST_REWARD = float(np.finfo(np.float32).max)
"""Largest reward: rewards are stored as float32."""

MARGIN_TOLERANCE = 1e-3
"""Relative error that a margin may have beside the rewards whose difference it is."""

_PLACEHOLDER = re.compile(r"(?:<(image|video|audio)>)+(?=\n|[^\s<]|\Z)")
"""Tags of media that a line break, a word or nothing follows."""


class Parsed(NamedTuple):
    """A parsed record, with prompt and responses all text, all messages, or all ids."""

    prompt: str | list[Message] | Int32  # may be empty
    responses: Sequence[str] | Sequence[list[Message]] | Sequence[Int32]
    rewards: Sequence[float]  # one for each response
    has_rewards: bool = False  # of a pair: the record has them, or a margin
    tools: Tools = None
    variables: dict[str, Any] | None = None  # of the chat template
    supervised: Sequence[Bool] = ()  # the mask of each response, if they are ids
    events: tuple[str, ...] = ()  # names of events that the job counts

    @property
    def is_chat(self) -> bool:
        """True if prompt and responses are messages."""
        return isinstance(self.prompt, list)

    @property
    def is_ids(self) -> bool:
        """True if prompt and responses are token ids."""
        return isinstance(self.prompt, np.ndarray)

    @property
    def has_close_rewards(self) -> bool:
        """True if different rewards are the same number as float32."""
        if self.rewards is DEFAULT_REWARDS or len(self.rewards) == 1:
            return False
        float32_rewards = {float(np.float32(reward)) for reward in self.rewards}
        return len(float32_rewards) < len(set(self.rewards))

    @property
    def questions(self) -> list[str]:
        """A prompt of text, or the text of each user turn; empty for ids."""
        match self.prompt:
            case str():
                return [self.prompt]
            case list():
                messages: Any = itertools.chain(self.prompt, *self.responses)
                user_turns = [turn for turn in messages if turn["role"] == "user"]
                return [turn["content"] or "" for turn in user_turns]
            case _:
                return []

    @property
    def asks_nothing(self) -> bool:
        """True if every question is empty or dashes.

        Some datasets withhold questions that they took from another dataset.
        """
        questions = self.questions
        has_words = any(text.strip().strip("-") for text in questions)
        return len(questions) > 0 and not has_words


def parse(
    reading: Reading,
    config: TokenizeConfig,
    as_chat: bool,
    roles: Mapping[str, str] | None = None,
    columns: Collection[str] = (),
) -> Parsed:
    """Return a reading as text, messages or ids, checked.

    Args:
        as_chat: whether text becomes user and assistant turns: ``config.as_chat``, or
            if it is None, as the form of the record has it.
        roles: further names of roles -> the role that each means.
        columns: names under which the record was read, for error messages.

    Raises:
        Refused: a value is of the wrong type, sides share no prompt, or messages have
            unknown keys.
    """
    rewards = _rewards_of(reading)
    if _holds_token_ids(reading):
        if config.as_chat:
            raise Refused(
                "wrong_type", "as_chat needs text or messages, found token ids"
            )
        return _with_rewards(_parse_ids(reading, columns), rewards)

    prompt, responses = _contents(reading)
    if _are_texts(prompt, responses):
        prompt, responses = _prompt_and_answers(prompt, responses)
        if not as_chat:
            _refuse_beside_text(reading, columns)
            return _with_rewards(Parsed(prompt, responses, rewards=()), rewards)
        prompt, responses = text_as_messages(prompt, responses)
    parsed = _parse_chat(reading, prompt, responses, config, roles or {})
    return _with_rewards(parsed, rewards)


def _contents(reading: Reading) -> tuple[Any, list[Any]]:
    """Return the prompt, or None, and the list of responses."""
    match reading:
        case Pair():
            return reading.prompt, [reading.chosen, reading.rejected]
        case Answers():
            if not _is_filled(reading.responses, list):
                raise wrong_type(
                    "responses must be a list with an answer", reading.responses
                )
            return reading.prompt, reading.responses
        case Chat(messages=None):
            return reading.prompt, [reading.response]
        case Chat():
            messages = parsed_json(reading.messages)
            if not _is_filled(messages, list | dict):
                raise wrong_type(
                    "messages must be a list of messages", reading.messages
                )
            return reading.prompt, [messages]


def _is_filled(value: Any, kind: type | UnionType) -> bool:
    """Return True if a value is of a type, and not empty."""
    return isinstance(value, kind) and bool(value)


def _are_texts(prompt: Any, responses: list[Any]) -> bool:
    if prompt is not None and not isinstance(prompt, str):
        return False
    return all(isinstance(response, str) for response in responses)


class _Rewards(NamedTuple):
    """The rewards of the responses.

    Attributes:
        values: one for each response.
        are_explicit: True for a pair with rewards or a margin; both are optional.
        events: names of events to count.
    """

    values: Sequence[float]
    are_explicit: bool = False
    events: tuple[str, ...] = ()


def _with_rewards(parsed: Parsed, rewards: _Rewards) -> Parsed:
    return parsed._replace(
        rewards=rewards.values,
        has_rewards=rewards.are_explicit,
        events=(*rewards.events, *parsed.events),
    )


def _rewards_of(reading: Reading) -> _Rewards:
    """Return the rewards of the responses.

    Raises:
        Refused: one is not a finite number, or a margin is not the difference of the
            rewards.
    """
    match reading:
        case Pair():
            return _rewards_of_pair(reading)
        case Answers():
            return _Rewards(_scores_of(reading))
        case Chat():
            return _Rewards((1.0,))


def _scores_of(answers: Answers) -> list[float]:
    scores = answers.scores
    is_list = isinstance(scores, list | tuple | np.ndarray)
    if not is_list or not isinstance(answers.responses, list):
        raise wrong_type(
            "scores must be a list of numbers, one for each response", scores
        )
    if len(scores) != len(answers.responses):
        raise wrong_type(f"scores must be a list of {len(answers.responses)}", scores)
    return [_number(score, "a score") for score in scores]


def _rewards_of_pair(pair: Pair) -> _Rewards:
    """Return the rewards of both sides.

    A margin without rewards is the reward of the chosen side, and the other is 0.0.
    Without either, they are :data:`DEFAULT_REWARDS`.
    """
    num_rewards = (pair.chosen_reward is not None) + (pair.rejected_reward is not None)
    if num_rewards == 1:
        detail = "a reward on one side alone, and nothing for the other"
        raise Refused("one_reward", detail)
    if num_rewards == 0 and pair.margin is None:
        return _Rewards(DEFAULT_REWARDS)
    if num_rewards == 0:
        chosen = _number(pair.margin, "margin")
        rejected = 0.0
    else:
        chosen = _number(pair.chosen_reward, "chosen_reward")
        rejected = _number(pair.rejected_reward, "rejected_reward")
        if pair.margin is not None:
            _check_margin(pair, chosen - rejected)
    events = ("reward_reversed",) if chosen < rejected else ()
    return _Rewards((chosen, rejected), are_explicit=True, events=events)


def _check_margin(pair: Pair, difference: float) -> None:
    """Raise for a margin that is not the difference of the rewards."""
    margin = _number(pair.margin, "margin")
    if math.isclose(difference, margin, rel_tol=MARGIN_TOLERANCE):
        return
    rewards = f"{quote(pair.chosen_reward)} and {quote(pair.rejected_reward)}"
    detail = f"margin {quote(pair.margin)} beside rewards {rewards}"
    remedy = "Leave out the margin or the rewards ({})"
    raise Refused("unread_field", detail, remedy, {"ignore": ["margin"]})


def _number(value: Any, name: str) -> float:
    """Return a number that is finite as float32.

    An integer is returned as an integer: a float may not hold all of its digits.
    """
    number = number_of(value)
    if number is None or not abs(number) <= LARGEST_REWARD:
        raise wrong_type(f"{name} must be a finite number, as a float32", value)
    return number


def _refuse_beside_text(reading: Reading, columns: Collection[str]) -> None:
    """Raise for system text, tools or template variables of a record that no template
    renders.

    Args:
        columns: names under which the record was read, for the remedy.
    """
    for field in ("system", "tools", "chat_template_kwargs"):
        value = getattr(reading, field)
        if value is None or value in ("", [], {}):
            continue
        column = next((name for name in SPELLINGS[field] if name in columns), field)
        detail = f"{field} {quote(value)} beside plain text"
        remedy = "Make chats of text ({}), or ignore it ({})"
        raise Refused(
            "unread_field", detail, remedy, {"as_chat": True}, {"ignore": [column]}
        )


def _prompt_and_answers(
    prompt: str | None, responses: list[str]
) -> tuple[str, list[str]]:
    """Return the prompt and the answers of plain text.

    Responses that are whole dialogues of the HH form are split.

    Raises:
        Refused: there is no prompt (``missing_field``), or a dialogue does not begin
            with it.
    """
    dialogues = [response for response in responses if _is_dialogue(prompt, response)]
    if len(responses) > 1 and len(dialogues) == len(responses):
        return _split_dialogues(prompt, dialogues)
    if prompt is None:
        remedy = "Name it ({})"
        raise Refused("missing_field", "answers without a prompt", remedy, NAME_PROMPT)
    if any(_begins_again(prompt, dialogue) for dialogue in dialogues):
        raise _no_common_prompt()
    return prompt, responses


def _is_dialogue(prompt: str | None, response: str) -> bool:
    """Return True for a response that is a whole dialogue of the HH form."""
    headers = turn_headers(response)
    if headers is SINGLE_BREAK_HEADERS and prompt is not None:
        # Plain text has single line breaks, too: an answer without the question only
        # quotes some dialogue.
        return prompt.strip() in response
    return headers is not None


def _split_dialogues(prompt: str | None, dialogues: list[str]) -> tuple[str, list[str]]:
    """Return the common prompt of whole dialogues, and the answer of each.

    The common prompt may be longer than the prompt of the record, which may be the
    first question alone. A longer prompt of the record counts if all begin with it.
    """
    common_prompt, answers = split_texts(dialogues)
    if prompt is None or common_prompt.startswith(prompt):
        return common_prompt, answers
    if not all(dialogue.startswith(prompt) for dialogue in dialogues):
        raise _no_common_prompt()
    return prompt, [dialogue[len(prompt) :] for dialogue in dialogues]


def _begins_again(prompt: str, dialogue: str) -> bool:
    """Return True if a dialogue begins with the first question, as the prompt does.

    Else it goes on after the prompt: the answer is empty, and further turns follow.
    """
    headers = turn_headers(dialogue)
    if headers is None:
        return False
    first_turn = prompt.lstrip().partition(headers.assistant)[0]
    if not HH_BEGINNING.match(first_turn):
        return True  # the prompt is no dialogue of this form that could go on
    return dialogue.lstrip().startswith(first_turn)


def _parse_chat(
    reading: Reading,
    prompt: Any,
    responses: list[Any],
    config: TokenizeConfig,
    roles: Mapping[str, str],
) -> Parsed:
    """Return a reading of messages, without its rewards.

    Args:
        prompt: text or messages, or None.
        responses: text or messages; of a dialogue to learn, all of its messages.
    """
    unknown_keys: set[str] = set()  # `_turns` adds to it
    sides = [
        _turns(response, "assistant", unknown_keys, roles) for response in responses
    ]
    events: tuple[str, ...] = ()
    if isinstance(reading, Chat) and reading.messages is not None:
        # A dialogue to learn: every answer is learned, so that no prompt is split off.
        prompt_turns: list[Message] = []
        sides = [_with_system(reading.system, sides[0])]
        if prompt:
            _check_prompt(_turns(prompt, "user", unknown_keys, roles), sides[0])
    elif isinstance(reading, Answers) and prompt is None and len(sides) == 1:
        # A scored dialogue: the score is of its last answer.
        dialogue = _with_system(reading.system, sides[0])
        prompt_turns, answer, events = _split_last_answer(dialogue)
        sides = [answer]
    else:
        question = [] if prompt is None else _turns(prompt, "user", unknown_keys, roles)
        if _are_dialogues(sides):
            prompt_turns, sides = split_messages(sides)
            if prompt:
                _check_prompt(question, prompt_turns)
        else:
            _check_answers(question, responses)
            prompt_turns = question
        prompt_turns = _with_system(reading.system, prompt_turns)
    return Parsed(
        prompt_turns,
        sides,
        rewards=(),
        tools=normalize_tools(reading.tools),
        variables=normalize_variables(reading.chat_template_kwargs),
        events=(*events, *_unknown_keys(unknown_keys, config)),
    )


def _unknown_keys(unknown: set[str], config: TokenizeConfig) -> tuple[str, ...]:
    """Return the event to note for keys of messages that are not read.

    Raises:
        Refused: the job does not keep records with such keys (``unknown_key``).
    """
    if not unknown:
        return ()
    if config.on["unknown_key"] == "keep":
        return ("unknown_key",)
    keys = ", ".join(sorted(unknown))
    remedy = "Remove it, or ignore it ({})"
    setting = {"on": {"unknown_key": "keep"}}
    raise Refused("unknown_key", f"messages with {quote(keys)}", remedy, setting)


def _split_last_answer(
    dialogue: list[Message],
) -> tuple[list[Message], list[Message], tuple[str, ...]]:
    """Return the turns of a scored dialogue up to its last question, the turns of the
    answer, and events.
    """
    roles = [message["role"] for message in dialogue]
    if "assistant" not in roles:
        raise Refused(
            "wrong_type", "messages must hold an answer, found questions alone"
        )
    events: tuple[str, ...] = ()
    while roles[-1] == "user":
        roles.pop()
        events = ("question_without_answer",)
    start = len(roles)
    while start > 0 and roles[start - 1] != "user":
        start -= 1
    return dialogue[:start], dialogue[start : len(roles)], events


def _turns(
    value: Any, role: str, unknown: set[str], roles: Mapping[str, str]
) -> list[Message]:
    """Return text as a turn of a role, and messages in the form that templates
    expect.

    Args:
        unknown: gets the keys that are not read.
    """
    if isinstance(value, str):
        value = [{"role": role, "content": value}]
    elif not _is_filled(value, list | dict):
        raise wrong_type("a prompt or an answer must be text or messages", value)
    return normalize_messages(value, unknown, roles)


def _are_dialogues(sides: list[list[Message]]) -> bool:
    """Return True if a side begins with a system or user turn, as a whole dialogue
    does.
    """
    return any(side and side[0]["role"] in (*SYSTEM, "user") for side in sides)


def _check_answers(prompt: list[Message], responses: list[Any]) -> None:
    """Raise for answers without a prompt, and for texts that repeat it as a
    dialogue.
    """
    if not prompt:
        remedy = "Name the turns before the answers ({})"
        raise Refused("missing_field", "answers without a prompt", remedy, NAME_PROMPT)
    question = (prompt[-1]["content"] or "").strip()
    for response in responses:
        # An answer without the question only quotes some dialogue.
        if is_hh(response) and question in response:
            raise _no_common_prompt()


def _check_prompt(prompt: list[Message], messages: list[Message]) -> None:
    """Raise for a prompt that is neither the beginning of messages nor their last
    question.

    A system turn may stand before the beginning.
    """
    has_own_system = messages[0]["role"] in SYSTEM and prompt[:1] != messages[:1]
    start = 1 if has_own_system else 0
    beginning = messages[start : start + len(prompt)]
    expected = [_trimmed(message) for message in prompt]
    for part in (beginning, messages[-1:]):
        if [_trimmed(message) for message in part] == expected:
            return
    raise _no_common_prompt()


def _trimmed(message: Message) -> Message:
    return {**message, "content": (message["content"] or "").strip()}


def _no_common_prompt() -> Refused:
    remedy = "Leave the prompt out, or the turns before the answers"
    return Refused(
        "no_common_prompt", "the text after the prompt does not begin with it", remedy
    )


def _with_system(system: Any, messages: list[Message]) -> list[Message]:
    """Put a system turn before messages, unless they begin with the same one.

    Raises:
        Refused: they begin with another system turn (``unread_field``).
    """
    if system is None:
        return messages
    if not isinstance(system, str):
        raise wrong_type("system must be text", system)
    if not system:
        return messages
    if messages and messages[0]["role"] in SYSTEM:
        if messages[0]["content"] == system:
            return messages
        detail = f"system {quote(system)} beside messages with another system turn"
        remedy = "Leave out one of them ({})"
        raise Refused("unread_field", detail, remedy, {"ignore": ["system"]})
    return [{"role": "system", "content": system}, *messages]


def _holds_token_ids(reading: Reading) -> bool:
    match reading:
        case Pair():
            return holds_ids(reading.chosen) or holds_ids(reading.rejected)
        case Answers():
            responses = reading.responses
            return _is_filled(responses, list) and holds_ids(responses[0])
        case Chat():
            return reading.input_ids is not None or holds_ids(reading.response)


def _parse_ids(reading: Reading, columns: Collection[str]) -> Parsed:
    """Return a reading of token ids, with the mask of each response."""
    _refuse_beside_text(reading, columns)
    if isinstance(reading, Chat) and reading.input_ids is not None:
        ids = as_ids(reading.input_ids, "input_ids")
        if reading.labels is not None:
            mask = supervised_ids(ids, reading.labels, "input_ids")
        else:
            mask = masked_ids(ids, reading.mask)
        return Parsed(ids[:0], [ids], rewards=(), supervised=[mask])

    prompt, responses = _contents(reading)
    names, labels = _labels_of(reading, responses)
    if prompt is None and any(label is None for label in labels):
        detail = "token ids without a prompt need labels of each response"
        remedy = "Name the column of the prompt ({})"
        raise Refused("missing_field", detail, remedy, NAME_PROMPT)

    sequences = []
    masks = []
    for response, name, label in zip(responses, names, labels, strict=True):
        ids = as_ids(response, name)
        sequences.append(ids)
        masks.append(supervised_ids(ids, label, name))
    prompt_ids = as_ids([] if prompt is None else prompt, "prompt")
    return Parsed(prompt_ids, sequences, rewards=(), supervised=masks)


def _labels_of(reading: Reading, responses: list[Any]) -> tuple[list[str], list[Any]]:
    """Return the names of responses that are ids, for error messages, and the labels
    of each, or None.
    """
    if isinstance(reading, Pair):
        labels = [reading.chosen_labels, reading.rejected_labels]
        return ["chosen", "rejected"], labels

    names = [f"response {i + 1}" for i in range(len(responses))]
    if isinstance(reading, Chat) or reading.response_labels is None:
        return names, [None] * len(responses)
    is_list = isinstance(reading.response_labels, list | np.ndarray)
    if not is_list or len(reading.response_labels) != len(responses):
        rule = f"response_labels must be a list of {len(responses)}"
        raise wrong_type(rule, reading.response_labels)
    return names, list(reading.response_labels)


def check_responses(parsed: Parsed, config: TokenizeConfig) -> Parsed:
    """Return a record without thinking, if so configured.

    Raises:
        Refused: a response is empty (``empty_side``).
    """
    if config.thinking == "strip":
        parsed = _without_thinking(parsed)
    if config.on["empty_side"] == "keep":
        return parsed
    for number, response in enumerate(parsed.responses, start=1):
        if _is_empty(response):
            detail = f"response {number} of {len(parsed.responses)} empty"
            raise Refused("empty_side", detail)
    return parsed


def _without_thinking(parsed: Parsed) -> Parsed:
    prompt: Any = parsed.prompt
    if parsed.is_chat:
        prompt = without_thinking(prompt)
    responses: Any = [without_thinking(response) for response in parsed.responses]
    return parsed._replace(prompt=prompt, responses=responses)


def _is_empty(response: Any) -> bool:
    match response:
        case str():
            return not response or response.isspace()
        case np.ndarray():
            return len(response) == 0
        case _:
            answers = [turn for turn in response if turn["role"] == "assistant"]
            has_words = any(has_content(answer) for answer in answers)
            return len(answers) > 0 and not has_words


def check_placeholders(questions: Iterable[str]) -> None:
    """Raise if a tag in a question stands for an image, a video or a sound.

    LLaMA-Factory, ms-swift and LLaVA write such tags at the beginning of a question,
    and LLaVA ``<image>`` on its last line, too. A tag that is closed, or a word in a
    sentence, is text.

    Raises:
        Refused: the place of a missing image (``unread_field``).
    """
    for text in questions:
        name = _placeholder_in(text)
        if name:
            remedy = "packstore packs text alone: leave such records out, or their tags"
            raise Refused(
                "unread_field",
                f"the place of a missing {name} in {quote(text)}",
                remedy,
            )


def _placeholder_in(text: str) -> str:
    """Return the kind of media that a tag in a question stands for, or ""."""
    match = _PLACEHOLDER.match(text)
    if match:
        name = match[1]
    elif text.endswith("\n<image>"):
        name = "image"
    else:
        return ""
    return "" if f"</{name}>" in text else name


def prompt_key(parsed: Parsed) -> int:
    """Return a 64-bit hash of the prompt.

    The prompt of text or messages is hashed before it is encoded: the ids at its end
    may depend on the text after it. The prompt of a dialogue without a separate one
    ends before its first answer. Without any prompt, the whole record is hashed.
    """
    prompt: Any = parsed.prompt
    if parsed.is_chat and len(prompt) == 0:
        prompt = _turns_before_answer(parsed.responses[0])
    if len(prompt) > 0:
        return _hash([prompt, parsed.tools])

    record = [parsed.prompt, *parsed.responses, parsed.tools]
    if parsed.variables:
        record.append(parsed.variables)
    return _hash(record)


def _turns_before_answer(dialogue: Any) -> list[Message]:
    """Return the turns before the first answer; none if there is no answer."""
    for i, message in enumerate(dialogue):
        if message["role"] == "assistant":
            return list(dialogue[:i])
    return []


def _hash(parts: list[Any]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        kind, data = _to_bytes(part)
        digest.update(b"%b%d:" % (kind, len(data)))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")


def _to_bytes(part: Any) -> tuple[bytes, bytes]:
    """Return a letter for the type of a part of a record, and its bytes."""
    match part:
        case np.ndarray():
            return b"i", part.tobytes()
        case str():
            return b"t", part.encode(errors="surrogatepass")
        case _:
            text = as_json(part, sort_keys=True)
            return b"m", text.encode(errors="surrogatepass")
