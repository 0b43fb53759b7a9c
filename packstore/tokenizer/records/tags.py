"""Finds text that stands in the tags which the chat template writes around its role, too."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from packstore.tokenizer.dialogue.template import Message
from packstore.tokenizer.records.parse import Parsed

_OPENS = re.compile(r"\s*(<[\w-]+>|\[[\w-]+\])\s?")


def without_tags(parsed: Parsed, texts: Sequence[str]) -> Parsed:
    """Returns a record of messages without the tags that stand twice in its rendered `texts`.

    Sets for Hermes have results in ``<tool_response>``, which Qwen's templates write around them.
    Without such tags, returns `parsed` itself.
    """
    prompt, responses = _bare(parsed.prompt, texts[0]), [*map(_bare, parsed.responses, texts)]
    if prompt is parsed.prompt and all(map(lambda a, b: a is b, responses, parsed.responses)):
        return parsed
    return parsed._replace(prompt=prompt, responses=responses)


def _bare(messages: Any, text: str) -> Any:
    bare: dict[int, Message] = {}
    for i, message in enumerate(messages):
        content = (message["content"] or "").rstrip()
        if not (begins := _OPENS.match(content)):
            continue
        opens = begins[1]
        closes = f"{opens[0]}/{opens[1:]}"
        if not content.endswith(closes):
            continue
        around = itertools.pairwise(text.split(content.lstrip()))
        if any(a.rstrip().endswith(opens) and b.lstrip().startswith(closes) for a, b in around):
            inner = content[begins.end() :].removesuffix(closes)
            bare[i] = {**message, "content": inner[: len(inner) - inner[-1:].isspace()]}
    return [bare.get(i, message) for i, message in enumerate(messages)] if bare else messages
