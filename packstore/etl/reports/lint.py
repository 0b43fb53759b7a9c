"""Checks the texts of records for errors that token ids no longer show."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from packstore.config import PackConfig
from packstore.errors import PackstoreError, quote
from packstore.etl.sources import Part, Tokenize
from packstore.format.arrays import Rows, Tally, example_id
from packstore.io.inputs.files import Block
from packstore.tokenizer import Tokenizer
from packstore.tokenizer.records.shapes import Parsed, parse_record
from packstore.tokenizer.refusals import Refused

_MARKER = re.compile(r"<[^<>\s]{1,40}>")

_ENDS = frozenset(".,;:!?\"'’”)…")
"""Characters at the end of sentences, besides letters and digits. Turn markers end with > or ]."""


class TextLint:
    """Tokenizes a block in a worker of doctor, and checks its texts.

    Args:
        tokenize: converts parsed records to examples.
        kind: ``preference``, ``sft`` or ``ranked``.
        config: the settings.
    """

    def __init__(self, tokenize: Tokenize, kind: str, config: PackConfig) -> None:
        self._tokenize, self._kind, self._config = tokenize, kind, config
        self.suits_threads = tokenize.suits_threads
        tokenizer = tokenize.tokenizer
        self._markers = markers_without_token(tokenizer) if tokenizer else []

    def __call__(self, block: Block) -> Part:
        """Returns the examples of a block, and the tally of its records with the findings."""
        rows = block.parse()
        examples, tally = self._tokenize.of(rows)
        kept = set(examples.example_ids.tolist())
        # Tokenizing may already have counted the same findings.
        known = set(tally.noted)
        for i, value in enumerate(rows.values):
            if example_id(rows.source, rows.ordinals[i]) in kept:
                self._look(rows, i, value, tally, known)
        return examples, tally

    def _look(self, rows: Rows, i: int, value: object, tally: Tally, known: set[str]) -> None:
        try:
            parsed = parse_record(value, self._kind, self._config)
        except Refused:  # tokenizing may accept it, as settings can change it before parsing
            return
        for check, detail in self._found(parsed):
            if check not in known:
                tally.note(check, rows.where(i), detail)

    def _found(self, parsed: Parsed) -> Iterator[tuple[str, str]]:
        prompt, responses = parsed.prompt, parsed.responses
        dialogue = isinstance(prompt, list)
        # Messages and ids of kind sft are all response, prompts included.
        if not (self._kind == "sft" and not isinstance(prompt, str)) and not _says(prompt):
            yield "empty_prompt", ""
        if isinstance(prompt, str) and any(_glued(prompt, str(r)) for r in responses):
            yield "glued_prompt", f"{quote(prompt[-20:])} and {quote(str(responses[0])[:20])}"
        if dialogue and self._markers:
            yield "marker_no_token", " ".join(self._markers)


def markers_without_token(tokenizer: Tokenizer) -> list[str]:
    """Returns turn markers of the chat template that are missing in the vocabulary.

    Markers are texts in angle brackets without white space.
    """
    template = tokenizer.template
    if template is None:
        return []
    roles = ("user", "assistant")
    try:
        text = template.render([{"role": role, "content": "a"} for role in roles])
    except (Refused, PackstoreError):  # the template refuses this dialogue
        return []
    found = dict.fromkeys(_MARKER.findall(text))
    return [marker for marker in found if tokenizer.engine.token_to_id(marker) is None]


def _says(prompt: Any) -> bool:
    """Returns True if a prompt is not only white space."""
    if isinstance(prompt, str):
        return bool(prompt.strip())
    if isinstance(prompt, list):
        return any(str(m.get("content") or "").strip() for m in prompt if m["role"] != "system")
    return len(prompt) > 0


def _glued(prompt: str, response: str) -> bool:
    """Returns True if prompt and response join without a space, in a script with spaces."""
    if not prompt or not response:
        return False
    last, first = prompt[-1], response[0]
    if any(unicodedata.east_asian_width(c) in "WF" for c in (last, first)):
        return False
    return (last.isalnum() or last in _ENDS) and first.isalnum()
