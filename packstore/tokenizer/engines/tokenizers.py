"""``tokenizers``: the Hugging Face library; reads ``tokenizer.json``."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Self

import tokenizers

from packstore.errors import TokenizerError, sentence
from packstore.format.arrays import Int32, Int64, flatten
from packstore.format.tokenizer_identity import vocabulary_sha256
from packstore.tokenizer.engines import inside

MAX_IDS = 1 << 24
"""Upper bound of ids; the largest vocabularies have a tenth of it."""

MAX_GROWTH = 1000
"""Largest growth of a text by the replacements of a normalizer, as a factor, and the
most ids that a post-processor may add to a text.
"""


class Modes:
    """Lets threads encode at the same time only in the same mode: control strings
    become ids, or are plain text. The library's object has one mode for all threads.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._users = 0  # threads that encode now, all in one mode

    @contextlib.contextmanager
    def using(
        self, tokenizer: tokenizers.Tokenizer, *, control: bool
    ) -> Iterator[None]:
        """Encode control strings as their ids, or as plain text, inside this
        context.
        """
        # The library's flag has the opposite meaning: control strings are plain text.
        with self._free:
            while self._users and tokenizer.encode_special_tokens == control:
                self._free.wait()
            if tokenizer.encode_special_tokens == control:
                tokenizer.encode_special_tokens = not control
            self._users += 1
        try:
            yield
        finally:
            with self._free:
                self._users -= 1
                self._free.notify_all()


class TokenizersEngine:
    """See :class:`packstore.tokenizer.engines.Engine`."""

    version = tokenizers.__version__
    loading: Any = None  # future of the file, loaded by a faster library

    def __init__(self, payload: bytes, where: str) -> None:
        self._where = where
        self._modes = Modes()
        rule = "it must be a tokenizer.json that the tokenizers library reads"
        with inside(where, rule):
            tokenizer = tokenizers.Tokenizer.from_buffer(payload)
            self._tokenizer = tokenizer
            self.dropout = float(getattr(tokenizer.model, "dropout", None) or 0)  # BPE
            # Whether the object still is as the file has it.
            self._is_file = not (
                tokenizer.truncation or tokenizer.padding or self.dropout
            )
            # The file's settings would silently truncate texts, pad them, and draw
            # other ids at every call.
            tokenizer.no_truncation()
            tokenizer.no_padding()
            if self.dropout:
                tokenizer.model.dropout = None
            self._find_specials()
            self._check_growth()
            self._check_added_ids()
        self._load()

    @classmethod
    def from_reference(cls, reference: TokenizersEngine) -> Self:
        """Return an engine of this class with the file that the reference has
        loaded.
        """
        engine = cls.__new__(cls)
        engine.__dict__ |= reference.__dict__
        # Both may be computed when first used. The vocabulary also refuses huge ids,
        # for which a faster library would make a table.
        engine.__dict__["_tokenizer"] = reference._tokenizer
        engine.__dict__["vocabulary"] = reference.vocabulary
        engine._load()
        return engine

    def register(self, tokens: Sequence[str]) -> None:
        """Make control tokens of all `tokens` that are in the vocabulary."""
        new_tokens = []
        for token in tokens:
            is_in_vocabulary = self._tokenizer.token_to_id(token) is not None
            if is_in_vocabulary and token not in self.specials:
                new_tokens.append(token)
        if not new_tokens:
            return
        self._tokenizer.add_special_tokens(new_tokens)
        self._is_file = False
        self.__dict__.pop("vocabulary", None)
        self._find_specials()
        self._load()

    def encode_batch(
        self, texts: Sequence[str], *, control: bool
    ) -> tuple[Int32, Int64]:
        """Return flat ids of all texts, and their offsets."""
        try:
            with self._modes.using(self._tokenizer, control=control):
                encodings = self._tokenizer.encode_batch_fast(
                    list(texts), add_special_tokens=False
                )
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a Rust panic is not even an Exception
            rule = "it must encode every text"
            raise TokenizerError(sentence(self._where, rule, str(error))) from error
        return flatten([encoding.ids for encoding in encodings])

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including control tokens."""
        with inside(self._where, "it must decode ids"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def vocabulary(self) -> tuple[int, str]:
        """The highest id + 1, and the hash of the token of each id: slow, a call for
        each.
        """
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        tokens = self._tokens_below(size)
        has_gaps = None in tokens
        if has_gaps:
            # Some ids are above the number of tokens. The library has no call for the
            # highest id, only for all tokens.
            ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
            size = max(ids, default=-1) + 1
            if size > MAX_IDS:
                rule = f"its ids must be below {MAX_IDS}"
                raise TokenizerError(sentence(self._where, rule, str(size - 1)))
            tokens = self._tokens_below(size)
        return size, vocabulary_sha256(tokens)

    def _tokens_below(self, size: int) -> list[str | None]:
        return [self._tokenizer.id_to_token(i) for i in range(size)]

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary entry with this id."""
        return self._tokenizer.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry."""
        special_id = self.specials.get(token)
        return self._tokenizer.token_to_id(token) if special_id is None else special_id

    def wrapping(self) -> tuple[list[int], list[int]]:
        """Return the ids that the file adds before and after a text by default."""
        with inside(self._where, "it must encode every text"):
            encoding = self._tokenizer.encode("a", add_special_tokens=True)
        mask = encoding.special_tokens_mask
        inner = [i for i, is_special in enumerate(mask) if not is_special]
        if not inner:
            return [], []
        return encoding.ids[: inner[0]], encoding.ids[inner[-1] + 1 :]

    def _load(self) -> None:
        """Prepare a faster engine; called again after control tokens were added."""

    def _check_growth(self) -> None:
        """Raise if the normalizer lengthens text excessively."""
        normalizer = self._tokenizer.normalizer
        steps = (
            [json.loads(normalizer.__getstate__())] if normalizer is not None else []
        )
        growth = 1
        while steps:
            step = steps.pop()
            steps += step.get("normalizers", ())
            growth *= max(len(step.get("content") or ""), 1)
        if growth > MAX_GROWTH:
            rule = (
                f"its normalizer must not make texts more than {MAX_GROWTH} times "
                "as long"
            )
            raise TokenizerError(sentence(self._where, rule, f"{growth} times"))

    def _check_added_ids(self) -> None:
        """Refuse a post-processor that adds very many ids to a text, or repeats the
        text.
        """
        processor = self._tokenizer.post_processor
        steps = [json.loads(processor.__getstate__())] if processor is not None else []
        added = 0
        while steps:
            step = steps.pop()
            steps += step.get("processors", ())
            specials = step.get("special_tokens") or {}
            texts = 0
            for piece in step.get("single") or ():
                if "SpecialToken" in piece:
                    added += len(specials[piece["SpecialToken"]["id"]]["ids"])
                else:
                    texts += 1
            if texts > 1:
                rule = "its post-processor must take a text once"
                raise TokenizerError(sentence(self._where, rule, f"{texts} times"))
        if added > MAX_GROWTH:
            rule = (
                f"its post-processor must not add more than {MAX_GROWTH} ids to a text"
            )
            raise TokenizerError(sentence(self._where, rule, str(added)))

    def _find_specials(self) -> None:
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = {
            token.content: i for i, token in added.items() if token.special
        }
