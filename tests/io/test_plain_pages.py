"""Row groups decoded page by page, against Arrow's own reader."""

from __future__ import annotations

import io
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore.errors import FormatError
from packstore.io.checksums import byte_range
from packstore.io.plain_pages import PageReader
from packstore.schema import from_arrow, list_of, signed_packs

TYPES = [pa.int32(), pa.int64(), pa.float32(), pa.float64()]
AS_WE_WRITE = {
    "compression": "zstd",
    "use_dictionary": False,
    "write_statistics": False,
    "write_page_checksum": True,
}


def written(rows: list[list[int | None]], nulls: bool = False, **how: Any) -> Any:
    """A file of one row group, all columns alike; its reader, and the bytes of the row group."""
    types = [list_of(t) if not nulls else pa.list_(t) for t in TYPES]
    schema = pa.schema([pa.field(f"c{i}", t, nullable=nulls) for i, t in enumerate(types)])
    table = pa.table([pa.array(rows, t) for t in types], schema=schema)
    out = io.BytesIO()
    pq.write_table(table, out, **AS_WE_WRITE | how)
    metadata = pq.read_metadata(out)
    reader = PageReader.of(metadata, schema)
    start, end = byte_range(metadata.row_group(0))
    return reader, out.getvalue()[start:end]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(1, 12), st.integers(1, 200), st.just(1)), min_size=1, max_size=90
    ),
    st.sampled_from(["zstd", "none"]),
)
def test_lists_of_any_length(lengths: list[int], codec: str) -> None:
    values = np.arange(sum(lengths)).tolist()
    cuts = np.cumsum([0, *lengths]).tolist()
    rows = [values[a:b] for a, b in pairwise(cuts)]
    reader, data = written(rows, compression=codec)
    found = reader.read(data, len(rows))
    assert reader.read(data, len(rows) - 20) is None or len(rows) < 20
    for (column, offsets), type_ in zip(found.values(), TYPES, strict=True):
        assert offsets.tolist() == cuts
        assert column.tolist() == values
        assert column.dtype == type_.to_pandas_dtype()


@pytest.mark.parametrize(
    "how",
    [
        {"compression": "snappy"},
        {"use_dictionary": True},
        {"data_page_size": 64, "write_batch_size": 8},
        {"data_page_version": "2.0"},
        {"column_encoding": {f"c{i}.list.element": "BYTE_STREAM_SPLIT" for i in range(4)}},
    ],
    ids=lambda how: next(iter(how)),
)
def test_other_pages_are_left_to_arrow(how: dict[str, Any]) -> None:
    reader, data = written([[1, 2, 3]] * 100, **how)
    assert reader is None or reader.read(data, 100) is None


@pytest.mark.parametrize("rows", [[[1], [], [2]], [[1], None, [2]], [[1], [None], [2]]])
def test_empty_lists_and_nulls_are_left_to_arrow(rows: Any) -> None:
    reader, data = written(rows, nulls=True)
    assert reader.read(data, 3) is None


@pytest.mark.parametrize("kind", ["dpo", "sft", "ranked"])
@pytest.mark.parametrize("how", [{}, {"labels": "spans"}, {"compression": "none"}], ids=str)
def test_a_shard_of_ours_takes_the_fast_way(
    tmp_path: Any, kit: SimpleNamespace, kind: str, how: dict[str, Any]
) -> None:
    written = kit.Written(str(tmp_path / "ds"), kind)
    data = written.dataset([kit.some_packs(60, kind)], shard_bytes=1 << 20, **how)
    reader = data._readers[0]
    for group in range(len(data.row_groups)):
        columns = reader._metadata and reader._pages.read(reader.fetch(group), 1000)
        assert columns is not None
        plain = from_arrow(reader.read_batch(group), kind)
        for i in range(len(plain)):
            kit.assert_packs_equal(data.decode(group, data.fetch(group)).row(i), plain.row(i))
        signed = signed_packs(columns, kind).input_ids
        assert (signed >= 0).tolist() == (plain.labels >= 0).tolist()


def test_an_id_below_zero_is_refused(tmp_path: Any, kit: SimpleNamespace) -> None:
    data = kit.Written(str(tmp_path / "ds")).dataset([kit.some_packs(20)], shard_bytes=1 << 20)
    columns = dict(data._readers[0]._columns(0, data.fetch(0)))
    ids, offsets = columns["input_ids"]
    columns["input_ids"] = (np.where(np.arange(len(ids)) == 7, -5, ids), offsets)
    with pytest.raises(FormatError, match="at least 0"):
        signed_packs(columns, "dpo")
