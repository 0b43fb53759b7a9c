"""Evaluation against a plain loop over unpacked sequences, in float64."""

from __future__ import annotations

import copy
import json
import math
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars
import pytest
import torch
from ranks import launch
from small_jobs import write_jsonl
from torch.nn.functional import logsigmoid

import packstore
from packstore import Dataset
from packstore import open as open_dataset
from packstore.errors import CompatibilityError, ConfigError, UnsupportedFormatError
from packstore.testing import random_examples
from packstore.torch import PreferenceLoss, evaluate, use_packed_attention

N, BETA = 41, 0.3
SOURCES = ("forum", "wiki", "rare")
SIDES = ("chosen", "rejected")


def record(i: int) -> dict[str, Any]:
    prompt, source = [1, 2, i % 9, i % 5], SOURCES[2 if i == 7 else i % 2]
    chosen, rejected = [3 + i % 7] * (1 + i % 7), [4, i % 50]
    more = {"source": source, "weight": i / 2}
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def pack(folder: Path, rows: list[dict[str, Any]], layout: str = "concat") -> Dataset:
    lines = folder / "rows.jsonl"
    write_jsonl(lines, rows)
    how: dict[str, Any] = {
        "row_group_tokens": 200,
        "shard_tokens": 400,
        "layout": layout,
    }
    how["carry"] = ("source:string", "weight:float64")
    return packstore.pack(str(lines), str(folder / layout), pack_size=60, **how)


@pytest.fixture(scope="module", params=["concat", "shared_prefix"])
def pairs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Dataset:
    folder = tmp_path_factory.mktemp("pairs")
    return pack(folder, [record(i) for i in range(N)], request.param)


def models(kit: SimpleNamespace) -> tuple[Any, Any]:
    policy = kit.tiny_model()
    reference = copy.deepcopy(policy)
    with torch.no_grad():
        for i, weight in enumerate(policy.parameters()):
            weight += 0.05 * torch.sin(torch.arange(weight.numel()) + i).view_as(weight)
    return policy, reference


@torch.no_grad()
def plain_logp(model: Any, prompt: list[int], response: list[int]) -> float:
    """One sequence alone, by the model's own logits and attention."""
    assert model.config._attn_implementation == "sdpa"
    logps = model(torch.tensor([prompt + response])).logits[0].log_softmax(-1)
    rows = range(len(prompt) - 1, len(prompt) + len(response) - 1)
    return sum(float(logps[r, t]) for r, t in zip(rows, response, strict=True))


def plain_figures(
    policy: Any, reference: Any, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    """Metric -> its mean, by source and over all (``None``)."""
    sums: dict[Any, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in rows:
        logps = [
            [plain_logp(m, row["prompt"], row[side]) for side in SIDES]
            for m in (policy, reference)
        ]
        u, v = (BETA * (logps[0][k] - logps[1][k]) for k in (0, 1))
        figures = {
            "loss": -float(logsigmoid(torch.tensor(u - v, dtype=torch.float64))),
            "rewards/chosen": u,
            "rewards/rejected": v,
            "rewards/margins": u - v,
            "rewards/accuracies": float(u > v),
            "logps/chosen": logps[0][0],
            "logps/rejected": logps[0][1],
        }
        for group in (None, row["source"]):
            sums[group]["examples"] += 1
            for name, value in figures.items():
                sums[group][name] += value
    return {
        group: {
            n: x if n == "examples" else x / own["examples"] for n, x in own.items()
        }
        for group, own in sums.items()
    }


@pytest.fixture(scope="module")
def expected(kit: SimpleNamespace) -> dict[str, Any]:
    """Of all examples."""
    return plain_figures(*models(kit), [record(i) for i in range(N)])


def assert_equal(
    found: Any, expected: dict[Any, dict[str, float]], atol: float = 1e-9
) -> None:
    assert found["by"].keys() == expected.keys() - {None}
    for group, own in expected.items():
        place = found["metrics"] if group is None else found["by"][group]
        for name, value in own.items():
            assert place[name] == pytest.approx(value, abs=atol, rel=0), (group, name)


@pytest.mark.parametrize(
    "batching", [{}, {"packs_per_batch": 4}, {"tokens_per_batch": 130}], ids=str
)
def test_it_equals_a_plain_loop(
    kit: SimpleNamespace,
    pairs: Dataset,
    expected: dict[str, Any],
    batching: dict[str, int],
) -> None:
    policy, reference = models(kit)
    loss = PreferenceLoss("dpo", beta=BETA)
    for model in (policy, reference):
        use_packed_attention(model)
    policy.train()
    found = evaluate(
        policy, pairs, loss=loss, reference=reference, by="source", **batching
    )
    assert_equal(found, expected)
    assert policy.training


def test_a_row_for_each_example(kit: SimpleNamespace, pairs: Dataset) -> None:
    policy, reference = models(kit)
    rows = [record(i) for i in range(N)]
    plain = [plain_figures(policy, reference, [row])[None] for row in rows]
    for model in (policy, reference):
        use_packed_attention(model)
    given: dict[str, Any] = {
        "loss": PreferenceLoss("dpo", beta=BETA),
        "reference": reference,
    }
    told: list[tuple[object, ...]] = []
    found = evaluate(
        policy,
        pairs,
        rows=True,
        packs_per_batch=4,
        progress=lambda *t: told.append(t),
        **given,
    )
    batches = math.ceil(len(pairs) / 4)
    assert told == [("evaluate", i + 1, batches, "batches") for i in range(batches)]
    frame = polars.from_arrow(found["rows"])
    # The examples were shuffled before they were packed: ids are places in the input.
    assert frame["example_id"].to_list() == list(range(N))
    assert frame["source"].to_list() == [row["source"] for row in rows]
    for name in ("loss", "rewards/chosen", "rewards/rejected", "rewards/margins"):
        values = [figures[name] for figures in plain]
        assert frame[name].to_list() == pytest.approx(values, abs=1e-9), name
        assert frame[name].mean() == pytest.approx(found["metrics"][name], abs=1e-9)
    logps = np.array(
        [[figures[f"logps/{side}"] for side in SIDES] for figures in plain]
    )
    rewards = np.array(
        [[figures[f"rewards/{side}"] for side in SIDES] for figures in plain]
    )
    assert np.abs(np.array(frame["logps"].to_list()) - logps).max() < 1e-5
    assert (
        np.abs(np.array(frame["ref_logps"].to_list()) - (logps - rewards / BETA)).max()
        < 1e-5
    )
    assert "rows" not in evaluate(policy, pairs, **given)


LOSSES = {
    "dpo": "pairs",
    "kto": "single answers",
    "sft": "chats",
    "cpo": "several answers",
    "plackett_luce": "several answers",
}
"""Loss -> the records that it is evaluated on."""

GROUPS = ("forum", "wiki", "rare", "")


def judged_record(kind: str, i: int) -> dict[str, Any]:
    """A record whose group does not follow from its length or its scores."""
    prompt = [1, 2, i % 9]
    answers = [[3 + i % 7] * (1 + i % 7), [4, i % 50], [i % 11, 8, 9]]
    parts: dict[str, Any] = {
        "pairs": {"chosen": answers[0], "rejected": answers[1]},
        "single answers": {"response": answers[i % 3], "score": float(i % 4 > 1)},
        "chats": {"response": answers[i % 3]},
        "several answers": {
            "responses": answers[: 2 + i % 2],
            "scores": [float(i % 3), 1.0, 0.5][: 2 + i % 2],
        },
    }
    group = GROUPS[(i * i + i // 5) % 3 if i % 13 else 3]
    return {"prompt": prompt, **parts[kind], "source": group}


def weight_of(loss: str, row: dict[str, Any]) -> int:
    """How often a record counts in the mean: its pairs, its answers or its tokens."""
    if loss == "sft":
        return len(row["response"])
    if loss == "cpo":  # pairs of the best answer and each other of a lower score
        best = max(row["scores"])
        return sum(score < best for score in row["scores"])
    return 1


@pytest.mark.parametrize("name", LOSSES)
def test_metrics_of_a_group_are_those_of_its_examples_alone(
    kit: SimpleNamespace, tmp_path: Path, name: str
) -> None:
    """And the mean over all is that of the groups, by what the loss counts."""
    rows = [judged_record(LOSSES[name], i) for i in range(N)]

    def figures_of(rows: list[dict[str, Any]], folder: str, **settings: Any) -> Any:
        data = packstore.pack(
            rows, str(tmp_path / folder), pack_size=60, carry=("source:string",)
        )
        return evaluate(policy, data, **needs, **settings)

    needs: dict[str, Any] = {"loss": name}
    if name == "plackett_luce":  # it compares the scores of a reward model
        policy = use_packed_attention(kit.tiny_model(head="score"))
    else:
        policy, reference = (use_packed_attention(m) for m in models(kit))
        if name in ("dpo", "kto"):
            needs["reference"] = reference
    figures = figures_of(rows, "all", by="source", packs_per_batch=2)

    assert figures["by"].keys() == {*GROUPS}
    weights = {}
    for group, of_group in figures["by"].items():
        members = [row for row in rows if row["source"] == group]
        alone = figures_of(members, f"group-{group}")["metrics"]
        assert of_group == pytest.approx(alone, abs=1e-9, rel=0), group
        weights[group] = sum(weight_of(name, row) for row in members)

    losses = {group: of_group["loss"] for group, of_group in figures["by"].items()}
    total = sum(weights[group] * losses[group] for group in GROUPS)
    mean = total / sum(weights.values())
    assert figures["metrics"]["loss"] == pytest.approx(mean, abs=1e-9, rel=0)
    assert figures["metrics"]["examples"] == N
    sizes = [of_group["examples"] for of_group in figures["by"].values()]
    assert sizes == sorted(sizes, reverse=True)


def test_by_input_file(
    kit: SimpleNamespace, tmp_path: Path, expected: dict[str, Any]
) -> None:
    """Told apart by the example ids."""
    rows = [record(i) for i in range(N)]
    parts = {name: [r for r in rows if r["source"] == name] for name in SOURCES}
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    paths = {"forum": "a/x.jsonl", "wiki": "b/x.jsonl", "rare": "b/y.jsonl"}
    for name, path in paths.items():
        text = "".join(json.dumps(row) + "\n" for row in parts[name])
        (tmp_path / path).write_text(text, encoding="utf-8")
    files = [str(tmp_path / path) for path in paths.values()]
    dataset = packstore.pack(
        files, str(tmp_path / "packed"), pack_size=60, ignore=["weight"]
    )
    policy, reference = (use_packed_attention(m) for m in models(kit))
    loss = PreferenceLoss("dpo", beta=BETA)
    found = evaluate(policy, dataset, loss=loss, reference=reference, by="file")
    names = {"forum": files[0], "wiki": files[1], "rare": "y.jsonl", None: None}
    assert_equal(found, {names[group]: figures for group, figures in expected.items()})


def test_sft_gives_perplexity(kit: SimpleNamespace, pairs: Dataset) -> None:
    policy, _ = models(kit)
    rows = [record(i) for i in range(N)]
    logps = [plain_logp(policy, row["prompt"], row["chosen"]) for row in rows]
    tokens = sum(len(row["chosen"]) for row in rows)
    found = evaluate(use_packed_attention(policy), pairs, loss="sft")["metrics"]
    assert found["loss"] == pytest.approx(-sum(logps) / tokens, abs=1e-9, rel=0)
    assert found["perplexity"] == pytest.approx(
        math.exp(-sum(logps) / tokens), rel=1e-9
    )
    assert found["logps/chosen"] == pytest.approx(sum(logps) / N, abs=1e-9, rel=0)


def on_rank(task: dict[str, Any]) -> Any:
    """One of the ranks."""
    from transformers import AutoModelForCausalLM

    policy, reference = (
        use_packed_attention(
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
        )
        for path in task["models"]
    )
    data = open_dataset(task["data"])
    found: Any = evaluate(policy, data, reference=reference, by="source", rows=True)
    return {**found, "rows": found["rows"].to_pylist()}


@pytest.mark.slow
def test_two_ranks_equal_one(
    kit: SimpleNamespace, pairs: Dataset, tmp_path: Path
) -> None:
    """The rare source lies on one of them alone, and their number of packs may
    be odd.
    """
    for name, model in zip(("policy", "reference"), models(kit), strict=True):
        model.save_pretrained(tmp_path / name)
    paths = [str(tmp_path / name) for name in ("policy", "reference")]
    task = {"models": paths, "data": pairs.url}
    one, (first, second) = on_rank(task), launch(__file__, task, 2, tmp_path)
    assert first == second
    assert one["by"].keys() == {*SOURCES}
    assert_equal(first, {None: one["metrics"], **one["by"]})
    assert [row["example_id"] for row in first["rows"]] == list(range(N))
    for own, other in zip(one["rows"], first["rows"], strict=True):
        assert own["source"] == other["source"]
        for name in ("logps", "ref_logps", "loss", "rewards/margins"):
            assert own[name] == pytest.approx(other[name], abs=1e-9)


def test_what_does_not_fit_is_refused(
    kit: SimpleNamespace, pairs: Dataset, tmp_path: Path
) -> None:
    policy, _ = (use_packed_attention(m) for m in models(kit))
    with pytest.raises(ConfigError, match="compares with a reference model"):
        evaluate(policy, pairs)
    for name in ("colour", "weight"):  # of floats
        rule = "column of texts, integers or booleans, of file, source, weight; found"
        with pytest.raises(ConfigError, match=f"{rule} '{name}'"):
            evaluate(policy, pairs, loss="sft", by=name)
    other = kit.write(str(tmp_path), kit.packed(random_examples(4), [4], "concat"))
    policy.resize_token_embeddings(49)
    with pytest.raises(CompatibilityError, match="vocab_size"):
        evaluate(policy, other, loss="sft")


def test_packs_of_too_many_keys_are_refused(
    kit: SimpleNamespace, pairs: Dataset
) -> None:
    model, _ = models(kit)
    most_keys = pairs.manifest.statistics.most_keys
    with pytest.raises(UnsupportedFormatError, match="max_keys"):
        evaluate(model, pairs, loss="sft", max_keys=most_keys - 1)
    use_packed_attention(model)
    figures = evaluate(model, pairs, loss="sft", max_keys=most_keys)
    assert figures["metrics"] == evaluate(model, pairs, loss="sft")["metrics"]


def test_the_loss_with_a_likelihood_term_is_that_of_all_batches_as_one(
    kit: SimpleNamespace, pairs: Dataset
) -> None:
    """Pairs and tokens have counts of their own, so a mean over batches would depend on
    them.
    """
    policy, reference = (use_packed_attention(m) for m in models(kit))
    loss = PreferenceLoss("dpo", beta=BETA, sft_weight=0.4)
    found = [
        evaluate(
            policy,
            pairs,
            loss=loss,
            reference=reference,
            by="source",
            packs_per_batch=n,
        )
        for n in (1, len(pairs))
    ]
    for figures in zip(
        *([x["metrics"], *x["by"].values()] for x in found), strict=True
    ):
        assert figures[1]["loss"] == pytest.approx(figures[0]["loss"], abs=1e-9)


def test_a_rank_of_fillers_alone_adds_nothing(
    kit: SimpleNamespace, pairs: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which it has where there are fewer packs than ranks."""
    policy, reference = (use_packed_attention(m) for m in models(kit))
    ranks = len(pairs) + 1
    loss = PreferenceLoss("dpo", beta=BETA, sft_weight=0.4)
    examples = []
    for rank in (0, ranks - 1):  # as a launcher tells, without a group to sum over
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", str(ranks))
        figures = evaluate(policy, pairs, loss=loss, reference=reference)
        examples.append(figures["metrics"]["examples"])
    assert examples[0] > 0 == examples[1]
