"""Notes of records: one table for `pack`, which keeps those records, and `doctor`."""

from __future__ import annotations

from packstore.config import REASONS

PROBLEMS = {
    "double_bos": "a sequence begins with BOS twice",
    "no_bos": "the tokenizer begins texts with BOS, a sequence does not",
    "no_eos": "a response does not end with EOS, so the model is not taught to stop",
    "marker_no_token": "a marker of the chat template is no token, but split into several",
    "reward_reversed": "the rejected side has the higher reward",
    "reward_rounded": "rewards that differ are one number as float32",
    "reward_default": "no rewards, while other records have some: 1 and 0 are taken",
    "mixed_forms": "plain text, while other records are chats; as_chat=True makes them chats",
    "raw_text": "plain text, though there is a chat template; as_chat=True renders it as a chat, "
    "as_chat=False says that it is right",
}
"""Findings that harm training: `pack` and `append` log them as warnings, `doctor` fails."""

REMARKS = {
    "unknown_tokens": "text that the vocabulary cannot spell",
    "generation_prompt_always": "the chat template writes the generation prompt even where it is "
    "not asked for; behind the last turn it is stored, and not supervised",
    "rendered_text": "text that begins with a control string of the chat template, or whose "
    "answers end with EOS: taken as rendered, with its control strings as control ids",
    "empty_thinking": "a turn begins with an empty thinking block, which is not supervised",
    "tags_once": "a message stood in the tags that the chat template writes around its role, as in "
    "<tool_response>: they are written once",
    "arguments_quoted": "arguments of tool calls that are JSON text, quoted by the chat template",
    "reasoning_unrendered": "the chat template leaves out the reasoning of a supervised turn",
    "empty_prompt": "the prompt is empty, or only white space",
    "glued_prompt": "no white space separates the prompt from its answer",
    "duplicate_prompts": "the prompt of an earlier record again (dedup=prompt leaves it out)",
    "duplicate_records": "an earlier record again, rewards apart (dedup=pair leaves it out)",
}
"""Findings that may be fine, and need an explanation."""


def meaning(check: str) -> str:
    """Returns what a check finds, with the setting that decides what then happens, if any."""
    known = PROBLEMS.get(check) or REMARKS.get(check, "")
    if known or check not in REASONS:
        return known
    rule, answers = REASONS[check]
    return f"{rule} (--on {check}={'|'.join(answers)})"
