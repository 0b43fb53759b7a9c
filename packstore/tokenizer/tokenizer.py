"""A loaded tokenizer, with its control tokens, chat template and provenance."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from packstore.format.tokenizer_identity import PROBES, probe_sha256
from packstore.tokenizer.control import control_pattern, foreign_patterns
from packstore.tokenizer.dialogue.template import TEMPLATE_DATE, ChatTemplate, Tools
from packstore.tokenizer.engines import ENGINES, Engine

FAST = "fastokens"
"""Faster engine, for most files of the reference engine ``tokenizers``."""

VARIED_TEMPLATES = 64
"""Maximum number of cached chat templates with variables from records."""


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer file and the files next to it.

    Picklable: a worker loads the engine on first use.
    """

    name: str  # of the file, for messages and the manifest
    engine_name: str  # in :data:`packstore.tokenizer.engines.ENGINES`
    payload: bytes = field(repr=False)  # of the file
    # Strings of tokens, if known. The padding token is only recorded.
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    adds_bos: bool = False  # whether plain text gets a BOS
    chat_template: str | None = field(default=None, repr=False)  # Jinja text
    # The chat template for records with tools.
    tool_template: str | None = field(default=None, repr=False)
    # name -> sha256 of each file next to the tokenizer file that was read
    files: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def engine(self) -> Engine:
        """The loaded engine."""
        engine = ENGINES.load(self.engine_name)(self.payload, f"tokenizer {self.name}")
        engine.register(self.marker_tokens)
        return engine

    @property
    def marker_tokens(self) -> list[str]:
        """The known strings of BOS, EOS and padding."""
        tokens = (self.bos_token, self.eos_token, self.pad_token)
        return [token for token in tokens if token]

    def with_engine(self, name: str, engine: Engine | None = None) -> Self:
        """Return the tokenizer with another engine: `engine`, or a new one by
        `name`.
        """
        tokenizer = replace(self, engine_name=name)
        if engine is None:
            engine = ENGINES.load(name).from_reference(self.engine)  # type: ignore[attr-defined]
        tokenizer.__dict__["engine"] = engine
        return tokenizer

    @cached_property
    def sha256(self) -> str:
        """sha256 (hex) of the tokenizer file."""
        return hashlib.sha256(self.payload).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """Highest id + 1, added tokens included."""
        size, _ = self.engine.vocabulary
        return size

    @cached_property
    def bos_id(self) -> int | None:
        """Id of `bos_token`."""
        return self._id(self.bos_token)

    @cached_property
    def eos_id(self) -> int | None:
        """Id of `eos_token`."""
        return self._id(self.eos_token)

    @cached_property
    def unk_id(self) -> int | None:
        """Id of `unk_token`."""
        return self._id(self.unk_token)

    @cached_property
    def specials(self) -> Mapping[str, int]:
        """Control tokens: string -> id."""
        return self.engine.specials

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The compiled chat template."""
        return self._compile(self.chat_template)

    @cached_property
    def tool_use_template(self) -> ChatTemplate | None:
        """The compiled chat template for records with tools, if it differs."""
        return self._compile(self.tool_template)

    def _compile(self, text: str | None) -> ChatTemplate | None:
        if text is None:
            return None
        tokens = {
            name: token
            for name, token in self._token_strings().items()
            if token is not None
        }
        return ChatTemplate(text, tokens)

    def template_for(
        self, tools: Tools, variables: Mapping[str, Any]
    ) -> ChatTemplate | None:
        """Return the chat template of a record with these tools and variables, chosen
        as transformers chooses it; None without a template.
        """
        template = self.tool_use_template if tools else None
        template = template or self.template
        if template is None or not variables:
            return template
        key = (template.source, json.dumps(variables, sort_keys=True))
        if key not in self._varied:
            if len(self._varied) >= VARIED_TEMPLATES:
                self._varied.clear()
            self._varied[key] = replace(
                template, variables={**template.variables, **variables}
            )
        return self._varied[key]

    @cached_property
    def _varied(self) -> dict[tuple[str, str], ChatTemplate]:
        """Cache of templates with variables."""
        return {}

    @cached_property
    def separable(self) -> frozenset[str]:
        """Control strings at which text can be split and encoded piecewise, with equal
        ids.

        Excludes tokens that strip adjacent white space, and tokenizers that add a
        leading space to the first piece of a text only: both ways are compared for
        ``<control> a<control>\\na``.
        """
        ids, offsets = self.engine.encode_batch([" a", "\na"], control=False)
        first = ids[: offsets[1]]
        second = ids[offsets[1] :]
        texts = [f"{name} a{name}\na" for name in self.specials]
        ids, offsets = self.engine.encode_batch(texts, control=True)
        full_texts = np.split(ids, offsets[1:-1])

        names = []
        for (name, control_id), full_ids in zip(
            self.specials.items(), full_texts, strict=False
        ):
            piecewise = np.concatenate([[control_id], first, [control_id], second])
            if np.array_equal(full_ids, piecewise):
                names.append(name)
        return frozenset(names)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens."""
        return frozenset(self.specials.values())

    @cached_property
    def controls(self) -> re.Pattern[str]:
        """Pattern that matches the string of any control token."""
        return control_pattern(frozenset(self.specials))

    @cached_property
    def foreign_controls(self) -> tuple[re.Pattern[str], ...]:
        """Patterns of control strings of other models, which are plain text to this
        tokenizer.

        They are the strings of well-known chat templates, except tokens of this
        tokenizer and strings that a chat template of it writes.
        """
        templates = (self.chat_template or "") + (self.tool_template or "")

        def is_foreign(name: str) -> bool:
            return name not in templates and self.engine.token_to_id(name) is None

        return foreign_patterns(is_foreign)

    @cached_property
    def control_hint(self) -> str:
        """Common prefix of all control strings, possibly empty: a text without it holds
        none.
        """
        hint = os.path.commonprefix(list(self.specials))  # noqa: RUF071  (of characters)
        return "" if "\n" in hint else hint

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including control tokens."""
        return self.engine.decode([int(i) for i in ids])

    def provenance(self) -> dict[str, Any]:
        """Return the manifest's record of the tokenizer and its chat template, as JSON
        values.
        """
        ids, offsets = self.engine.encode_batch(PROBES, control=True)
        probes = [row.tolist() for row in np.split(ids, offsets[1:-1])]
        return {
            "name": self.name,
            "sha256": self.sha256,
            "vocab_sha256": self.engine.vocabulary[1],
            "probe_sha256": probe_sha256(probes),
            "files": dict(self.files),
            "engine": self.engine_name,
            "engine_version": self.engine.version,
            "vocab_size": self.vocab_size,
            **self._token_strings(),
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "pad_id": self._id(self.pad_token),
            "unk_id": self.unk_id,
            "adds_bos": self.adds_bos,
            "chat_template": self.chat_template,
            "chat_template_sha256": _sha256(self.chat_template),
            "tool_use_template": self.tool_template,
            "tool_use_template_sha256": _sha256(self.tool_template),
            "chat_template_date": TEMPLATE_DATE,
        }

    def _token_strings(self) -> dict[str, str | None]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {name: getattr(self, name) for name in names}

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.engine.token_to_id(token)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        # A worker computes these again. The faster engine is sent: it loads itself on
        # first use, without the reference.
        recomputed = ["template", "tool_use_template", "_varied", "specials"]
        if self.engine_name != FAST:
            recomputed.append("engine")
        for name in recomputed:
            state.pop(name, None)
        return state


def _sha256(text: str | None) -> str | None:
    return text and hashlib.sha256(text.encode()).hexdigest()
