"""Loads the tokenizer that a dataset was made with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packstore.errors import CompatibilityError, TokenizerError, sentence
from packstore.tokenizer.source import load_tokenizer
from packstore.tokenizer.tokenizer import Tokenizer


def recorded_tokenizer(
    provenance: Mapping[str, Any], path: str | None, where: str, do: str
) -> Tokenizer:
    """Loads the tokenizer at `path`, or at the path recorded in the manifest.

    Args:
        provenance: provenance of the dataset's manifest.
        path: path given by the user, or None.
        where: name of the dataset in error texts.
        do: remedy if the tokenizer is missing.

    Raises:
        TokenizerError: it does not load, or its path is unknown.
        CompatibilityError: the dataset was packed with another tokenizer.
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
