"""Distillation against the formulas over all logits, each sequence run by itself."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradients import take_gradients
from mpmath import mp  # torch brings it, by way of sympy
from torch import Tensor

import packstore
from packstore.errors import ConfigError
from packstore.testing import random_examples
from packstore.torch import (
    DistillLoss,
    PackedBatch,
    PackedDataLoader,
    PackedDataset,
    SideWriter,
    TopK,
    count_step,
    pack_in_memory,
    packed_logps,
    packed_top_k,
    pad_batch,
    pad_segments,
    use_packed_attention,
)

mp.dps = 40
KINDS = {"scored": 6, "preference": 8, "sft": 14}
EXAMPLES = {kind: random_examples(n, seed=5, kind=kind) for kind, n in KINDS.items()}
K = 5
SETTINGS = [
    {"direction": direction, "rest": rest}
    for direction, rest in product(("forward", "reverse"), ("outcome", "renormalize"))
]
BIG = {"hidden_size": 48, "num_hidden_layers": 3}
"""The teacher's size; the student's is that of the kit."""


def logps_alone(model: Any, kind: str) -> list[Tensor]:
    """Log-probs of all ids, `[n, V]`, at the supervised tokens of each sequence."""
    examples = EXAMPLES[kind]
    logps = []
    for first, last in pairwise(examples.sequence_offsets.tolist()):
        ids = torch.from_numpy(examples.input_ids[first:last]).long()
        is_target = torch.from_numpy(examples.supervised[first:last])[1:]
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        logps.append(logits[is_target].log_softmax(-1))
    return logps


def divergence(p: Tensor, q: Tensor, ids: Tensor, direction: str, rest: str) -> Tensor:
    """The KL of each token, `[n]`, from log-probs of all ids."""
    is_top = torch.zeros_like(p, dtype=torch.bool).scatter(1, ids, value=True)
    sides = []
    for logps in (p, q):
        top = logps.gather(1, ids)
        if rest == "outcome":
            others = logps.masked_fill(is_top, -torch.inf).logsumexp(1, keepdim=True)
            sides.append(torch.cat([top, others], 1))
        else:
            sides.append(top - top.logsumexp(1, keepdim=True))
    a, b = sides if direction == "forward" else reversed(sides)
    return (a.exp() * (a - b)).sum(1)


def step_mean(losses: list[Tensor], kind: str, average: str) -> Tensor:
    """The mean of the losses of all sequences over a step."""
    if average == "token":
        return torch.cat(losses).mean()
    if average == "sequence":
        return torch.stack([loss.mean() for loss in losses]).mean()
    edges = pairwise(EXAMPLES[kind].example_offsets.tolist())
    return torch.stack([torch.cat(losses[a:b]).mean() for a, b in edges]).mean()


def by_batch(batch: PackedBatch, kind: str, values: list[Tensor]) -> Tensor:
    """Values of the tokens of each sequence, in the order of the batch."""
    edges = EXAMPLES[kind].example_offsets.tolist()
    sequences = [
        sequence
        for example in batch.example_ids.tolist()
        for sequence in range(edges[example], edges[example + 1])
    ]
    return torch.cat([values[sequence] for sequence in sequences])


def with_teacher(batch: PackedBatch, kind: str, tops: list[Any]) -> PackedBatch:
    ids = by_batch(batch, kind, [top.indices for top in tops])
    logps = by_batch(batch, kind, [top.values for top in tops])
    return batch.replace(token_columns={"ref_top_k": TopK(ids.int(), logps)})


@pytest.mark.parametrize(
    ("kind", "average"),
    [
        ("scored", "group"),
        pytest.param("preference", "sequence", marks=pytest.mark.slow),
        pytest.param("sft", "token", marks=pytest.mark.slow),
    ],
)
def test_loss_and_gradients_are_those_of_all_logits(
    kit: SimpleNamespace, kind: str, average: Any
) -> None:
    """Both directions and rests, both layouts, on one rank and on two."""
    with torch.no_grad():
        teacher = logps_alone(kit.tiny_model("qwen3", **BIG), kind)
    tops = [logps.topk(K) for logps in teacher]
    assert 0.2 < torch.cat([top.values for top in tops]).exp().sum(1).mean() < 0.9

    student = kit.tiny_model("llama")
    expected = []
    for settings in SETTINGS:
        losses = [
            divergence(p, q, top.indices, **settings)
            for p, q, top in zip(teacher, logps_alone(student, kind), tops, strict=True)
        ]
        loss = step_mean(losses, kind, average)
        loss.backward()
        expected.append((loss.detach(), take_gradients(student)))

    use_packed_attention(student)
    for layout, size, ranks in (("concat", 70, 2), ("shared_prefix", 70, 1)):
        batches = [
            with_teacher(batch, kind, tops)
            for rank in range(ranks)
            for batch in pack_in_memory(
                EXAMPLES[kind], size, layout, kind=kind, rank=rank, world_size=ranks
            )
        ]
        assert len(batches) > 2
        for settings, (loss, gradients) in zip(SETTINGS, expected, strict=True):
            loss_fn = DistillLoss(**settings, average=average, gradients="sum")
            total = torch.zeros((), dtype=torch.float64)
            for batch in batches:
                logps = packed_logps(student, batch, ids_of="ref_top_k")
                output = loss_fn(logps, batch)
                output.loss.backward()
                total += output.loss.detach()
            assert abs(total - loss) < 1e-12
            actual = take_gradients(student)
            for name, gradient in gradients.items():
                assert (actual[name] - gradient).abs().max() < 1e-12, name
            assert max(g.abs().max() for g in gradients.values()) > 1e-3


def test_bfloat16_loses_what_the_model_loses(kit: SimpleNamespace) -> None:
    """The loss and its gradients by the head's log-probs of a model in bfloat16."""
    with torch.no_grad():
        teacher = logps_alone(kit.tiny_model("qwen3", **BIG), "sft")
    tops = [logps.topk(K) for logps in teacher]
    (batch,) = pack_in_memory(EXAMPLES["sft"], 10_000, kind="sft")
    batch = with_teacher(batch, "sft", tops)
    for settings in SETTINGS:
        results = []
        for dtype in (torch.float64, torch.bfloat16):
            student = use_packed_attention(kit.tiny_model("llama", dtype))
            logps = packed_logps(student, batch, ids_of="ref_top_k")
            loss = DistillLoss(**settings)(logps, batch).loss
            loss.backward()
            assert logps.dtype == torch.promote_types(dtype, torch.float32)
            gradients = take_gradients(student)
            results.append((loss.detach(), gradients["lm_head.weight"].double()))
        (exact, exact_gradient), (loss, gradient) = results
        assert abs(loss - exact) < 0.02 * exact
        assert (gradient - exact_gradient).norm() < 0.05 * exact_gradient.norm()


def one_batch(log_p: Tensor, ids: Tensor) -> PackedBatch:
    """A batch with these values of a teacher, `[n, k]`."""
    record = {"prompt": [1], "response": [2] * len(ids)}
    (batch,) = pack_in_memory([record], 100, kind="sft")
    return batch.replace(token_columns={"ref_top_k": TopK(ids.int(), log_p)})


def random_logps(seed: int, scale: float = 3.0, dtype: Any = torch.float64) -> Tensor:
    """Log-probs of 12 ids at 9 tokens."""
    generator = torch.Generator().manual_seed(seed)
    draws = torch.randn(9, 12, generator=generator, dtype=torch.float64)
    return (scale * draws).log_softmax(-1).to(dtype)


@pytest.mark.parametrize("settings", SETTINGS)
def test_the_top_of_all_ids_is_the_whole_divergence(settings: dict[str, Any]) -> None:
    p, q = random_logps(0), random_logps(1)
    top = p.topk(12)
    loss = DistillLoss(**settings)(
        q.gather(1, top.indices), one_batch(top.values, top.indices)
    ).loss
    a, b = (p, q) if settings["direction"] == "forward" else (q, p)
    assert abs(loss - (a.exp() * (a - b)).sum(1).mean()) < 1e-12


def test_the_divergence_grows_with_k_and_is_never_negative() -> None:
    """With neither rest, the reverse sums are negative here."""
    p, q = random_logps(0), random_logps(1)
    for direction in ("forward", "reverse"):
        losses = []
        for k in (1, 2, 5, 11):
            top = p.topk(k)
            loss_fn = DistillLoss(direction=direction)  # type: ignore[arg-type]
            batch = one_batch(top.values, top.indices)
            losses.append(float(loss_fn(q.gather(1, top.indices), batch).loss))
        assert losses[0] > 0
        assert losses == sorted(losses)
    top = p.topk(2)
    q = q.gather(1, top.indices)
    assert (q.exp() * (q - top.values)).sum(1).min() < 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("gaps", [(0.3, 1e-4), (1e-4, 0.3), (1e-5, 1e-5), (0.0, 0.2)])
def test_small_rests(
    settings: dict[str, Any], dtype: Any, gaps: tuple[float, float]
) -> None:
    """Sums of 1 - gap, against the formula with 40 digits."""
    split = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    p, q = (((1 - gap) * split).log()[None].to(dtype) for gap in gaps)
    q = q.roll(1, 1)
    leaf = q.clone().requires_grad_()
    loss = DistillLoss(**settings)(leaf, one_batch(p, torch.arange(3)[None])).loss
    loss.backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()

    sides = [[mp.exp(mp.mpf(float(x))) for x in side[0]] for side in (p, q)]
    if settings["rest"] == "outcome":
        least = torch.finfo(dtype).eps
        sides = [[*side, max(1 - mp.fsum(side), least)] for side in sides]
    else:
        sides = [[x / mp.fsum(side) for x in side] for side in sides]
    if settings["direction"] == "reverse":
        sides.reverse()
    expected = mp.fsum(a * mp.log(a / b) for a, b in zip(*sides, strict=True))
    tolerance = 1e-2 if dtype == torch.float32 else 1e-10
    assert abs(loss.item() - float(expected)) < tolerance * max(1, abs(expected))


@pytest.mark.parametrize("settings", SETTINGS)
def test_saturated_sides_have_finite_gradients(settings: dict[str, Any]) -> None:
    """Sums of 1 and above it, by rounding, and a student that is certain."""
    certain = torch.tensor([[0.0, -90.0, -95.0]])
    above = torch.tensor([[-0.1, -2.0, -4.0]]) + 0.002
    even = torch.tensor([[-1.5, -1.6, -1.7]])
    for p, q in product((certain, above, even), repeat=2):
        leaf = q.clone().requires_grad_()
        loss = DistillLoss(**settings)(leaf, one_batch(p, torch.arange(3)[None])).loss
        loss.backward()  # type: ignore[no-untyped-call]
        assert loss.isfinite()
        assert leaf.grad is not None
        assert leaf.grad.isfinite().all()
        if p is q:
            assert abs(loss) < 1e-5
    assert loss.dtype == torch.float32


def test_counting_agrees_with_the_plan_and_padding_changes_nothing() -> None:
    for kind, average in product(KINDS, ("token", "sequence", "group")):
        loss_fn = DistillLoss(average=average)  # type: ignore[arg-type]
        batches = pack_in_memory(EXAMPLES[kind], 120, kind=kind, rank=0, world_size=1)
        planned = count_step(batches, loss_fn)
        assert planned == loss_fn.planned_divisor(batches[1]) or kind != "sft"
        assert count_step([b.replace(step=None) for b in batches], loss_fn) == planned

        batch = batches[0].replace(step=None)
        n = len(batch.target_index)
        generator = torch.Generator().manual_seed(0)
        draws = torch.randn(2, 200, 9, generator=generator).double().log_softmax(-1)
        teacher, student = draws[0, :n].topk(3), draws[1, :, :3]
        columns = {"ref_top_k": TopK(teacher.indices.int(), teacher.values)}
        batch = batch.replace(token_columns=columns)
        sizes = {"num_tokens": 400, "num_segments": 80, "num_targets": 200}
        padded = pad_batch(pad_segments(batch, 4), **sizes)
        expected = loss_fn(student[:n], batch)
        output = loss_fn(student, padded)
        assert abs(output.loss - expected.loss) < 1e-12
        for name, (total, count) in expected.metrics.items():
            assert abs(output.metrics[name][0] - total) < 1e-10, name
            assert output.metrics[name][1] == count, name
        means, _ = loss_fn.per_example(student[:n], batch)
        assert len(means) == batch.num_examples
        if average == "group":
            assert abs(means.mean() - expected.loss) < 1e-12


def test_metrics() -> None:
    p = torch.tensor([[0.5, 0.3], [0.6, 0.2]])
    q = torch.tensor([[0.2, 0.4], [0.7, 0.1]])
    batch = one_batch(p.log(), torch.arange(2).expand(2, 2))
    output = DistillLoss(average="sequence")(q.log(), batch)
    means = {name: float(a / b) for name, (a, b) in output.metrics.items()}
    full_p = torch.cat([p, 1 - p.sum(1, keepdim=True)], 1)
    full_q = torch.cat([q, 1 - q.sum(1, keepdim=True)], 1)
    kl = float((full_p * (full_p / full_q).log()).sum(1).mean())
    expected = {"loss": kl, "kl": kl, "teacher_mass": 0.8, "student_mass": 0.7}
    assert means == pytest.approx({**expected, "agreement": 0.5}, abs=1e-6)


@pytest.mark.parametrize(("dtype", "k"), [("float16", 4), ("uint8", 4)])
def test_stored_values_are_those_computed_up_to_rounding(
    tmp_path: Path, kit: SimpleNamespace, dtype: str, k: int
) -> None:
    records = [
        {"prompt": [1, 2, i % 7], "chosen": [3] * (1 + i % 9), "rejected": [4] * 3}
        for i in range(20)
    ]
    dataset = packstore.pack(records, str(tmp_path / "data"), pack_size=64)
    teacher = use_packed_attention(kit.tiny_model("qwen3", torch.float32, **BIG))
    student = use_packed_attention(kit.tiny_model("llama", torch.float32))

    columns = {"teacher": f"token<top{k},{dtype}>"}
    online = []
    with torch.no_grad(), SideWriter(str(tmp_path / "side"), dataset, columns) as side:
        for batch in PackedDataLoader(PackedDataset(dataset, shuffle=False)):
            top = packed_top_k(teacher, batch, k)
            values = {"teacher": TopK(*(x.numpy() for x in top))}
            ids = batch.example_ids.numpy()
            side.write(ids, values, num_targets=batch.num_targets.numpy())
            online.append(batch.replace(token_columns={"ref_top_k": top}))

    # float16 has 11 bits, 8 bits have 255 steps of the largest log-prob of an example.
    lowest = min(float(b.token_columns["ref_top_k"].logps.min()) for b in online)
    error = abs(lowest) * (2**-11 if dtype == "float16" else 1 / 255 / 2)
    stored = PackedDataset(dataset, shuffle=False, side=str(tmp_path / "side"))
    for settings in SETTINGS:
        for computed, batch in zip(online, PackedDataLoader(stored), strict=True):
            logps = packed_logps(student, computed, ids_of="ref_top_k").detach()
            expected = DistillLoss(**settings)(logps, computed).loss
            loss = DistillLoss("teacher", **settings)(logps, batch).loss
            assert abs(loss - expected) < 4 * error
            assert loss != expected


def test_mistakes_are_named() -> None:
    batch = one_batch(random_logps(0)[:, :1], torch.zeros(9, 1))
    logps = random_logps(1)[:, :1]
    with pytest.raises(ConfigError, match=r"'teacher'.*ref-logps --top-k"):
        DistillLoss("teacher")(logps, batch)
    with pytest.raises(ConfigError, match="ids_of"):
        DistillLoss()(logps[:, 0], batch)
    with pytest.raises(ConfigError, match="renormalize"):
        DistillLoss(rest="renormalize")(logps, batch)
    with pytest.raises(ConfigError, match="float32"):
        DistillLoss()(logps.bfloat16(), batch)
    with pytest.raises(ConfigError, match="direction"):
        DistillLoss(direction="backward")  # type: ignore[arg-type]
