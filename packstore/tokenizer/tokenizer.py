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
"""Engine for most files of ``tokenizers``, the reference."""

VARIED_TEMPLATES = 64
"""Number of cached chat templates with records' own variables."""


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer file and the files next to it.

    Picklable: a worker loads the engine on first use.
    """

    name: str  # of the file, for messages and the manifest
    engine_name: str  # in :data:`packstore.tokenizer.engines.ENGINES`
    payload: bytes = field(repr=False)  # of the file
    # Strings of tokens, if known; packstore itself never pads.
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    adds_bos: bool = False  # True: to plain text
    chat_template: str | None = field(default=None, repr=False)
    tool_template: str | None = field(default=None, repr=False)  # of records with tools
    files: Mapping[str, str] = field(default_factory=dict)  # sha256 of each other file, by name

    @cached_property
    def engine(self) -> Engine:
        """The loaded engine."""
        engine = ENGINES.load(self.engine_name)(self.payload, f"tokenizer {self.name}")
        engine.register(self.marks)
        return engine

    @property
    def marks(self) -> list[str]:
        """The known strings of BOS, EOS and padding."""
        return [token for token in (self.bos_token, self.eos_token, self.pad_token) if token]

    def with_engine(self, name: str, engine: Engine | None = None) -> Self:
        """Returns the tokenizer with another engine: `engine`, or a new one by `name`."""
        other = replace(self, engine_name=name)
        other.__dict__["engine"] = engine or ENGINES.load(name).beside(self.engine)  # type: ignore[attr-defined]
        return other

    @cached_property
    def sha256(self) -> str:
        """sha256 (hex) of the tokenizer file."""
        return hashlib.sha256(self.payload).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """Highest id + 1, added tokens included."""
        return self.engine.vocabulary[0]

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
        known = {name: token for name, token in self._token_strings().items() if token is not None}
        return None if text is None else ChatTemplate(text, known)

    def template_for(self, tools: Tools, variables: Mapping[str, Any]) -> ChatTemplate | None:
        """Returns the chat template of a record with these tools and variables, as transformers."""
        template = self.tool_use_template if tools else None
        template = template or self.template
        if template is None or not variables:
            return template
        key = template.source, json.dumps(variables, sort_keys=True)
        if key not in self._varied:
            if len(self._varied) >= VARIED_TEMPLATES:
                self._varied.clear()
            self._varied[key] = replace(template, variables={**template.variables, **variables})
        return self._varied[key]

    @cached_property
    def _varied(self) -> dict[tuple[str, str], ChatTemplate]:
        """Cache of templates with variables."""
        return {}

    @cached_property
    def separable(self) -> frozenset[str]:
        """Control strings at which text can be split and encoded piecewise, with equal ids.

        Excludes tokens that strip adjacent white space, and tokenizers that add a leading space to
        the first piece of a text only.
        """
        names = list(self.specials)
        whole, offsets = self.engine.encode_batch([f"{s} a{s}\na" for s in names], control=True)
        a, cut = self.engine.encode_batch([" a", "\na"], control=False)
        return frozenset(
            name
            for i, (name, s) in enumerate(self.specials.items())
            if np.array_equal(
                whole[offsets[i] : offsets[i + 1]],
                np.concatenate([[s], a[: cut[1]], [s], a[cut[1] :]]),
            )
        )

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
        """Patterns of control strings of well-known templates that are letters to this tokenizer.

        Not those that are tokens here, or that a chat template of this tokenizer writes.
        """
        templates = (self.chat_template or "") + (self.tool_template or "")

        def is_foreign(name: str) -> bool:
            return name not in templates and self.engine.token_to_id(name) is None

        return foreign_patterns(is_foreign)

    @cached_property
    def control_hint(self) -> str:
        """Common prefix of all control strings, possibly empty: a text without it holds none."""
        hint = os.path.commonprefix(list(self.specials))  # noqa: RUF071  (of characters)
        return "" if "\n" in hint else hint

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes `ids` to text, including control tokens."""
        return self.engine.decode([int(i) for i in ids])

    def provenance(self) -> dict[str, Any]:
        """Returns the manifest's record of the tokenizer and its chat template, as JSON values."""
        template, for_tools = self.chat_template, self.tool_template
        template_sha256, tools_sha256 = (
            text and hashlib.sha256(text.encode()).hexdigest() for text in (template, for_tools)
        )
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
            "chat_template": template,
            "chat_template_sha256": template_sha256,
            "tool_use_template": for_tools,
            "tool_use_template_sha256": tools_sha256,
            "chat_template_date": TEMPLATE_DATE,
        }

    def _token_strings(self) -> dict[str, str | None]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {name: getattr(self, name) for name in names}

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.engine.token_to_id(token)

    def __getstate__(self) -> dict[str, Any]:
        rebuilt = {"template", "tool_use_template", "_varied", "specials"}
        if self.engine_name != FAST:
            rebuilt.add("engine")
        return {name: value for name, value in self.__dict__.items() if name not in rebuilt}
