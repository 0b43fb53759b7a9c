"""Token ids in memory, packed into the batches of one step: the same examples, loss and
divisor.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from forests import dialogues_of, examples_of, random_forest
from hypothesis import given, settings
from hypothesis import strategies as st

import packstore.torch as pt
from packstore.config import PackConfig
from packstore.errors import ConfigError, RecordError
from packstore.format import IGNORE_INDEX
from packstore.testing import random_examples

N = 20
EXAMPLES = random_examples(N, seed=3)


def records() -> list[dict[str, Any]]:
    """The pairs as whole sequences with labels, as collators of other trainers have
    them.
    """
    made: list[dict[str, Any]] = [{} for _ in range(N)]
    for s, start in enumerate(EXAMPLES.sequence_offsets[:-1]):
        tokens = slice(start, EXAMPLES.sequence_offsets[s + 1])
        ids, on = EXAMPLES.input_ids[tokens], EXAMPLES.supervised[tokens]
        name = ("chosen", "rejected")[s % 2]
        made[s // 2] |= {
            f"{name}_input_ids": ids.tolist(),
            f"{name}_labels": np.where(on, ids, IGNORE_INDEX).tolist(),
            f"{name}_reward": float(EXAMPLES.reward[s]),
            f"ref_{name}_logps": torch.tensor(-0.1 * s * s),
        }
    return made


def real_ids(batches: Any) -> list[int]:
    return [i for b in batches for i in b.example_ids[b.weights > 0].tolist()]


def test_examples_are_taken_as_they_are() -> None:
    batches = pt.pack_in_memory(EXAMPLES, 90, kind="preference")
    assert sorted(real_ids(batches)) == sorted(EXAMPLES.example_ids.tolist())
    with pytest.raises(ConfigError, match="kind"):
        pt.pack_in_memory(EXAMPLES, 90)


@pytest.mark.parametrize(
    ("record", "ids", "labels"),
    [
        (
            {"prompt": [1, 2], "chosen": [3], "rejected": [4, 5]},
            [1, 2, 3],
            [-100, -100, 3],
        ),
        (
            {"prompt_ids": [1], "chosen_ids": [2, 3], "rejected_ids": [4]},
            [1, 2, 3],
            [-100, 2, 3],
        ),
        (
            {"input_ids": torch.tensor([1, 2]), "completion_mask": [0, 1]},
            [1, 2],
            [-100, 2],
        ),
        ({"prompt": "q", "prompt_ids": [1], "response_ids": [2]}, [1, 2], [-100, 2]),
        (
            {
                "prompt": torch.tensor([1]),
                "responses": [torch.tensor([2, 3]), np.array([4])],
                "scores": np.float32([1, 0]),
            },
            [1, 2, 3],
            [-100, 2, 3],
        ),
    ],
)
def test_shapes_of_records(
    record: dict[str, Any], ids: list[int], labels: list[int]
) -> None:
    (batch,) = pt.pack_in_memory([record], 90)
    first = slice(0, int(batch.cu_seqlens[1]))
    assert (batch.input_ids[first].tolist(), batch.labels[first].tolist()) == (
        ids,
        labels,
    )


def test_fields_and_columns_of_records() -> None:
    record = {"q": [1], "chosen": [2], "rejected": [3], "lang": "de"}
    (batch,) = pt.pack_in_memory([record], 90, fields={"prompt": "q"}, carry=["lang"])
    assert batch.input_ids.tolist() == [1, 2, 1, 3]
    assert batch.columns["lang"].tolist() == ["de"]


def rollouts() -> list[tuple[Any, Any, Any]]:
    """Groups of 1 to 4 responses, as lists, arrays and tensors; one prompt is empty."""
    rng = np.random.default_rng(0)
    made: list[tuple[Any, Any, Any]] = []
    for i in range(N):
        k = int(rng.integers(1, 5))
        sides = [rng.integers(0, 50, rng.integers(2, 9)) for _ in range(k)]
        prompt = rng.integers(0, 50, int(rng.integers(1, 12)) if i else 0)
        form: Any = (np.asarray, np.ndarray.tolist, torch.from_numpy)[i % 3]
        made.append((form(prompt), [form(side) for side in sides], rng.normal(size=k)))
    return made


@pytest.mark.parametrize("layout", ["concat", "shared_prefix"])
def test_rollouts_are_laid_out_as_examples(layout: Any) -> None:
    seen, batches = [], pt.pack_in_memory(rollouts(), 90, layout, rank=0, world_size=1)
    for average in ("token", "sequence", "group"):
        loss_fn = pt.PolicyLoss(average=average)  # type: ignore[arg-type]
        uncounted = [batch.replace(step=None) for batch in batches]
        assert pt.count_step(batches, loss_fn) == pt.count_step(uncounted, loss_fn)
    for batch in batches:
        assert batch.num_tokens <= 90
        s, starts = 0, batch.cu_seqlens_k.tolist()
        index = batch.kv_index
        rows = torch.arange(batch.num_tokens) if index is None else index
        targets = set(batch.target_index.tolist())
        for i in batch.example_ids.tolist():
            prompt, sides, rewards = rollouts()[i]
            for side, reward in zip(sides, rewards, strict=True):
                places = rows[starts[s] : starts[s + 1]].tolist()
                assert batch.input_ids[places].tolist() == [
                    *map(int, prompt),
                    *map(int, side),
                ]
                learned = [place in targets for place in places]
                first = max(len(prompt), 1)
                assert learned == [False] * first + [True] * (len(places) - first)
                assert batch.rewards[s] == np.float32(reward)
                s += 1
            seen.append(i)
    assert sorted(seen) == list(range(N))


def test_the_layout_follows_the_kind() -> None:
    pair = {"prompt": [1, 2, 3], "chosen": [4], "rejected": [5]}
    group = ([1, 2, 3], [[4], [5], [6]], [1.0, 0.0, 2.0])
    chat = {"prompt": [1, 2, 3], "response": [4]}
    longer_chat = {"prompt": [1, 2, 3, 4, 5], "response": [6]}
    for kind, records, num_tokens in (
        ("preference", [pair], 4 + 2),
        ("scored", [group], 4 + 2 + 2),
        ("sft", [chat, longer_chat], 4 + 6),
    ):
        (batch,) = pt.pack_in_memory(records, 90)
        assert (batch.kind, batch.num_tokens) == (kind, num_tokens)
    assert pt.PackCollator("preference")([pair]).num_tokens == 4 + 2
    assert pt.PackCollator("sft")([chat, longer_chat]).num_tokens == 4 + 6

    config = PackConfig(layout="concat")
    (whole,) = pt.pack_in_memory([pair], 90, "concat")
    assert whole.num_tokens == 4 + 4
    assert pt.PackCollator("preference", config)([pair]).num_tokens == 4 + 4


def test_rollouts_of_equal_responses_are_kept() -> None:
    same = [
        ([1, 2], [[3, 4], [3, 4]], [1.0, 0.0]),
        ([5], [[6], [6], [6]], [0.0, 0.0, 0.0]),
    ]
    (batch,) = pt.pack_in_memory(same, 90, rank=0, world_size=1)
    assert batch.example_ids.tolist() == [0, 1]
    assert batch.num_responses.tolist() == [2, 3]


@pytest.mark.parametrize(
    ("wrong", "mentioned"),
    [
        (([1], [[2], [3]]), "rewards"),
        (([1], [[2], [3]], [1.0]), "item 2.* scores"),
        (([1, 2], [[2], []], [1.0, 0.0]), "item 2.*empty_side"),
        (([], [[2], [3]], [1.0, 0.0]), "item 2.*unsupervised"),
        (([1], [[2], [-3]], [1.0, 0.0]), "item 2.*response 2"),
        (([1], [[2], [1 << 31]], [1.0, 0.0]), "item 2.*response 2"),
        (([1], [[2], [0.5]], [1.0, 0.0]), "item 2"),
        (([1], [[2], [3]], [1.0, np.nan]), "item 2"),
        (([1], [[2], "ab"], [1.0, 0.0]), "item 2"),
        (([1], [], []), "item 2"),
    ],
)
def test_rollouts_that_are_refused(wrong: Any, mentioned: str) -> None:
    good = ([1], [[2], [3]], [1.0, 0.0])
    assert len(pt.pack_in_memory([good, good], 90)) == 1
    with pytest.raises(RecordError, match=mentioned):
        pt.pack_in_memory([good, wrong], 90)


PAIR = {"prompt": [1], "chosen": [2], "rejected": [3]}


@pytest.mark.parametrize(
    ("wrong", "mentioned"),
    [
        ({**PAIR, "rejected": None}, "item 2.*missing_field"),
        ({**PAIR, "chosen": []}, "empty_side"),
        ({**PAIR, "prompt": "hi"}, "prompt"),
        ({**PAIR, "prompt": [-1]}, "prompt"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "token ids"),
        (
            {
                **PAIR,
                "prompt": [{"role": "user", "content": "a"}],
                "chosen": "b",
                "rejected": "c",
            },
            "token ids",
        ),
        (
            {**PAIR, "chosen": [2] * 90},
            "pack_size",
        ),
    ],
)
def test_records_that_are_refused(wrong: dict[str, Any], mentioned: str) -> None:
    with pytest.raises(RecordError, match=mentioned):
        pt.pack_in_memory([PAIR, wrong], 90)
    some = [{**PAIR, "ref_chosen_logps": -1.0, "ref_rejected_logps": -2.0}, PAIR]
    with pytest.raises(RecordError, match="ref_chosen_logps"):
        pt.pack_in_memory(some, 90)
    with pytest.raises(ConfigError, match="records"):
        pt.pack_in_memory([], 90)


def test_the_collator_lays_records_end_to_end() -> None:
    batch = pt.PackCollator("preference", PackConfig(layout="shared_prefix"))(records())
    assert batch.num_packs == 1
    assert batch.example_ids.tolist() == list(range(N))
    assert batch.ref_logps.tolist() == pytest.approx(
        [-0.1 * s * s for s in range(2 * N)]
    )
    assert batch.kv_index is not None


def turns(longest_first: bool = True) -> list[dict[str, Any]]:
    """A row for each turn of forked dialogues, each of which extends the turn before."""
    rng = np.random.default_rng(1)
    rows: list[dict[str, Any]] = []
    for _ in range(3):
        context = rng.integers(0, 50, 30).tolist()
        for fork in range(3):
            prompt = [*context, fork]
            for turn in range(4):
                answer = rng.integers(0, 50, 4).tolist()
                row = {"prompt_ids": prompt, "response_ids": answer}
                rows.append({**row, "turn": turn, "number": float(len(rows))})
                prompt = [*prompt, *answer, *rng.integers(0, 50, 3).tolist()]
    if longest_first:
        rows.sort(key=lambda row: -row["turn"])
    return rows


def assert_holds(batch: pt.PackedBatch, rows: list[dict[str, Any]]) -> None:
    """Every sequence of the batch is that of its row, and so are its columns."""
    starts = batch.cu_seqlens_k.tolist()
    keys = torch.arange(batch.num_tokens) if batch.kv_index is None else batch.kv_index
    targets = batch.target_index.tolist()
    for i, record in enumerate(batch.example_ids.tolist()):
        row = rows[record]
        places = keys[starts[i] : starts[i + 1]].tolist()
        ids = batch.input_ids[places].tolist()
        assert ids == row["prompt_ids"] + row["response_ids"]
        own = range(*batch.cu_seqlens[i : i + 2].tolist())
        learned = [place for place in targets if place in own]
        assert learned == places[len(row["prompt_ids"]) :]
        assert batch.columns["number"][i] == row["number"]


def test_the_collator_lays_rows_before_those_that_extend_them() -> None:
    config = PackConfig(layout="shared_prefix", carry=("number",))
    in_order, shuffled = turns(longest_first=False), turns()
    sizes = []
    for rows in (in_order, shuffled):
        batch = pt.PackCollator("sft", config)(rows)
        assert sorted(batch.example_ids.tolist()) == list(range(36))
        assert_holds(batch, rows)
        sizes.append(batch.num_tokens)
        if rows is in_order:
            assert batch.example_ids.tolist() == list(range(36))
    concat = pt.PackCollator("sft", PackConfig(layout="concat"))(shuffled)
    assert concat.example_ids.tolist() == list(range(36))
    assert sizes[0] == sizes[1] < concat.num_tokens / 3


def lay_out(rows: list[list[int]]) -> list[int]:
    """The order in which the collator lays rows of these prompts."""
    config = PackConfig(layout="shared_prefix")
    records = [{"prompt_ids": row, "response_ids": [99]} for row in rows]
    return pt.PackCollator("sft", config)(records).example_ids.tolist()


def test_the_collator_moves_a_row_only_before_those_that_extend_it() -> None:
    assert lay_out([[5, 6, 7]] * 50) == list(range(50))
    # Its beginning is the whole of another row, answer included.
    assert lay_out([[1, 99, 2, 99, 3], [4], [1, 99, 2], [1], [1], [1, 99, 4]]) == [
        3, 4, 2, 0, 1, 5,
    ]  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(
        st.lists(st.sampled_from([1, 99]), min_size=1, max_size=6),
        min_size=1,
        max_size=20,
    )
)
def test_in_forests_every_row_stands_before_those_that_extend_it(
    rows: list[list[int]],
) -> None:
    order = lay_out(rows)
    assert sorted(order) == list(range(len(rows)))
    place = {row: i for i, row in enumerate(order)}
    whole = [[*row, 99] for row in rows]
    for i, beginning in enumerate(whole):
        for j, row in enumerate(whole):
            is_extended = row[: len(beginning)] == beginning
            if is_extended and (len(beginning) < len(row) or i < j):
                assert place[i] < place[j]


def test_reference_log_probs_follow_their_pairs() -> None:
    pairs = [
        {"prompt_ids": row["prompt_ids"], "chosen_ids": row["response_ids"],
         "rejected_ids": [7], "ref_chosen_logps": -i, "ref_rejected_logps": -i - 0.5}
        for i, row in enumerate(turns())
    ]  # fmt: skip
    collator = pt.PackCollator("preference", PackConfig(layout="shared_prefix"))
    packed = pt.pack_in_memory(pairs, 200, "shared_prefix", rank=0, world_size=1)
    for batches in ([collator(pairs)], packed):
        records = torch.cat([batch.example_ids for batch in batches])
        assert records.tolist() != sorted(records.tolist())
        expected = torch.stack([-records, -records - 0.5], dim=1).flatten()
        found = torch.cat([batch.ref_logps for batch in batches])
        assert found.tolist() == expected.tolist()


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["preference", "sft", "scored"]),
    room=st.integers(0, 60),
    key_room=st.integers(0, 200),
)
def test_forests_are_packed_whole(
    seed: int, kind: str, room: int, key_room: int
) -> None:
    """Every sequence once, in packs of at most so many tokens and keys."""
    examples = examples_of(random_forest(seed, size=24), kind)
    dialogues = dialogues_of(examples)
    edges = examples.example_offsets.tolist()
    keys = np.add.reduceat(examples.lengths, edges[:-1])
    pack_size, max_keys = int(keys.max()) + room, int(keys.max()) + key_room
    batches = pt.pack_in_memory(
        examples, pack_size, "shared_prefix", kind=kind, max_keys=max_keys,
        rank=0, world_size=1,
    )  # fmt: skip
    assert sorted(real_ids(batches)) == list(range(examples.num_examples))
    for batch in batches:
        assert batch.num_tokens <= pack_size
        assert batch.num_keys <= max_keys
        sequences = [s for e in batch.example_ids for s in range(*edges[e : e + 2])]
        assert batch.rewards.tolist() == examples.reward[sequences].tolist()
        whole = batch.to_concat()
        starts = whole.cu_seqlens.tolist()
        for s, start in zip(sequences, starts, strict=False):
            end = start + len(dialogues[s].ids)
            assert whole.input_ids[start:end].tolist() == dialogues[s].ids
            is_target = whole.labels[start:end] != IGNORE_INDEX
            assert is_target.tolist() == dialogues[s].supervised


def test_rows_of_turns_share_batches() -> None:
    rows = turns()
    batches = pt.pack_in_memory(
        rows, 200, "shared_prefix", carry=["number"], rank=0, world_size=1
    )
    assert sorted(real_ids(batches)) == list(range(36))
    for batch in batches:
        assert_holds(batch, rows)
    tokens = sum(batch.num_tokens for batch in batches)
    assert tokens < sum(len(r["prompt_ids"]) + 4 for r in rows) / 2.5
    few_keys = pt.pack_in_memory(rows, 200, "shared_prefix", max_keys=250)
    assert len(few_keys) > len(batches)
    assert all(batch.num_keys <= 250 for batch in few_keys)
    with pytest.raises(RecordError, match="max_keys"):
        pt.pack_in_memory(rows, 200, "shared_prefix", max_keys=50)


LOGPS = [  # of a group of 2 and 1 tokens, in the forms that samplers return
    [[-0.5, -0.25], [-1.0]],
    [-0.5, -0.25, -1.0],
    torch.tensor([-0.5, -0.25, -1.0], dtype=torch.float64, requires_grad=True),
    [torch.tensor([-0.5, -0.25], dtype=torch.bfloat16), np.array([-1.0])],
]


@pytest.mark.parametrize("logps", LOGPS)
def test_values_of_tokens_move_with_their_records(logps: Any) -> None:
    group = {"prompt": [1, 2], "responses": [[3, 4], [5]], "scores": [1.0, 0.0]}
    first = {**group, "prompt": [1], "p": [[-2.0, -3.0], [-4.0]]}
    for layout in ("concat", "shared_prefix"):
        batches = pt.pack_in_memory(
            [first, {**group, "p": logps}],
            9,
            layout,
            token_values={"old_logps": "p"},
            rank=0,
            world_size=1,
        )
        columns = {
            example: batch.token_columns["old_logps"].tolist()
            for batch in batches
            for example in batch.example_ids.tolist()
        }
        assert columns == {0: [-2.0, -3.0, -4.0], 1: [-0.5, -0.25, -1.0]}

    config = PackConfig(token_values={"old_logps": "meta.p"})
    nested = {**group, "meta": {"p": logps, "id": 3}}
    batch = pt.PackCollator("scored", config)([nested])
    assert batch.token_columns["old_logps"].tolist() == [-0.5, -0.25, -1.0]


@pytest.mark.parametrize(
    ("logps", "mentioned"),
    [
        (None, "3 supervised tokens; found None"),
        ("three", "'three'"),
        ([-0.5, -1.0], r"3 supervised tokens; found \[2\]"),
        ([[-0.5], [-1.0, -1.0]], r"\[2, 1\] in its responses; found \[1, 2\]"),
        ([-0.5, None, -1.0], "None"),
        ([-0.5, float("nan"), -1.0], "NaN"),
        ([[[-0.5], [-0.5]], [[-1.0]]], "3 supervised tokens"),
    ],
)
def test_values_of_tokens_that_are_refused(logps: Any, mentioned: str) -> None:
    group = {"prompt": [1, 2], "responses": [[3, 4], [5]], "scores": [1.0, 0.0]}
    records = [{**group, "p": [-1, -1, -1]}, {**group, "p": logps}]
    names = {"old_logps": "p"}
    with pytest.raises(RecordError, match=f"item 2, old_logps: .*{mentioned}"):
        pt.pack_in_memory(records, 90, token_values=names)
    with pytest.raises(ConfigError, match="token_values"):
        pt.pack_in_memory(EXAMPLES, 90, kind="preference", token_values=names)
    sides = {"first": "a", "second": "b", "verdict": "best"}
    with pytest.raises(ConfigError, match="chosen, rejected"):
        pt.pack_in_memory(records, 90, fields=sides, token_values=names)
