"""Names of the fields of a record: the canonical ones, and their synonyms."""

from __future__ import annotations

FIELD_NAMES = (
    *("prompt", "chosen", "rejected", "chosen_reward", "rejected_reward", "messages", "response"),
    *("responses", "scores", "chosen_labels", "rejected_labels", "response_labels", "tools"),
    *("chat_template_kwargs", "system", "input_ids", "labels", "mask"),
)
"""Canonical field names of a record; the setting ``fields`` maps them to names in the input."""

NOT_TEXT = (
    *("chosen_reward", "rejected_reward", "messages", "responses", "scores", "tools"),
    *("input_ids", "labels", "mask"),
)
"""Fields whose values are not text: their CSV cells are parsed as JSON."""

_REWARD = ("{}_reward", "reward_{}", "{}_score", "score_{}", "{}_rating", "rating_{}", "{}-rating")

SPELLINGS: dict[str, tuple[str, ...]] = {
    "chosen": ("chosen", "chosen_response"),
    "rejected": ("rejected", "rejected_response"),
    "messages": ("messages", "conversations"),
    "response": ("response", "completion"),
    "mask": ("loss_mask", "completion_mask", "assistant_masks"),
    "chosen_reward": tuple(name.format("chosen") for name in _REWARD),
    "rejected_reward": tuple(name.format("rejected") for name in _REWARD),
}
"""Canonical name -> accepted names, in order of precedence, unless `fields` maps the name."""

ID_SPELLINGS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt_ids", "prompt_input_ids", "prompt"),
    "chosen": ("chosen_ids", "chosen_input_ids", "chosen"),
    "rejected": ("rejected_ids", "rejected_input_ids", "rejected"),
    "response": ("response_ids", "completion_ids", "response", "completion"),
    "mask": SPELLINGS["mask"],
}
"""The same of records that are token ids: a record may hold its texts as well."""

REWARD_FIELDS = frozenset(SPELLINGS["chosen_reward"] + SPELLINGS["rejected_reward"])
"""Names of the fields that may hold the reward of a side."""

LIKELY: dict[str, tuple[str, ...]] = {
    "prompt": ("instruction", "question", "query", "problem", "input", "context", "user"),
    "chosen": ("better", "preferred", "accepted", "positive", "winner", "chosen_answer"),
    "rejected": ("worse", "dispreferred", "negative", "loser", "rejected_answer"),
    "messages": ("conversation", "dialogue", "dialog", "chat", "turns"),
    "response": ("output", "answer", "target", "solution"),
    "responses": ("answers", "completions", "candidates"),
    "scores": ("rewards", "ratings", "ranks"),
}
"""Canonical name -> names that an error suggests to map to it; they are not used by themselves."""

FEEDBACK = ("label", "kto_tag")
"""Names of a field that labels a single answer as good or bad."""

MEANINGFUL = REWARD_FIELDS.union(
    ("system", "system_prompt", "system_message", "tools", "functions"),
    ("image", "images", "video", "videos", "audio", "audios"),
    ("weight", "weights", "sample_weight", "margin"),
    ("history", "input", "context"),
)
"""Names of fields that change a record's content or weight: ignoring them is reported."""
