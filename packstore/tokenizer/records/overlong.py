"""Handles overlong examples: measures them in their layout, and truncates by the settings."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from packstore.config import TokenizeConfig
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
    size, multiple = config.pack_size, config.pad_to_multiple
    longest, total = int(lengths.max()), _padded(lengths - left_out, multiple)
    if longest <= config.sequence_limit and total <= size:
        return sequences
    if config.on["overlong"] == "truncate_prompt":
        # A prompt token stored once is also saved only once.
        stored = (np.arange(len(lengths)) == 0) | (config.layout == "concat")
        over = int(lengths.sum() - left_out.sum()) - size
        cut = max(longest - config.sequence_limit, -(-over // int(stored.sum())), 1)
        head = min(sequences[0].head, min(shared))
        most = min(shared) - max(head, 1)
        while cut <= most and _padded(lengths - left_out - cut * stored, multiple) > size:
            cut += 1
        if cut <= most:
            return [_without(s, head, head + cut, "truncated_prompt") for s in sequences]
    if config.on["overlong"] == "truncate_response":
        limit = _common_limit(lengths, config.sequence_limit, size + int(left_out.sum()))
        while limit > 0 and _padded(np.minimum(lengths, limit) - left_out, multiple) > size:
            limit -= 1
        fitted = [_cut_response(s, limit, specials) for s in sequences]
        if all(tokens is not None for tokens in fitted):
            return [tokens for tokens in fitted if tokens is not None]
    raise Refused(
        "overlong",
        f"longest sequence {longest} of at most {config.sequence_limit} tokens, "
        f"example {total} of at most {config.pack_size}",
    )


def _padded(lengths: np.ndarray, multiple: int) -> int:
    """Tokens of segments of these lengths, each padded to a multiple."""
    return int((-(-lengths // multiple) * multiple).sum())


def _prompt_length(tokens: Tokens) -> int:
    """Tokens before the first supervised one."""
    return int(np.argmax(tokens.supervised)) if tokens.supervised.any() else len(tokens.ids)


def _without(tokens: Tokens, start: int, end: int, event: str) -> Tokens:
    gone = slice(start, end)
    ids, supervised = np.delete(tokens.ids, gone), np.delete(tokens.supervised, gone)
    return Tokens(ids, supervised, tokens.head, [*tokens.events, event])


def _common_limit(lengths: np.ndarray, limit: int, budget: int) -> int:
    """The largest length to which all can be truncated so that their sum fits `budget`."""
    ordered = np.sort(np.minimum(lengths, limit))
    for i, length in enumerate(ordered):
        share = budget // (len(ordered) - i)
        if length > share:
            return int(share)
        budget -= int(length)
    return limit


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
