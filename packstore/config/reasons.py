"""Reasons to refuse a record, and the answers to each: the setting `on`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from packstore.config.settings import check_names
from packstore.registry import choice


class Reason(NamedTuple):
    """A rule for records, and the possible answers to a record that breaks it.

    Attributes:
        rule: the rule, in words.
        answers: the possible answers, the default first. ``drop`` counts the record and
            leaves it out, ``keep`` packs it, ``error`` stops the job.
    """

    rule: str
    answers: tuple[str, ...] = ("drop", "error")


_DROP_KEEP_ERROR = ("drop", "keep", "error")

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
    "invalid_unicode": Reason("text must be valid Unicode", _DROP_KEEP_ERROR),
    "empty_side": Reason("every response must have text", _DROP_KEEP_ERROR),
    "empty_turn": Reason(
        "every turn that is supervised must have words or calls", _DROP_KEEP_ERROR
    ),
    "identical_sides": Reason(
        "the token ids of responses must differ", _DROP_KEEP_ERROR
    ),
    "no_common_prompt": Reason("whole dialogues must share a beginning"),
    "template_refused": Reason("the chat template must render the messages"),
    "unrendered": Reason(
        "the chat template must show every turn, call and tool", _DROP_KEEP_ERROR
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
        "an example must fit max_length, pack_size and max_keys",
        ("drop", "error", "truncate_prompt", "truncate_response"),
    ),
}
"""Reason, as the manifest counts it -> its rule and answers.

To pack the record, ``keep`` does this:

- ``unknown_key``: ignore the unknown keys of messages.
- ``invalid_unicode``: replace invalid characters by U+FFFD.
- ``special_tokens``: tokenize control strings as plain text; ``control`` makes control
  ids of them.
- ``boundary``: count a token that joins prompt and response as part of the response.
- others: nothing.
"""


def answers_of(answers: Mapping[str, str]) -> dict[str, str]:
    """Return the answer to every reason: the one in `answers`, else the default.

    Raises:
        UnknownNameError: `answers` names an unknown reason.
        ConfigError: a reason does not have this answer.
    """
    check_names(answers, REASONS, listed_by="docs/tokenizing.md", noun="reason")
    for name, answer in answers.items():
        choice(f"setting on, {name},", answer, REASONS[name].answers)
    defaults = {name: reason.answers[0] for name, reason in REASONS.items()}
    return {**defaults, **answers}
