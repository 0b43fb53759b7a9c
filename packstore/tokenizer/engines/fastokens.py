"""``fastokens``: a faster library for ``tokenizer.json``; it refuses some kinds (Unigram, NFKC)."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version

import fastokens
import numpy as np

from packstore.format.arrays import Int32, Int64
from packstore.tokenizer.engines import inside
from packstore.tokenizer.engines.tokenizers import TokenizersEngine


class FastokensEngine(TokenizersEngine):
    """Encodes with ``fastokens``; the reference library does the rest."""

    version = version("fastokens")

    def encode_batch(self, texts: Sequence[str], *, control: bool) -> tuple[Int32, Int64]:
        """Encodes all texts; returns flat ids and their offsets."""
        with inside(self._where, "fastokens must encode every text"):
            ids, offsets = self._fast.encode_batch_flat(
                list(texts), split_special_tokens=not control
            )
        return np.frombuffer(ids, np.int32), np.frombuffer(offsets, np.int64)

    def _load(self) -> None:
        with inside(self._where, "fastokens must know this kind of tokenizer"):
            self._fast = fastokens.Tokenizer.from_json_str(self._tokenizer.to_str())
