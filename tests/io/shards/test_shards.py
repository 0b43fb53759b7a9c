"""Shards: what is packed is read back bit for bit, the same bytes everywhere, damage is
told.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading

import numpy as np
import pytest
from places import Files, at_each

from packstore import open as open_dataset
from packstore.errors import IntegrityError, StorageError

FORMATS = pytest.mark.parametrize("format_", ["parquet", "arrow"])


@FORMATS
@pytest.mark.parametrize("kind", ["preference", "sft", "scored"])
def test_round_trip(kit, place, format_, kind):
    records = kit.records(40, kind)
    how = {"format": format_, "layout": "concat"}
    ds = kit.made(place, records, kind, shard_tokens=1, **how)
    assert len(ds) == ds.manifest.totals.packs == 40
    assert len(ds.manifest.shards) > 1
    assert kit.rows(ds) == [
        kit.stored_row(record, i) for i, record in enumerate(records)
    ]
    assert all(batch.schema.equals(ds.schema) for batch in ds.iter_batches())
    assert ds.verify().ok


@FORMATS
def test_a_shared_prompt_is_stored_once(kit, tmp_path, format_):
    how = {"format": format_, "strategy": "pool"}
    whole = kit.made(tmp_path / "concat", 90, layout="concat", **how)
    shared = kit.made(tmp_path / "shared", 90, layout="shared_prefix", **how)
    assert shared.verify().ok
    assert shared.manifest.totals.logical_tokens == whole.manifest.totals.tokens
    assert shared.manifest.totals.tokens < whole.manifest.totals.tokens


@FORMATS
def test_row_groups_and_shards_end_where_tokens_say(kit, tmp_path, format_):
    """Whatever a codec makes of them: so its release does not decide."""
    ds = kit.made(tmp_path / "ds", 300, format=format_, shard_tokens=1000)
    tokens = np.concatenate([np.diff(packs.token_offsets) for packs in ds.iter_packs()])
    first = np.cumsum(ds.group_rows)[:-1]
    assert (ds.row_groups.tokens <= 200).all()
    groups = [shard.row_groups.tokens for shard in ds.manifest.shards]
    last = (
        np.cumsum([len(g) for g in groups])[:-1] - 1
    )  # a shard ends after its row group
    full = ds.row_groups.tokens[:-1] + tokens[first] > 200
    assert np.delete(full, last).all()
    assert len(groups) > 3
    assert all(tokens.sum() >= 1000 for tokens in groups[:-1])
    assert all(tokens[:-1].sum() < 1000 for tokens in groups)
    single = kit.made(tmp_path / "single", 30, row_group_tokens=1)
    assert (single.group_rows == 1).all()


def test_views_of_packs_stay_while_others_are_read(ds):
    """Their memory is used again only after the last view."""
    expected = [packs.signed_ids.tolist() for packs in ds.iter_packs()]
    views = [ds.read_packs(group).signed_ids[3:] for group in range(len(expected))]
    looks = [
        memoryview(ds.read_packs(group).signed_ids)[1:]
        for group in range(len(expected))
    ]
    for _ in range(3):
        assert [packs.signed_ids.tolist() for packs in ds.iter_packs()] == expected
    assert [view.tolist() for view in views] == [ids[3:] for ids in expected]
    assert [look.tolist() for look in looks] == [ids[1:] for ids in expected]


@FORMATS
@pytest.mark.parametrize("size", [0, 3, 100, 4000, -1])
def test_a_truncated_shard(kit, tmp_path, format_, size):
    ds = kit.made(tmp_path / "ds", format=format_, shard_tokens=4000)
    shard = ds.manifest.shards[0].path
    whole = Files(ds.url).read(shard)
    Files(ds.url).write(shard, whole[:size])
    with pytest.raises(IntegrityError, match=rf"{shard}, row group 0"):
        ds.read_packs(0)
    assert shard in open_dataset(ds.url).verify().problems[0]


@FORMATS
def test_a_missing_shard(kit, place, format_):
    ds = kit.made(place, format=format_, shard_tokens=1)
    lost = ds.manifest.shards[1].path
    Files(place).remove(lost)
    with pytest.raises(StorageError, match=rf"{lost}, row group [0-9]+"):
        ds.read_packs(1)
    ds.read_packs(0)
    (problem,) = ds.verify().problems
    assert lost in problem


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), MemoryError(), StorageError("full")]
)
def test_nothing_unfinished_is_left_of_a_failure(kit, tmp_path, error):
    def fail(path: str) -> None:
        if fail.calls == 3:
            raise error
        fail.calls += 1

    fail.calls = 0
    with at_each("put_file", fail), pytest.raises(type(error)):
        kit.made(tmp_path / "ds", 300)
    # Shards that were put stay for `clean`: a run elsewhere may name them.
    left = Files(str(tmp_path)).names()
    assert left
    assert all(re.fullmatch(r"ds/data/[\w-]+\.parquet", path) for path in left)
    assert not [
        t for t in threading.enumerate() if t.name.startswith("packstore-write")
    ]


def test_a_wrong_crc32_of_isal_is_not_used(ds, tmp_path):
    """What was written with the right one is read in a process that finds a broken
    isal.
    """
    (tmp_path / "isal").mkdir()
    (tmp_path / "isal" / "__init__.py").touch()
    broken = (
        "import zlib\ndef crc32(data, before=0):\n    return zlib.crc32(data, "
        "before) ^ 1\n"
    )
    (tmp_path / "isal" / "isal_zlib.py").write_text(broken, encoding="utf-8")
    code = "import packstore, sys; assert packstore.open(sys.argv[1]).verify().ok"
    paths = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    how = {"env": {**os.environ, "PYTHONPATH": paths}, "check": True}
    subprocess.run([sys.executable, "-c", code, ds.url], **how)
