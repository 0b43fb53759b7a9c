"""The closed table of the shapes of records: fields, the forms of their values, and their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Shape:
    """A shape of records."""

    kind: str  # `scored`, `preference` or `sft`
    needs: Mapping[str, str]  # canonical field -> form of its value, a key of the forms below
    takes: Mapping[str, str]  # of fields that a record may have; further ones are named as not used
    becomes: str
    without: tuple[str, ...] = ()  # fields that it must not have, as they would be lost

    @cached_property
    def holds_ids(self) -> bool:
        """True if records are token ids."""
        return "token ids" in self.needs.values()

    @property
    def tells(self) -> tuple[str, ...]:
        """The fields of which one tells the kind."""
        if "rejected_messages" in self.needs:
            return ("rejected_messages",)
        answers = ("messages", "response", "responses", "chosen", "rejected", "input_ids")
        return tuple(name for name in self.needs if name in answers)

    def __str__(self) -> str:
        return ", ".join(f"{name} {form}" for name, form in self.needs.items())


_CHAT = {"system": "text", "tools": "tools", "chat_template_kwargs": "variables"}
_REWARDS = {"chosen_reward": "number", "rejected_reward": "number", "margin": "number"}
_LABELS = {"chosen_labels": "labels", "rejected_labels": "labels"}


def _pair(form: str, **others: str) -> dict[str, str]:
    return {**others, "chosen": form, "rejected": form}


def _scored(prompt: str, responses: str) -> dict[str, str]:
    return {"prompt": prompt, "responses": responses, "scores": "numbers"}


def _judged(form: str) -> dict[str, str]:
    return {"prompt": form, "response": form, "score": "score"}


SHAPES = (
    Shape("scored", _scored("text", "texts"), {}, "prompt + response"),
    Shape("scored", _scored("turns", "dialogues"), _CHAT, "the template of prompt + response"),
    Shape(
        "scored",
        _scored("token ids", "lists of ids"),
        {"response_labels": "lists of labels"},
        "the ids as they are",
    ),
    Shape(
        "preference",
        _pair("HH text"),
        {"prompt": "text", **_REWARDS},
        "split where the sides differ; a prompt must be their beginning",
    ),
    Shape("preference", _pair("text", prompt="text"), _REWARDS, "prompt + side"),
    Shape(
        "preference",
        _pair("turns", prompt="turns"),
        {**_REWARDS, **_CHAT},
        "the template of prompt + side; of the sides, if these begin with the prompt",
    ),
    Shape(
        "preference",
        _pair("messages"),
        {**_REWARDS, **_CHAT},
        "the template of the sides, split where they differ",
        without=("prompt",),
    ),
    Shape(
        "preference",
        {"messages": "messages", "rejected_messages": "turns"},
        {**_REWARDS, **_CHAT},
        "the template of the messages, which are chosen, and of the rejected ones, or of the text "
        "in place of the last answer; split where they differ",
        without=("prompt", "chosen"),
    ),
    Shape(
        "preference",
        _pair("token ids", prompt="token ids"),
        {**_LABELS, **_REWARDS},
        "the ids as they are",
    ),
    Shape(
        "preference",
        {**_pair("token ids"), **_LABELS},
        _REWARDS,
        "the ids as they are, split by their labels",
        without=("prompt",),
    ),
    Shape("scored", _judged("text"), {}, "prompt + response"),
    Shape("scored", _judged("turns"), _CHAT, "the template of prompt + response"),
    Shape("scored", _judged("token ids"), {}, "the ids as they are"),
    Shape(
        "scored",
        {"messages": "messages", "score": "score"},
        _CHAT,
        "the template of the messages; what follows the last question is the answer",
        without=("prompt", "response"),
    ),
    Shape(
        "sft", {"input_ids": "token ids", "labels": "labels"}, {}, "the ids; -100: not supervised"
    ),
    Shape("sft", {"input_ids": "token ids", "mask": "labels"}, {}, "the ids; 0: not supervised"),
    Shape(
        "sft",
        {"messages": "messages"},
        {"prompt": "turns", **_CHAT},
        "the template of the messages; a prompt must be their beginning",
        without=("response",),
    ),
    Shape("sft", {"prompt": "text", "response": "text"}, {}, "prompt + response"),
    Shape(
        "sft",
        {"prompt": "turns", "response": "turns"},
        _CHAT,
        "the template of prompt + response",
    ),
    Shape("sft", {"prompt": "token ids", "response": "token ids"}, {}, "the ids as they are"),
)
"""Every shape that is read; a record is of the first that it matches whole."""

FORMS: Mapping[str, str] = {
    "text": "text",
    "HH text": "text of turns that begin with Human: and Assistant:",
    "messages": "a list of messages, or its JSON text",
    "chat": "a list of messages with roles",
    "question": "a list of messages that ends with a question",
    "answer": "text, or messages that begin with an answer",
    "turns": "text or messages",
    "texts": "a list of texts",
    "dialogues": "a list of texts or lists of messages",
    "token ids": "token ids",
    "lists of ids": "a list of lists of token ids",
    "number": "number",
    "score": "a number, or true or false, which are 1 and 0",
    "numbers": "a list of numbers, higher for better responses",
    "labels": "a list of numbers, one for each id",
    "lists of labels": "a list of lists of labels",
    "tools": "a list, or its JSON text",
    "variables": "an object, or its JSON text",
}
"""Form of values -> its description."""

FIELD_NAMES = tuple(
    dict.fromkeys(name for shape in SHAPES for name in (*shape.needs, *shape.takes))
)
"""Canonical field names of a record; the setting ``fields`` maps them to names in the input."""

NOT_TEXT = tuple(
    name
    for name in FIELD_NAMES
    if not any(
        {**shape.needs, **shape.takes}.get(name) in ("text", "HH text", "turns", "variables")
        for shape in SHAPES
    )
)
"""Fields whose values are never text: their CSV cells are parsed as JSON."""

LABELS = ("label", "kto_tag", "is_chosen", "desirable", "is_desirable")
"""Names of fields that say of a single answer whether it is good."""

_REWARD = ("{}_reward", "reward_{}", "{}_score", "score_{}", "{}_rating", "rating_{}", "{}-rating")

_SPELLINGS: Mapping[str, tuple[str, ...]] = {
    "chosen": ("chosen", "chosen_response"),
    "rejected": ("rejected", "rejected_response"),
    "messages": ("messages", "conversations"),
    "rejected_messages": ("rejected_messages", "rejected_response"),
    "response": ("response", "completion"),
    "score": (*LABELS, "score", "reward"),
    "mask": ("mask", "loss_mask", "completion_mask", "assistant_masks"),
    "chosen_reward": tuple(name.format("chosen") for name in _REWARD),
    "rejected_reward": tuple(name.format("rejected") for name in _REWARD),
}

SPELLINGS = {name: _SPELLINGS.get(name, (name,)) for name in FIELD_NAMES}
"""Canonical name -> accepted names, in order of precedence, unless `fields` maps the name."""

ID_SPELLINGS = {
    name: tuple(s + end for end in ("_ids", "_input_ids", "") for s in SPELLINGS[name])
    for name in ("prompt", "chosen", "rejected", "response")
}
"""The same of fields that hold token ids: a record may have its texts as well."""

REWARD_FIELDS = frozenset(SPELLINGS["chosen_reward"] + SPELLINGS["rejected_reward"])
"""Names of the fields that may hold the reward of a side."""

_JUDGES = (
    *LABELS,
    *("score", "scores", "reward", "rewards", "rating", "ratings", "rank", "ranks", "ranking"),
    *("feedback", "winner", "preference", "overall_preference", "preference_strength"),
    *("helpfulness", "correctness", "quality", "grade", "stars", "verdict", "judgment"),
    *("judgement", "thumbs", "vote", "votes", "upvotes", "downvotes", "likes", "accepted"),
    *("is_correct", "advantage", "advantages", "better_response_id", "safer_response_id"),
)
_WEIGHS = ("weight", "weights", "sample_weight", "example_weight", "loss_weight", "importance")
_SIDES = ("chosen", "rejected", "preferred", "dispreferred", "non_preferred")
_ANSWERS = ("", "_messages", "_response", "_responses", "_completion", "_answer", "_output")
_ADDS = (
    *(side + end for side in _SIDES for end in _ANSWERS),
    *("responses", "completions", "candidates", "generations"),
)
_TURNS = ("system", "system_prompt", "system_message", "history", "tools", "functions")
_MEDIA = ("image", "images", "video", "videos", "audio", "audios")

_MAP = "Map it if it is what the loss compares (--field score={0}, --field chosen_reward={0})"

FEEDBACK = frozenset((*_JUDGES, *_WEIGHS, *_ADDS, "margin"))
"""Names of fields that judge, weigh or add an answer: such an answer is no SFT."""

WEIGHTS = frozenset(_WEIGHS)
"""Names of fields that weigh an example; 1 changes nothing."""

ADDED_ANSWERS = frozenset(_ADDS)
"""Names of fields that hold an answer."""

UNREAD: Mapping[str, str] = {
    **dict.fromkeys(_JUDGES, _MAP),
    "margin": "Leave out it or the rewards, whose difference it must be",
    **dict.fromkeys(_WEIGHS, "Carry it (--carry {0}:float64), and name it as the weight_field"),
    **dict.fromkeys(_ADDS, "Make a list of all answers (responses), with their scores"),
    **dict.fromkeys(_TURNS, "Make chats of text (--as-chat), or turns of messages of it"),
    **dict.fromkeys(_MEDIA, "packstore packs text alone: leave such records out"),
}
"""Name of a field that changes a record's meaning -> what to do where nothing reads it."""

HARMLESS = frozenset(
    (
        *("id", "ids", "idx", "index", "uid", "uuid", "guid", "key", "hash", "sha256", "row_id"),
        *("record_id", "sample_id", "example_id", "prompt_id", "question_id", "query_id"),
        *("conversation_id", "dialogue_id", "dialog_id", "session_id", "message_id", "thread_id"),
        *("parent_id", "user_id", "response_id", "dataset_id", "conversation_hash", "url", "link"),
        *("source", "sources", "source_dataset", "data_source", "dataset", "dataset_name", "split"),
        *("subset", "origin", "path", "file", "file_name", "filename", "license", "title"),
        *("model", "models", "model_id", "model_name", "generator", "engine", "teacher_model"),
        *("generation_model", "generation_models", "chosen_model", "rejected_model", "provider"),
        *("version", "language", "lang", "locale", "country", "created", "created_at"),
        *("updated_at", "timestamp", "date", "time", "datetime", "author", "user", "annotator"),
        *("category", "categories", "domain", "topic", "topics", "subject", "task", "task_name"),
        *("task_type", "length", "num_tokens", "num_turns", "turns", "turn", "metadata", "meta"),
        *("extra_info", "info"),
    )
)
"""Names of fields that say nothing of an answer's worth: they may stay unread."""


def plain_name(name: str) -> str:
    """Returns a name as the tables of names have it: small letters, with underscores."""
    return name.lower().replace("-", "_").replace(" ", "_")
