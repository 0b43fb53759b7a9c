"""Handles overlong examples: measures them in their layout, and truncates by the settings."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import replace

import numpy as np

from packstore.config import TokenizeConfig
from packstore.format.arrays import Int64
from packstore.tokenizer.records.sequences import Tokens, common_prefix
from packstore.tokenizer.refusals import Refused


def fit(sequences: list[Tokens], config: TokenizeConfig, specials: frozenset[int]) -> list[Tokens]:
    """Returns the sequences of one example, truncated if necessary and allowed.

    Every sequence must fit ``config.sequence_limit``, and the example ``config.pack_size``, with
    sequences padded to ``config.pad_to_multiple``. Layout ``shared_prefix`` counts the prompt once.
    A truncated response keeps those of the control tokens `specials` that end it.
    """
    prompts = [_prompt_length(s) for s in sequences]
    shared = [
        common_prefix(sequences[0].ids[: prompts[0]], s.ids[:p])
        for s, p in zip(sequences, prompts, strict=True)
    ]
    lengths = np.array([len(s.ids) for s in sequences], np.int64)
    left_out = np.zeros(len(lengths), np.int64)
    if config.layout == "shared_prefix":
        left_out[1:] = [max(n - 1, 0) for n in shared[1:]]

    def stored(lengths: Int64) -> int:
        """Tokens of an example of sequences of these lengths, each padded to a multiple."""
        multiple = config.pad_to_multiple
        return int((-(-(lengths - left_out) // multiple) * multiple).sum())

    longest, total = int(lengths.max()), stored(lengths)
    if longest <= config.sequence_limit and total <= config.pack_size:
        return sequences
    if config.on["overlong"] == "truncate_prompt":
        # A prompt token stored once is also saved only once.
        saved = (np.arange(len(lengths)) == 0) | (config.layout == "concat")
        head = min(sequences[0].head, min(shared))
        cuts = range(max(longest - config.sequence_limit, 1), min(shared) - max(head, 1) + 1)
        fits = bisect_left(cuts, -config.pack_size, key=lambda n: -stored(lengths - n * saved))
        if fits < len(cuts):
            return [_without(s, head, head + cuts[fits], "truncated_prompt") for s in sequences]
    if config.on["overlong"] == "truncate_response":
        limits = range(1, config.sequence_limit + 1)
        limit = bisect_right(limits, config.pack_size, key=lambda n: stored(np.minimum(lengths, n)))
        fitted = [cut for s in sequences if (cut := _cut_response(s, limit, specials))]
        if len(fitted) == len(sequences):
            return fitted
    raise Refused(
        "overlong",
        f"longest sequence {longest} of at most {config.sequence_limit} tokens, "
        f"example {total} of at most {config.pack_size}",
    )


def _prompt_length(tokens: Tokens) -> int:
    """Tokens before the first supervised one."""
    return int(np.argmax(tokens.supervised)) if tokens.supervised.any() else len(tokens.ids)


def _without(tokens: Tokens, start: int, end: int, event: str) -> Tokens:
    gone = slice(start, end)
    ids, supervised = np.delete(tokens.ids, gone), np.delete(tokens.supervised, gone)
    return Tokens(ids, supervised, tokens.head, [*tokens.events, event])


def _cut_response(tokens: Tokens, limit: int, specials: frozenset[int]) -> Tokens | None:
    """Truncates a sequence to `limit` tokens; None if no supervised text would be left."""
    if len(tokens.ids) <= limit:
        return tokens
    tail = 0  # the tokens that end a turn: EOS, or a control token and the line break after it
    # A generation prompt after the last turn can be dropped.
    end = len(tokens.ids) - int(np.argmax(tokens.supervised[::-1]))
    for n in (1, 2):
        if end > n and int(tokens.ids[end - n]) in specials and tokens.supervised[end - n]:
            tail = n
            break
    kept = max(limit - tail, 0)
    if not tokens.supervised[:kept].any():
        return None
    answered = replace(tokens, ids=tokens.ids[:end], supervised=tokens.supervised[:end])
    return _without(answered, kept, max(end - tail, kept), "truncated_response")
