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
from packstore.format.arrays import Int32, Int64
from packstore.format.tokenizer_identity import vocabulary_sha256
from packstore.tokenizer.engines import flatten, inside

MAX_IDS = 1 << 24
"""Upper bound of ids; the largest vocabularies have a tenth of it."""

MAX_GROWTH = 1000
"""Largest factor by which the replacements of a normalizer may lengthen a text, and the most ids
that a post-processor may add to one."""


class Modes:
    """Serialises encoding by mode: the library's object has one mode for all threads."""

    def __init__(self) -> None:
        self._free = threading.Condition()
        self._users = 0

    @contextlib.contextmanager
    def using(self, tokenizer: tokenizers.Tokenizer, *, control: bool) -> Iterator[None]:
        """A context in which control strings become their ids, or stay plain text."""
        with self._free:
            while self._users and tokenizer.encode_special_tokens == control:
                self._free.wait()
            if tokenizer.encode_special_tokens == control:  # must not change while in use
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
        with inside(where, "it must be a tokenizer.json that the tokenizers library reads"):
            self._tokenizer = loaded = tokenizers.Tokenizer.from_buffer(payload)
            self.dropout = float(getattr(loaded.model, "dropout", None) or 0)  # of BPE
            self._is_file = not (loaded.truncation or loaded.padding or self.dropout)
            # Otherwise these would truncate, pad, and draw other ids at every call, silently.
            loaded.no_truncation()
            loaded.no_padding()
            if self.dropout:
                loaded.model.dropout = None
            self._find_specials()
            self._check_growth()
            self._check_added_ids()
        self._load()

    @classmethod
    def beside(cls, other: TokenizersEngine) -> Self:
        """Makes an engine of this class from the loaded file of `other`."""
        # Also refuses huge ids, for which a faster library would make a table.
        loaded = {"_tokenizer": other._tokenizer, "vocabulary": other.vocabulary}
        engine = cls.__new__(cls)
        engine.__dict__ |= {**other.__dict__, **loaded}
        engine._load()
        return engine

    def register(self, tokens: Sequence[str]) -> None:
        """Makes those of `tokens` that are in the vocabulary control tokens."""
        known = [t for t in tokens if self._tokenizer.token_to_id(t) is not None]
        if new := [t for t in known if t not in self.specials]:
            self._tokenizer.add_special_tokens(new)
            self._is_file = False
            self.__dict__.pop("vocabulary", None)
            self._find_specials()
            self._load()

    def encode_batch(self, texts: Sequence[str], *, control: bool) -> tuple[Int32, Int64]:
        """Encodes all texts; returns flat ids and their offsets."""
        rule = "it must encode every text"
        with inside(self._where, rule), self._modes.using(self._tokenizer, control=control):
            found = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
            return flatten([encoding.ids for encoding in found])

    def decode(self, ids: Sequence[int]) -> str:
        """Decodes `ids` to text, including control tokens."""
        with inside(self._where, "it must decode ids"):
            return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    @cached_property
    def vocabulary(self) -> tuple[int, str]:
        """The highest id + 1, and the hash of the token of each id: a call of the library each."""
        size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        tokens = list(map(self._tokenizer.id_to_token, range(size)))
        if None in tokens:  # ids with gaps: the library has no other way to tell the highest
            size = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
            if size > MAX_IDS:
                rule = f"its ids must be below {MAX_IDS}"
                raise TokenizerError(sentence(self._where, rule, str(size - 1)))
            tokens = list(map(self._tokenizer.id_to_token, range(size)))
        return size, vocabulary_sha256(tokens)

    def id_to_token(self, token_id: int) -> str | None:
        """Returns the vocabulary entry with this id."""
        return self._tokenizer.id_to_token(token_id)

    def token_to_id(self, token: str) -> int | None:
        """Returns the id of a vocabulary entry."""
        known = self.specials.get(token)
        return self._tokenizer.token_to_id(token) if known is None else known

    def wrapping(self) -> tuple[list[int], list[int]]:
        """Returns the ids that the file adds before and after a text by default."""
        with inside(self._where, "it must encode every text"):
            whole = self._tokenizer.encode("a", add_special_tokens=True)
        inner = [i for i, special in enumerate(whole.special_tokens_mask) if not special]
        if not inner:
            return [], []
        return whole.ids[: inner[0]], whole.ids[inner[-1] + 1 :]

    def _load(self) -> None:
        """Prepares a faster engine; called again after control tokens were added."""

    def _check_growth(self) -> None:
        """Refuses a normalizer that lengthens text excessively."""
        normalizer = self._tokenizer.normalizer
        steps = [json.loads(normalizer.__getstate__())] if normalizer is not None else []
        growth = 1
        while steps:
            step = steps.pop()
            steps += step.get("normalizers", ())
            growth *= max(len(step.get("content") or ""), 1)
        if growth > MAX_GROWTH:
            rule = f"its normalizer must not make texts more than {MAX_GROWTH} times as long"
            raise TokenizerError(sentence(self._where, rule, f"{growth} times"))

    def _check_added_ids(self) -> None:
        """Refuse a post-processor that adds very many ids to a text, or repeats the text."""
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
            rule = f"its post-processor must not add more than {MAX_GROWTH} ids to a text"
            raise TokenizerError(sentence(self._where, rule, str(added)))

    def _find_specials(self) -> None:
        added = self._tokenizer.get_added_tokens_decoder()
        self.specials = {token.content: i for i, token in added.items() if token.special}
