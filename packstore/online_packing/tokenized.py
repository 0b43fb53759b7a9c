"""Converts tokenized records that were never packed to examples, in memory.

Their fields are those of a packing job (:mod:`packstore.tokenizer.records`), under the names of ids
first, as a record may hold its texts as well: ``prompt_ids``, ``chosen_input_ids`` and so on; also
`ref_chosen_logps` and `ref_rejected_logps`, and `example_id`. Values are lists, arrays or tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from packstore.config import ID_SPELLINGS, PackConfig
from packstore.errors import RecordError, quote, sentence
from packstore.format.arrays import Examples, Float32, to_offsets
from packstore.format.schema import KINDS
from packstore.online_packing.sizes import Measured, measure_examples
from packstore.tokenizer import parse_carry, typed_carry
from packstore.tokenizer.records.carry import carried_values, to_columns
from packstore.tokenizer.records.fields import Fields, check_feedback, number
from packstore.tokenizer.records.ids import id_sequences, unwrapped
from packstore.tokenizer.records.sequences import Sequences, Tokens
from packstore.tokenizer.records.shapes import kind_of as kind_of_fields
from packstore.tokenizer.records.shapes import parse_fields
from packstore.tokenizer.refusals import Refused

Record = Mapping[str, Any]


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


def kind_of(record: Record, config: PackConfig) -> str:
    """Returns the kind of a record by its fields.

    Raises:
        RecordError: the fields fit no kind.
    """
    found = quote(record)
    if isinstance(record, Mapping):
        if kind := kind_of_fields(Fields(record, config, ID_SPELLINGS)):
            return kind
        found = f"fields {', '.join(map(str, record))}"
    must = "it must be a mapping with chosen and rejected, input_ids, or responses"
    do = "Name its fields by the setting fields, or set kind"
    raise RecordError(sentence("the first record", must, found, do))


def with_types(config: PackConfig, records: Sequence[Record]) -> PackConfig:
    """Completes `config` with the types of carried columns in `records`, where it names none."""
    return replace(config, carry=typed_carry(config, records)) if config.carry else config


def examples_of(
    records: Sequence[Record], numbers: Sequence[int], kind: str, config: PackConfig
) -> Tokenized:
    """Parses records into examples.

    Args:
        records: records of one kind.
        numbers: index of each in the data; its example id, unless it has one.
        kind: ``preference``, ``sft`` or ``ranked``.
        config: its `fields` maps names of fields, and its `carry` names the carried columns.

    Raises:
        RecordError: a record is not of this kind; names its number.
        ConfigError: a carried column is not possible.
    """
    types = parse_carry(config)
    sequences: list[Tokens] = []
    rewards: list[float] = []
    counts: list[int] = []
    ids: list[int] = []
    refs: list[float] = []
    rows: list[list[Any]] = []
    for record, index in zip(records, numbers, strict=True):
        try:
            own, scores = _parse(record, kind, config)
            refs += _ref_logps(record)
            ids.append(_example_id(record.get("example_id", index)))
            rows.append(carried_values(record, types))
        except Refused as refused:
            raise refused.as_error(f"record {index}") from None
        sequences += own
        rewards += scores
        counts.append(len(own))
    joined = Sequences.of(sequences)
    examples = Examples(
        input_ids=joined.ids,
        supervised=joined.supervised,
        sequence_offsets=joined.offsets,
        example_offsets=to_offsets(np.array(counts, np.int64)),
        reward=np.array(rewards, np.float32),
        example_ids=np.array(ids, np.int64),
        columns=to_columns(rows, types),
    )
    whole = len(refs) == len(sequences) and KINDS[kind] == 2
    return Tokenized(examples, np.array(refs, np.float32) if whole else None)


def _parse(record: object, kind: str, config: PackConfig) -> tuple[list[Tokens], list[float]]:
    """Returns the sequences and rewards of a record."""
    if not isinstance(record, Mapping):
        raise Refused("not_an_object", f"a record must be a mapping, found {quote(record)}")
    if kind == "sft" and isinstance(record.get("label"), bool | np.bool_):
        check_feedback(record, "label")
    parsed = parse_fields(Fields(record, config, ID_SPELLINGS), kind)
    if not isinstance(parsed.prompt, np.ndarray):
        found = quote(next(iter(parsed.responses)))
        raise Refused("wrong_type", f"prompt and responses must be token ids, found {found}")
    sequences = id_sequences(parsed.prompt, parsed.responses, parsed.supervised, None)
    for i, tokens in enumerate(sequences):
        if not tokens.supervised.any():
            raise Refused("unsupervised", f"response {i + 1} has no supervised token")
    return sequences, parsed.rewards


def _ref_logps(record: Record) -> list[float]:
    names = ("ref_chosen_logps", "ref_rejected_logps")
    return [
        number(unwrapped(value), name) for name in names if (value := record.get(name)) is not None
    ]


def _example_id(value: Any) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise Refused("wrong_type", f"example_id must be a whole number, found {quote(value)}")
    return int(value)
