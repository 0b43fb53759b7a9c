"""``tokenizers``: the Hugging Face library; reads ``tokenizer.json``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import tokenizers

from packstore.errors import TokenizerError, sentence
from packstore.records import Int32, Int64
from packstore.tokenizer.engines import flatten


class TokenizersEngine:
    """See :class:`packstore.tokenizer.engines.Engine`."""

    version = tokenizers.__version__

    def __init__(self, payload: bytes, where: str) -> None:
        self._where = where
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(payload.decode())
        except Exception as error:  # the library raises no narrower class
            must = "it must be a tokenizer.json that the tokenizers library reads"
            raise TokenizerError(sentence(self._where, must, str(error))) from error
        # Left in place, these would cut and pad silently.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._find_specials()
        self._load()

    @classmethod
    def beside(cls, other: TokenizersEngine) -> Self:
        """The engine of this class for the file of `other`, which is not read again."""
        engine = cls.__new__(cls)
        engine._where, engine._tokenizer = other._where, other._tokenizer
        engine.specials = dict(other.specials)
        engine._load()
        return engine

    def register(self, tokens: Sequence[str]) -> None:
        """Makes `tokens` control tokens, where they are in the vocabulary."""
        known = [t for t in tokens if self._tokenizer.token_to_id(t) is not None]
        if new := [t for t in known if t not in self.specials]:
            self._tokenizer.add_special_tokens(new)
            self._find_specials()
            self._load()

    def encode_batch(self, texts: Sequence[str], *, control: bool) -> tuple[Int32, Int64]:
        """Ids of all texts, flat, and their offsets."""
        self._tokenizer.encode_special_tokens = not control
        try:
            found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises no narrower class
            raise TokenizerError(
                sentence(self._where, "it must encode every text", str(error))
            ) from error
        return flatten([encoding.ids for encoding in found])

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def vocab_size(self) -> int:
        """Highest id + 1."""
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        if None not in map(self._tokenizer.id_to_token, range(size)):
            return size  # no gaps: the vocabulary need not be copied
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry with this id."""
        return self._tokenizer.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry."""
        return self._tokenizer.token_to_id(token)

    def wrapping(self) -> tuple[list[int], list[int]]:
        """Ids that the file puts before and after a text by itself."""
        whole = self._tokenizer.encode("a", add_special_tokens=True)
        inner = [i for i, special in enumerate(whole.special_tokens_mask) if not special]
        if not inner:
            return [], []
        return whole.ids[: inner[0]], whole.ids[inner[-1] + 1 :]

    def _load(self) -> None:
        """Makes ready what a faster engine needs; again when control tokens were added."""

    def _find_specials(self) -> None:
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = {token.content: i for i, token in added.items() if token.special}
