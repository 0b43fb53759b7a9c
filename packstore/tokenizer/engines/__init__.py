"""Libraries that turn text into ids: one file each, one line in :data:`ENGINES`."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np

from packstore.errors import PackstoreError, TokenizerError, sentence
from packstore.records import Int32, Int64, to_offsets
from packstore.registry import Registry
from packstore.tokenizer.token_bound import TokenBound


class Engine(Protocol):
    """One loaded tokenizer. Never adds a token that the text does not ask for.

    Attributes:
        version: the library's version.
        specials: control tokens by their string: the strings that may become control ids.
        token_bound: tells how many tokens a text has at least; None where nobody can.
    """

    version: str
    specials: Mapping[str, int]

    @property
    def token_bound(self) -> TokenBound | None:
        """See above."""

    def register(self, tokens: Sequence[str]) -> None:
        """Makes `tokens` control tokens, where they are in the vocabulary."""

    def encode_batch(self, texts: Sequence[str], *, control: bool) -> tuple[Int32, Int64]:
        """Ids of all texts, flat, and their offsets.

        Args:
            texts: the texts.
            control: whether the strings of `specials` become their ids, or are plain text.

        Raises:
            TokenizerError: the library refuses the text.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, control tokens included."""

    def vocab_size(self) -> int:
        """Highest id + 1."""

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary entry with this id."""

    def token_to_id(self, token: str) -> int | None:
        """The id of a vocabulary entry."""

    def wrapping(self) -> tuple[list[int], list[int]]:
        """Ids that the tokenizer file puts before and after a text by itself."""


ENGINES: Registry[Callable[[bytes, str], Engine]] = Registry(
    "tokenizer engine",
    {
        "tokenizers": "packstore.tokenizer.engines.tokenizers:TokenizersEngine",
        "fastokens": "packstore.tokenizer.engines.fastokens:FastokensEngine",
        "gigatoken": "packstore.tokenizer.engines.gigatoken:GigatokenEngine",
        "sentencepiece": "packstore.tokenizer.engines.sentencepiece:SentencePieceEngine",
    },
    extras={"fastokens": "fast", "gigatoken": "fast", "sentencepiece": "sentencepiece"},
)
"""Name -> class, made from the bytes of the tokenizer file and its name for error texts."""


@contextlib.contextmanager
def inside(where: str, must: str, do: str = "") -> Iterator[None]:
    """A context in which whatever a library raises becomes a :class:`TokenizerError`.

    They have no narrower class, and a panic of Rust is not even an ``Exception``.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, PackstoreError):
        raise
    except BaseException as error:
        raise TokenizerError(sentence(where, must, str(error), do)) from error


def flatten(rows: Sequence[Sequence[int]]) -> tuple[Int32, Int64]:
    """Lists of ids as flat int32 and int64 offsets."""
    offsets = to_offsets(np.fromiter(map(len, rows), np.int64, len(rows)))
    return np.fromiter(itertools.chain.from_iterable(rows), np.int32, int(offsets[-1])), offsets
