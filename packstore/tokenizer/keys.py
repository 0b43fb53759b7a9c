"""Hashes that tell records apart: their prompts, and all of them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from packstore.tokenizer.sandbox import as_json
from packstore.tokenizer.shapes import Parsed


def record_keys(parsed: Parsed) -> tuple[int, int]:
    """64-bit hashes of the prompt and of the record, rewards apart.

    They are those of the words, not of ids, which at the end of a prompt may depend on what
    follows. A dialogue that has no prompt of its own begins with one, up to its first answer; where
    there is none either, all of the record counts as prompt.
    """
    whole = [parsed.prompt, *parsed.responses, parsed.tools]
    if parsed.variables:
        whole.append(parsed.variables)
    prompt: Any = parsed.prompt
    if len(prompt) == 0 and isinstance(prompt, list):
        prompt = _before_answer(parsed.responses[0])
    record = _hash(whole)
    return (_hash([prompt, parsed.tools]) if len(prompt) else record), record


def _before_answer(messages: Any) -> Any:
    roles = [message["role"] for message in messages]
    return messages[: roles.index("assistant")] if "assistant" in roles else []


def _hash(parts: list[Any]) -> int:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        if isinstance(part, np.ndarray):
            kind, data = b"i", part.tobytes()
        elif isinstance(part, str):
            kind, data = b"t", part.encode(errors="surrogatepass")
        else:
            text = as_json(part, sort_keys=True)
            kind, data = b"m", text.encode(errors="surrogatepass")
        digest.update(b"%b%d:" % (kind, len(data)))
        digest.update(data)
    return int.from_bytes(digest.digest(), "little")
