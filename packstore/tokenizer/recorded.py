"""The tokenizer that a dataset was made with, found again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packstore.errors import CompatibilityError, TokenizerError, sentence
from packstore.tokenizer.source import load_tokenizer
from packstore.tokenizer.tokenizer import Tokenizer


def recorded_tokenizer(
    provenance: Mapping[str, Any], path: str | None, where: str, do: str
) -> Tokenizer:
    """The tokenizer at `path`, or where the manifest says that it was.

    Args:
        provenance: of the dataset's manifest.
        path: as the user named it, or None.
        where: the dataset, as error texts name it.
        do: what the user can do if it is not at hand.

    Raises:
        TokenizerError: it does not load, or nothing says where it is.
        CompatibilityError: the dataset was packed with another one.
    """
    told = provenance.get("tokenizer") or {}
    chosen = path or told.get("path")
    if chosen is None:
        must = "its tokenizer must be known to write text"
        raise TokenizerError(sentence(where, must, do=do))
    try:
        tokenizer = load_tokenizer(chosen)
    except TokenizerError as error:
        if path is not None:
            raise
        raise TokenizerError(f"{error} {do}.") from error
    if told.get("sha256") not in (None, tokenizer.sha256):
        must = f"must be the tokenizer that {where} was packed with"
        found = f"sha256 {tokenizer.sha256[:12]}…, recorded {told['sha256'][:12]}…"
        raise CompatibilityError(sentence(str(chosen), must, found, do))
    return tokenizer
