"""Reasons for refusing a record, and the answers that a job may give to each: the
setting `on`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from packstore.config.settings import check_names
from packstore.registry import choice


class Reason(NamedTuple):
    """A rule of records, and what a job may do with one that breaks it, the default
    first: ``drop`` and count it, ``keep`` it, or stop with an ``error``.
    """

    rule: str
    answers: tuple[str, ...] = ("drop", "error")


_KEPT_BY_WISH = ("drop", "keep", "error")

REASONS: Mapping[str, Reason] = {
    "not_json": Reason("a line must be valid JSON, in UTF-8", ("error", "drop")),
    "not_an_object": Reason("a record must be an object with named fields"),
    "missing_field": Reason(
        "a record must have the fields of its kind", ("error", "drop")
    ),
    "one_reward": Reason(
        "rewards must stand on both sides, or on none", ("error", "drop")
    ),
    "unpaired_feedback": Reason(
        "a column beside a single answer must not judge it", ("error", "drop")
    ),
    "tie": Reason("one of two answers must be better", ("drop", "error")),
    "different_contexts": Reason(
        "answers that are compared must follow the same rounds"
    ),
    "unread_field": Reason(
        "a column that changes the meaning of a record must be read, or ignored by "
        "name",
        ("error", "drop"),
    ),
    "wrong_type": Reason("every field must be of its type"),
    "unknown_key": Reason("a message must have known keys", ("error", "drop", "keep")),
    "bad_role": Reason("the roles of messages must be known and in a sensible order"),
    "invalid_unicode": Reason("text must be valid Unicode", _KEPT_BY_WISH),
    "empty_side": Reason("every response must have text", _KEPT_BY_WISH),
    "empty_turn": Reason(
        "every turn that is supervised must have words or calls", _KEPT_BY_WISH
    ),
    "identical_sides": Reason("the token ids of responses must differ", _KEPT_BY_WISH),
    "no_common_prompt": Reason("whole dialogues must share a beginning"),
    "template_refused": Reason("the chat template must render the messages"),
    "unrendered": Reason(
        "the chat template must show every turn, call and tool", _KEPT_BY_WISH
    ),
    "special_tokens": Reason(
        "text must not hold strings of control tokens",
        ("keep", "control", "drop", "error"),
    ),
    "boundary": Reason(
        "no token may join prompt and response", ("keep", "drop", "error")
    ),
    "unsupervised": Reason("every sequence must have a supervised token"),
    "overlong": Reason(
        "an example must fit max_length and pack_size",
        ("drop", "error", "truncate_prompt", "truncate_response"),
    ),
}
"""Reason, as the manifest counts it -> its rule and answers.

``keep`` ignores unknown keys of messages, replaces invalid Unicode by U+FFFD, takes
control strings as plain text (``control``: as control ids) and a token that joins
prompt and response as part of the response.
"""


def answers_of(given: Mapping[str, str]) -> dict[str, str]:
    """Returns the answer to every reason: the one given, else the default."""
    choices = {name: reason.answers for name, reason in REASONS.items()}
    check_names(given, choices, "docs/tokenizing.md", "reason")
    for name, answer in given.items():
        choice(f"setting on, {name},", answer, choices[name])
    return {name: given.get(name, answers[0]) for name, answers in choices.items()}
