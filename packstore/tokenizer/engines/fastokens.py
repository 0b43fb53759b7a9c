"""``fastokens``: a faster library for ``tokenizer.json``; it refuses some kinds
(Unigram, NFKC).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from importlib.metadata import version
from typing import Any

import fastokens
import numpy as np
import tokenizers

from packstore.format.arrays import Int32, Int64
from packstore.tokenizer.engines import inside
from packstore.tokenizer.engines.tokenizers import Modes, TokenizersEngine


class FastokensEngine(TokenizersEngine):
    """Encode with ``fastokens``; the reference library does all else.

    Picklable: a worker loads each of the two libraries when it is first used.
    """

    version = version("fastokens")

    def encode_batch(
        self, texts: Sequence[str], *, control: bool
    ) -> tuple[Int32, Int64]:
        """Return flat ids of all texts, and their offsets."""
        with inside(self._where, "fastokens must encode every text"):
            ids, offsets = self._fast.encode_batch_flat(
                list(texts), split_special_tokens=not control
            )
        return np.frombuffer(ids, np.int32), np.frombuffer(offsets, np.int64)

    @staticmethod
    def start_loading(payload: bytes) -> Future[fastokens.Tokenizer] | None:
        """Begin to load a file, while the reference loads it; not one that may have
        huge ids.
        """
        if re.search(rb":\s*\d{8}", payload):
            return None
        thread = ThreadPoolExecutor(1, "packstore-tokenizer")
        loading = thread.submit(_load_payload, payload)
        thread.shutdown(wait=False)
        return loading

    def _load(self) -> None:
        self.__dict__.pop("_fast", None)
        _ = self._fast

    @cached_property
    def _fast(self) -> fastokens.Tokenizer:
        with inside(self._where, "fastokens must know this kind of tokenizer"):
            if self.loading is not None and self._is_file:
                fast = self.loading.result()
                if self._has_equal_added_tokens(fast):
                    return fast
            text = self.__dict__.get("_text") or self._tokenizer.to_str()
            return fastokens.Tokenizer.from_json_str(text)

    def _has_equal_added_tokens(self, fast: fastokens.Tokenizer) -> bool:
        """Return False if the reference gives added tokens other ids than their
        file.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        return all(fast.token_to_id(token.content) == i for i, token in added.items())

    @cached_property
    def _tokenizer(self) -> tokenizers.Tokenizer:  # type: ignore[override]
        return tokenizers.Tokenizer.from_str(self.__dict__["_text"])

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in ("_fast", "_tokenizer", "_modes", "loading"):
            state.pop(name, None)
        state["_text"] = self._tokenizer.to_str()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._modes = Modes()


def _load_payload(payload: bytes) -> fastokens.Tokenizer:
    return fastokens.Tokenizer.from_json_str(payload.decode())
