"""The fields of records in packstore's own form: their roles and column names.

A role is the meaning of a field, such as `prompt` or `chosen`. Each role has the column
names that are known for it, its spellings; the setting `fields` maps any other column
to a role.
"""

from __future__ import annotations

from collections.abc import Mapping

SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt",),
    "chosen": ("chosen", "chosen_response"),
    "rejected": ("rejected", "rejected_response"),
    "messages": ("messages", "conversations"),
    "rejected_messages": ("rejected_messages", "rejected_response"),
    "response": ("response", "completion"),
    "responses": ("responses",),
    "score": (
        "label",
        "kto_tag",
        "is_chosen",
        "desirable",
        "is_desirable",
        "score",
        "reward",
    ),
    "scores": ("scores",),
    "chosen_reward": (
        "chosen_reward",
        "reward_chosen",
        "chosen_score",
        "score_chosen",
        "chosen_rating",
        "rating_chosen",
        "chosen-rating",
    ),
    "rejected_reward": (
        "rejected_reward",
        "reward_rejected",
        "rejected_score",
        "score_rejected",
        "rejected_rating",
        "rating_rejected",
        "rejected-rating",
    ),
    "margin": ("margin",),
    "system": ("system", "system_prompt"),
    "tools": ("tools",),
    "chat_template_kwargs": ("chat_template_kwargs",),
    "input_ids": ("input_ids",),
    "labels": ("labels",),
    "mask": ("mask", "loss_mask", "completion_mask", "assistant_masks"),
    "chosen_labels": ("chosen_labels",),
    "rejected_labels": ("rejected_labels",),
    "response_labels": ("response_labels",),
    "first": (),
    "second": (),
    "verdict": (),
}
"""Role -> its column names, in order of precedence; `fields` adds another name.

The roles `first`, `second` and `verdict`, two answers and which of them is better, have
no known names: `fields` must name their columns.
"""

VERDICT_ROLES = ("first", "second", "verdict")
"""Roles of two answers and a verdict, which become `chosen` and `rejected`."""

ID_ROLES = ("prompt", "chosen", "rejected", "response")
"""Roles that may be token ids, in a column such as `prompt_ids`."""

ID_ENDINGS = ("_ids", "_input_ids")
"""Endings of the names of such columns."""

JSON_COLUMNS = (
    "messages",
    "tools",
    "responses",
    "scores",
    "chosen_reward",
    "rejected_reward",
    "margin",
    "score",
    "input_ids",
    "labels",
    "mask",
    "chosen_labels",
    "rejected_labels",
    "response_labels",
)
"""Roles that never hold text: their cells in a CSV file are parsed as JSON."""

JUDGING_NUMBERS = frozenset(
    name
    for role in ("score", "scores", "chosen_reward", "rejected_reward", "margin")
    for name in SPELLINGS[role]
)
"""Columns of scores and rewards: NaN there is a wrong number, not an absent value."""


def id_spellings(role: str) -> tuple[str, ...]:
    """Return the names of a role's column of token ids, in order of precedence."""
    return tuple(name + ending for name in SPELLINGS[role] for ending in ID_ENDINGS)
