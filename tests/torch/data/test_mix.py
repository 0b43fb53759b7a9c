"""Mixing: shares that hold in every prefix, in closed form, and batches put together in order."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import pickle
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore.errors import CompatibilityError, ConfigError
from packstore.format.arrays import Examples, Int64, Packs, PackSizes
from packstore.io.dataset.dataset import Dataset
from packstore.io.dataset.order import PackOrder
from packstore.io.shards.statistics import NO_TOTALS, Totals
from packstore.testing import random_examples
from packstore.torch import PackedDataLoader, PackedDataset
from packstore.torch.data import mix as mix_module
from packstore.torch.data import mix_reader as mix_reader_module
from packstore.torch.data.mix import MixedPacks, Source
from packstore.torch.data.mix_schedule import MixSchedule, Schedule
from packstore.torch.data.side import JoinedPacks
from packstore.torch.data.stream import StoredPacks

weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=8)
goals = st.lists(
    st.tuples(st.floats(0.05, 20), st.integers(1, 40), st.none() | st.integers(1, 60)),
    min_size=1,
    max_size=5,
)


def pack_of(value: int, examples: int, kit: SimpleNamespace) -> Packs:
    """A pack of `examples` examples whose ids begin at ``1000 * value``."""
    base = random_examples(examples, seed=value)
    arrays = {name: getattr(base, name) for name in Examples.__slots__}
    arrays["example_ids"] = 1000 * value + np.arange(examples, dtype=np.int64)
    packs: Packs = kit.packed(Examples(**arrays), [examples], "concat")
    return packs


class Listed:
    """A stream of packs in memory: pack p of epoch e is number ``(p + 7 e) % n``."""

    datasets = ()

    def __init__(self, packs: list[Packs], kind: str = "preference", name: str = "") -> None:
        self.packs, self.kind, self.name, self.epoch = packs, kind, name, 0
        self.taken: list[int] = []
        self.openings: list[int] = []

    @property
    def identity(self) -> dict[str, Any]:
        return {"name": self.name}

    @property
    def totals(self) -> Totals:
        return dataclasses.replace(
            NO_TOTALS,
            packs=len(self.packs),
            examples=sum(len(p.example_ids) for p in self.packs),
            tokens=sum(len(p.input_ids) for p in self.packs),
        )

    def __len__(self) -> int:
        return len(self.packs)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def numbers(self, indices: Int64) -> list[int]:
        assert ((indices >= 0) & (indices < len(self))).all()
        return ((indices + 7 * self.epoch) % len(self)).tolist()

    def sizes(self, indices: Int64) -> PackSizes:
        packs = [self.packs[i] for i in self.numbers(indices)]
        tokens = np.array([len(p.input_ids) for p in packs], np.int64)
        examples = np.array([len(p.example_ids) for p in packs], np.int64)
        squares = np.array([(p.segment_lengths.astype(np.int64) ** 2).sum() for p in packs])
        return PackSizes(tokens, examples, squares)

    def sources(self, indices: Int64) -> Int64:
        return np.zeros_like(indices)

    def read(self, batches: Iterable[Int64], *, stride: int = 1) -> Iterator[list[Packs]]:
        """Looks three batches ahead."""
        self.openings.append(self.epoch)
        waiting: list[Int64] = []
        for indices in batches:
            self.taken.append(len(indices))
            waiting.append(indices)
            if len(waiting) > 3:
                yield [self.packs[i] for i in self.numbers(waiting.pop(0))]
        for indices in waiting:
            yield [self.packs[i] for i in self.numbers(indices)]


@pytest.fixture(scope="module")
def three(kit: SimpleNamespace) -> list[list[Packs]]:
    """Packs of three sources: of 1 to 3, of 2, of 5 examples."""
    return [
        [pack_of(i, 1 + i % 3, kit) for i in range(60)],
        [pack_of(100 + i, 2, kit) for i in range(40)],
        [pack_of(200 + i, 5, kit) for i in range(10)],
    ]


def mix_of(three: list[list[Packs]], weights: Any = (5, 3, 2), **settings: Any) -> MixedPacks:
    parts = [
        Source(Listed(packs, name=str(i)), weight)
        for i, (packs, weight) in enumerate(zip(three, weights, strict=True))
    ]
    return MixedPacks(parts, **settings)


def everything(mix: MixedPacks) -> list[tuple[int, int]]:
    """Source and first example id of each pack of the epoch, read in batches of 4."""
    indices = np.arange(len(mix))
    cuts = np.split(indices, range(4, len(mix), 4))
    packs = [p for batch in mix.read(cuts) for p in batch]
    ids = (int(p.example_ids[0]) // 1000 for p in packs)
    return list(zip(mix.sources(indices).tolist(), ids, strict=True))


def evenly(weights: list[float], turns: int, packs: int) -> Schedule:
    """A schedule in which nothing is ever used up."""
    n = len(weights)
    return Schedule(weights, [10**9] * n, [None] * n, packs, turns)


@pytest.mark.parametrize(("turns", "most"), [(1, 2), (8, 4.5)])
@given(weights)
@settings(max_examples=40, deadline=None)
def test_shares_hold_in_every_prefix(turns: int, most: float, weights: list[float]) -> None:
    n = 600
    sources, _ = evenly(weights, turns, n).locate(np.arange(n))
    counted = np.stack([np.cumsum(sources == s) for s in range(len(weights))], axis=1)
    exact = np.arange(1, n + 1)[:, None] * (np.array(weights) / sum(weights))
    assert np.abs(counted - exact).max() < most


@given(weights, st.sampled_from([(0, 1), (0, 8), (5, 8)]))
@settings(max_examples=40, deadline=None)
def test_shares_count_and_find_what_they_give(weights: list[float], turn: tuple[int, int]) -> None:
    n, shares = 300, MixSchedule(weights, *turn)
    sources, numbers = shares.locate(np.arange(n))
    counted = np.stack([np.cumsum(sources == s) for s in range(len(weights))], axis=1)
    assert [shares.counts(i).tolist() for i in range(1, n + 1)] == counted.tolist()
    for s in range(len(weights)):
        mine = np.flatnonzero(sources == s)
        assert numbers[mine].tolist() == list(range(len(mine)))
        assert [shares.find(s, k) for k in range(len(mine))] == mine.tolist()


@given(goals, st.sampled_from([1, 8]))
@settings(max_examples=200, deadline=None)
def test_the_first_source_to_repeat_ends_the_epoch(
    parts: list[tuple[float, int, int | None]], turns: int
) -> None:
    rates, goals, caps = ([p[i] for p in parts] for i in range(3))
    endless = Schedule(rates, [10**9] * len(parts), caps, "first", turns)
    n = Schedule(rates, goals, caps, "first", turns).length
    sources, numbers = endless.locate(np.arange(min(endless.length, n + 1)))
    limits = np.array([10**9 if cap is None else cap for cap in caps])
    starts = (numbers >= np.array(goals)[sources]) & (np.array(goals) < limits)[sources]
    assert not starts[:n].any()
    assert starts[n:].all()


def test_shares_hold_far_out() -> None:
    shares, far = MixSchedule([3, 2, 1]), 10**12
    sources, numbers = shares.locate(np.arange(far, far + 60))
    assert np.bincount(sources).tolist() == [30, 20, 10]
    assert np.abs(shares.counts(far) / far - [1 / 2, 1 / 3, 1 / 6]).max() < 1e-6
    assert [shares.find(s, int(k)) for s, k in zip(sources, numbers, strict=True)] == list(
        range(far, far + 60)
    )


@given(goals, st.sampled_from(["first", "all"]) | st.integers(1, 200), st.sampled_from([1, 8]))
@settings(max_examples=200, deadline=None)
def test_a_schedule_counts_what_it_gives(
    parts: list[tuple[float, int, int | None]], until: Any, turns: int
) -> None:
    rates, goals, caps = ([p[i] for p in parts] for i in range(3))
    schedule = Schedule(rates, goals, caps, until, turns)
    n = schedule.length
    sources, numbers = schedule.locate(np.arange(n))
    seen = np.zeros(len(parts), np.int64)
    for i, source in enumerate(sources):
        assert schedule.counts(i).tolist() == seen.tolist()
        seen[source] += 1
    assert schedule.counts(n).tolist() == seen.tolist()
    assert (numbers % turns == np.arange(n) % turns).all()
    given = [numbers[sources == s] for s in range(len(parts))]
    for mine in given:
        for turn in range(turns):
            of_turn = mine[mine % turns == turn]
            assert of_turn.tolist() == list(range(turn, turns * len(of_turn), turns))
    limits = [math.inf if cap is None else cap for cap in caps]
    assert all((mine < limit).all() for mine, limit in zip(given, limits, strict=True))
    left = [s for s in range(len(parts)) if seen[s] < limits[s]]
    if until == "all" and (turns == 1 or None in caps):
        for s, mine in enumerate(given):
            assert set(range(int(min(goals[s], limits[s])))) <= set(mine.tolist())
        if n:  # and not one pack more than that takes
            last = sources[-1]
            assert numbers[-1] + turns >= min(goals[last], limits[last])
    elif until == "first":
        assert all(max(given[s], default=0) < goals[s] for s in left if limits[s] > goals[s])
        assert turns > 1 or not left or any(seen[s] == goals[s] for s in left)
    elif until != "all":
        assert n == until or turns > 1 or not left


class Long(Listed):
    """So many packs of one example that nobody reads."""

    def __init__(self, packs: int) -> None:
        super().__init__([])
        self.number = packs

    def __len__(self) -> int:
        return self.number

    @property
    def totals(self) -> Totals:
        n = self.number
        return dataclasses.replace(NO_TOTALS, packs=n, examples=n, tokens=100 * n)


def test_ranks_read_lanes_of_their_own_from_every_source() -> None:
    groups = [np.full(4096, 4), np.full(1000, 3)]
    mix = MixedPacks([Source(Long(int(g.sum())), w) for g, w in zip(groups, (3, 1), strict=True)])
    orders = [PackOrder(g) for g in groups]
    for ranks in (2, 4, 8):
        read = 0
        for rank in range(ranks):
            sources, uses, positions = mix.locate(np.arange(rank, len(mix), ranks))
            assert not uses.any()
            for s in (0, 1):
                read += len(np.unique(orders[s].locate(positions[sources == s])[0]))
        every, _, positions = mix.locate(np.arange(len(mix)))
        once = sum(len(np.unique(orders[s].locate(positions[every == s])[0])) for s in (0, 1))
        assert read <= 1.1 * once
        assert once > 3000


@pytest.mark.parametrize("unit", ["pairs", "tokens"])
def test_weights_are_shares_in_pairs_or_in_tokens(three: Any, unit: Any) -> None:
    mix = mix_of(three, unit=unit, until=4000)
    sizes, sources = mix.sizes(np.arange(4000)), mix.sources(np.arange(4000))
    amounts = sizes.examples if unit == "pairs" else sizes.tokens
    given = np.bincount(sources, amounts)
    assert given / given.sum() == pytest.approx([0.5, 0.3, 0.2], abs=0.005)


def test_counts_are_those_of_the_packs(three: Any) -> None:
    mix = mix_of(three, until=300)
    sizes, sources = mix.sizes(np.arange(300)), mix.sources(np.arange(300))
    for index in range(301):
        counts = mix.counts(index)
        assert counts.packs.tolist() == np.bincount(sources[:index], minlength=3).tolist()
        exact = np.bincount(sources[:index], sizes.examples[:index], minlength=3)
        assert np.abs(counts.examples - exact).max() <= 3
    with pytest.raises(IndexError, match=r"0\.\.300"):
        mix.counts(301)


def test_packs_come_from_where_the_formula_says(three: Any) -> None:
    for until in ("first", "all", 77):
        mix = mix_of(three, until=until)
        sizes = mix.sizes(np.arange(len(mix)))
        packs = [p for batch in mix.read([np.arange(len(mix))]) for p in batch]
        assert [len(p.input_ids) for p in packs] == sizes.tokens.tolist()
        assert [len(p.example_ids) for p in packs] == sizes.examples.tolist()
        for source, first in everything(mix):
            assert first // 100 == source


def test_first_repeats_nothing_and_all_leaves_nothing_out(three: Any) -> None:
    short = everything(mix_of(three, until="first"))
    assert len(set(short)) == len(short)
    assert [s for s, _ in short].count(0) == 60  # used up; one pack more would be its second use
    long = everything(mix_of(three, until="all"))
    assert long[: len(short)] == short
    assert set(long) == {(s, int(p.example_ids[0]) // 1000) for s in range(3) for p in three[s]}
    assert [s for s, _ in long].count(0) > 60


def test_each_use_of_a_source_is_whole_and_in_another_order(three: Any) -> None:
    mix = MixedPacks([Source(Listed(three[0]), 1), Source(Listed(three[2]), 2, repeat=3)])
    mine = [pack for source, pack in everything(mix) if source == 1]
    assert len(mine) == 30
    uses = [mine[i : i + 10] for i in (0, 10, 20)]
    assert all(sorted(use) == list(range(200, 210)) for use in uses)
    assert len({tuple(use) for use in uses}) == 3


def test_a_capped_source_leaves_and_the_others_go_on(three: Any) -> None:
    parts = [
        Source(Listed(three[0]), 5),
        Source(Listed(three[1]), 3, cap=21),
        Source(Listed(three[2]), 2),
    ]
    mix = MixedPacks(parts, until=400)
    sources = mix.sources(np.arange(400))
    assert np.count_nonzero(sources == 1) == 10  # packs of 2
    rest = sources[np.flatnonzero(sources == 1)[-1] + 1 :]
    assert np.bincount(rest)[0] / len(rest) == pytest.approx(2.5 / (2.5 + 0.4), abs=0.02)
    only = MixedPacks([Source(Listed(three[1]), 1, cap=21)], until=400)
    assert len(only) == 10


@pytest.mark.parametrize("until", ["first", "all", 120])
def test_turns_change_who_reads_and_not_what(
    three: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mix_module, "_TURN_PACKS", 1)
    mix = mix_of(three, until=until)
    given = everything(mix)
    assert all(first // 100 == source for source, first in given)
    counts = mix.counts(len(mix)).packs
    assert np.bincount([s for s, _ in given], minlength=3).tolist() == counts.tolist()
    if until == "first":
        assert len(set(given)) == len(given)
        assert counts[0] >= 60 - 16
    if until == "all":
        assert len(set(given)) == 110
    _, uses, positions = mix.locate(np.arange(len(mix)))
    assert not ((positions - np.arange(len(mix)))[uses == 0] % 8).any()


def test_epochs(three: Any) -> None:
    mix = mix_of(three)
    first = everything(mix)
    mix.set_epoch(1)
    assert sorted(s for s, _ in everything(mix)) == sorted(s for s, _ in first)
    assert everything(mix) != first
    mix.set_epoch(0)
    assert everything(mix) == first


@given(st.data())
@settings(max_examples=30, deadline=None)
def test_any_batches_give_the_packs_of_their_positions(three: Any, data: Any) -> None:
    """Also positions that go back, repeat, and cross from one use of a source into the next."""
    mix = mix_of(three, until=150)
    whole = [p for batch in mix.read([np.arange(150)]) for p in batch]
    position = st.integers(0, 149)
    batches = data.draw(st.lists(st.lists(position, max_size=6), max_size=40))
    given = list(mix.read(np.array(b, np.int64) for b in batches))
    assert len(given) == len(batches)
    for batch, packs in zip(batches, given, strict=True):
        for i, pack in zip(batch, packs, strict=True):
            np.testing.assert_array_equal(pack.example_ids, whole[i].example_ids)


def test_each_source_is_read_on_and_not_anew(three: Any) -> None:
    mix = mix_of(three, until=100)
    list(mix.read(np.arange(100)[:, None]))
    for part in mix.parts:
        stream: Any = part.stream
        assert len(stream.openings) == len(set(stream.openings))


def test_looking_ahead_is_bounded_where_a_source_is_rare(
    three: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mix_reader_module, "LOOK_AHEAD", 50)
    mix = mix_of(three, weights=(1000, 1000, 1), until=20000)
    taken = 0

    def batches() -> Iterator[Int64]:
        nonlocal taken
        for taken in range(20000):
            yield np.array([taken])

    given: list[int] = []
    for number, packs in enumerate(mix.read(batches())):
        assert taken - number < 50 + mix_reader_module._CHUNK
        given.append(int(packs[0].example_ids[0]) // 100_000)
    assert given == mix.sources(np.arange(20000)).tolist()
    assert 0 < given.count(2) < 20


@pytest.fixture(scope="module")
def stored(kit: SimpleNamespace, tmp_path_factory: pytest.TempPathFactory) -> list[Dataset]:
    """Two datasets, of both layouts."""
    folder = tmp_path_factory.mktemp("mix")
    return [
        kit.write(
            str(folder / layout),
            kit.packed(random_examples(2 * n, seed=n), [2] * n, layout),
            "preference",
        )
        if layout == "concat"
        else kit.write(
            str(folder / layout),
            kit.packed(random_examples(2 * n, seed=n), [2] * n, layout),
            "preference",
            layout,
        )
        for layout, n in (("concat", 23), ("shared_prefix", 9))
    ]


def loaded(stored: list[Dataset], rank: int = 0, world_size: int = 1) -> PackedDataLoader:
    sources = [Source(stored[0], 2), Source(stored[1], 1)]
    placed = {"rank": rank, "world_size": world_size}
    data = PackedDataset.mix(sources, until="all", seed=3, **placed)
    plain = PackedDataset(MixedPacks(sources, until="all", seed=3), **placed)
    assert data.state_dict() == plain.state_dict()
    return PackedDataLoader(data, tail="uneven")


def names(batch: Any) -> list[tuple[int, int]]:
    """(source, example id) of each example: unique in a mix, while ids alone are not."""
    return list(zip(batch.sources.tolist(), batch.example_ids.tolist(), strict=True))


def test_batches_name_the_source_of_every_example(stored: list[Dataset]) -> None:
    whole = [name for batch in loaded(stored) for name in names(batch)]
    assert {s for s, _ in whole} == {0, 1}
    assert len({i for _, i in whole}) < len(set(whole)) == 2 * (23 + 9)
    tokens = {
        (s, int(i)): len(p.input_ids)
        for s, data in enumerate(stored)
        for packs in data.iter_packs()
        for p in map(packs.row, range(len(packs)))
        for i in p.example_ids
    }
    for batch in loaded(stored):
        assert {tokens[name] for name in names(batch)} == {batch.num_tokens}


def test_ranks_and_resuming_share_one_sequence(stored: list[Dataset]) -> None:
    whole = [names(batch) for batch in loaded(stored)]
    for ranks in (2, 3, 4):
        parts = [[names(b) for b in loaded(stored, r, ranks)] for r in range(ranks)]
        assert [parts[i % ranks][i // ranks] for i in range(len(whole))] == whole
    for k in range(len(whole) + 1):
        loader = loaded(stored)
        batches = iter(loader)
        for _ in range(k):
            next(batches)
        state = json.dumps(loader.state_dict())
        assert len(state) < 150
        resumed = loaded(stored)
        resumed.load_state_dict(json.loads(state))
        assert [names(batch) for batch in resumed] == whole[k:]


def test_a_state_of_another_mix_is_refused(stored: list[Dataset]) -> None:
    state = loaded(stored).state_dict()
    others = [
        [Source(stored[0], 2), Source(stored[1], 2)],
        [Source(stored[0], 2), Source(stored[1], 1, repeat=2)],
        [Source(stored[0], 2), Source(stored[1], 1, cap=5)],
        [Source(stored[1], 2), Source(stored[0], 1)],
    ]
    mixes = [MixedPacks(parts, until="all", seed=3) for parts in others]
    mixes += [MixedPacks(loaded(stored).data.stream.parts, until="all", seed=4)]  # type: ignore[attr-defined]
    mixes += [MixedPacks(mixes[0].parts, until="first", seed=3)]
    mixes += [MixedPacks(loaded(stored).data.stream.parts, until="all", seed=3, unit="tokens")]  # type: ignore[attr-defined]
    for mix in mixes:
        with pytest.raises(CompatibilityError, match="mix must be"):
            PackedDataLoader(PackedDataset(mix)).load_state_dict(state)


def test_pickles_and_nests(stored: list[Dataset]) -> None:
    inner = MixedPacks([Source(stored[0], 2), Source(stored[1], 1)], seed=3)
    outer = MixedPacks([Source(inner, 1), Source(StoredPacks(stored[1]), 1)], until=40)
    again = pickle.loads(pickle.dumps(outer))
    indices = np.arange(40)
    assert again.sources(indices).tolist() == outer.sources(indices).tolist()
    for a, b in zip(outer.read([indices]), again.read([indices]), strict=True):
        assert [p.example_ids.tolist() for p in a] == [p.example_ids.tolist() for p in b]
    assert outer.totals.packs == 40
    assert outer.totals.examples == 80


def test_a_source_may_be_a_stream_with_side_data(stored: list[Dataset]) -> None:
    """Two uses of it are read at a time, so its copies must not share an epoch."""

    def given(first: Any) -> list[Any]:
        mix = MixedPacks([Source(first, 2), Source(StoredPacks(stored[0], seed=3), 1)], until=60)
        packs = [p.example_ids.tolist() for b in mix.read([np.arange(60)]) for p in b]
        return [packs, *(mix.sizes(np.arange(60)).tokens.tolist() for _ in range(2))]

    plain = StoredPacks(stored[1], seed=3)
    assert given(JoinedPacks(plain, [])) == given(plain)


def test_the_order_is_fixed_for_good() -> None:
    """A saved position must mean the same in every later release."""
    terms: Any = [3, 2, 1], [9, 9, 9], [None, 4, None], 24
    sources, numbers = Schedule(*terms).locate(np.arange(24))
    assert "".join(map(str, sources)) == "010201010201002000200020"
    assert (
        "".join(map(str, Schedule(*terms, 8).locate(np.arange(24))[0]))
        == "100200000110020200010020"
    )
    assert numbers[-1] == 14
    digest = hashlib.sha256()
    goals, caps = [900, 700, 30, 250, 260], [None, 500, None, None, 200]
    for turns in (1, 8):
        for until, length in (
            ("first", (1762, 1749)),
            ("all", (18432, 20937)),
            (3000, (3000,) * 2),
        ):
            long = Schedule([5, 3.5, 0.01, 1, 1], goals, caps, until, turns)  # type: ignore[arg-type]
            assert long.length == length[turns > 1]
            for array in long.locate(np.arange(long.length)):
                digest.update(array.astype("<i8").tobytes())
    assert digest.hexdigest().startswith("2b2427207ce14a44")


def tokenized(data: Dataset, **tokenizer: Any) -> Dataset:
    """The dataset as if another tokenizer had made it."""
    made = {"sha256": "a", "chat_template_sha256": "c", **tokenizer}
    provenance = {**data.manifest.provenance, "tokenizer": made}
    manifest = dataclasses.replace(data.manifest, provenance=provenance)
    return Dataset(data.location, manifest, data.version)


def test_refusals(three: Any, stored: list[Dataset]) -> None:
    good = Source(Listed(three[0]), 1)
    for parts, options, message in (
        ([], {}, "at least one source"),
        ([Source(Listed(three[0]), 0)], {}, "weight of source 0 must be above 0; found 0"),
        ([good, Source(Listed(three[0]), -1)], {}, "weight of source 1"),
        ([Source(Listed(three[0]), math.inf)], {}, "weight of source 0"),
        ([Source(Listed(three[0]), math.nan)], {}, "weight of source 0"),
        ([Source(Listed(three[0]), 1, repeat=0)], {}, "repeat of source 0"),
        ([Source(Listed(three[1]), 1, cap=1)], {}, r"one pack, about 2\.0 examples; found 1"),
        ([good], {"unit": "packs"}, "unit must be one of: pairs, tokens; found 'packs'"),
        ([good], {"until": 0}, "until must be first, all or a number from 1; found 0"),
        ([good], {"until": "end"}, "until must be"),
        ([good, Source(Listed([]), 1)], {}, "source 1 of the mix must hold packs"),
    ):
        with pytest.raises(ConfigError, match=message):
            MixedPacks(parts, **options)
    with pytest.raises(
        CompatibilityError, match="source 1 of the mix: must be of kind 'preference'"
    ):
        MixedPacks([good, Source(Listed(three[1], kind="sft"), 1)])
    same = [Source(tokenized(stored[0]), 1), Source(tokenized(stored[1]), 1)]
    assert len(MixedPacks(same))
    with pytest.raises(CompatibilityError, match=r"datasets 0 and 1: .* one tokenizer"):
        MixedPacks([same[0], Source(tokenized(stored[1], sha256="b"), 1)])
    with pytest.raises(CompatibilityError, match=r"sources of the mix: .* one chat template"):
        MixedPacks([same[0], Source(tokenized(stored[1], chat_template_sha256="d"), 1)])
    assert MixedPacks([same[0], Source(tokenized(stored[1], chat_template_sha256=None), 1)])
    with pytest.raises(IndexError, match=r"0\.\.59"):
        MixedPacks([good]).locate(np.array([60]))
