"""Packstore's own fields of records: their roles, and the column names of each."""

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

Two answers and a verdict on them have no name of their own: `fields` must name them.
"""

VERDICT_ROLES = ("first", "second", "verdict")
"""Roles that become `chosen` and `rejected`."""

ID_ROLES = ("prompt", "chosen", "rejected", "response")
"""Roles with columns of token ids, which end as in :data:`ID_ENDINGS`."""

ID_ENDINGS = ("_ids", "_input_ids")

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
"""Columns where NaN is a wrong number, not an absent value."""


def id_spellings(role: str) -> tuple[str, ...]:
    """Return the names of a role's column of token ids, in order of precedence."""
    return tuple(name + ending for name in SPELLINGS[role] for ending in ID_ENDINGS)
