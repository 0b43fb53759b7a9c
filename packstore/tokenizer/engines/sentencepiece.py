"""``sentencepiece``: the reference library of SentencePiece; reads ``.model`` files."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property, partial

import sentencepiece

from packstore.errors import TokenizerError, sentence
from packstore.format.arrays import Int32, Int64, flatten
from packstore.format.tokenizer_identity import vocabulary_sha256
from packstore.tokenizer.control import encode_around_controls


class SentencePieceEngine:
    """See :class:`packstore.tokenizer.engines.Engine`.

    The library itself never encodes text to control ids; here text is split around
    control strings.
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
        if not self._size:  # the library accepts some damaged files
            raise TokenizerError(
                sentence(where, "it must be a SentencePiece model", "no pieces")
            )
        self.specials = {
            self._model.id_to_piece(i): i
            for i in range(self._size)
            if self._model.is_control(i)
        }

    def register(self, tokens: Sequence[str]) -> None:
        """Make control tokens of all `tokens` that are in the vocabulary."""
        for token in tokens:
            token_id = self.token_to_id(token)
            if token_id is not None:
                self.specials[token] = token_id

    def encode_batch(
        self, texts: Sequence[str], *, control: bool
    ) -> tuple[Int32, Int64]:
        """Return flat ids of all texts, and their offsets."""
        if not control or not self.specials:
            return flatten(self._model.encode(list(texts), out_type=int))
        return encode_around_controls(
            texts, self.specials, partial(self.encode_batch, control=False)
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including control tokens."""
        names = {i: token for token, i in self.specials.items()}
        texts: list[str] = []
        for is_control, run in itertools.groupby(ids, names.__contains__):
            if is_control:
                texts += [names[i] for i in run]
            else:
                texts.append(self._model.decode(list(run)))
        return "".join(texts)

    @cached_property
    def vocabulary(self) -> tuple[int, str]:
        """The highest id + 1, and the hash of the token of each id."""
        return self._size, vocabulary_sha256(
            [self.id_to_token(i) for i in range(self._size)]
        )

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary entry with this id."""
        if token_id not in range(self._size):
            return None
        return str(self._model.id_to_piece(token_id))

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry."""
        # The library returns the id of UNK for a text that is no piece.
        token_id = int(self._model.piece_to_id(token))
        return token_id if self.id_to_token(token_id) == token else None

    def wrapping(self) -> tuple[list[int], list[int]]:
        """Return BOS before a text if the model file has one, as users of such files
        add it.
        """
        bos = int(self._model.bos_id())
        before = [bos] if bos >= 0 else []
        return before, []
