"""Handles overlong examples: measures them in their layout, and truncates by the
settings.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, replace

import numpy as np

from packstore.config import TokenizeConfig
from packstore.format.arrays import Bool, Int64
from packstore.tokenizer.records.sequences import Tokens, common_prefix
from packstore.tokenizer.refusals import Refused


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of one example's sequences in its layout.

    Attributes:
        lengths: tokens of each sequence, int64 `[S]`.
        shared: number of tokens that each prompt shares with the first, `[S]`.
        left_out: tokens of each sequence that the layout does not store again, int64
            `[S]`.
        multiple: each stored sequence is padded to a multiple of it.
    """

    lengths: Int64
    shared: list[int]
    left_out: Int64
    multiple: int

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    def total(self, lengths: Int64) -> int:
        """Return the stored tokens of an example with sequences of these lengths."""
        stored_lengths = lengths - self.left_out
        padded = -(-stored_lengths // self.multiple) * self.multiple
        return int(padded.sum())


def fit(
    sequences: list[Tokens], config: TokenizeConfig, specials: frozenset[int]
) -> list[Tokens]:
    """Return the sequences of one example, truncated if necessary and allowed.

    Every sequence must fit ``config.sequence_limit``, and the example
    ``config.pack_size``, with sequences padded to ``config.pad_to_multiple``. Layout
    ``shared_prefix`` counts the prompt once.

    Args:
        specials: control tokens; a truncated response keeps those that end it.

    Raises:
        Refused: the example does not fit (``overlong``).
    """
    sizes = _measure(sequences, config)
    total = sizes.total(sizes.lengths)
    if sizes.longest <= config.sequence_limit and total <= config.pack_size:
        return sequences

    fitted = None
    if config.on["overlong"] == "truncate_prompt":
        fitted = _cut_prompts(sequences, sizes, config)
    elif config.on["overlong"] == "truncate_response":
        fitted = _cut_responses(sequences, sizes, config, specials)
    if fitted is not None:
        return fitted
    detail = (
        f"longest sequence {sizes.longest} of at most {config.sequence_limit} tokens, "
        f"example {total} of at most {config.pack_size}"
    )
    raise Refused("overlong", detail)


def _measure(sequences: list[Tokens], config: TokenizeConfig) -> _Sizes:
    prompts = [tokens.ids[: _prompt_length(tokens)] for tokens in sequences]
    shared = [common_prefix(prompts[0], prompt) for prompt in prompts]
    lengths = np.array([len(tokens.ids) for tokens in sequences], np.int64)
    left_out = np.zeros(len(lengths), np.int64)
    if config.layout == "shared_prefix":
        # The last shared token is stored again: it predicts the token behind it.
        left_out[1:] = [max(number - 1, 0) for number in shared[1:]]
    return _Sizes(lengths, shared, left_out, config.pad_to_multiple)


def _cut_prompts(
    sequences: list[Tokens], sizes: _Sizes, config: TokenizeConfig
) -> list[Tokens] | None:
    """Return the sequences with the shortest cut of the shared prompt that fits, or
    None.
    """
    # A prompt token that is stored once is also saved only once.
    is_saved: Bool = np.arange(len(sequences)) == 0
    if config.layout == "concat":
        is_saved = np.ones(len(sequences), np.bool_)
    head = min(sequences[0].head, min(sizes.shared))
    shortest = max(sizes.longest - config.sequence_limit, 1)
    cuts = range(shortest, min(sizes.shared) - max(head, 1) + 1)

    def negative_total(cut: int) -> int:  # bisect needs an increasing key
        return -sizes.total(sizes.lengths - cut * is_saved)

    index = bisect_left(cuts, -config.pack_size, key=negative_total)
    if index == len(cuts):
        return None
    end = head + cuts[index]
    return [_without(tokens, head, end, "truncated_prompt") for tokens in sequences]


def _cut_responses(
    sequences: list[Tokens],
    sizes: _Sizes,
    config: TokenizeConfig,
    specials: frozenset[int],
) -> list[Tokens] | None:
    """Return the sequences cut to the largest length that fits, or None."""

    def total_of(limit: int) -> int:
        return sizes.total(np.minimum(sizes.lengths, limit))

    limits = range(1, config.sequence_limit + 1)
    limit = bisect_right(limits, config.pack_size, key=total_of)
    fitted = []
    for tokens in sequences:
        cut = _cut_response(tokens, limit, specials)
        if cut is None:
            return None
        fitted.append(cut)
    return fitted


def _prompt_length(tokens: Tokens) -> int:
    """Return the number of tokens before the first supervised one."""
    if not tokens.supervised.any():
        return len(tokens.ids)
    return int(np.argmax(tokens.supervised))


def _without(tokens: Tokens, start: int, end: int, event: str) -> Tokens:
    """Return a sequence without a range of tokens, with an event to note."""
    removed = slice(start, end)
    return Tokens(
        ids=np.delete(tokens.ids, removed),
        supervised=np.delete(tokens.supervised, removed),
        head=tokens.head,
        events=[*tokens.events, event],
    )


def _cut_response(
    tokens: Tokens, limit: int, specials: frozenset[int]
) -> Tokens | None:
    """Return a sequence cut to `limit` tokens; None if no supervised text would
    remain.
    """
    if len(tokens.ids) <= limit:
        return tokens
    # A generation prompt behind the last turn can be dropped.
    end = len(tokens.ids) - int(np.argmax(tokens.supervised[::-1]))
    tail = _tail_length(tokens, end, specials)
    remaining = max(limit - tail, 0)
    if not tokens.supervised[:remaining].any():
        return None
    answer = replace(tokens, ids=tokens.ids[:end], supervised=tokens.supervised[:end])
    return _without(answer, remaining, max(end - tail, remaining), "truncated_response")


def _tail_length(tokens: Tokens, end: int, specials: frozenset[int]) -> int:
    """Return the number of tokens that end a turn: EOS, or a control token and its line
    break.
    """
    for number in (1, 2):
        if end <= number:
            break
        index = end - number
        if int(tokens.ids[index]) in specials and tokens.supervised[index]:
            return number
    return 0
