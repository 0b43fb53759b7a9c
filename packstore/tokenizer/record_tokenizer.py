"""The stage itself: parsed records in, examples and a tally out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from packstore.config import TokenizeConfig
from packstore.errors import TokenizerError, sentence
from packstore.records import Examples, Rows, Tally, example_id, to_offsets
from packstore.tokenizer.carry import carried_values, parse_carry, to_columns
from packstore.tokenizer.drafts import Draft, check_responses, draft_record
from packstore.tokenizer.encode import Encoded, Tokens, assemble, encode_drafts, starts_with
from packstore.tokenizer.fastest import FASTER
from packstore.tokenizer.overlong import fit
from packstore.tokenizer.refusals import Refused, raise_if_error
from packstore.tokenizer.shapes import Parsed, parse_record
from packstore.tokenizer.tokenizer import Tokenizer

log = logging.getLogger("packstore")

FIRST_RECORDS = 64
"""Records on which a faster engine must agree with the reference before it is used."""


@dataclass(slots=True)
class _Work:
    """One record on its way through the stage."""

    drafts: list[Draft] = field(default_factory=list)
    sequences: list[Tokens] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    carried: list[Any] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    refused: Refused | None = None


class RecordTokenizer:
    """Turns records into examples. Picklable, and the same rows always give the same examples.

    Args:
        tokenizer: the tokenizer; None only where all records are token ids already.
        config: the settings.
        kind: ``dpo``, ``sft`` or ``ranked``.

    Raises:
        TokenizerError: BOS or EOS is asked for, and the tokenizer has none.
        ConfigError: a carried column that cannot be.
    """

    def __init__(self, tokenizer: Tokenizer | None, config: TokenizeConfig, kind: str) -> None:
        self.tokenizer = tokenizer
        self.config = config
        self.kind = kind
        self.carry = parse_carry(config)
        for role, asked in (("bos", config.add_bos), ("eos", config.append_eos)):
            if asked and tokenizer and getattr(tokenizer, f"{role}_id") is None:
                must = f"it must name its {role.upper()} token, as the settings ask for one"
                raise TokenizerError(sentence(f"tokenizer {tokenizer.name}", must, "none"))

    def __call__(self, rows: Rows) -> tuple[Examples, Tally]:
        """The examples of `rows`, in order, and what happened to every record.

        Raises:
            RecordError: a record breaks a rule whose policy is ``error``.
            TokenizerError: text without a tokenizer, or messages without a chat template.
        """
        works = [self._prepare(value) for value in rows.values]
        encoded: Encoded = {}
        if self.tokenizer is not None:
            drafts = [draft for work in works if not work.refused for draft in work.drafts]
            encoded = encode_drafts(self.tokenizer, drafts)
        tally = Tally(read=len(works))
        kept: list[tuple[int, _Work]] = []
        for i, work in enumerate(works):
            try:
                if work.refused:
                    raise work.refused
                self._finish(work, encoded)
            except Refused as refused:
                raise_if_error(refused, rows.where(i), self.config)
                tally.drop(refused.reason, rows.where(i), refused.detail)
                continue
            for event in dict.fromkeys(work.events):
                tally.note(event, rows.where(i))
            kept.append((rows.ordinals[i], work))
        return self._examples(rows.source, kept), tally

    def _prepare(self, value: object) -> _Work:
        work = _Work()
        try:
            parsed = check_responses(parse_record(value, self.kind, self.config), self.config)
            work.rewards = parsed.rewards
            if self.carry and isinstance(value, dict):
                work.carried = carried_values(value, self.carry)
            if isinstance(parsed.prompt, np.ndarray):
                work.sequences = self._from_ids(parsed)
            else:
                work.drafts, work.events = draft_record(parsed, self._needed(), self.config)
        except Refused as refused:
            work.refused = refused
        return work

    def _needed(self) -> Tokenizer:
        if self.tokenizer is None:
            must = "it must be given, as the records hold text"
            raise TokenizerError(sentence("setting tokenizer", must, "none"))
        return self.tokenizer

    def _from_ids(self, parsed: Parsed) -> list[Tokens]:
        """Sequences of records that are token ids already; BOS and EOS are as they are there."""
        sequences = []
        for response in parsed.responses:
            ids = np.concatenate([np.asarray(parsed.prompt), np.asarray(response)]).astype(np.int32)
            if parsed.supervised is None:
                supervised = np.arange(len(ids)) >= len(parsed.prompt)
            else:
                supervised = parsed.supervised.copy()
            supervised[:1] = False
            head = 0
            if self.tokenizer is not None:
                if len(ids) and ids.max() >= self.tokenizer.vocab_size:
                    detail = f"id {ids.max()} in a vocabulary of {self.tokenizer.vocab_size}"
                    raise Refused("wrong_type", detail)
                head = int(starts_with(ids, self.tokenizer.bos_id))
            sequences.append(Tokens(ids, supervised, head))
        return sequences

    def _finish(self, work: _Work, encoded: Encoded) -> None:
        """Ids of the record's texts, cut to size."""
        if self.tokenizer is not None:
            work.sequences += [
                assemble(draft, encoded, self.tokenizer, self.config) for draft in work.drafts
            ]
        specials = self.tokenizer.special_ids if self.tokenizer else frozenset()
        for i, tokens in enumerate(work.sequences):
            if not tokens.supervised.any():
                raise Refused("unsupervised", f"response {i + 1} has no supervised token")
        work.sequences = fit(work.sequences, self.config, specials)
        work.events += [event for tokens in work.sequences for event in tokens.events]

    def _examples(self, source: int, kept: list[tuple[int, _Work]]) -> Examples:
        columns = to_columns([work.carried for _, work in kept], self.carry)
        if not kept:
            return Examples.empty(columns)
        sequences = [tokens for _, work in kept for tokens in work.sequences]
        return Examples(
            input_ids=np.concatenate([tokens.ids for tokens in sequences]).astype(np.int32),
            supervised=np.concatenate([tokens.supervised for tokens in sequences]),
            sequence_offsets=to_offsets(np.array([len(t.ids) for t in sequences], np.int64)),
            example_offsets=to_offsets(np.array([len(w.sequences) for _, w in kept], np.int64)),
            reward=np.array([r for _, work in kept for r in work.rewards], np.float32),
            example_ids=np.array([example_id(source, n) for n, _ in kept], np.int64),
            columns=columns,
        )


def agreeing(tokenizer: Tokenizer, rows: Rows, config: TokenizeConfig, kind: str) -> Tokenizer:
    """`tokenizer`, or the same with the reference engine if that one reads records differently.

    Args:
        tokenizer: as chosen by probe texts.
        rows: the first records of the input; some of them are tokenized with both engines.
        config: the settings of the job.
        kind: ``dpo``, ``sft`` or ``ranked``.
    """
    if tokenizer.engine_name not in FASTER:
        return tokenizer
    reference = replace(tokenizer, engine_name="tokenizers")
    n = min(len(rows.values), FIRST_RECORDS)
    few = replace(rows, ordinals=rows.ordinals[:n], values=rows.values[:n])
    fast, slow = (RecordTokenizer(t, config, kind)(few)[0] for t in (tokenizer, reference))
    same = np.array_equal(fast.input_ids, slow.input_ids) and np.array_equal(
        fast.supervised, slow.supervised
    )
    if same:
        return tokenizer
    log.warning("tokenizer engine %s is not used: its ids differ", tokenizer.engine_name)
    return reference
