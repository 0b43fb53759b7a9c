"""Values of supervised tokens: stored as Arrow columns, and checked by their rules.

A message names the column, the example, and on reading the file.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from packstore.errors import ConfigError, FormatError, IntegrityError, quote, sentence
from packstore.format.arrays import Float32, Int64, TopK, to_offsets
from packstore.format.schema import LOG_PROB_COLUMNS, MAX_LOGP, as_numpy
from packstore.io.manifest.side_manifest import PER_SEQUENCE, TokenType, token_type
from packstore.io.shards.parquet import MAX_VALUES

TOKEN_RULES = {
    "token-count": (
        "a row must have a number, or K ids and K log-probs, for each supervised token"
    ),
    "token-finite": "numbers and log-probs must be finite",
    "top-ids": "token ids must be at least 0",
    "top-distinct": "the ids of a token must be distinct",
    "top-sign": "log-probs must be at most 0",
    "top-order": "log-probs of a token must go from the highest to the lowest",
    "top-scale": "a scale must be finite and above 0",
}
"""Rule of values of tokens -> its text, as in ``schemas/annex-e-side-data.md``."""

_FINITE_SEQUENCES = "values of sequences must be finite"
_LOGPS_REMEDY = "Pass log-probs, not probabilities or losses"
_MAX_ID = np.iinfo(np.int32).max


def rule_text(name: str) -> str:
    """Return the text of a rule of :data:`TOKEN_RULES` with its name, for errors."""
    return f"{TOKEN_RULES[name]} [{name}]"


class ColumnRows(NamedTuple):
    """Rows of a column of lists, for messages.

    Attributes:
        column: name of the column.
        example_ids: int64 `[E]`.
        counts: int64 `[E]`, tokens, or sequences, of each row.
        file: of the rows; "" if they are being written.
        error: class of errors.
    """

    column: str
    example_ids: Int64
    counts: Int64
    file: str = ""
    error: type[FormatError] = FormatError

    def require(
        self,
        is_valid: npt.NDArray[np.bool_],
        rule: str,
        values: npt.NDArray[Any],
        remedy: str = "",
    ) -> None:
        """Raise, naming the first example with a value that is not valid.

        Args:
            is_valid: bool `[n]`, or `[n, k]`.
            rule: the rule of the values.
            values: the values, of the shape of `is_valid`.
            remedy: a way out.
        """
        if is_valid.all():
            return
        first = np.unravel_index(int(np.argmin(is_valid)), is_valid.shape)
        ends = np.cumsum(self.counts)
        row = int(np.searchsorted(ends, first[0], side="right"))
        raise self.error_at(row, rule, str(values[first]), remedy)

    def error_at(
        self, row: int, rule: str, found: str, remedy: str = ""
    ) -> FormatError:
        """Return the error of a row."""
        where = f"column {quote(self.column)}, example {self.example_ids[row]}"
        if self.file:
            where = f"{self.file}, {where}"
        return self.error(sentence(where, rule, found, remedy))


# Writing


def sequence_lists(values: npt.NDArray[Any], rows: ColumnRows) -> pa.Array:
    """Return a column with one float32 for each sequence, of type ``list<float32>``.

    Args:
        values: `[S]`.
        rows: the number of sequences of each example.

    Raises:
        ConfigError: the values have another shape.
        FormatError: a value is not finite.
    """
    type_ = TokenType("float32", None)
    return _number_lists(values, type_, rows, _FINITE_SEQUENCES)


def token_lists(values: Any, type_: TokenType, rows: ColumnRows) -> pa.Array:
    """Return a column with the values of supervised tokens.

    Args:
        values: `[n]`, or a :class:`TopK` of `[n, k]`.
        type_: type of the column.
        rows: the number of supervised tokens of each example.

    Raises:
        ConfigError: the values have another shape, k or type.
        FormatError: a value breaks a rule of its type.
    """
    if type_.k is None:
        if isinstance(values, TopK):
            raise ConfigError(f"{rows.column} must be an array; found a TopK.")
        numbers = np.asarray(values)
        if rows.column in LOG_PROB_COLUMNS:
            rule = f"log-probs of column {quote(rows.column)} must be at most 0"
            is_log_prob = (numbers <= MAX_LOGP) | ~np.isfinite(numbers)
            rows.require(is_log_prob, rule, numbers, _LOGPS_REMEDY)
        return _number_lists(numbers, type_, rows, rule_text("token-finite"))

    if not isinstance(values, TopK):
        raise ConfigError(
            sentence(
                where=f"column {quote(rows.column)}",
                rule=f"values must be a packstore.torch.TopK of ids and log-probs, "
                f"[n, {type_.k}] each",
                found=type(values).__name__,
                remedy="Pass TopK(ids, logps)",
            )
        )
    ids = np.asarray(values.ids)
    logps = np.asarray(values.logps)
    shape = (int(rows.counts.sum()), type_.k)
    _require_shape(f"ids of {rows.column}", ids, shape)
    _require_shape(f"log-probs of {rows.column}", logps, shape)
    ids = _checked_ids(ids, rows)
    logps = _checked_logps(logps, rows)

    offsets = to_offsets(rows.counts)
    offsets_of_values = offsets * type_.k
    fields = list(type_.arrow)
    arrays = [_lists(offsets_of_values, ids, fields[0].type)]
    if type_.dtype == "uint8":
        gaps, scales = _to_gaps(logps, offsets)
        _check_scales(gaps, scales, rows)
        arrays += [_lists(offsets_of_values, gaps, fields[1].type), pa.array(scales)]
    else:
        rounded_logps = _rounded(logps, type_, rows)
        arrays.append(_lists(offsets_of_values, rounded_logps, fields[1].type))
    return pa.StructArray.from_arrays(arrays, fields=fields)


def _number_lists(
    values: npt.NDArray[Any], type_: TokenType, rows: ColumnRows, rule: str
) -> pa.Array:
    _require_shape(rows.column, values, (int(rows.counts.sum()),))
    rows.require(np.isfinite(values), rule, values)
    rounded_values = _rounded(values, type_, rows)
    return _lists(to_offsets(rows.counts), rounded_values, type_.arrow)


def _checked_ids(ids: npt.NDArray[Any], rows: ColumnRows) -> npt.NDArray[np.int32]:
    if not np.issubdtype(ids.dtype, np.integer):
        raise ConfigError(
            f"ids of {rows.column} must be integers; found {ids.dtype.name}."
        )
    rows.require(ids >= 0, rule_text("top-ids"), ids)
    rows.require(ids <= _MAX_ID, f"token ids must be at most {_MAX_ID}", ids)
    check_distinct(ids, rows)
    return ids.astype(np.int32)


def _checked_logps(logps: npt.NDArray[Any], rows: ColumnRows) -> npt.NDArray[Any]:
    if not np.issubdtype(logps.dtype, np.floating):
        raise ConfigError(
            f"log-probs of {rows.column} must be floats; found {logps.dtype.name}."
        )
    _require_finite(logps, rows)
    rule = rule_text("top-sign")
    rows.require(logps <= MAX_LOGP, rule, logps, _LOGPS_REMEDY)
    _require_falling(logps, rows)
    not_positive: npt.NDArray[Any] = np.minimum(logps, 0)
    return not_positive


def check_distinct(ids: npt.NDArray[np.integer], rows: ColumnRows) -> None:
    """Raise if a token has an id twice. `ids`: `[n, k]`."""
    sorted_ids = np.sort(ids, axis=1)
    is_new = sorted_ids[:, 1:] != sorted_ids[:, :-1]
    rows.require(is_new, rule_text("top-distinct"), sorted_ids[:, 1:])


def _require_finite(values: npt.NDArray[Any], rows: ColumnRows) -> None:
    rows.require(np.isfinite(values), rule_text("token-finite"), values)


def _require_falling(logps: npt.NDArray[Any], rows: ColumnRows) -> None:
    rows.require(
        logps[:, 1:] <= logps[:, :-1],
        rule_text("top-order"),
        logps[:, 1:],
        "Sort each token's ids and log-probs by log-prob, as torch.topk does",
    )


def _rounded(
    values: npt.NDArray[Any], type_: TokenType, rows: ColumnRows
) -> npt.NDArray[Any]:
    """Return finite values in the dtype of the column; raise if one overflows."""
    with np.errstate(over="ignore"):
        rounded_values = values.astype(type_.dtype)
    largest = np.finfo(type_.dtype).max
    rule = f"its values must lie in the range of {type_.dtype}, -{largest} to {largest}"
    rows.require(np.isfinite(rounded_values), rule, values)
    return rounded_values


def _to_gaps(
    logps: npt.NDArray[Any], offsets: Int64
) -> tuple[npt.NDArray[np.uint8], Float32]:
    """Return log-probs in 8 bits each, and the scale of each example.

    A log-prob is stored as the gap to the one before it in its token, the first as the
    gap to 0, in multiples of ``-scale``. Gaps are small, so they compress to half the
    bytes of multiples. The lowest log-prob of an example is 255 times its scale.
    """
    magnitudes = -logps.astype(np.float32)
    largest = np.zeros(len(offsets) - 1, np.float32)
    counts = np.diff(offsets)
    starts = offsets[:-1][counts > 0]
    if len(starts):
        # The last log-prob of a token is its lowest.
        largest[counts > 0] = np.maximum.reduceat(magnitudes[:, -1], starts)
    # A scale is above 0, also where all log-probs are 0.
    scales = np.maximum(largest / 255, np.finfo(np.float32).tiny)
    multiples = np.rint(magnitudes / np.repeat(scales, counts)[:, None]).clip(0, 255)
    return np.diff(multiples, axis=1, prepend=0).astype(np.uint8), scales


def from_gaps(gaps: npt.NDArray[np.uint8], scales: np.float32 | Float32) -> Float32:
    """Return log-probs that are stored in 8 bits, float32 `[n, k]`.

    Args:
        gaps: `[n, k]`, see :func:`top_k_of`.
        scales: of one example, or of each token's example, float32 `[n, 1]`.
    """
    k = gaps.shape[1]
    # The fewer bytes, the faster: 16 bits up to a k of 257.
    multiples = gaps.astype(np.min_scalar_type(255 * k))
    # numpy.cumsum along short rows takes four times as long.
    for column in range(1, k):
        multiples[:, column] += multiples[:, column - 1]
    logps: Float32 = multiples.astype(np.float32)
    logps *= -scales
    return logps


def _check_scales(
    gaps: npt.NDArray[np.uint8], scales: Float32, rows: ColumnRows
) -> None:
    """Raise unless scales are finite and above 0, and log-probs finite with them."""
    is_scale = np.isfinite(scales) & (scales > 0)
    rows_of_scales = rows._replace(counts=np.ones(len(scales), np.int64))
    rows_of_scales.require(is_scale, rule_text("top-scale"), scales)

    largest_sum = 255 * gaps.shape[1]
    if largest_sum * float(scales.max(initial=0)) > float(np.finfo(np.float32).max):
        scale_of_tokens = np.repeat(scales, rows.counts)
        with np.errstate(over="ignore"):
            logps = from_gaps(gaps, scale_of_tokens[:, None])
        _require_finite(logps, rows)


def _lists(offsets: Int64, values: npt.NDArray[Any], type_: pa.DataType) -> pa.Array:
    if offsets[-1] > MAX_VALUES:
        raise ConfigError(
            f"at most {MAX_VALUES} values of a column may be written at once; found "
            f"{offsets[-1]}. Write fewer examples at once."
        )
    return pa.ListArray.from_arrays(
        pa.array(offsets.astype(np.int32)), pa.array(values.ravel()), type=type_
    )


def _require_shape(name: str, values: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    if values.shape != shape:
        raise ConfigError(f"{name} must have shape {shape}; found {values.shape}.")


# Reading


def top_k_of(array: pa.Array, k: int) -> TopK:
    """Return the stored ids and log-probs of a column, `[n, k]` each, as views;
    log-probs of 8 bits as gaps, see :func:`from_gaps`.
    """
    ids = as_numpy(array.field("ids").flatten()).reshape(-1, k)
    logps = as_numpy(array.field("logps").flatten()).reshape(-1, k)
    return TopK(ids, logps)


def list_counts(array: pa.Array, k: int | None = None) -> Int64:
    """Return the number of tokens, or sequences, of each row, int64 `[E]`.

    Args:
        array: a column of lists, or with `k` one of the top k.
        k: values of a token.
    """
    lists = array if k is None else array.field("ids")
    offsets: Int64 = as_numpy(lists.offsets).astype(np.int64)
    return np.diff(offsets) // (k or 1)


def check_stored_lists(
    batch: pa.RecordBatch, name: str, type_name: str, file: str, *, distinct: bool
) -> None:
    """Raise IntegrityError if the values of a column break a rule of its type.

    Args:
        batch: rows of a side dataset.
        name: the column; one of a type without lists passes.
        type_name: type of the column in the manifest.
        file: of the rows, for messages.
        distinct: check also that the ids of each token are distinct.
    """
    type_ = token_type(type_name)
    if type_ is None and type_name != PER_SEQUENCE:
        return
    k = None if type_ is None else type_.k
    array = batch.column(name)
    rows = ColumnRows(
        column=name,
        example_ids=as_numpy(batch.column("example_ids")),
        counts=list_counts(array, k),
        file=file,
        error=IntegrityError,
    )
    if type_ is None:
        values = as_numpy(array.flatten())
        rows.require(np.isfinite(values), _FINITE_SEQUENCES, values)
    elif k is None:
        _require_finite(as_numpy(array.flatten()), rows)
    else:
        _check_top_k(array, type_, k, rows, distinct)


def _check_top_k(
    array: pa.Array, type_: TokenType, k: int, rows: ColumnRows, distinct: bool
) -> None:
    num_ids, num_logps = [list_counts(array.field(name)) for name in ("ids", "logps")]
    wrong_rows = np.flatnonzero((num_ids != num_logps) | (num_ids % k != 0))
    if len(wrong_rows):
        row = int(wrong_rows[0])
        rule = f"it must have {k} ids, and as many log-probs, for each token"
        rule += " [token-count]"
        counts = f"{num_ids[row]} ids and {num_logps[row]} log-probs"
        raise rows.error_at(row, rule, counts)

    ids, logps = top_k_of(array, k)
    rows.require(ids >= 0, rule_text("top-ids"), ids)
    if distinct:
        check_distinct(ids, rows)
    if type_.dtype == "uint8":
        _check_scales(logps, as_numpy(array.field("scale")), rows)
        return
    if _are_falling_log_probs(logps):
        return
    # Each rule by itself, for the message.
    logps = logps.astype(np.float32)
    _require_finite(logps, rows)
    rows.require(logps <= 0, rule_text("top-sign"), logps)
    _require_falling(logps, rows)


def _are_falling_log_probs(logps: npt.NDArray[np.float16]) -> bool:
    """Tell by their bits if log-probs are finite, at most 0, and never rise in a token.

    numpy compares integers five times as fast as halves. Of numbers below 0 the lower
    one has the larger bits. A token with 0 after -0 is not recognised.
    """
    bits = logps.view(np.uint16)
    is_positive = bits.view(np.int16) > 0  # the first bit is the sign
    is_falling = bits[:, 1:] >= bits[:, :-1]
    lowest = np.finfo(np.float16).min.view(np.uint16)
    is_finite = bits[:, -1] <= lowest  # the last is the lowest of its token
    return bool(not is_positive.any() and is_falling.all() and is_finite.all())
