"""Reasons for refusing a record, and the settings that decide what then happens."""

from __future__ import annotations

from packstore.config import TokenizeConfig
from packstore.errors import RecordError, sentence

REASONS: dict[str, tuple[str, str | None]] = {
    "not_an_object": ("a record must be an object with named fields", "wrong_type"),
    "missing_field": ("a record must have the fields of its kind", "missing_field"),
    "one_reward": ("rewards must stand on both sides, or on none", "missing_field"),
    "unpaired_feedback": ("an answer must be one to learn", "unpaired_feedback"),
    "wrong_type": ("every field must be of its type", "wrong_type"),
    "bad_role": ("the roles of messages must be known and in a sensible order", "wrong_type"),
    "invalid_unicode": ("text must be valid Unicode", "invalid_unicode"),
    "empty_response": ("every response must have text", "empty_side"),
    "empty_turn": ("every turn that is supervised must have words or calls", "empty_turn"),
    "identical_responses": ("the responses of a record must differ", "identical_sides"),
    "no_common_prompt": ("whole dialogues must share a beginning", None),
    "template_refused": ("the chat template must render the messages", None),
    "unrendered": ("the chat template must show every turn, call and tool", "unrendered"),
    "special_tokens": ("text must not hold strings of control tokens", "special_tokens"),
    "boundary_merged": ("no token may join prompt and response", "boundary"),
    "unsupervised": ("every sequence must have a supervised token", "unsupervised"),
    "overlong": ("an example must fit max_length and pack_size", "overlong"),
}
"""Drop reason -> the rule, and the setting that may make a breach an error (None: no setting)."""


class Refused(Exception):
    """One record cannot become an example, for a reason in :data:`REASONS`.

    Args:
        reason: a key of :data:`REASONS`.
        detail: description of the value found.
        do: the remedy, if there is a better one than to correct the record.
    """

    def __init__(self, reason: str, detail: str, do: str = "Correct it") -> None:
        super().__init__(reason, detail, do)
        self.reason = reason
        self.detail = detail
        self.do = do

    def as_error(self, where: str, alternative: str = "") -> RecordError:
        """Returns the error of the record at `where`; its remedy ends with `alternative`."""
        rule, _ = REASONS[self.reason]
        return RecordError(sentence(where, rule, self.detail, self.do + alternative))


def raise_if_error(refused: Refused, where: str, config: TokenizeConfig) -> None:
    """Raises unless the settings drop such records.

    Raises:
        RecordError: the policy of the reason is ``error``.
    """
    _, setting = REASONS[refused.reason]
    if setting is not None and getattr(config, setting) == "error":
        do = f", or set {setting} to drop to count and leave out such records"
        raise refused.as_error(where, do) from None
