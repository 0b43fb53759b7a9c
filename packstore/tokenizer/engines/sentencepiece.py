"""``sentencepiece``: the reference library of SentencePiece; reads ``.model`` files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import sentencepiece

from packstore.errors import TokenizerError, sentence
from packstore.format.arrays import Int32, Int64, flatten
from packstore.format.tokenizer_identity import vocabulary_sha256
from packstore.tokenizer.control import encode_around_controls


class SentencePieceEngine:
    """See :class:`packstore.tokenizer.engines.Engine`.

    The library itself never encodes text to control ids; here text is split around control strings.
    """

    version = str(sentencepiece.__version__)

    def __init__(self, payload: bytes, where: str) -> None:
        self._where = where
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=payload)
        except RuntimeError as error:
            rule = "it must be a SentencePiece model"
            raise TokenizerError(sentence(self._where, rule, str(error))) from error
        self._size = int(self._model.get_piece_size())
        if not self._size:  # of some damaged files the library says nothing
            raise TokenizerError(sentence(where, "it must be a SentencePiece model", "no pieces"))
        self.specials = {
            self._model.id_to_piece(i): i for i in range(self._size) if self._model.is_control(i)
        }

    def register(self, tokens: Sequence[str]) -> None:
        """Makes those of `tokens` that are in the vocabulary control tokens."""
        found = {token: self.token_to_id(token) for token in tokens}
        self.specials |= {token: i for token, i in found.items() if i is not None}

    def encode_batch(self, texts: Sequence[str], *, control: bool) -> tuple[Int32, Int64]:
        """Encodes all texts; returns flat ids and their offsets."""
        if not control or not self.specials:
            return flatten(self._model.encode(list(texts), out_type=int))
        return encode_around_controls(
            texts, self.specials, lambda t: self.encode_batch(t, control=False)
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes `ids` to text, including control tokens."""
        names = {i: token for token, i in self.specials.items()}
        runs = itertools.groupby(ids, names.__contains__)
        return "".join(
            "".join(names[i] for i in run) if control else self._model.decode(list(run))
            for control, run in runs
        )

    @cached_property
    def vocabulary(self) -> tuple[int, str]:
        """The highest id + 1, and the hash of the token of each id."""
        return self._size, vocabulary_sha256(map(self.id_to_token, range(self._size)))

    def id_to_token(self, token_id: int) -> str | None:
        """Returns the vocabulary entry with this id."""
        return str(self._model.id_to_piece(token_id)) if 0 <= token_id < self._size else None

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a vocabulary entry."""
        found = int(self._model.piece_to_id(token))
        return found if self.id_to_token(found) == token else None

    def wrapping(self) -> tuple[list[int], list[int]]:
        """Returns BOS before a text if the model file has one, as users of such files add it."""
        bos = int(self._model.bos_id())
        return ([bos] if bos >= 0 else []), []
