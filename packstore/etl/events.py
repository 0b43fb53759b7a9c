"""Meanings of the events that are noted for packed records, and of the findings of
lint.
"""

from __future__ import annotations

from collections.abc import Mapping

from packstore.config import REASONS

PROBLEMS: Mapping[str, str] = {
    "double_bos": "a sequence begins with BOS twice",
    "no_bos": "the tokenizer begins texts with BOS, a sequence does not",
    "no_eos": "a response does not end with EOS, so the model is not taught to stop",
    "marker_no_token": (
        "a marker of the chat template is no token, but split into several: add it to "
        "the tokenizer as a special token, or take the model's own chat template"
    ),
    "foreign_template": (
        "text holds control strings of another model's chat template; they are "
        "learned as plain letters"
    ),
    "text_unrendered": (
        "the chat template leaves out words of a message, beside its reasoning"
    ),
    "reward_reversed": "the rejected side has the higher reward",
    "reward_rounded": "rewards that differ are one number as float32",
    "reward_default": "no rewards, while other records have some: 1 and 0 are taken",
    "mixed_forms": (
        "plain text, while other records are chats; as_chat (--as-chat) makes them "
        "chats"
    ),
    "raw_text": (
        "plain text, though there is a chat template; as_chat (--as-chat) renders it "
        "as a chat, as_chat=False (--no-as-chat) says that it is right"
    ),
}
"""Findings that harm training: `pack` and `append` log them as warnings, and lint
reports them as problems.
"""

REMARKS: Mapping[str, str] = {
    "unknown_tokens": "text that the vocabulary cannot spell",
    "generation_prompt_always": (
        "the chat template writes the generation prompt even where it is not asked "
        "for; behind the last turn it is stored, and not supervised"
    ),
    "rendered_text": (
        "text that begins with a control string of the chat template, or whose "
        "answers end with EOS: taken as rendered, with its control strings as control "
        "ids"
    ),
    "empty_thinking": (
        "a turn begins with the empty thinking block that the chat template writes; it "
        "is not supervised, and nothing is wrong"
    ),
    "boundary_merged": (
        "a token joins prompt and response; it counts as part of the response"
    ),
    "special_tokens_literal": (
        "text holds control strings, such as <|im_end|>; they are tokenized as plain "
        "text"
    ),
    "special_tokens_control": "control strings in text became control ids",
    "truncated_prompt": "the prompt is cut, as the example was too long",
    "truncated_response": "the response is cut, as the example was too long",
    "tags_once": (
        "a message stood in the tags that the chat template writes around its role, "
        "as in <tool_response>: they are written once"
    ),
    "arguments_quoted": (
        "arguments of tool calls that are JSON text, quoted by the chat template"
    ),
    "reasoning_unrendered": "the chat template leaves out the reasoning of a turn",
    "empty_prompt": (
        "the prompt, or every question, is empty, or only white space or a dash"
    ),
    "glued_prompt": "no white space separates the prompt from its answer",
    "duplicate_prompts": (
        "the prompt of an earlier record again (dedup=prompt leaves it out)"
    ),
    "duplicate_records": (
        "an earlier record again, rewards apart (dedup=pair leaves it out)"
    ),
}
"""Findings that may be fine, and need an explanation."""


def meaning_of(check: str) -> str:
    """Return an explanation of an event or a check, with the setting that decides, if
    there is one. It is empty for a check that its name explains.
    """
    if check in PROBLEMS:
        return PROBLEMS[check]
    if check in REMARKS:
        return REMARKS[check]
    if check in REASONS:
        reason = REASONS[check]
        answers = "|".join(reason.answers)
        return f"{reason.rule} (--on {check}={answers})"
    return ""
