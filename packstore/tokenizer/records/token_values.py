"""Numbers of single tokens in records, such as the log-probs of a sampler.

The setting `token_values` names their fields. A field holds a list of numbers for each
response of the record, in the order of its responses (`chosen` before `rejected`): one
number for each supervised token. For a record of one response it may be the list
itself. Forms, adapters and own field names do not see these fields.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from packstore.config import TokenizeConfig
from packstore.errors import ConfigError, quote, sentence
from packstore.format.arrays import Float32, Int64
from packstore.format.schema import (
    COLUMN_NAME,
    COLUMNS,
    LOG_PROB_COLUMNS,
    MAX_LOGP,
)
from packstore.tokenizer.records.carry import parse_carry
from packstore.tokenizer.records.paths import (
    follow,
    is_path,
    parse_json_text,
    parse_path,
)
from packstore.tokenizer.records.sequences import unwrapped
from packstore.tokenizer.refusals import Stop

_LARGEST = float(np.finfo(np.float32).max)


def check_token_values(config: TokenizeConfig) -> None:
    """Raise ConfigError if a column of `token_values` cannot have its name."""
    carried = parse_carry(config)
    for column in config.token_values:
        is_taken = column in COLUMNS or column in carried
        if is_taken or not COLUMN_NAME.fullmatch(column):
            rule = "a column must be letters a to z, digits and _, begin with a "
            rule += "letter, and differ from all columns of the packs"
            raise ConfigError(sentence("setting token_values", rule, quote(column)))
    if config.token_values and "first" in config.fields:
        raise ConfigError(
            sentence(
                where="setting token_values",
                rule="the order of the responses must be known: chosen, rejected",
                found="fields that map first and second, which a verdict orders",
                remedy="Put chosen and rejected into the records",
            )
        )


def find_value(record: Mapping[str, Any], field: str) -> Any:
    """Return the value of a field, a name or a path; None if it is missing."""
    if field in record or not is_path(field):
        return record.get(field)
    return follow(record, parse_path(field))


def flat_numbers(value: Any) -> Float32:
    """Return the numbers of all responses of a record, float32 `[n]`."""
    return np.concatenate([np.asarray(x, np.float32) for x in _of_responses(value)])


def check_numbers(
    value: Any, field: str, counts: Int64, columns: Collection[str] = ()
) -> None:
    """Raise unless a field has a finite number for each supervised token of a record.

    Args:
        value: the value of the field.
        field: its name.
        counts: int64 `[K]`, supervised tokens of each response.
        columns: names of the columns that the numbers go to.

    Raises:
        Stop: it has not.
    """
    rule = f"field {quote(field)} must hold a number for each supervised token"
    if value is None:
        remedy = "Add it to the record, or drop the record"
        raise Stop(rule, "none", remedy)
    responses = _of_responses(value)
    if not responses or not all(isinstance(x, list) for x in responses):
        raise Stop(rule, quote(value))
    if len(responses) != len(counts):
        found = f"lists for {len(responses)} of {len(counts)} responses"
        raise Stop(f"{rule}, in a list for each response", found)

    for number, (values, count) in enumerate(zip(responses, counts, strict=True), 1):
        place = f"response {number} has " if len(counts) > 1 else ""
        if len(values) != count:
            raise _wrong_count(rule, place, len(values), int(count))
        _require_finite(values, f"{rule}, finite as float32", place)
        if not set(columns).isdisjoint(LOG_PROB_COLUMNS):
            _require_log_probs(values, f"{rule}, a log-prob of at most 0", place)


def _of_responses(value: Any) -> Sequence[Any]:
    """Return the lists of a record's responses."""
    value = parse_json_text(unwrapped(value))
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if not isinstance(value, list):
        return ()
    has_lists = bool(value) and isinstance(value[0], list)
    return value if has_lists else [value]


def _wrong_count(rule: str, place: str, count: int, expected_count: int) -> Stop:
    detail = f"{place}{count} for {expected_count} supervised tokens"
    remedy = "Give the token ids that were sampled, and a number for each of them"
    if abs(count - expected_count) == 1:
        remedy += "; an EOS token may be among them (setting append_eos)"
    return Stop(rule, detail, remedy)


def _require_log_probs(values: Sequence[float], rule: str, place: str) -> None:
    """Raise Stop for the first value that no log-prob has."""
    for position, value in enumerate(values, 1):
        if value > MAX_LOGP:
            remedy = "Give log-probs, not probabilities or losses"
            raise Stop(rule, f"{place}{quote(value)} for token {position}", remedy)


def _require_finite(values: Sequence[Any], rule: str, place: str) -> None:
    """Raise Stop for the first value that is no number, or not finite as float32."""
    if set(map(type, values)) == {float}:
        with np.errstate(over="ignore"):
            if np.isfinite(np.array(values, np.float32)).all():
                return  # as most are: the loop takes ten times as long
    for position, value in enumerate(values, 1):
        is_number = type(value) in (int, float)
        if not is_number or not abs(value) <= _LARGEST:
            raise Stop(rule, f"{place}{quote(value)} for token {position}")
