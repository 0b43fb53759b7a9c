"""Hashes of records and of their prompts, for deduplication and splits."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from packstore.tokenizer.chat.sandbox import as_json
from packstore.tokenizer.records.shapes import Parsed


def record_keys(parsed: Parsed) -> tuple[int, int]:
    """Returns 64-bit hashes of the prompt and of the record, without rewards.

    They hash text, not ids, which at the end of a prompt may depend on what follows. The prompt of
    a dialogue without a separate one ends before its first answer; without an answer, the whole
    record is the prompt.
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
