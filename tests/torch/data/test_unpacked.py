"""Tokenized records that were never packed: packed while they are read, each exactly once."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from packstore.config import PackConfig
from packstore.errors import CompatibilityError, ConfigError, DropRateError, RecordError
from packstore.format.arrays import IGNORE_INDEX, Examples
from packstore.online_packing.tokenized import examples_of
from packstore.testing import assert_examples_equal, random_examples
from packstore.torch import (
    PackedBatch,
    PackedDataLoader,
    PackedDataset,
    PreferenceLoss,
    TokenizedBatches,
    count_step,
    packed_logps,
    use_packed_attention,
)

N = 60
EXAMPLES = random_examples(N, seed=3)
CONFIG = PackConfig(pack_size=90, layout="shared_prefix")


def records_of(examples: Examples) -> list[dict[str, Any]]:
    """The pairs as whole sequences with labels, as collators of other trainers have them."""
    records = []
    starts = examples.sequence_offsets
    for i in range(examples.num_examples):
        record: dict[str, Any] = {"example_id": int(examples.example_ids[i])}
        for k, name in enumerate(("chosen", "rejected")):
            s = int(examples.example_offsets[i]) + k
            ids = examples.input_ids[starts[s] : starts[s + 1]]
            on = examples.supervised[starts[s] : starts[s + 1]]
            record[f"{name}_input_ids"] = ids.tolist()
            record[f"{name}_labels"] = np.where(on, ids, IGNORE_INDEX).tolist()
            record[f"{name}_reward"] = float(examples.reward[s])
            record[f"ref_{name}_logps"] = -10.0 - i - 0.5 * k
        records.append(record)
    return records


RECORDS = records_of(EXAMPLES)


class Endless:
    """Records without a length, which can be gone through again."""

    def __iter__(self) -> Iterator[Any]:
        return iter(RECORDS)


def ids(batches: Any) -> list[int]:
    return [i for b in batches for i in b.example_ids[b.weights > 0].tolist()]


def test_records_become_the_same_examples() -> None:
    made = examples_of(RECORDS, range(N), "preference", CONFIG)
    assert_examples_equal(made.examples, EXAMPLES)


@pytest.mark.parametrize(
    ("record", "ids", "labels"),
    [
        ({"prompt": [1, 2], "chosen": [3], "rejected": [4, 5]}, [1, 2, 3], [-100, -100, 3]),
        ({"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4]}, [1, 2, 3], [-100, 2, 3]),
        ({"input_ids": [1, 2, 3], "labels": [-100, -100, 3]}, [1, 2, 3], [-100, -100, 3]),
        ({"input_ids": torch.tensor([1, 2]), "completion_mask": [0, 1]}, [1, 2], [-100, 2]),
        ({"prompt": np.array([1]), "completion": [2]}, [1, 2], [-100, 2]),
        ({"prompt": [1], "responses": [[2, 3], [4]], "scores": [1, 0]}, [1, 2, 3], [-100, 2, 3]),
        (
            {
                "prompt": torch.tensor([1]),
                "responses": [torch.tensor([2, 3]), np.array([4])],
                "scores": np.float32([1, 0]),
            },
            [1, 2, 3],
            [-100, 2, 3],
        ),
        ({"prompt": "q", "prompt_ids": [1], "response_ids": [2]}, [1, 2], [-100, 2]),
    ],
)
def test_shapes_of_records(record: dict[str, Any], ids: list[int], labels: list[int]) -> None:
    data = PackedDataset.from_records([record], CONFIG)
    pack = next(iter(data))
    n = pack.segment_lengths[0]
    assert (pack.input_ids[:n].tolist(), pack.labels[:n].tolist()) == (ids, labels)


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ({"chosen": [1, 2], "rejected": [3]}, "or add the labels of whole"),
        (
            {"prompt": [1], "chosen": [], "rejected": [3]},
            "supervised token; found response 1",
        ),
        ({"prompt": [1], "chosen": [2]}, "no field .rejected_ids. among"),
        (
            {"prompt": "hi", "chosen": [2], "rejected": [3]},
            "found prompt text, chosen ids",
        ),
        (
            {"prompt": [1], "chosen": [[2], [3, 4]], "rejected": [3]},
            r"found chosen \[\[2",
        ),
        (
            {"prompt": [-1], "chosen": [2], "rejected": [3]},
            "prompt must be token ids, whole",
        ),
        ({"input_ids": [1, 2], "labels": [2, 2]}, "must be the id at its place"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "one value for each"),
        ({"text": "hi"}, "it must be a mapping with chosen"),
        ({"prompt": [1], "responses": [[2]], "scores": [1]}, "a list of at least 2, found 1"),
        ({"prompt": [1], "chosen": [2], "rejected": [3], "chosen_reward": 1}, "both sides"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "must be token ids, found 'b'"),
        ({"prompt": [1], "chosen": [2], "rejected": [3], "example_id": "x"}, "a whole number"),
        (
            {
                "prompt": [1],
                "chosen": [2],
                "rejected": [3],
                "chosen_reward": "x",
                "rejected_reward": 1,
            },
            "finite number",
        ),
        (
            {"prompt": [1], "response": [2], "label": False},
            "to learn; found label False",
        ),
    ],
)
def test_what_is_no_record_is_refused(record: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordError, match=said):
        PackedDataset.from_records([record], CONFIG)


def test_any_position_epoch_and_number_of_ranks() -> None:
    """A list of records behaves as a stored dataset does."""
    batching = {"examples_per_step": 9, "tail": "pad"}
    data = PackedDataset.from_records(RECORDS, CONFIG, seed=1)
    loader = PackedDataLoader(data, **batching)
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches = list(loader)
        assert sorted(ids(batches)) == list(range(N))
        assert all(b.num_tokens <= 90 and b.step.examples <= 9 for b in batches)
        epochs.append(ids(batches))
    assert epochs[0] != epochs[1]
    loader.set_epoch(0)
    for stop in (1, 5, 11):
        source = iter(loader)
        before = ids([next(source) for _ in range(stop)])
        state = json.loads(json.dumps(loader.state_dict()))
        after = PackedDataLoader(PackedDataset.from_records(RECORDS, CONFIG, seed=1), **batching)
        after.load_state_dict(state)
        assert before + ids(after) == epochs[0]
        halves = []
        for rank in range(2):
            half = PackedDataset.from_records(RECORDS, CONFIG, seed=1, rank=rank, world_size=2)
            part = PackedDataLoader(half, **batching)
            part.load_state_dict(state)
            halves += ids(part)
        assert sorted(before + halves) == list(range(N))
    changed = copy.deepcopy(RECORDS)
    changed[7]["chosen_input_ids"][0] += 1
    other = PackedDataset.from_records(changed, CONFIG, seed=1)
    with pytest.raises(CompatibilityError, match="records must be"):
        other.load_state_dict(state)


def test_the_named_constructor_is_the_argument_repack() -> None:
    named = PackedDataset.from_records(RECORDS, CONFIG, seed=3, rank=1, world_size=2)
    plain = PackedDataset(RECORDS, repack=CONFIG, seed=3, rank=1, world_size=2)
    assert named.state_dict() == plain.state_dict()
    assert [p.example_ids.tolist() for p in named] == [p.example_ids.tolist() for p in plain]
    with pytest.raises(ConfigError, match="make PackedDataset"):
        PackedDataset.from_records("prefs-8k", CONFIG)


def test_workers_give_the_same_batches() -> None:
    def found(**workers: Any) -> list[int]:
        return ids(PackedDataLoader(PackedDataset.from_records(RECORDS, CONFIG), **workers))

    assert found(num_workers=2, multiprocessing_context="fork") == found()


def test_a_hugging_face_dataset() -> None:
    datasets = pytest.importorskip("datasets", reason="datasets")
    table = datasets.Dataset.from_list(RECORDS)
    stored, plain = (PackedDataset.from_records(x, CONFIG) for x in (table, RECORDS))
    assert stored.state_dict() == plain.state_dict()
    for a, b in zip(stored, plain, strict=True):
        assert np.array_equal(a.input_ids, b.input_ids)
    stream = table.to_iterable_dataset()
    loader = TokenizedBatches(stream, CONFIG, examples_per_step=9, tail="pad")
    whole = ids(loader)
    assert whole == ids(TokenizedBatches(Endless(), CONFIG, examples_per_step=9, tail="pad"))
    source = iter(loader)
    before = ids([next(source) for _ in range(7)])
    loader.load_state_dict(loader.state_dict())  # by skip()
    assert before + ids(loader) == whole


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_records_without_a_length(ranks: int) -> None:
    """Whole steps of so many pairs, over all ranks; as many batches on each."""

    def on(rank: int, ranks: int) -> TokenizedBatches:
        settings: Any = {"rank": rank, "world_size": ranks, "tail": "pad"}
        return TokenizedBatches(Endless(), CONFIG, examples_per_step=9, **settings)

    loaders = [on(rank, ranks) for rank in range(ranks)]
    given = [list(loader) for loader in loaders]
    assert len({len(batches) for batches in given}) == 1
    steps: dict[int, list[int]] = {}
    for batches in given:
        for b in batches:
            assert b.num_tokens <= 90
            steps.setdefault(b.step.index, []).extend(ids([b]))
            assert b.step.examples == (9 if b.step.index < N // 9 else N % 9)
    every = [sorted(found) for _, found in sorted(steps.items())]
    assert every == [list(range(i, min(i + 9, N))) for i in range(0, N, 9)]
    drop = TokenizedBatches(Endless(), CONFIG, examples_per_step=9, rank=0, world_size=1)
    assert sorted(ids(drop)) == list(range(N // 9 * 9))
    for stop in range(len(given[0])):
        states = []
        for loader in loaders:
            source = iter(loader)
            for _ in range(stop):
                next(source)
            states.append(loader.state_dict())
        assert all(state == states[0] for state in states)
        before = [i for batches in given for i in ids(batches[:stop])]
        for others in (ranks, 1 + ranks % 3):
            rest = []
            for rank in range(others):
                other = on(rank, others)
                other.load_state_dict(json.loads(json.dumps(states[0])))
                assert other.state_dict() == states[0]
                batches = list(other)
                if others == ranks:
                    assert ids(batches) == ids(given[rank][stop:])
                    assert [b.step for b in batches] == [b.step for b in given[rank][stop:]]
                rest += ids(batches)
            assert sorted(before + rest) == list(range(N))


def test_losses_are_those_of_unpacked_pairs(kit: SimpleNamespace) -> None:
    """Sums over a step, divided by its count: as one pair at a time, in float64."""
    model = use_packed_attention(kit.tiny_model())
    loss_fn = PreferenceLoss("dpo", beta=0.3)

    def loss_of(batches: list[PackedBatch]) -> float:
        total = 0.0
        for batch in batches:
            divisor = count_step([batch], loss_fn)
            logps = packed_logps(model, batch)
            total += float(loss_fn(logps, batch, divisor=divisor).loss.detach())
        return total

    alone = PackConfig(pack_size=200, strategy="none")
    for start in (0, 9):
        plain = TokenizedBatches(RECORDS[start : start + 9], alone, examples_per_step=9)
        expected = loss_of(list(plain))
        assert len(list(plain)) == 9
        for layout in ("concat", "shared_prefix"):
            config = PackConfig(pack_size=90, layout=layout)
            made = list(TokenizedBatches(RECORDS[start : start + 9], config, examples_per_step=9))
            assert 1 < len(made) < 9
            assert loss_of(made) == pytest.approx(expected, abs=1e-10)
    ref = {i: -10.0 - i - 0.5 * k for i in range(9) for k in (0,)}
    for batch in made:
        assert batch.ref_logps is not None
        first = batch.ref_logps[::2].tolist()
        assert first == [ref[i % 9] - (9 if i >= 9 else 0) for i in batch.example_ids.tolist()]


def test_what_does_not_fit() -> None:
    small = PackConfig(pack_size=24, layout="shared_prefix")
    loader = TokenizedBatches(RECORDS, small, examples_per_step=5, tail="pad")
    kept = ids(loader)
    assert 0 < loader.left_out == N - len(kept)
    mapped = PackedDataset(RECORDS, repack=small)
    assert mapped.stream.left_out == loader.left_out
    assert sorted(ids(PackedDataLoader(mapped))) == sorted(kept)
    for made in (
        lambda config: list(TokenizedBatches(RECORDS, config, examples_per_step=5)),
        lambda config: PackedDataset(RECORDS, repack=config),
    ):
        with pytest.raises(RecordError, match="must fit pack_size 24"):
            made(PackConfig(pack_size=24, overlong="error"))
        with pytest.raises(DropRateError, match="that do not"):
            made(PackConfig(pack_size=24, max_drop_rate=0.01))
        with pytest.raises(ConfigError, match="no longer know their texts"):
            made(PackConfig(pack_size=24, overlong="truncate_prompt"))


def test_a_state_of_another_cut_is_refused() -> None:
    loader = TokenizedBatches(RECORDS, CONFIG, examples_per_step=9)
    source = iter(loader)
    next(source)
    inside = loader.state_dict()
    assert inside["packs"]
    other = TokenizedBatches(RECORDS, CONFIG, examples_per_step=8)
    with pytest.raises(CompatibilityError, match="examples_per_step and config must stay"):
        other.load_state_dict(inside)
    while loader.state_dict()["packs"]:
        next(source)
    other.load_state_dict(loader.state_dict())
    assert sorted(ids(other)) == list(range(9, 9 + (N - 9) // 8 * 8))
    with pytest.raises(CompatibilityError, match="of version 1"):
        other.load_state_dict({"epoch": 0})


def test_sentences_for_other_sources() -> None:
    with pytest.raises(ConfigError, match="TokenizedBatches"):
        PackedDataset(Endless(), repack=CONFIG)
    with pytest.raises(ConfigError, match="records need repack"):
        PackedDataset(RECORDS)
    with pytest.raises(ConfigError, match="one at least"):
        PackedDataset([], repack=CONFIG)
