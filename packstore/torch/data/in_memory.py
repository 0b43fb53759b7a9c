"""Token ids in memory, such as rollouts: packed into the batches of a step, or laid end
to end as one batch.

Packing and the parser of records are imported when they are called: training from a
dataset needs neither numba nor a tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from packstore.config import PackConfig
from packstore.errors import ConfigError, RecordError, TokenizerError, sentence
from packstore.format.arrays import (
    COUNTS,
    Examples,
    Float32,
    Int32,
    Int64,
    Packs,
    Rows,
    count_packs,
)
from packstore.format.schema import require_kind
from packstore.torch.batch.batch import PackedBatch, StepInfo, collate
from packstore.torch.data.dataset import placement

Record = Mapping[str, Any] | tuple[Any, Any, Any]
"""The fields of a record; or a prompt, responses to it, and a reward for each."""

ROLLOUT = ("prompt", "responses", "scores")
"""Field names of a record that is a tuple."""

REF_LOGPS = ("ref_chosen_logps", "ref_rejected_logps")
"""Fields of a pair that hold log-probs of a reference model, under TRL's names."""

_NO_LIMIT = 1 << 24
"""A pack size that no record exceeds."""


def pack_in_memory(
    records: Sequence[Record] | Examples,
    pack_size: int,
    layout: Literal["auto", "concat", "shared_prefix"] = "auto",
    *,
    kind: str = "auto",
    fields: Mapping[str, str] | None = None,
    carry: Sequence[str] = (),
    max_keys: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> list[PackedBatch]:
    """Pack the examples of one optimizer step into batches of `pack_size` tokens.

    Batches go to the ranks in turn, equally many to each; a rank without one in the
    last turn gets one of weight 0. ``batch.step`` holds the divisors of the whole step.

    Args:
        records: token ids as lists, arrays or tensors, equal on every rank: ``(prompt,
            responses, rewards)`` of each prompt, rewards a number for each response; or
            dicts with the fields of :func:`packstore.pack`; or examples. With a loss of
            tokens, such as :class:`~packstore.torch.PolicyLoss`, the responses to a
            prompt that do not fit one pack may be split over several records.
        pack_size: maximum tokens of a batch.
        layout: ``concat``; or ``shared_prefix``, where a sequence leaves out what any
            earlier one of its batch begins with: the prompt of several responses, or
            the turns before, in a row for each turn of a dialogue; ``auto``: by the
            kind, as :func:`packstore.pack` chooses.
        kind: ``preference``, ``sft`` or ``scored``; default: the kind that the fields
            of the records belong to.
        fields: canonical name -> name in the records.
        carry: names of fields to carry into ``batch.columns``.
        max_keys: maximum keys of a batch's attention, the tokens of its logical
            sequences, which take memory; default: 16 x `pack_size`.
        rank, world_size: defaults as in :class:`~packstore.torch.PackedDataset`.

    Returns:
        The batches of this rank. Records are reordered: in layout ``shared_prefix``,
        those that have a beginning of 16 tokens or more in common, besides what all
        records share, mostly get into one batch, the shorter before those that extend
        it. Example ids are the indices of the records.

    Raises:
        RecordError: a record is not of the kind, is longer than `pack_size`, or has
            more keys than `max_keys`.
        ConfigError: there are no records, or examples come without a kind.
    """
    from packstore.pack.fill import fill
    from packstore.pack.layout import count_keys, sizes
    from packstore.pack.plan import plan_examples, plan_prefixes

    settings: dict[str, Any] = {
        "kind": kind,
        "fields": fields or {},
        "carry": tuple(carry),
        "max_keys": max_keys,
    }
    config = PackConfig.of(
        pack_size=pack_size, layout=layout, shuffle=False, **settings
    )
    rank, world_size = placement(rank, world_size)

    ref_logps = None
    if isinstance(records, Examples):
        examples = records
        if kind == "auto":
            raise ConfigError(
                "the kind of examples must be given: preference, sft or scored."
            )
    else:
        examples, ref_logps, kind = _parse_records(records, config)

    layout = config.with_layout_of(kind).layout
    keys = count_keys(examples)
    _require_fit(keys, "max_keys", config.key_limit, "keys")
    if keys.max() > pack_size:  # the tokens are no more than the keys
        _require_fit(sizes(examples, layout), "pack_size", pack_size, "tokens")
    if layout == "concat":
        tokens = keys.astype(np.int32)
        packing = plan_examples(tokens, tokens, config)
        order = packing.order
        offsets = packing.offsets
    else:
        order, offsets = plan_prefixes(examples, pack_size, max_keys)
    packs = fill(examples, offsets, layout, order, share="pack")
    packs = replace(packs, ref_logps=_reorder_ref_logps(ref_logps, order))
    return _batches_of_rank(packs, kind, examples.num_examples, rank, world_size)


def _require_fit(sizes: Int32 | Int64, setting: str, limit: int, unit: str) -> None:
    """Raise RecordError for the largest record if it is above a limit."""
    largest = int(sizes.argmax())
    if sizes[largest] > limit:
        raise RecordError(
            f"record {largest}: it must fit {setting} {limit}; found "
            f"{sizes[largest]} {unit}. Raise {setting}, or leave the record out."
        )


def _batches_of_rank(
    packs: Packs, kind: str, num_examples: int, rank: int, world_size: int
) -> list[PackedBatch]:
    """Return the batches of a rank, one pack each, for one optimizer step."""
    totals = count_packs(packs, kind).sum(axis=0).tolist()
    counts = dict(zip(COUNTS, totals, strict=True))
    counts["tokens"] = int(packs.supervised.sum())
    counts["sequences"] = len(packs.lengths)

    num_batches = math.ceil(len(packs) / world_size)
    batches = []
    for number in range(num_batches):
        step = StepInfo(
            index=0,
            batch=number,
            batches=num_batches,
            examples=num_examples,
            ranks=world_size,
            packs=len(packs),
            counts=counts,
        )
        pack_number = number * world_size + rank
        is_filler = pack_number >= len(packs)
        pack = packs.row(pack_number % len(packs))
        batches.append(collate(pack, kind, step=step, fillers=int(is_filler)))
    return batches


class PackCollator:
    """Lays packs, or records of token ids, end to end as one batch.

    In layout ``shared_prefix`` all records share, whatever `share_prefixes` is: a
    record leaves out what any earlier one begins with. So a record stands before those
    that extend it; otherwise the order stays. Example ids are the indices of the
    records.

    Args:
        kind: ``preference``, ``sft`` or ``scored``.
        config: for records, `layout`, `fields` and `carry`; records have the shapes of
            :func:`pack_in_memory`. Limits on number and length do not apply. With
            `share_prefixes` ``pack``, `layout` ``auto`` is ``shared_prefix`` for
            ``sft``, too.
        max_length: maximum tokens of a prompt with one side, for records of pairs: ends
            are cut off, as by TRL's ``truncation_mode="keep_start"``; default: none.

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
        self.kind = kind
        self.config = config or PackConfig()
        self.max_length = max_length

    def __call__(self, items: Sequence[Packs | Mapping[str, Any]]) -> PackedBatch:
        """Collate these items into one batch."""
        if not items:
            raise ConfigError("a batch must hold at least one item; found none.")
        packs: Sequence[Any] = items
        if not all(isinstance(item, Packs) for item in items):
            packs = [self._pack_records(items)]
        return collate(packs, self.kind)

    def _pack_records(self, records: Sequence[Any]) -> Packs:
        """Return one pack of all records."""
        from packstore.pack.fill import fill

        config = PackConfig.of(self.config, kind=self.kind).with_layout_of(self.kind)
        records = [self._prepare(record) for record in records]
        examples, ref_logps, _ = _parse_records(records, config)
        offsets = np.array([0, len(records)])
        if config.layout == "concat":
            return replace(fill(examples, offsets, "concat"), ref_logps=ref_logps)
        order = _order_beginnings_first(examples)
        pack = fill(examples, offsets, config.layout, order, share="pack")
        return replace(pack, ref_logps=_reorder_ref_logps(ref_logps, order))

    def _prepare(self, record: Any) -> Any:
        """Return a record; drop the texts of TRL's tokenized pairs, and cut their ids.

        Such a pair has ``chosen`` and ``chosen_ids``. The ids are cut to `max_length`.
        """
        if not isinstance(record, Mapping) or "chosen_ids" not in record:
            return record
        record = {
            name: value for name, value in record.items() if f"{name}_ids" not in record
        }
        if self.max_length is not None:
            max_response = max(0, self.max_length - len(record["prompt_ids"]))
            for name in ("chosen_ids", "rejected_ids"):
                record[name] = record[name][:max_response]
        return record


def _order_beginnings_first(examples: Examples) -> Int64:
    """Return an order in which an example stands before those that extend it.

    A turn that one row learns is context in the row that extends it, which can leave it
    out; the other way round it would be stored twice. Examples keep their order as far
    as possible. Their first sequences are compared.

    Returns:
        int64 `[E]`.
    """
    starts = examples.sequence_offsets[examples.example_offsets[:-1]].tolist()
    lengths = examples.lengths[examples.example_offsets[:-1]].tolist()
    # Big-endian bytes sort like the numbers.
    ids = examples.input_ids.astype(">i4")
    sequences = [
        ids[start : start + length].tobytes()
        for start, length in zip(starts, lengths, strict=True)
    ]

    # Sorted, an example stands behind those that it extends, the longest one last.
    parents: dict[int, int] = {}
    ancestors: list[int] = []
    for example in sorted(range(len(sequences)), key=sequences.__getitem__):
        sequence = sequences[example]
        while ancestors and not sequence.startswith(sequences[ancestors[-1]]):
            ancestors.pop()
        if ancestors:
            parents[example] = ancestors[-1]
        ancestors.append(example)

    order: dict[int, None] = {}  # a set that keeps its order
    for example in range(len(sequences)):
        chain = [example]
        # The ancestors of an example in the order are in it, too.
        while chain[-1] in parents and parents[chain[-1]] not in order:
            chain.append(parents[chain[-1]])
        order.update(dict.fromkeys(reversed(chain)))
    return np.array(list(order), np.int64)


def _reorder_ref_logps(
    ref_logps: Float32 | None, order: Int32 | Int64
) -> Float32 | None:
    """Return the log-probs of pairs, `[S]`, in the order of their examples."""
    if ref_logps is None:
        return None
    return ref_logps.reshape(-1, 2)[order].reshape(-1)


def _parse_records(
    records: Sequence[Record], config: PackConfig
) -> tuple[Examples, Float32 | None, str]:
    """Return the examples, their reference log-probs, and their kind.

    Log-probs are `[S]`, in nats, or None if no record has any.
    """
    from packstore.tokenizer import RecordTokenizer, detect_kind, typed_carry

    if not len(records):
        raise ConfigError("records to pack must be one at least; found none.")
    fields = [_fields_of(record) for record in records]
    without_ref_logps = [
        {name: value for name, value in record.items() if name not in REF_LOGPS}
        for record in fields
    ]
    rows = Rows(
        source=0,
        path="records",
        unit="item",
        ordinals=range(len(records)),
        values=without_ref_logps,
    )
    config = _without_limits(config, carry=typed_carry(config, fields))
    kind = detect_kind(without_ref_logps[0], config, rows.where(0))
    try:
        examples, tally, _ = RecordTokenizer(None, config, kind)(rows)
    except TokenizerError as error:
        raise RecordError(
            "records: they must be token ids; found text. "
            "Tokenize them, or pack them by packstore.pack."
        ) from error
    if tally.dropped:
        sample = tally.samples[0]
        raise RecordError(
            sentence(
                where=sample.where,
                rule=f"it must be an example [{sample.reason}]",
                found=sample.detail,
                remedy="Correct it",
            )
        )
    return examples, _collect_ref_logps(fields, kind), kind


def _fields_of(record: Record) -> dict[str, Any]:
    """Return the fields of a record; a tuple gets the names of :data:`ROLLOUT`."""
    if not isinstance(record, tuple):
        return dict(record)
    if len(record) != len(ROLLOUT):
        raise RecordError(
            sentence(
                where="records",
                rule="they must be (prompt, responses, rewards), or dicts",
                found=f"a tuple of {len(record)}",
            )
        )
    return dict(zip(ROLLOUT, record, strict=True))


def _without_limits(config: PackConfig, carry: Any) -> PackConfig:
    """Return the settings for records in memory, which have no maximum length.

    A refused record is dropped, even where the setting is to raise at once: the caller
    raises an error with its place. Two sampled responses may be equal.
    """
    on = dict(config.on)
    for event, policy in on.items():
        if policy == "error":
            on[event] = "drop"
    on["identical_sides"] = "keep"
    return replace(
        config,
        carry=carry,
        pack_size=_NO_LIMIT,
        max_keys=None,
        max_length=None,
        on=on,
    )


def _collect_ref_logps(
    records: Sequence[Mapping[str, Any]], kind: str
) -> Float32 | None:
    """Return the reference log-probs of pairs, `[S]`; None if no pair has any."""
    if kind != "preference":
        return None
    # Two for each record, in the order of its sequences: chosen, rejected.
    values: list[Any] = [record.get(name) for record in records for name in REF_LOGPS]
    is_present = [value is not None for value in values]
    if not any(is_present):
        return None
    if not all(is_present):
        first_absent = is_present.index(False)
        raise RecordError(
            sentence(
                where=f"record {first_absent // len(REF_LOGPS)}",
                rule=f"it must have {' and '.join(REF_LOGPS)}, or no record may",
                found="not both",
            )
        )
    return np.array([float(value) for value in values], np.float32)
