"""Token ids in memory, such as rollouts: packed into the batches of a step, or laid end
to end.

Packing and the parser of records are imported when they are called: training from a
dataset needs neither numba nor a tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from packstore.config import PackConfig
from packstore.errors import ConfigError, RecordError, TokenizerError, sentence
from packstore.format.arrays import COUNTS, Examples, Float32, Packs, Rows, count_packs
from packstore.format.schema import require_kind
from packstore.torch.batch.batch import PackedBatch, StepInfo, collate
from packstore.torch.data.dataset import placement

Record = Mapping[str, Any] | tuple[Any, Any, Any]
"""The fields of a record; or a prompt, responses to it, and a reward for each."""

ROLLOUT = ("prompt", "responses", "scores")

REF_LOGPS = ("ref_chosen_logps", "ref_rejected_logps")
"""Fields of a pair that hold log-probs of a reference model, under TRL's names."""


def pack_in_memory(
    records: Sequence[Record] | Examples,
    pack_size: int,
    layout: Literal["concat", "shared_prefix"] = "concat",
    *,
    kind: str = "auto",
    fields: Mapping[str, str] | None = None,
    carry: Sequence[str] = (),
    rank: int | None = None,
    world_size: int | None = None,
) -> list[PackedBatch]:
    """Packs the examples of one optimizer step into batches of at most `pack_size`
    tokens.

    Batches go to the ranks in turn, equally many to each; a rank without one in the
    last turn gets one of weight 0. ``batch.step`` holds the divisors of the whole step.

    Args:
        records: token ids as lists, arrays or tensors, equal on every rank: ``(prompt,
            responses, rewards)`` of each prompt, rewards a number for each response; or
            dicts with the fields of :func:`packstore.pack`; or examples. A loss of
            tokens compares no responses, so those of a prompt that no pack holds may be
            given apart.
        pack_size: most tokens of a batch.
        layout: ``concat`` or ``shared_prefix``, which stores a prompt once for its
            responses.
        kind: ``preference``, ``sft`` or ``scored``; of records by default that of their
            fields.
        fields: canonical name -> name in the records.
        carry: names of fields to carry into ``batch.columns``.
        rank, world_size: defaults as in :class:`~packstore.torch.PackedDataset`.

    Returns:
        The batches of this rank. The example ids of records are their indices.

    Raises:
        RecordError: a record is not of the kind, or is longer than `pack_size`.
        ConfigError: there are no records, or the kind of examples is not given.
    """
    from packstore.pack.fill import fill
    from packstore.pack.layout import sizes
    from packstore.pack.plan import plan

    settings: dict[str, Any] = {
        "kind": kind,
        "fields": fields or {},
        "carry": tuple(carry),
    }
    config = PackConfig.of(pack_size=pack_size, layout=layout, **settings)
    rank, world_size = placement(rank, world_size)
    ref_logps = None
    if isinstance(records, Examples):
        examples = records
        if kind == "auto":
            raise ConfigError(
                "the kind of examples must be given: preference, sft or scored."
            )
    else:
        examples, ref_logps, kind = _examples(records, config)
    tokens = sizes(examples, layout)
    longest = int(tokens.argmax())
    if tokens[longest] > pack_size:
        raise RecordError(
            f"record {longest}: it must fit pack_size {pack_size}; found "
            f"{tokens[longest]} tokens. "
            "Raise pack_size, or leave the record out."
        )
    packing = plan(tokens, pack_size=pack_size, shuffle=False)
    packs = fill(examples, packing.offsets, layout, packing.order)
    if ref_logps is not None:
        packs = replace(
            packs, ref_logps=ref_logps.reshape(-1, 2)[packing.order].reshape(-1)
        )
    counts = dict(zip(COUNTS, count_packs(packs, kind).sum(0).tolist(), strict=True))
    counts |= {"tokens": int(packs.supervised.sum()), "sequences": len(packs.lengths)}
    batches = -(-len(packs) // world_size)

    def batch(number: int) -> PackedBatch:
        place = number * world_size + rank
        step = StepInfo(
            0, number, batches, examples.num_examples, world_size, len(packs), counts
        )
        fillers = int(place >= len(packs))
        return collate(packs.row(place % len(packs)), kind, step=step, fillers=fillers)

    return [batch(number) for number in range(batches)]


class PackCollator:
    """Lays packs, or records of token ids, end to end as one batch.

    Args:
        kind: ``preference``, ``sft`` or ``scored``.
        config: for records, `layout`, `fields` and `carry`; their shapes are those of
            :func:`pack_in_memory`. Limits on number and length do not apply.
        max_length: most tokens of a prompt with one side, of records of pairs: ends are
            cut off, as by TRL's ``truncation_mode="keep_start"``; default: none.

    Raises:
        UnknownNameError: `kind` is none of those.
    """

    def __init__(
        self,
        kind: str = "preference",
        config: PackConfig | None = None,
        *,
        max_length: int | None = None,
    ) -> None:
        require_kind(kind)
        self.kind, self.config, self.max_length = (
            kind,
            config or PackConfig(),
            max_length,
        )

    def __call__(self, items: Sequence[Packs | Mapping[str, Any]]) -> PackedBatch:
        """Collates these items into one batch."""
        if not items:
            raise ConfigError("a batch must hold at least one item; found none.")
        packs: Sequence[Any] = items
        if not all(isinstance(item, Packs) for item in items):
            from packstore.pack.fill import fill

            config = PackConfig.of(self.config, kind=self.kind)
            examples, ref_logps, _ = _examples([*map(self._read, items)], config)
            pack = fill(examples, np.array([0, len(items)]), config.layout)
            packs = [replace(pack, ref_logps=ref_logps)]
        return collate(packs, self.kind)

    def _read(self, record: Any) -> Any:
        """Returns a record; where it has ids of a pair, as TRL makes them, without its
        texts.
        """
        if not isinstance(record, Mapping) or "chosen_ids" not in record:
            return record
        record = {
            name: value for name, value in record.items() if f"{name}_ids" not in record
        }
        if self.max_length is None:
            return record
        kept = max(0, self.max_length - len(record["prompt_ids"]))
        sides = {name: record[name][:kept] for name in ("chosen_ids", "rejected_ids")}
        return {**record, **sides}


def _examples(
    records: Sequence[Record], config: PackConfig
) -> tuple[Examples, Float32 | None, str]:
    """Returns the examples of records, log-probs of a reference model `[S]` or None,
    the kind.
    """
    from packstore.tokenizer import RecordTokenizer, detect_kind, typed_carry

    if not len(records):
        raise ConfigError("records to pack must be one at least; found none.")
    for record in records:
        if isinstance(record, tuple) and len(record) != len(ROLLOUT):
            rule = "they must be (prompt, responses, rewards), or dicts"
            raise RecordError(sentence("records", rule, f"a tuple of {len(record)}"))
    values = [
        dict(zip(ROLLOUT, record, strict=True) if isinstance(record, tuple) else record)
        for record in records
    ]
    config = replace(
        config,
        carry=typed_carry(config, values),
        pack_size=1 << 24,
        max_length=None,
        # Rollouts may be equal. What is dropped is refused below, with its place.
        on={
            **{
                name: "drop" if answer == "error" else answer
                for name, answer in config.on.items()
            },
            "identical_sides": "keep",
        },
    )
    read = [
        {n: x for n, x in record.items() if n not in REF_LOGPS} for record in values
    ]
    rows = Rows(0, "records", "item", range(len(values)), read)
    kind = detect_kind(read[0], config, rows.where(0))
    try:
        examples, tally, _ = RecordTokenizer(None, config, kind)(rows)
    except TokenizerError as error:
        raise RecordError(
            "records: they must be token ids; found text. "
            "Tokenize them, or pack them by packstore.pack."
        ) from error
    if tally.dropped:
        bad = tally.samples[0]
        raise RecordError(
            sentence(
                bad.where,
                f"it must be an example [{bad.reason}]",
                bad.detail,
                "Correct it",
            )
        )
    logps: list[Any] = [record.get(name) for record in values for name in REF_LOGPS]
    present = [value is not None for value in logps]
    if kind != "preference" or not any(present):
        return examples, None, kind
    if not all(present):
        rule = f"it must have {' and '.join(REF_LOGPS)}, or no record may"
        raise RecordError(
            sentence(f"record {present.index(False) // 2}", rule, "not both")
        )
    return examples, np.array([float(value) for value in logps], np.float32), kind
