"""A loaded tokenizer: what the stages after it and the manifest need to know of it."""

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

from packstore.identity import PROBES, probe_sha256, vocabulary_sha256
from packstore.tokenizer.control import control_pattern
from packstore.tokenizer.engines import ENGINES, Engine
from packstore.tokenizer.template import TEMPLATE_DATE, ChatTemplate, Tools

VARIED_TEMPLATES = 64
"""Chat templates with variables of their own that are kept for the next record that wants them."""


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """A tokenizer file and what lay beside it.

    Picklable: a worker rebuilds the engine on first use.

    Attributes:
        name: name of the file, for messages and the manifest.
        engine_name: a name in :data:`packstore.tokenizer.engines.ENGINES`.
        payload: bytes of the tokenizer file.
        bos_token: beginning-of-sequence string, if known.
        eos_token: end-of-sequence string, if known.
        pad_token: padding string, if known (packstore itself never pads).
        unk_token: string of the unknown token, if known.
        adds_bos: whether the tokenizer begins plain text with BOS.
        chat_template: text of the chat template, if there is one.
        tool_template: text of the one for records with tools, where that is another one.
        files: sha256 of each further file that was read, by name.
    """

    name: str
    engine_name: str
    payload: bytes = field(repr=False)
    bos_token: str | None = None
    eos_token: str | None = None
    pad_token: str | None = None
    unk_token: str | None = None
    adds_bos: bool = False
    chat_template: str | None = field(default=None, repr=False)
    tool_template: str | None = field(default=None, repr=False)
    files: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def engine(self) -> Engine:
        """The loaded library."""
        engine = ENGINES.load(self.engine_name)(self.payload, f"tokenizer {self.name}")
        engine.register(self.marks)
        return engine

    @property
    def marks(self) -> list[str]:
        """The strings of BOS, EOS and padding that are known."""
        return [token for token in (self.bos_token, self.eos_token, self.pad_token) if token]

    def with_engine(self, name: str, engine: Engine | None = None) -> Self:
        """The same with another engine, that is loaded already, or that of `name`.

        Raises:
            TokenizerError: the engine does not know this kind of tokenizer.
            MissingExtraError: its package is not installed.
        """
        other = replace(self, engine_name=name)
        other.__dict__["engine"] = engine or ENGINES.load(name).beside(self.engine)  # type: ignore[attr-defined]
        if "vocab_sha256" in self.__dict__:
            other.__dict__["vocab_sha256"] = self.vocab_sha256
        return other

    @cached_property
    def sha256(self) -> str:
        """sha256 (hex) of the tokenizer file."""
        return hashlib.sha256(self.payload).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """Highest id + 1, added tokens included."""
        return self.engine.vocab_size()

    @cached_property
    def vocab_sha256(self) -> str:
        """Hash of the token of each id; see :mod:`packstore.identity`."""
        return vocabulary_sha256(map(self.id_to_token, range(self.vocab_size)))

    @property
    def bos_id(self) -> int | None:
        """Id of `bos_token`."""
        return self._id(self.bos_token)

    @property
    def eos_id(self) -> int | None:
        """Id of `eos_token`."""
        return self._id(self.eos_token)

    @property
    def pad_id(self) -> int | None:
        """Id of `pad_token`."""
        return self._id(self.pad_token)

    @property
    def unk_id(self) -> int | None:
        """Id of `unk_token`."""
        return self._id(self.unk_token)

    @property
    def specials(self) -> Mapping[str, int]:
        """Control tokens: string -> id."""
        return self.engine.specials

    @cached_property
    def template(self) -> ChatTemplate | None:
        """The compiled chat template.

        Raises:
            TokenizerError: the template has a syntax error.
        """
        if self.chat_template is None:
            return None
        return ChatTemplate(self.chat_template, self._token_strings())

    @cached_property
    def tool_use_template(self) -> ChatTemplate | None:
        """The compiled chat template for records with tools, where that is another one.

        Raises:
            TokenizerError: it has a syntax error.
        """
        if self.tool_template is None:
            return None
        return ChatTemplate(self.tool_template, self._token_strings())

    def template_for(self, tools: Tools, variables: Mapping[str, Any]) -> ChatTemplate | None:
        """The chat template for a record with these tools and variables, as transformers chooses.

        Raises:
            TokenizerError: the template has a syntax error.
        """
        template = self.tool_use_template if tools else None
        template = template or self.template
        if template is None or not variables:
            return template
        key = template.source, json.dumps(variables, sort_keys=True)
        found = self._varied.get(key)
        if found is None:
            if len(self._varied) >= VARIED_TEMPLATES:
                self._varied.clear()
            found = self._varied[key] = template.with_variables(variables)
        return found

    @cached_property
    def _varied(self) -> dict[tuple[str, str], ChatTemplate]:
        """Templates with variables that were used already."""
        return {}

    @cached_property
    def separable(self) -> frozenset[str]:
        """Control strings around which text may be cut and encoded piecewise, with equal ids.

        Not so where a token swallows the white space beside it, or where only the very first
        piece of a text gets a leading space.
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
        """Matches the string of any control token."""
        return control_pattern(frozenset(self.specials))

    @cached_property
    def control_hint(self) -> str:
        """What every control string begins with: a text without it holds none; maybe empty."""
        hint = os.path.commonprefix(list(self.specials))  # noqa: RUF071  (of characters)
        return "" if "\n" in hint else hint

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included."""
        return self.engine.decode([int(i) for i in ids])

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry with this id."""
        return self.engine.id_to_token(token_id)

    def provenance(self) -> dict[str, Any]:
        """What the manifest records of the tokenizer and its chat template, as JSON values."""
        template, for_tools = self.chat_template, self.tool_template
        return {
            "name": self.name,
            "sha256": self.sha256,
            "vocab_sha256": self.vocab_sha256,
            "probe_sha256": self._probe_sha256(),
            "files": dict(self.files),
            "engine": self.engine_name,
            "engine_version": self.engine.version,
            "vocab_size": self.vocab_size,
            **self._token_strings(),
            "bos_id": self.bos_id,
            "eos_id": self.eos_id,
            "pad_id": self.pad_id,
            "unk_id": self.unk_id,
            "adds_bos": self.adds_bos,
            "chat_template": template,
            "chat_template_sha256": template and hashlib.sha256(template.encode()).hexdigest(),
            "tool_use_template": for_tools,
            "tool_use_template_sha256": for_tools
            and hashlib.sha256(for_tools.encode()).hexdigest(),
            "chat_template_date": TEMPLATE_DATE,
        }

    def _probe_sha256(self) -> str:
        ids, offsets = self.engine.encode_batch(PROBES, control=True)
        return probe_sha256([row.tolist() for row in np.split(ids, offsets[1:-1])])

    def _token_strings(self) -> dict[str, str | None]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {name: getattr(self, name) for name in names}

    def _id(self, token: str | None) -> int | None:
        return None if token is None else self.engine.token_to_id(token)

    def __getstate__(self) -> dict[str, Any]:
        rebuilt = {"engine", "template", "tool_use_template", "_varied", "controls", "control_hint"}
        return {name: value for name, value in self.__dict__.items() if name not in rebuilt}
