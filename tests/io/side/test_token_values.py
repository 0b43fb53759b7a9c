"""Side data with a value for each supervised token, or its k most probable ids."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_jobs import pack, pairs

import packstore
import packstore.torch as pt
from packstore.errors import ConfigError
from packstore.format.arrays import concat_token_values
from packstore.io.side import side as side_module
from packstore.io.side import table as table_module

COLUMNS = {
    "old_logps": "token<float32>",
    "half": "token<float16>",
    "teacher": "token<top4,float16>",
    "coarse": "token<top4,uint8>",
}


def values_of(example_ids: np.ndarray, num_targets: np.ndarray) -> dict[str, object]:
    """Values that follow from the id of an example and the place of a token in it."""
    starts = np.cumsum(num_targets) - num_targets
    place = np.arange(num_targets.sum()) - np.repeat(starts, num_targets)
    numbers = -(np.repeat(example_ids, num_targets) % 7 + place / 8)
    ids = (place[:, None] * 4 + np.arange(4)).astype(np.int32)
    logps = numbers[:, None] - np.arange(4) / 4
    return {
        "old_logps": numbers.astype(np.float32),
        "half": numbers.astype(np.float16),
        "teacher": pt.TopK(ids, logps.astype(np.float16)),
        "coarse": pt.TopK(ids, logps),
    }


@pytest.mark.parametrize("form", [dict, tuple])
def test_the_top_k_in_another_form_is_answered_with_the_class_to_use(
    tmp_path: Path, form: type
) -> None:
    """As servers return it. The number of tokens is asked for, too."""
    dataset = packstore.pack(pairs(2), str(tmp_path / "ds"), pack_size=64)
    columns = {"teacher": COLUMNS["teacher"]}
    (packs, *_) = dataset.iter_packs()
    top = values_of(packs.example_ids, packs.num_targets)["teacher"]
    assert isinstance(top, pt.TopK)
    with pt.SideWriter(str(tmp_path / "side"), dataset, columns) as writer:
        with pytest.raises(ConfigError, match=r"num_targets=batch\.num_targets"):
            writer.write(packs.example_ids, {"teacher": top})
        values = top._asdict() if form is dict else tuple(top)
        with pytest.raises(ConfigError, match=r"packstore\.torch\.TopK.*\[n, 4\]"):
            writer.write(
                packs.example_ids, {"teacher": values}, None, packs.num_targets
            )
        writer.write(packs.example_ids, {"teacher": top}, None, packs.num_targets)


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_there_and_back(tmp_path: Path, layout: str) -> None:
    records = [
        {"prompt": [1, 2, i % 7], "chosen": [3] * (1 + i % 9), "rejected": [4] * 3}
        for i in range(40)
    ]
    dataset = packstore.pack(records, str(tmp_path / "first"), pack_size=64)
    side = str(tmp_path / "side")
    with pt.SideWriter(side, dataset, COLUMNS) as writer:
        for packs in dataset.iter_packs():
            values = values_of(packs.example_ids, packs.num_targets)
            writer.write(packs.example_ids, values, None, packs.num_targets)

    again = packstore.pack(dataset, str(tmp_path / "b"), pack_size=100, layout=layout)
    loader = pt.PackedDataLoader(pt.PackedDataset(again, side=side), packs_per_batch=3)
    for batch in loader:
        expected = values_of(batch.example_ids.numpy(), batch.num_targets.numpy())
        for name in ("old_logps", "half"):
            np.testing.assert_array_equal(batch.token_columns[name], expected[name])
        for name, tolerance in {"teacher": 0, "coarse": 0.02}.items():
            ids, logps = batch.token_columns[name]
            np.testing.assert_array_equal(ids, expected[name].ids)
            np.testing.assert_allclose(logps, expected[name].logps, 0, tolerance)


def test_zeros_of_either_sign_are_equal(tmp_path: Path) -> None:
    dataset = packstore.pack(pairs(3), str(tmp_path / "data"))
    side = str(tmp_path / "side")
    with pt.SideWriter(side, dataset, {"teacher": COLUMNS["teacher"]}) as writer:
        for packs in dataset.iter_packs():
            top = values_of(packs.example_ids, packs.num_targets)["teacher"]
            top.logps[:] = np.array([-0.0, 0.0, -0.0, -1], np.float16)
            writer.write(packs.example_ids, {"teacher": top}, None, packs.num_targets)

    for packs in pt.PackedDataset(dataset, side=side):
        assert (packs.token_columns["teacher"].logps == [0, 0, 0, -1]).all()


# Any values


K = 3
RANDOM_COLUMNS = {
    "single": "token<float32>",
    "half": "token<float16>",
    "top_half": f"token<top{K},float16>",
    "top_bytes": f"token<top{K},uint8>",
}


def random_floats(rng: np.random.Generator, shape: Any, dtype: Any) -> np.ndarray:
    """Finite floats of any magnitude: any bits that are no NaN or infinity."""
    bits = rng.integers(0, 2 ** (8 * np.dtype(dtype).itemsize), shape)
    floats = bits.astype(f"u{np.dtype(dtype).itemsize}").view(dtype)
    return np.where(np.isfinite(floats), floats, np.dtype(dtype).type(-1))


def random_values(
    seed: int, example_ids: np.ndarray, num_targets: np.ndarray
) -> dict[str, Any]:
    """Values of every column that follow from the id of an example, and from the seed,
    which is one higher for each source.
    """
    parts: dict[str, list[Any]] = {name: [] for name in RANDOM_COLUMNS}
    for example_id, n in zip(example_ids, num_targets, strict=True):
        source, number = divmod(int(example_id), 1 << 40)
        rng = np.random.default_rng([seed + source, number])
        ids = rng.integers(0, 2**31, (n, K)).astype(np.int32)
        ids[:, 1:] = ids[:, :1] ^ np.arange(1, K, dtype=np.int32)
        halves = np.sort(-abs(random_floats(rng, (n, K), np.float16)), axis=1)[:, ::-1]
        singles = np.sort(-rng.gamma(0.5, 10, (n, K)), axis=1)[:, ::-1]
        parts["single"].append(random_floats(rng, n, np.float32))
        parts["half"].append(random_floats(rng, n, np.float16))
        parts["top_half"].append(pt.TopK(ids, halves))
        parts["top_bytes"].append(pt.TopK(ids[:, ::-1], singles))
    return {name: concat_token_values(part) for name, part in parts.items()}


def write_random(url: str, dataset: packstore.Dataset, seed: int) -> str:
    with pt.SideWriter(url, dataset, RANDOM_COLUMNS, overwrite=True) as writer:
        for packs in dataset.iter_packs():
            values = random_values(seed, packs.example_ids, packs.num_targets)
            writer.write(packs.example_ids, values, None, packs.num_targets)
    return url


def same_bits(values: np.ndarray) -> np.ndarray:
    """View floats as integers: -0.0 is not 0.0."""
    return np.ascontiguousarray(values).view(f"u{values.itemsize}")


def assert_joined(dataset: packstore.Dataset, sides: list[str], seed: int) -> None:
    for packs in pt.PackedDataset(dataset, side=sides, rank=0, world_size=1):
        expected = random_values(seed, packs.example_ids, packs.num_targets)
        joined = packs.token_columns
        for name in ("single", "half"):
            assert joined[name].dtype == expected[name].dtype
            bits = same_bits(joined[name])
            np.testing.assert_array_equal(bits, same_bits(expected[name]))
        for name in ("top_half", "top_bytes"):
            np.testing.assert_array_equal(joined[name].ids, expected[name].ids)
        halves = same_bits(joined["top_half"].logps)
        np.testing.assert_array_equal(halves, same_bits(expected["top_half"].logps))

        logps = expected["top_bytes"].logps
        tolerance = -logps.min() / 255 / 2 * 1.001
        np.testing.assert_allclose(joined["top_bytes"].logps, logps, 0, tolerance)


@pytest.fixture(scope="module")
def datasets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, packstore.Dataset]:
    folder = tmp_path_factory.mktemp("datasets")
    first = pack(folder / "first", pairs(12))
    second = pack(folder / "second", pairs(9, 20))
    combined = packstore.concat([first, second], str(folder / "combined"))
    grown = pack(folder / "grown", pairs(12))
    return {
        "first": first,
        "second": second,
        "repacked": packstore.pack(
            first, str(folder / "tree"), pack_size=100, layout="shared_prefix"
        ),
        "combined": packstore.pack(combined, str(folder / "mixed"), pack_size=100),
        "appended": packstore.append(grown, pairs(9, 20)),
    }


@settings(max_examples=4)
@given(seed=st.integers(0, 2**32 - 1))
def test_any_values_come_back_to_the_bit(
    datasets: dict[str, packstore.Dataset],
    tmp_path_factory: pytest.TempPathFactory,
    seed: int,
) -> None:
    folder = tmp_path_factory.mktemp("sides")
    first = write_random(str(folder / "first"), datasets["first"], seed)
    second = write_random(str(folder / "second"), datasets["second"], seed + 1)
    assert packstore.torch.open_side(first).verify(datasets["repacked"]).ok
    for name in ("first", "repacked"):
        assert_joined(datasets[name], [first], seed)
    for name in ("combined", "appended"):
        assert_joined(datasets[name], [first, second], seed)


def test_shards_and_row_groups_are_small(
    datasets: dict[str, packstore.Dataset],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those of one large write; large tables are mapped files."""
    monkeypatch.setattr(side_module, "SHARD_BYTES", 2000)
    monkeypatch.setattr(side_module, "GROUP_BYTES", 500)
    monkeypatch.setattr(table_module, "MAPPED_BYTES", 100)
    dataset = datasets["first"]
    every = list(dataset.iter_packs())
    ids = np.concatenate([packs.example_ids for packs in every])
    num_targets = np.concatenate([packs.num_targets for packs in every])
    url = str(tmp_path / "side")
    with pt.SideWriter(url, dataset, RANDOM_COLUMNS) as writer:
        writer.write(ids, random_values(5, ids, num_targets), None, num_targets)
    side = pt.open_side(url)
    assert len(side.manifest.shards) > 1
    for shard in side.manifest.shards:
        metadata = pq.read_metadata(Path(url) / shard.path)
        assert metadata.num_row_groups > 1
        for number in range(metadata.num_row_groups):
            group = metadata.row_group(number)
            assert group.num_rows == 1 or group.total_byte_size < 1000
    assert_joined(dataset, [url], 5)


def test_few_row_groups_are_decoded_ahead(
    datasets: dict[str, packstore.Dataset],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A small file may decode to much more than memory holds."""
    num_submitted = 0

    class CountingPool(ThreadPoolExecutor):
        def submit(self, *args: Any, **keywords: Any) -> Any:
            nonlocal num_submitted
            num_submitted += 1
            return super().submit(*args, **keywords)

    monkeypatch.setattr(side_module, "ThreadPoolExecutor", CountingPool)
    monkeypatch.setattr(side_module, "GROUP_BYTES", 1)
    side = pt.open_side(write_random(str(tmp_path / "side"), datasets["first"], 5))
    for number, _ in enumerate(side.iter_batches(), 1):
        assert num_submitted < number + side_module.MAX_THREADS
    assert number == num_submitted == len(side)


def test_forked_workers_share_what_the_parent_loaded(
    datasets: dict[str, packstore.Dataset],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = write_random(str(tmp_path / "side"), datasets["first"], 5)
    log = tmp_path / "loads"
    load = side_module.Side.load

    def logging_load(side: Any) -> Any:
        with log.open("a", encoding="utf-8") as file:
            file.write(f"{os.getpid()}\n")
        return load(side)

    monkeypatch.setattr(side_module.Side, "load", logging_load)
    data = pt.PackedDataset(datasets["first"], side=url)
    how: Any = {"num_workers": 2, "multiprocessing_context": "fork"}
    batches = list(pt.PackedDataLoader(data, **how))
    assert len(batches) == 2
    assert all("top_half" in batch.token_columns for batch in batches)
    assert log.read_text(encoding="utf-8") == f"{os.getpid()}\n"
