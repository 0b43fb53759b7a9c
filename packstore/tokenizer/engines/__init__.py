"""Tokenizer libraries: one file each, one line in :data:`ENGINES`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from packstore.errors import PackstoreError, TokenizerError, sentence
from packstore.format.arrays import Int32, Int64
from packstore.registry import Registry


class Engine(Protocol):
    """A loaded tokenizer, which adds no tokens of its own to a text."""

    version: str  # of the library
    specials: Mapping[str, int]  # control strings and their ids
    vocabulary: tuple[int, str]  # highest id + 1, and hash of the token of each id

    def register(self, tokens: Sequence[str]) -> None:
        """Make control tokens of all `tokens` that are in the vocabulary."""

    def encode_batch(
        self, texts: Sequence[str], *, control: bool
    ) -> tuple[Int32, Int64]:
        """Return flat ids of all texts, and their offsets."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, including control tokens."""

    def id_to_token(self, token_id: int) -> str | None:
        """Return the vocabulary entry with this id."""

    def token_to_id(self, token: str) -> int | None:
        """Return the id of a vocabulary entry."""

    def wrapping(self) -> tuple[list[int], list[int]]:
        """Return the ids that the tokenizer file adds before and after a text by
        default.
        """


ENGINES: Registry[Callable[[bytes, str], Engine]] = Registry(
    "tokenizer engine",
    {
        "tokenizers": "packstore.tokenizer.engines.tokenizers:TokenizersEngine",
        "fastokens": "packstore.tokenizer.engines.fastokens:FastokensEngine",
        "sentencepiece": (
            "packstore.tokenizer.engines.sentencepiece:SentencePieceEngine"
        ),
    },
    extras={"tokenizers": "", "sentencepiece": "sentencepiece"},
)
"""Name -> class, called with the bytes of the tokenizer file and its name for error
texts.
"""


@contextlib.contextmanager
def inside(where: str, rule: str, remedy: str = "") -> Iterator[None]:
    """Convert any exception of a library to a :class:`TokenizerError`.

    The libraries raise no narrower class, and a Rust panic is not even an
    ``Exception``.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, PackstoreError):
        raise
    except BaseException as error:
        raise TokenizerError(sentence(where, rule, str(error), remedy)) from error
