"""Shards are what pyarrow writes; they end where their tokens say, and a failure leaves nothing."""

from __future__ import annotations

import io
import re
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from packstore.errors import IntegrityError, StorageError
from packstore.io.shards import parquet
from packstore.io.shards.parquet import byte_range, check_group
from packstore.io.write.shard_writer import ShardFile


def paths(folder):
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def written(kit, tmp_path):
    return kit.Written(str(tmp_path / "dataset"))


@pytest.mark.parametrize("format_", ["parquet", "arrow"])
def test_a_shard_ends_behind_the_row_group_that_fills_it(kit, tmp_path, format_):
    """Whatever a codec makes of it: so its release does not decide where shards end."""
    made = kit.Written(str(tmp_path / "dataset"))
    how = {"format": format_, "shard_tokens": 1000}
    groups = [
        s.row_groups.tokens for s in made.dataset([kit.some_packs(300)], **how).manifest.shards
    ]
    assert len(groups) > 3
    assert all(tokens.sum() >= 1000 for tokens in groups[:-1])
    assert all(tokens[:-1].sum() < 1000 for tokens in groups)
    other = kit.Written(str(tmp_path / "other")).dataset([kit.some_packs(300)], shard_tokens=1000)
    expected = [s.row_groups.tokens.tolist() for s in other.manifest.shards]
    assert [tokens.tolist() for tokens in groups] == expected


@pytest.mark.parametrize("error", [KeyboardInterrupt(), MemoryError(), StorageError("full")])
def test_nothing_is_left_of_a_failure_in_the_thread(kit, written, tmp_path, monkeypatch, error):
    calls, append = iter(range(1000)), ShardFile.append

    def failing(shard, batches):
        if next(calls) == 20:
            raise error
        append(shard, batches)

    monkeypatch.setattr(ShardFile, "append", failing)
    with pytest.raises(type(error)), written.writer() as writer:
        writer.write(kit.some_packs(300))
    # Shards that were put stay for `clean`: a run elsewhere may name them.
    assert all(re.fullmatch(r"dataset/data/[\w-]+\.parquet", path) for path in paths(tmp_path))
    assert not [t for t in threading.enumerate() if t.name.startswith("packstore-write")]


def row_group(**how):
    """The row group of a footer, for three lists of ten numbers."""
    sink, table = io.BytesIO(), pa.table({"x": [[7] * 10] * 3})
    pq.write_table(table, sink, **{"use_dictionary": False, **how})
    return pq.read_metadata(sink).row_group(0)


def test_limits_are_compared_with_the_footer(monkeypatch):
    group = row_group()
    check_group(group, 3, 30)
    with pytest.raises(IntegrityError, match="must have 4 rows; its footer declares 3"):
        check_group(group, 4, 30)
    with pytest.raises(IntegrityError, match="at most 29 values a column; its footer declares 30"):
        check_group(group, 3, 29)
    with pytest.raises(IntegrityError, match="must have no dictionary"):
        check_group(row_group(use_dictionary=True), 3, 30)
    with pytest.raises(IntegrityError, match=r"its bytes 4 to .* must lie in the file"):
        byte_range(group, 20)
    monkeypatch.setattr(parquet, "MAX_GROUP_BYTES", 40)
    with pytest.raises(IntegrityError, match="at most 40 bytes when decompressed"):
        check_group(group, 3, 30)
