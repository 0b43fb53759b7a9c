"""Token ids in memory, such as rollouts: packed into the batches of a step, or laid end
to end as one batch.

Packing and the parser of records are imported when they are called: training from a
dataset needs neither numba nor a tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from torch import Tensor

from packstore.config import PackConfig
from packstore.errors import (
    ConfigError,
    RecordError,
    TokenizerError,
    quote,
    sentence,
)
from packstore.format.arrays import (
    COUNTS,
    Examples,
    Float32,
    Int32,
    Int64,
    Packs,
    Rows,
    count_packs,
    ragged_indices,
    to_offsets,
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
    token_values: Mapping[str, str] | None = None,
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
        token_values: name in ``batch.token_columns`` -> field of the records with a
            number for each supervised token, such as ``{"old_logps": "logprobs"}``. The
            field is a list, array or tensor, by sequence, then position; or a list of
            these, one for each response.
        max_keys: maximum keys of a batch's attention, the tokens of its logical
            sequences, which take memory; default: 16 x `pack_size`.
        rank, world_size: defaults as in :class:`~packstore.torch.PackedDataset`.

    Returns:
        The batches of this rank. Records are reordered: in layout ``shared_prefix``,
        those that have a beginning of 16 tokens or more in common, besides what all
        records share, mostly get into one batch, the shorter before those that extend
        it. Example ids are the indices of the records.

    Raises:
        RecordError: a record is not of the kind, is longer than `pack_size`, has more
            keys than `max_keys`, or another number of token values than of supervised
            tokens.
        ConfigError: there are no records, or examples come without a kind, or with
            `token_values`.
    """
    from packstore.pack.fill import fill
    from packstore.pack.layout import count_keys, sizes
    from packstore.pack.plan import plan_examples, plan_prefixes

    settings: dict[str, Any] = {
        "kind": kind,
        "fields": fields or {},
        "carry": tuple(carry),
        "token_values": token_values or {},
        "max_keys": max_keys,
    }
    config = PackConfig.of(
        pack_size=pack_size, layout=layout, shuffle=False, **settings
    )
    rank, world_size = placement(rank, world_size)

    if isinstance(records, Examples):
        parsed = _without_fields(records, kind, token_values)
    else:
        parsed = _parse_records(records, config)
    examples = parsed.examples

    layout = config.with_layout_of(parsed.kind).layout
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
    packs = parsed.add_values(packs, order)
    return _batches_of_rank(packs, parsed.kind, examples.num_examples, rank, world_size)


@dataclass(frozen=True, eq=False)
class _ParsedRecords:
    """Records in memory as examples, and their values.

    Attributes:
        kind: kind of the examples.
        examples: the examples, in the order of the records.
        ref_logps: float32 `[S]`, log-probs of a reference model in nats, or None if no
            record has any.
        token_columns: name -> float32 `[n]`, a value for each supervised token.
    """

    kind: str
    examples: Examples
    ref_logps: Float32 | None = None
    token_columns: Mapping[str, Float32] = field(default_factory=dict)

    def add_values(self, packs: Packs, order: Int32 | Int64) -> Packs:
        """Return the packs of the examples with their values.

        Args:
            packs: the packs.
            order: int `[E]`, the position in `examples` of each example of the packs.
        """
        ref_logps = self.ref_logps
        if ref_logps is not None:
            ref_logps = ref_logps.reshape(-1, 2)[order].reshape(-1)
        token_columns = {}
        if self.token_columns:
            first_sequences = self.examples.example_offsets
            offsets = _target_offsets(self.examples)[first_sequences]
            targets = ragged_indices(offsets, order)
            token_columns = {
                name: values[targets] for name, values in self.token_columns.items()
            }
        return replace(packs, ref_logps=ref_logps, token_columns=token_columns)


def _target_offsets(examples: Examples) -> Int64:
    """Return where the supervised tokens of each sequence begin: int64 `[S + 1]`."""
    is_supervised = examples.supervised.view(np.int8)
    return to_offsets(is_supervised)[examples.sequence_offsets]


def _without_fields(
    examples: Examples, kind: str, token_values: Mapping[str, str] | None
) -> _ParsedRecords:
    """Return examples, which have no fields that could hold values."""
    if kind == "auto":
        raise ConfigError(
            "the kind of examples must be given: preference, sft or scored."
        )
    if token_values:
        raise ConfigError(
            "token_values names fields of records, which must be dicts; found Examples."
        )
    return _ParsedRecords(kind, examples)


def _require_fit(sizes: Int32 | Int64, setting: str, limit: int, unit: str) -> None:
    """Raise RecordError for the largest record if it is above a limit."""
    largest = int(sizes.argmax())
    if sizes[largest] > limit:
        raise RecordError(
            f"item {largest + 1}: it must fit {setting} {limit}; found "
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
        config: for records, `layout`, `fields`, `carry` and `token_values`; records
            have the shapes of :func:`pack_in_memory`. Limits on number and length do
            not apply. With `share_prefixes` ``pack``, `layout` ``auto`` is
            ``shared_prefix`` for ``sft``, too.
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
        parsed = _parse_records(records, config)
        offsets = np.array([0, len(records)])
        order = np.arange(len(records))
        if config.layout == "shared_prefix":
            order = _order_beginnings_first(parsed.examples)
        pack = fill(parsed.examples, offsets, config.layout, order, share="pack")
        return parsed.add_values(pack, order)

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


def _parse_records(records: Sequence[Record], config: PackConfig) -> _ParsedRecords:
    """Return the examples of records, and their values."""
    from packstore.tokenizer import (
        RecordTokenizer,
        check_token_values,
        detect_kind,
        find_value,
        typed_carry,
    )

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
    check_token_values(config)
    names = config.token_values
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
    token_columns = {}
    for column, name in names.items():
        values = [find_value(record, name) for record in fields]
        token_columns[column] = _collect_token_values(column, values, examples)
    ref_logps = _collect_ref_logps(fields, kind)
    return _ParsedRecords(kind, examples, ref_logps, token_columns)


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
    raises an error with its place. Two sampled responses may be equal. Values of tokens
    may be tensors, which the caller reads.
    """
    on = dict(config.on)
    for event, policy in on.items():
        if policy == "error":
            on[event] = "drop"
    on["identical_sides"] = "keep"
    return replace(
        config,
        carry=carry,
        ignore=(*config.ignore, *config.token_values.values()),
        token_values={},
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
                where=f"item {first_absent // len(REF_LOGPS) + 1}",
                rule=f"it must have {' and '.join(REF_LOGPS)}, or no record may",
                found="not both",
            )
        )
    return np.array([float(value) for value in values], np.float32)


def _collect_token_values(
    name: str, values_of_records: Sequence[Any], examples: Examples
) -> Float32:
    """Return the values of all supervised tokens, float32 `[n]`.

    Args:
        name: of the column.
        values_of_records: a list, array or tensor of each record, or a list of them,
            one for each sequence.
        examples: the records.
    """
    counts_of_sequences = np.diff(_target_offsets(examples))
    parts = []
    for record, values in enumerate(values_of_records):
        sequences = slice(*examples.example_offsets[record : record + 2])
        where = f"item {record + 1}, {name}"
        part = _token_values_of(values, counts_of_sequences[sequences], where)
        parts.append(part)
    return np.concatenate(parts)


def _token_values_of(values: Any, counts: Int64, where: str) -> Float32:
    """Return the values of a record's supervised tokens, float32 `[n]`.

    Args:
        values: numbers, flat or in a list for each sequence.
        counts: int64 `[K]`, supervised tokens of each sequence.
        where: the record and the column, for messages.
    """
    rule = f"must have a finite number for each of {counts.sum()} supervised tokens"
    try:
        is_flat = np.ndim(values[0]) == 0
        arrays = [_as_float32(part) for part in ([values] if is_flat else values)]
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise RecordError(sentence(where, rule, found=quote(values))) from error

    actual_counts = [len(array) for array in arrays]
    expected_counts = [int(counts.sum())] if is_flat else counts.tolist()
    if actual_counts != expected_counts:
        if len(expected_counts) > 1:
            rule += f", {expected_counts} in its responses"
        raise RecordError(sentence(where, rule, found=str(actual_counts)))
    flat = np.concatenate(arrays)
    if not np.isfinite(flat).all():
        raise RecordError(sentence(where, rule, found="NaN, None or infinite ones"))
    return flat


def _as_float32(values: Any) -> Float32:
    """Return a list, array or tensor of numbers as float32 `[n]`."""
    if isinstance(values, Tensor):
        # numpy has no bfloat16, and reads no tensor on a device or with a gradient.
        values = values.detach().float().cpu().numpy()
    array = np.asarray(values, np.float32)
    if array.ndim != 1:
        raise ValueError("numbers of tokens must be flat")
    return array
