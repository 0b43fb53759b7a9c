"""Parses and measures tokenized records that were never packed, in memory.

The fields are those of ``packstore export jsonl`` and of the collators of other trainers:

    dpo     prompt, chosen, rejected [, chosen_labels, rejected_labels]
            [, chosen_reward, rejected_reward] [, ref_chosen_logps, ref_rejected_logps]
    sft     input_ids, labels; or input_ids and a mask of what is supervised; or prompt, response
    ranked  prompt, responses, scores [, response_labels]

and optionally `example_id`. ``prompt_ids``, ``chosen_ids`` and so on are synonyms. Without a
prompt, responses are whole sequences and need labels. Values are lists, arrays or tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packstore.config import PackConfig
from packstore.errors import RecordError, quote, sentence
from packstore.format.arrays import IGNORE_INDEX, Bool, Column, Examples, Float32, Int32, to_offsets
from packstore.format.schema import KINDS
from packstore.online_packing.sizes import Measured, measure_examples

Record = Mapping[str, Any]

SPELLINGS: dict[str, tuple[str, ...]] = {
    "prompt": ("prompt_ids", "prompt_input_ids", "prompt"),
    "chosen": ("chosen_ids", "chosen_input_ids", "chosen"),
    "rejected": ("rejected_ids", "rejected_input_ids", "rejected"),
    "response": ("response_ids", "completion_ids", "response", "completion"),
    "mask": ("loss_mask", "completion_mask", "assistant_masks"),
}
"""Synonyms of field names; names of ids come first, as a record may have text fields as well."""

_LIMIT = 1 << 31


@dataclass(frozen=True, eq=False)
class Tokenized:
    """Records as examples.

    Attributes:
        examples: the E examples.
        ref_logps: float32 `[S]` in nats; None unless every record has them.
    """

    examples: Examples
    ref_logps: Float32 | None

    def measured(self, layout: str, kind: str) -> Measured:
        """Measures each example, of kind `kind`, in `layout`."""
        return measure_examples(self.examples, layout, kind)


class _Wrong(Exception):
    """A requirement that one record does not meet."""


def kind_of(record: Record) -> str:
    """Returns the kind of a record by its fields.

    Raises:
        RecordError: the fields fit no kind.
    """
    if isinstance(record, Mapping):
        if record.get("responses") is not None:
            return "ranked"
        if _get(record, "chosen") is not None:
            return "dpo"
        if record.get("input_ids") is not None or _get(record, "response") is not None:
            return "sft"
    found = (
        f"fields {', '.join(map(str, record))}" if isinstance(record, Mapping) else quote(record)
    )
    must = "it must be a mapping with chosen and rejected, input_ids, or responses"
    raise RecordError(sentence("the first record", must, found))


def with_types(config: PackConfig, records: Sequence[Record]) -> PackConfig:
    """Completes `config` with the types of carried columns in `records`, where it names none."""
    if not config.carry:
        return config
    from packstore.tokenizer.records.carry import typed_carry

    return replace(config, carry=typed_carry(config, records))


def examples_of(
    records: Sequence[Record], numbers: Sequence[int], kind: str, config: PackConfig
) -> Tokenized:
    """Parses records into examples.

    Args:
        records: records of one kind.
        numbers: index of each in the data; its example id, unless it has one.
        kind: ``dpo``, ``sft`` or ``ranked``.
        config: its `carry` names the carried columns.

    Raises:
        RecordError: a record is not of this kind; names its number.
        ConfigError: a carried column is not possible.
    """
    sequences: list[tuple[Int32, Bool]] = []
    rewards: list[float] = []
    counts: list[int] = []
    ids: list[int] = []
    refs: list[float] = []
    for record, number in zip(records, numbers, strict=True):
        try:
            own, scores = _PARSE[kind](record)
            refs += _ref_logps(record)
            ids.append(_whole(record.get("example_id", number)))
        except _Wrong as wrong:
            raise RecordError(sentence(f"record {number}", str(wrong))) from None
        sequences += own
        rewards += scores
        counts.append(len(own))
    examples = Examples(
        input_ids=np.concatenate([np.empty(0, np.int32), *(x for x, _ in sequences)]),
        supervised=np.concatenate([np.empty(0, np.bool_), *(on for _, on in sequences)]),
        sequence_offsets=to_offsets(np.array([len(x) for x, _ in sequences], np.int64)),
        example_offsets=to_offsets(np.array(counts, np.int64)),
        reward=np.array(rewards, np.float32),
        example_ids=np.array(ids, np.int64),
        columns=_columns(records, numbers, config),
    )
    whole = len(refs) == len(sequences) and KINDS[kind] == 2
    return Tokenized(examples, np.array(refs, np.float32) if whole else None)


def _pair(record: Record) -> tuple[list[tuple[Int32, Bool]], list[float]]:
    names = ("chosen", "rejected")
    prompt = _get(record, "prompt")
    sequences = [
        _sequence(prompt, _need(record, name), record.get(f"{name}_labels"), name) for name in names
    ]
    rewards = [record.get(f"{name}_reward") for name in names]
    if all(reward is None for reward in rewards):
        return sequences, [1.0, 0.0]
    if any(reward is None for reward in rewards):
        raise _Wrong("its rewards must stand on both sides, or on none")
    return sequences, [_number(r, f"{n}_reward") for r, n in zip(rewards, names, strict=True)]


def _single(record: Record) -> tuple[list[tuple[Int32, Bool]], list[float]]:
    label = record.get("label")
    if isinstance(label, bool | np.bool_) and not label:
        raise _Wrong("it must be an answer to learn; found label False: leave such records out")
    if record.get("input_ids") is None:
        prompt, response = _need(record, "prompt"), _need(record, "response")
        return [_sequence(prompt, response, None, "response")], [1.0]
    ids, mask = _ids(record["input_ids"], "input_ids"), _get(record, "mask")
    if record.get("labels") is not None or mask is None:
        return [_sequence(None, ids, _need(record, "labels"), "input_ids")], [1.0]
    on = np.asarray(mask).astype(np.bool_)
    if on.shape != ids.shape:
        raise _Wrong("its mask must have one value for each of input_ids")
    return [_sequence(None, ids, np.where(on, ids, IGNORE_INDEX), "input_ids")], [1.0]


def _ranking(record: Record) -> tuple[list[tuple[Int32, Bool]], list[float]]:
    prompt, responses, scores = (_need(record, n) for n in ("prompt", "responses", "scores"))
    labels = record.get("response_labels") or [None] * len(responses)
    if not 2 <= len(responses) == len(scores) == len(labels):
        raise _Wrong("it must have two responses at least, and as many scores")
    pairs = zip(responses, labels, strict=True)
    sequences = [_sequence(prompt, x, own, f"response {i}") for i, (x, own) in enumerate(pairs)]
    return sequences, [_number(score, "a score") for score in scores]


_PARSE = {"dpo": _pair, "sft": _single, "ranked": _ranking}


def _sequence(prompt: Any, response: Any, labels: Any, name: str) -> tuple[Int32, Bool]:
    """Ids and supervision mask of a sequence: by the response's labels, else the whole response."""
    before = np.empty(0, np.int32) if prompt is None else _ids(prompt, "prompt")
    ids = _ids(response, name)
    if labels is None:
        if prompt is None:
            raise _Wrong(f"without a prompt, {name} needs labels")
        on = np.ones(len(ids), np.bool_)
    else:
        told = np.asarray(labels)
        if told.shape != ids.shape or np.any((told != ids) & (told != IGNORE_INDEX)):
            raise _Wrong(f"each label of {name} must be the id at its place, or {IGNORE_INDEX}")
        on = told != IGNORE_INDEX
    whole, supervised = np.concatenate([before, ids]), np.concatenate([before < 0, on])
    supervised[:1] = False
    if not supervised.any():
        raise _Wrong(f"{name} must have a supervised token after the first of its sequence")
    return whole, supervised


def _ids(value: Any, name: str) -> Int32:
    try:
        array = np.asarray(value)
    except ValueError:  # lists of different lengths
        array = np.asarray(None)
    if array.size == 0 and array.ndim == 1:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise _Wrong(f"{name} must be token ids; found {quote(value)}")
    if array.min() < 0 or array.max() >= _LIMIT:
        raise _Wrong(f"token ids of {name} must lie in 0..{_LIMIT - 1}")
    return array.astype(np.int32)


def _ref_logps(record: Record) -> list[float]:
    values = [record.get(f"ref_{name}_logps") for name in ("chosen", "rejected")]
    return [_number(v, "a reference log-prob") for v in values if v is not None]


def _number(value: Any, name: str) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if not math.isfinite(found):
        raise _Wrong(f"{name} must be a finite number; found {quote(value)}")
    return found


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise _Wrong(f"example_id must be a whole number; found {quote(value)}")
    return int(value)


def _get(record: Record, name: str) -> Any:
    for spelling in SPELLINGS.get(name, (name,)):
        if record.get(spelling) is not None:
            return record[spelling]
    return None


def _need(record: Record, name: str) -> Any:
    if not isinstance(record, Mapping):
        raise _Wrong(f"it must be a mapping; found {quote(record)}")
    value = _get(record, name)
    if value is None:
        there = ", ".join(map(str, record)) or "none"
        raise _Wrong(f"it must have a field {name}; found {there}")
    return value


def _columns(
    records: Sequence[Record], numbers: Sequence[int], config: PackConfig
) -> dict[str, Column]:
    """The carried columns; imports the tokenizer package only if there are any."""
    if not config.carry:
        return {}
    from packstore.tokenizer.records.carry import carried_values, parse_carry, to_columns
    from packstore.tokenizer.refusals import Refused

    types, rows = parse_carry(config), []
    for record, number in zip(records, numbers, strict=True):
        try:
            rows.append(carried_values(record, types))
        except Refused as refused:
            raise RecordError(sentence(f"record {number}", refused.detail)) from None
    return to_columns(rows, types)
