"""``gigatoken``: a faster library for BPE ``tokenizer.json``; it refuses other kinds (Unigram)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import gigatoken
import numpy as np

from packstore.errors import TokenizerError, sentence
from packstore.format.arrays import Int32, Int64
from packstore.tokenizer.engines.tokenizers import TokenizersEngine


class GigatokenEngine(TokenizersEngine):
    """Encodes with ``gigatoken``; the reference library does the rest."""

    version = version("gigatoken")

    def encode_batch(self, texts: Sequence[str], *, control: bool) -> tuple[Int32, Int64]:
        """Encodes all texts; returns flat ids and their offsets."""
        try:
            rows = self._fast[control].encode_batch(list(texts), parallel=False).layout
            offsets = np.asarray(rows.offsets.data, np.int64)
            ids = np.asarray(rows.content.data)[offsets[0] : offsets[-1]]
        except Exception as error:  # the library raises no narrower class
            must = "gigatoken must encode every text"
            raise TokenizerError(sentence(self._where, must, str(error))) from error
        return ids.astype(np.int32), offsets - offsets[0]

    def _load(self) -> None:
        # It always matches control strings, so plain text is encoded by a copy without them.
        known = json.loads(self._tokenizer.to_str())
        added = known.get("added_tokens") or []
        plain: dict[str, Any] = {**known, "added_tokens": [t for t in added if not t["special"]]}
        try:
            self._fast = [gigatoken.Tokenizer.from_json(json.dumps(t)) for t in (plain, known)]
        except Exception as error:  # the library raises no narrower class
            must = "gigatoken must know this kind of tokenizer"
            do = "Set tokenizer_engine to tokenizers, or to auto"
            raise TokenizerError(sentence(self._where, must, str(error), do)) from error
