"""Repacking while reading: every example once an epoch, unchanged, at any position."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import packstore
from packstore.config import PackConfig, ReadConfig
from packstore.errors import CompatibilityError, ConfigError, DropRateError, RecordError
from packstore.format.arrays import Examples, Packs, PackSizes
from packstore.io.dataset.dataset import Dataset
from packstore.online_packing import EpochPlan, ExampleSizes, plan_epoch
from packstore.online_packing import plan as plan_module
from packstore.online_packing import read as read_module
from packstore.pack.fill import unpack
from packstore.pack.layout import sizes as sizes_of
from packstore.pack.plan import plan
from packstore.testing import assert_examples_equal, random_examples
from packstore.torch import PackedDataLoader, PackedDataset
from packstore.torch.data.online_packs import RepackedPacks

N = 120
LAYOUTS = ("concat", "shared_prefix")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several lanes and windows on little data."""
    monkeypatch.setattr(plan_module, "WINDOW", 8)
    monkeypatch.setattr(plan_module, "LANE_PACKS", 2)
    monkeypatch.setattr(plan_module, "LANES", 8)


@pytest.fixture(scope="module")
def stored(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Makes datasets of N examples, `each` to a pack; the same one only once."""
    made: dict[Any, Dataset] = {}

    def make(kind: str = "preference", layout: str = "concat", each: int = 1) -> Dataset:
        key = (kind, layout, each)
        if key not in made:
            packs = kit.packed(random_examples(N, kind=kind), [each] * (N // each), layout)
            url = str(tmp_path_factory.mktemp("repack") / "ds")
            made[key] = kit.write(url, packs, kind, layout)
        return made[key]

    return make


def repacked(dataset: Dataset, config: dict[str, Any] | None = None, **settings: Any) -> Any:
    return RepackedPacks(dataset, PackConfig(**{"pack_size": 90, **(config or {})}), **settings)


def packs_of(stream: RepackedPacks) -> list[Packs]:
    indices = np.arange(len(stream))
    return [p for batch in stream.read(np.split(indices, range(3, len(stream), 3))) for p in batch]


def ids(packs: list[Packs]) -> list[list[int]]:
    return [p.example_ids.tolist() for p in packs]


@pytest.mark.parametrize("each", [1, 3])
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["preference", "sft", "ranked"])
def test_every_example_once_and_unchanged(
    stored: Any, kind: str, layout: str, target: str, each: int
) -> None:
    examples = random_examples(N, kind=kind)
    size = 90 if kind == "preference" else 140
    stream = repacked(stored(kind, layout, each), {"pack_size": size, "layout": target})
    for epoch in (0, 1):
        stream.set_epoch(epoch)
        packs = packs_of(stream)
        assert len(packs) == len(stream)
        order = np.array([i for pack in ids(packs) for i in pack])
        assert sorted(order) == list(range(N))
        found = Examples.concat([unpack(p) for p in packs])
        assert_examples_equal(found, examples.take(order))
        tokens = sizes_of(examples, target)
        assert [len(p.input_ids) for p in packs] == [tokens[i].sum() for i in ids(packs)]
        assert max(len(p.input_ids) for p in packs) <= size
        check_sizes(stream.sizes(np.arange(len(stream))), packs)
        totals = stream.totals
        assert (totals.packs, totals.examples) == (len(packs), N)
        assert totals.tokens == tokens.sum()


def check_sizes(sizes: PackSizes, packs: list[Packs]) -> None:
    assert sizes.tokens.tolist() == [len(p.input_ids) for p in packs]
    assert sizes.examples.tolist() == [len(p.example_ids) for p in packs]
    squares = [(p.segment_lengths.astype(np.int64) ** 2).sum() for p in packs]
    assert sizes.squares.tolist() == squares


def test_lanes_and_windows_are_many_here(stored: Any) -> None:
    plan = repacked(stored())._plan
    assert len(plan.lane_offsets) - 1 == 8
    assert len(plan.window_offsets) - 1 > 12


def test_each_epoch_has_its_own_packs(stored: Any) -> None:
    stream = repacked(stored())
    epochs = []
    for epoch in (0, 1, 2, 0):
        stream.set_epoch(epoch)
        epochs.append(ids(packs_of(stream)))
    assert epochs[0] == epochs[3] == ids(packs_of(repacked(stored())))
    mates = [{frozenset(pack) for pack in epoch if len(pack) > 1} for epoch in epochs]
    assert len(mates[0] & mates[1]) < len(mates[0]) / 4
    for other in (repacked(stored(), seed=1), repacked(stored(), {"seed": 1})):
        assert ids(packs_of(other)) != epochs[0]


def test_unshuffled_is_file_order(stored: Any) -> None:
    stream = repacked(stored(), {"strategy": "sequential"}, shuffle=False)
    packs = ids(packs_of(stream))
    assert [i for pack in packs for i in pack] == list(range(N))
    stream.set_epoch(3)
    assert ids(packs_of(stream)) == packs


@pytest.mark.parametrize("strategy", ["pool", "best_fit_decreasing", "sequential", "none"])
@pytest.mark.parametrize("pack_order", ["shuffled", "stratified", "plain"])
def test_every_strategy_and_order_of_packs(stored: Any, strategy: str, pack_order: str) -> None:
    stream = repacked(stored(), {"strategy": strategy, "pack_order": pack_order})
    packs = ids(packs_of(stream))
    assert sorted(i for pack in packs for i in pack) == list(range(N))
    if strategy == "none":
        assert len(packs) == N


@given(st.data())
@settings(max_examples=40, deadline=None)
def test_any_batches_give_the_packs_of_their_positions(stored: Any, data: Any) -> None:
    stream = repacked(stored())
    whole = ids(packs_of(stream))
    position = st.integers(0, len(whole) - 1)
    batches = data.draw(st.lists(st.lists(position, max_size=9), max_size=12))
    given = list(stream.read(np.array(b, np.int64) for b in batches))
    assert [ids(packs) for packs in given] == [[whole[i] for i in batch] for batch in batches]


def test_resuming_at_every_step_continues_the_sequence(stored: Any) -> None:
    def loader() -> PackedDataLoader:
        return PackedDataLoader(PackedDataset(repacked(stored()), rank=0, world_size=1))

    whole = [batch.example_ids.tolist() for batch in loader()]
    for k in range(len(whole) + 1):
        first = loader()
        batches = iter(first)
        for _ in range(k):
            next(batches)
        state = json.dumps(first.state_dict())
        resumed = loader()
        resumed.load_state_dict(json.loads(state))
        assert [batch.example_ids.tolist() for batch in resumed] == whole[k:]
    other = PackedDataset(repacked(stored(), {"pack_size": 91}))
    with pytest.raises(CompatibilityError, match="repack must be"):
        other.load_state_dict(json.loads(state))


def test_ranks_share_one_sequence(stored: Any) -> None:
    whole = ids(packs_of(repacked(stored())))
    config, one = PackConfig(pack_size=90), {"rank": 0, "world_size": 1}
    assert ids(list(PackedDataset(stored().url, repack=config, **one))) == whole
    for source in (stored(), stored().url, Path(stored().url)):
        assert ids(list(PackedDataset.repacked(source, config, **one))) == whole
    with pytest.raises(ConfigError, match="make PackedDataset"):
        PackedDataset.repacked([], config)
    for ranks in (1, 2, 3, 4, 8):
        parts = [
            [
                p.example_ids.tolist()
                for p in PackedDataset(repacked(stored()), rank=r, world_size=ranks)
            ]
            for r in range(ranks)
        ]
        assert [parts[i % ranks][i // ranks] for i in range(len(whole))] == whole


def groups_read(plan: EpochPlan, positions: np.ndarray) -> list[int]:
    """The row groups that one process reads for these positions, in order."""
    return list(read_module._Schedule(positions[:, None], plan).groups())


def test_eight_ranks_read_the_dataset_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the real sizes of windows and lanes, from lengths alone."""
    monkeypatch.undo()
    sizes = lognormal(100_000, per_group=110)
    plan = plan_epoch(sizes, PackConfig(pack_size=4096), seed=0, epoch=0, shuffle=True)
    groups = len(sizes.group_offsets) - 1
    assert len(plan.lane_offsets) - 1 == 16
    for ranks in (1, 8):
        read = [groups_read(plan, np.arange(r, len(plan), ranks)) for r in range(ranks)]
        assert set().union(*read) == set(range(groups))
        assert sum(map(len, read)) <= 1.1 * groups


def test_an_order_that_is_mixed_within_steps_reads_nothing_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_module, "WINDOW", 64)
    sizes = lognormal(4000, per_group=10)
    plan = plan_epoch(sizes, PackConfig(pack_size=4096), seed=0, epoch=0, shuffle=True)
    positions = np.arange(len(plan))
    straight = groups_read(plan, positions)
    rng = np.random.default_rng(0)
    for step in np.split(positions, range(32, len(plan), 32)):
        rng.shuffle(step)
    assert positions.tolist() != list(range(len(plan)))
    assert sorted(groups_read(plan, positions)) == sorted(straight)


def test_few_windows_are_open(stored: Any) -> None:
    stream = repacked(stored())
    plan = stream._plan
    windows = read_module._Windows(plan, "concat", stream.dataset)
    schedule = read_module._Schedule(np.arange(len(plan))[:, None], plan)
    data = stream.dataset
    groups = (data.decode(group, data.fetch(group)) for group in schedule.groups())
    most = 0
    while (steps := schedule.next_batch()) is not None:
        for step in steps:
            windows.give(step, groups)
            most = max(most, len(windows._open))
    assert most <= 8
    assert not windows._open


def lognormal(n: int, per_group: int, median: int = 600) -> ExampleSizes:
    rng = np.random.default_rng(0)
    tokens = np.clip(rng.lognormal(np.log(median), 0.8, n), 1, 4096).astype(np.int32)
    return sized(tokens, per_group)


def sized(tokens: Any, per_group: int) -> ExampleSizes:
    offsets = np.append(np.arange(0, len(tokens), per_group), len(tokens))
    return ExampleSizes(tokens, tokens.astype(np.int64) ** 2, offsets, 0)


@pytest.fixture(scope="module")
def real(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """2,308 real pairs, one in a pack."""
    return packstore.pack(
        str(shared_data / "pairs" / "hh_harmless.jsonl.gz"),
        str(tmp_path_factory.mktemp("real") / "ds"),
        tokenizer=str(shared_data / "tokenizers" / "qwen3"),
        tokenizer_engine="tokenizers",
        strategy="none",
        pack_size=4096,
        num_workers=0,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_packs_are_as_full_as_offline(
    real: Dataset, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    for pack_size in (2048, 4096, 8192):
        config = PackConfig(pack_size=pack_size, layout=layout)
        stream = RepackedPacks(real, config)
        tokens = stream._sizes.tokens
        assert len(stream) <= 1.003 * plan(tokens, pack_size=pack_size).num_packs
        many = np.random.default_rng(0).choice(tokens, 60 * len(tokens))
        epoch = plan_epoch(sized(many, 400), config, seed=0, epoch=0, shuffle=True)
        assert len(epoch.lane_offsets) > 2
        assert len(epoch) <= 1.003 * plan(many, pack_size=pack_size).num_packs


def test_real_pairs_are_those_of_the_dataset(
    real: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    stream = RepackedPacks(real, PackConfig(pack_size=4096, layout="shared_prefix"))
    found = Examples.concat([unpack(p) for p in packs_of(stream)])
    expected = Examples.concat([unpack(p) for p in real.iter_packs()])
    order, other = np.argsort(found.example_ids), np.argsort(expected.example_ids)
    assert_examples_equal(found.take(order), expected.take(other))


def test_overlong_examples_are_left_out_and_counted(
    stored: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = sizes_of(random_examples(N), "concat")
    size = int(np.quantile(tokens, 0.8))
    for data in (stored(), stored(each=3)):
        caplog.clear()
        stream = repacked(data, {"pack_size": size, "max_drop_rate": 0.5})
        found = sorted(i for pack in ids(packs_of(stream)) for i in pack)
        assert found == np.flatnonzero(tokens <= size).tolist()
        assert stream.left_out == (tokens > size).sum() > 0
        assert stream.totals.examples == N - stream.left_out
        assert f"{stream.left_out} of {N} examples that do not" in caplog.text
    longest = np.maximum.reduceat(random_examples(N).lengths, np.arange(0, 2 * N, 2))
    stream = repacked(stored(), {"max_length": 15, "max_drop_rate": 0.5})
    found = sorted(i for pack in ids(packs_of(stream)) for i in pack)
    assert found == np.flatnonzero(longest <= 15).tolist()


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"pack_size": 30, "overlong": "error"}, RecordError, "fit pack_size 30; found .* longest"),
        ({"pack_size": 20}, DropRateError, "max_drop_rate"),
        ({"pack_size": 2, "max_drop_rate": 1.0}, DropRateError, "120 of 120"),
        ({"overlong": "truncate_prompt"}, ConfigError, "needs the records"),
        ({"kind": "sft"}, ConfigError, "kind must be auto or that of the dataset, preference"),
        ({"strategy": "best"}, ConfigError, "unknown strategy 'best'"),
    ],
)
def test_refusals(stored: Any, config: dict[str, Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        repacked(stored(), config)
    with pytest.raises(IndexError, match=r"0\.\."):
        repacked(stored())._plan.locate(np.array([-1]))


def test_what_cannot_be_read_is_raised_or_stood_in_for(
    kit: SimpleNamespace, tmp_path: Path
) -> None:
    packs = kit.packed(random_examples(N), [1] * N, "concat")
    data = kit.write(str(tmp_path / "ds"), packs)
    whole = ids(packs_of(repacked(data)))
    shard = data.manifest.shards[1]
    first = int(sum(s.examples for s in data.manifest.shards[:1]))
    lost = set(range(first, first + shard.examples))
    (tmp_path / "ds" / shard.path).unlink()
    with pytest.raises(OSError, match="no such file"):
        packs_of(repacked(data))
    config = ReadConfig(on_error="quarantine", backoff=0)
    given = packs_of(repacked(data, reading=config))
    assert len(given) == len(whole)
    assert 0 < sum(p.stand_in for p in given) < len(whole)
    for expected, pack in zip(whole, given, strict=True):
        assert pack.stand_in == bool(lost & set(expected))
        if not pack.stand_in:
            assert pack.example_ids.tolist() == expected


def test_columns_go_along(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = stored()
    decode = data.decode

    def with_column(group: int, fetched: Any) -> Packs:
        found = decode(group, fetched)
        names = np.array([f"r{i}" for i in found.example_ids], object)
        return dataclasses.replace(found, columns={"name": names})

    monkeypatch.setattr(data, "decode", with_column)
    for pack in packs_of(repacked(data)):
        assert pack.columns["name"].tolist() == [f"r{i}" for i in pack.example_ids]
