"""Truncates or refuses examples that are too long for a sequence or a pack."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np

from packstore.config import TokenizeConfig
from packstore.format.arrays import Bool, Int64
from packstore.tokenizer.records.sequences import Tokens, common_prefix
from packstore.tokenizer.refusals import Refused


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of one example's sequences, in tokens.

    Attributes:
        lengths: of each sequence, int64 `[S]`.
        shared: length of the prefix that each prompt shares with the first one, `[S]`.
        left_out: number of tokens of each sequence that the layout does not store
            again, int64 `[S]`.
        multiple: each stored sequence is padded to a multiple of it.
    """

    lengths: Int64
    shared: list[int]
    left_out: Int64
    multiple: int

    @property
    def longest(self) -> int:
        return int(self.lengths.max())

    @property
    def keys(self) -> int:
        """Tokens of all sequences, which the setting `max_keys` limits."""
        return int(self.lengths.sum())

    def total(self, lengths: Int64) -> int:
        """Return the stored tokens of the example with its sequences cut to `lengths`.

        Args:
            lengths: int64 `[S]`.
        """
        stored_lengths = lengths - self.left_out
        padded = -(-stored_lengths // self.multiple) * self.multiple
        return int(padded.sum())


def fit(
    sequences: list[Tokens], config: TokenizeConfig, specials: frozenset[int]
) -> list[Tokens]:
    """Return the sequences of one example, truncated if necessary and allowed.

    Every sequence must fit ``config.sequence_limit``, and the example
    ``config.pack_size``, with sequences padded to ``config.pad_to_multiple``; layout
    ``shared_prefix`` counts shared tokens once. All sequences together, with shared
    tokens in each, must fit ``config.key_limit``.

    Args:
        specials: control tokens; a truncated response keeps those that end it.

    Raises:
        Refused: the example does not fit (``overlong``).
    """
    sizes = _measure(sequences, config)
    total = sizes.total(sizes.lengths)
    if total > config.pack_size and config.layout == "shared_prefix":
        # Sequences may share more with others than with the first one.
        sizes = replace(sizes, left_out=_find_left_out(sequences))
        total = sizes.total(sizes.lengths)
    if (
        sizes.longest <= config.sequence_limit
        and total <= config.pack_size
        and sizes.keys <= config.key_limit
    ):
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
    if sizes.keys > config.key_limit:
        detail += (
            f", all sequences {sizes.keys} of at most {config.key_limit} (max_keys)"
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


def _find_left_out(sequences: list[Tokens]) -> Int64:
    """Return the tokens of each sequence that layout ``shared_prefix`` does not store
    again, int64 `[S]`.
    """
    left_out = np.zeros(len(sequences), np.int64)
    for i, tokens in enumerate(sequences):
        prompt = tokens.ids[: _prompt_length(tokens)]
        for earlier in sequences[:i]:
            shared = common_prefix(earlier.ids, prompt)
            left_out[i] = max(left_out[i], shared - 1)
    return left_out


def _cut_prompts(
    sequences: list[Tokens], sizes: _Sizes, config: TokenizeConfig
) -> list[Tokens] | None:
    """Return the sequences with the shortest cut of the shared prompt that fits, or
    None.
    """
    # Layout concat stores the prompt with each sequence, others with the first alone.
    stores_prompt: Bool = np.full(len(sequences), config.layout == "concat")
    stores_prompt[0] = True

    shared = min(sizes.shared)
    head = min(sequences[0].head, shared)  # BOS and system turn stay
    min_cut = max(sizes.longest - config.sequence_limit, 1)
    max_cut = shared - max(head, 1)  # one token must remain, to predict the response
    cuts = range(min_cut, max_cut + 1)

    def fits(cut: int) -> bool:
        total = sizes.total(sizes.lengths - np.where(stores_prompt, cut, 0))
        keys = sizes.keys - cut * len(sequences)
        return total <= config.pack_size and keys <= config.key_limit

    index = bisect_left(cuts, True, key=fits)
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

    def exceeds(limit: int) -> bool:
        lengths = np.minimum(sizes.lengths, limit)
        keys = int(lengths.sum())
        return sizes.total(lengths) > config.pack_size or keys > config.key_limit

    limits = range(1, config.sequence_limit + 1)
    # The largest that fits, as limits count from 1.
    limit = bisect_left(limits, True, key=exceeds)

    # A cut response keeps the tokens that end it, so it may share one token less than
    # before with the prompts behind it. Then shorter responses are needed.
    while limit > 0:
        fitted = []
        for tokens in sequences:
            cut = _cut_response(tokens, limit, specials)
            if cut is None:
                return None
            fitted.append(cut)
        if _fit_pack(fitted, sizes, config):
            return fitted
        limit -= 1
    return None


def _fit_pack(sequences: list[Tokens], sizes: _Sizes, config: TokenizeConfig) -> bool:
    """Return True if cut sequences fit a pack, by what they share after the cut."""
    if config.layout == "shared_prefix":
        sizes = replace(sizes, left_out=_find_left_out(sequences))
    lengths = np.array([len(tokens.ids) for tokens in sequences], np.int64)
    return sizes.total(lengths) <= config.pack_size


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
    # Tokens after the last supervised one, such as a generation prompt, are dropped.
    end = len(tokens.ids) - int(np.argmax(tokens.supervised[::-1]))
    answer = replace(tokens, ids=tokens.ids[:end], supervised=tokens.supervised[:end])

    tail = _tail_length(answer, specials)
    cut_start = max(limit - tail, 0)
    cut_end = max(end - tail, cut_start)  # an empty cut if dropping them was enough
    if not tokens.supervised[:cut_start].any():
        return None
    return _without(answer, cut_start, cut_end, "truncated_response")


def _tail_length(answer: Tokens, specials: frozenset[int]) -> int:
    """Return the number of tokens that end the last turn, or 0.

    They are a control token, such as EOS, or one with another token after it: the line
    break of many templates.
    """
    for length in (1, 2):
        if len(answer.ids) <= length:
            break
        if int(answer.ids[-length]) in specials and answer.supervised[-length]:
            return length
    return 0
