"""Losses of tokens, and functions of one's own: as of sequences run one by one, in any
packs.
"""

from __future__ import annotations

import runpy
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradients import take_gradients, tokens_alone
from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.errors import BackendError, ConfigError
from packstore.testing import random_examples
from packstore.torch import (
    PackedBatch,
    PackedDataLoader,
    PackedDataset,
    PackedPolicy,
    Pairs,
    PolicyLoss,
    PreferenceLoss,
    Tokens,
    count_step,
    evaluate,
    pack_in_memory,
    packed_logps,
    pad_batch,
    pad_segments,
    segment_logps,
    use_packed_attention,
)

KINDS = {"scored": 7, "preference": 10, "sft": 20}
EXAMPLES = {k: random_examples(n, seed=5, kind=k) for k, n in KINDS.items()}
LAYOUTS: tuple[Any, ...] = ("concat", "shared_prefix")
SIZES = (110, 200, 10_000)
"""Tokens of a pack: many, a few and one batch."""
CLIP = {"clip_low": 0.1, "clip_high": 0.3}
STEPS: dict[str, dict[str, Any]] = {
    "token": {"average": "token", **CLIP},
    "sequence": {"average": "sequence", **CLIP, "kl_weight": 0.2},
    "group": {"average": "group", **CLIP, "kl_weight": 0.2},
    "ratio of sequences": {"average": "sequence", "ratio": "sequence", **CLIP},
}


class Given:
    """What is given of each example's tokens, by example and sequence."""

    def __init__(self, kind: str) -> None:
        examples, rng = EXAMPLES[kind], np.random.default_rng(0)
        edges = examples.sequence_offsets
        counts = [int(examples.supervised[a:b].sum()) for a, b in pairwise(edges)]
        self.reward = torch.from_numpy(examples.reward).double()
        drawn = [torch.from_numpy(rng.normal(size=(3, n))) for n in counts]
        self.noise, self.far, self.advantages = zip(*drawn, strict=True)
        self.sequences = list(pairwise(examples.example_offsets.tolist()))

    def of(self, batch: PackedBatch, values: Any) -> Tensor:
        """The values of a batch's tokens, in the order of ``batch.target_index``."""
        rows = [
            s for e in batch.example_ids.tolist() for s in range(*self.sequences[e])
        ]
        return torch.cat([torch.atleast_1d(values[s]) for s in rows])


def expected(
    model: Any, kind: str, given: Given, settings: dict[str, Any], by_token: bool
) -> Any:
    """Loss and gradients of the step with each sequence alone, written out."""
    losses = []
    for s, logps in enumerate(tokens_alone(model, EXAMPLES[kind])):
        old = logps.detach() + 0.3 * given.noise[s]
        ratio = (logps - old).exp()
        if settings.get("ratio") == "sequence":
            ratio = (logps - old).mean().exp() * torch.ones_like(logps)
        advantage = given.advantages[s] if by_token else given.reward[s]
        bounded = ratio.clip(1 - CLIP["clip_low"], 1 + CLIP["clip_high"])
        loss = -torch.minimum(ratio * advantage, bounded * advantage)
        if weight := settings.get("kl_weight"):
            gap = logps.detach() + 0.3 * given.far[s] - logps
            loss = loss + weight * (gap.exp() - gap - 1)
        losses.append(loss)
    if settings["average"] == "token":
        total = torch.cat(losses).mean()
    elif settings["average"] == "sequence":
        total = torch.stack([loss.mean() for loss in losses]).mean()
    else:
        groups = [torch.cat(losses[a:b]).mean() for a, b in given.sequences]
        total = torch.stack(groups).mean()
    total.backward()  # type: ignore[no-untyped-call]
    return total.detach(), take_gradients(model)


FAST = {("scored", "token"), ("preference", "sequence"), ("scored", "group")}
FAST |= {("sft", "ratio of sequences")}


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (case not in FAST))
        for case in product(KINDS, STEPS)
    ],
)
def test_loss_and_gradients_are_those_of_sequences_alone(
    kit: SimpleNamespace, kind: str, name: str
) -> None:
    """Both layouts, three sizes of packs, on one rank and on two, in float64."""
    model, given, settings = kit.tiny_model(), Given(kind), STEPS[name]
    wanted = {by: expected(model, kind, given, settings, by) for by in (True, False)}
    with torch.no_grad():
        alone = list(tokens_alone(model, EXAMPLES[kind]))
    old = [a + 0.3 * b for a, b in zip(alone, given.noise, strict=True)]
    far = [a + 0.3 * b for a, b in zip(alone, given.far, strict=True)]
    policy = PackedPolicy(use_packed_attention(model), per_token=True)
    loss_fn = PolicyLoss(gradients="sum", **settings)
    numbers = set()
    for layout, size, ranks in product(LAYOUTS, SIZES, (1, 2)):
        shares = [
            pack_in_memory(
                EXAMPLES[kind], size, layout, kind=kind, rank=r, world_size=ranks
            )
            for r in range(ranks)
        ]
        batches = [batch for share in shares for batch in share]
        numbers.add(len(batches))
        for by_token in (True, False):
            total = torch.zeros((), dtype=torch.float64)
            for batch in batches:
                sampled = given.of(batch, old)
                if "ratio" in settings and not by_token:  # sums of sequences
                    sampled = given.of(batch, [x.sum() for x in old])
                out = loss_fn(
                    policy(batch),
                    batch,
                    given.of(batch, given.advantages) if by_token else None,
                    sampled,
                    given.of(batch, far) if loss_fn.kl_weight else None,
                )
                out.loss.backward()
                total += out.loss.detach()
            loss, gradients = wanted[by_token]
            assert abs(total - loss) < 1e-9
            found = take_gradients(model)
            for parameter, gradient in gradients.items():
                assert (found[parameter] - gradient).abs().max() < 1e-9, (
                    layout,
                    size,
                    parameter,
                )
                assert gradient.abs().max() > 1e-6
    assert min(numbers) == 1 < 3 <= max(numbers)


def test_tokens_are_in_the_order_of_the_targets(kit: SimpleNamespace) -> None:
    model, examples = kit.tiny_model(), EXAMPLES["scored"]
    with torch.no_grad():
        alone = list(tokens_alone(model, examples))
    use_packed_attention(model)
    for layout in LAYOUTS:
        (batch,) = pack_in_memory(examples, 10_000, layout, kind="scored")
        for how in ({}, {"chunk_size": 64}, {"chunk_size": 64, "keep_logits": True}):
            found = packed_logps(model, batch, per_token=True, **how)
            assert (found - Given("scored").of(batch, alone)).abs().max() < 1e-10
        logits = model(**batch.model_inputs()).logits
        assert (
            segment_logps(batch, logits=logits, per_token=True) - found
        ).abs().max() < 1e-10


def test_counting_agrees_with_the_plan_and_padding_changes_nothing() -> None:
    for kind, average in product(KINDS, ("token", "sequence", "group")):
        loss_fn = PolicyLoss(average=average)  # type: ignore[arg-type]
        batches = pack_in_memory(EXAMPLES[kind], 120, kind=kind, rank=0, world_size=1)
        planned = count_step(batches, loss_fn)
        assert planned == loss_fn.planned_divisor(batches[1])
        assert count_step([b.replace(step=None) for b in batches], loss_fn) == planned
        batch = batches[0].replace(step=None)
        sizes = {"num_tokens": 400, "num_segments": 80, "num_targets": 200}
        padded = pad_batch(pad_segments(batch, 4), **sizes)
        n = len(batch.target_index)
        logps = -torch.rand(200, dtype=torch.float64)
        for old in (None, logps + 0.3):
            outs = [
                loss_fn(
                    x[: len(b.target_index)],
                    b,
                    None,
                    old if old is None else old[: len(x)],
                )
                for b, x in ((batch, logps[:n]), (padded, logps))
            ]
            assert abs(outs[0].loss - outs[1].loss) < 1e-12
            for name, (total, count) in outs[0].metrics.items():
                assert abs(outs[1].metrics[name][0] - total) < 1e-10, name
                assert outs[1].metrics[name][1] == count, name


def test_metrics() -> None:
    (batch,) = pack_in_memory(EXAMPLES["sft"], 10_000, kind="sft")
    n = len(batch.target_index)
    logps, old = torch.zeros(n), torch.zeros(n)
    old[:5] = torch.tensor([-1.0, 1.0, -1.0, 1.0, 1.0])  # ratios e, 1/e
    advantages = torch.ones(n)
    advantages[2:5] = -1
    out = PolicyLoss(**CLIP)(logps, batch, advantages, old, logps - 0.5)
    means = {name: float(total / count) for name, (total, count) in out.metrics.items()}
    assert means["clipped"] == pytest.approx(
        3 / n
    )  # the first, which gains, and the last two
    assert means["ratio"] == pytest.approx((2 * np.e + 3 / np.e + n - 5) / n)
    assert means["kl"] == pytest.approx(np.exp(-0.5) - 0.5)
    terms = [-1.3, -1 / np.e, np.e, 0.9, 0.9]
    assert means["loss"] == pytest.approx((sum(terms) - (n - 5)) / n)
    far = PolicyLoss(kl_weight=1.0)(logps, batch, advantages, logps - 1e4, logps + 1e4)
    assert far.loss.isfinite()


def test_each_bound_has_its_own_share_of_clipped_tokens() -> None:
    """Ratios 0.8 and 1.2 under bounds of which one clips and the other does not."""
    (batch,) = pack_in_memory(EXAMPLES["sft"], 10_000, kind="sft")
    ratios = torch.ones(len(batch.target_index))
    ratios[:2] = torch.tensor([0.8, 1.2])
    advantages = torch.where(ratios < 1, -1.0, 1.0)
    for bounds, clipped in (
        ((0.1, 0.5), 1),
        ((0.5, 0.1), 1),
        ((0.1, 0.1), 2),
        ((0.5, 0.5), 0),
    ):
        loss_fn = PolicyLoss(clip_low=bounds[0], clip_high=bounds[1])
        total, _ = loss_fn(
            torch.zeros_like(ratios), batch, advantages, -ratios.log()
        ).metrics["clipped"]
        assert total == clipped, bounds


def my_dpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    return -logsigmoid(beta * pairs.d)


def reinforce(tokens: Tokens, *, scale: float = 1.0) -> Tensor:
    return -scale * tokens.logps * tokens.advantages


def test_functions_of_ones_own() -> None:
    (batch,) = pack_in_memory(EXAMPLES["preference"], 10_000, kind="preference")
    draws = torch.randn(
        2, batch.num_segments, generator=torch.Generator().manual_seed(0)
    )
    for own, named in (
        (PreferenceLoss(my_dpo, beta=0.3), PreferenceLoss("dpo", beta=0.3)),
        (
            PreferenceLoss({my_dpo: 0.4, "ipo": 0.6}),
            PreferenceLoss({"dpo": 0.4, "ipo": 0.6}),
        ),
    ):
        assert own.reference
        assert torch.equal(
            own(draws[0], batch, draws[1]).loss, named(draws[0], batch, draws[1]).loss
        )
    plain = PreferenceLoss(lambda pairs: pairs.rejected - pairs.chosen, reference=False)
    d = draws[0].view(-1, 2)
    assert plain(draws[0], batch).loss == pytest.approx(
        float((d[:, 1] - d[:, 0]).mean())
    )
    logps = -torch.rand(len(batch.target_index))
    loss = PolicyLoss(reinforce, scale=2.0)(logps, batch).loss
    rewards = batch.rewards[batch.targets.segments]
    leaf, advantages = logps.clone().requires_grad_(), rewards.clone().requires_grad_()
    PolicyLoss()(
        leaf, batch, advantages
    ).loss.backward()  # fresh samples: plain policy gradient
    assert leaf.grad is not None
    assert advantages.grad is None  # they may come of a network with a loss of its own
    assert (leaf.grad + rewards / len(rewards)).abs().max() < 1e-6
    assert loss == pytest.approx(float(-2 * (logps * rewards).mean()), rel=1e-5)


def middle(pairs: Pairs) -> Tensor:
    return pairs.d - pairs.d.mean()


def of_sequence(tokens: Tokens) -> Tensor:
    sums = (
        torch.zeros(len(tokens.logps))
        .double()
        .index_add(0, tokens.sequences, tokens.logps)
    )
    return sums[tokens.sequences]


@pytest.mark.parametrize(
    ("make", "mentioned"),
    [
        (lambda: PreferenceLoss(lambda p: p.d.mean()), "<lambda>"),
        (lambda: PreferenceLoss(lambda p: -p.u, reference=False), "<lambda>"),
        (lambda: PreferenceLoss(lambda p: -p.d, reference=False), "<lambda>"),
        (lambda: PreferenceLoss("dpo", reference=False), "'dpo'"),
        (lambda: PreferenceLoss("ipo", reference="no"), "reference"),
        (lambda: PreferenceLoss("DPO"), "'dpo'"),
        (lambda: PreferenceLoss(["dpo"]), "loss"),
        (lambda: PolicyLoss([my_dpo]), "PolicyLoss"),
        (lambda: PreferenceLoss(middle), "'middle'"),
        (lambda: PreferenceLoss(my_dpo, gamma=1), "'gamma'"),
        (lambda: PreferenceLoss(3), "loss"),  # type: ignore[arg-type]
        (
            lambda: PreferenceLoss({lambda p: p.d: 1, lambda p: p.u: 1}),
            "__name__",
        ),
        (lambda: PolicyLoss(lambda t: t.logps - t.logps.mean()), "<lambda>"),
        (lambda: PolicyLoss(clip_low=2), "clip_low"),
        (
            lambda: PolicyLoss(clip=0.2),
            "'clip'",
        ),
        (lambda: PolicyLoss(averag="token"), "'average'"),
        (
            lambda: PreferenceLoss(sft_wieght=1),
            "'sft_weight'",
        ),
        (lambda: PolicyLoss(kl_weight=-1), "kl_weight"),
        (
            lambda: PolicyLoss(average="pack"),
            "average",
        ),  # type: ignore[arg-type]
    ],
)
def test_refused_losses(make: Any, mentioned: str) -> None:
    assert (
        PolicyLoss(of_sequence).name == "of_sequence"
    )  # tokens of one sequence may meet
    with pytest.raises(ConfigError, match=mentioned):
        make()


def test_swapped_arguments_are_named(kit: Any) -> None:
    (batch,) = pack_in_memory(EXAMPLES["preference"], 10_000, kind="preference")
    model = kit.tiny_model()
    for call, mentioned in (
        (lambda: packed_logps(batch, model), "model"),
        (lambda: PackedPolicy("model"), "model"),
        (lambda: use_packed_attention(None), "model"),
        (lambda: evaluate(model, "data"), "dataset"),
        (lambda: PackedDataset(["data"]), "PackedDataset"),
        (lambda: PackedDataLoader("data"), "PackedDataLoader"),
    ):
        with pytest.raises((ConfigError, BackendError), match=mentioned):
            call()


def test_a_divisor_is_a_number_above_zero() -> None:
    (batch,) = pack_in_memory(EXAMPLES["preference"], 10_000, kind="preference")
    zeros = torch.zeros(batch.num_segments)
    for divisor in (0, -1, float("nan"), "1", torch.ones(2)):
        with pytest.raises(ConfigError, match="divisor"):
            PreferenceLoss("dpo")(zeros, batch, zeros, divisor=divisor)


def test_refused_inputs() -> None:
    (batch,) = pack_in_memory(EXAMPLES["sft"], 10_000, kind="sft")
    n, S, loss_fn = len(batch.target_index), batch.num_segments, PolicyLoss()
    logps = torch.zeros(n)
    with pytest.raises(ConfigError, match=r"^logps: .*per_token"):
        loss_fn(torch.zeros(S), batch)
    with pytest.raises(ConfigError, match=r"^advantages: "):
        loss_fn(logps, batch, torch.zeros(3))
    with pytest.raises(ConfigError, match="old_logps: "):
        loss_fn(logps, batch, None, torch.zeros(S))
    with pytest.raises(ConfigError, match=r"^logps: "):
        loss_fn(logps.half(), batch)
    with pytest.raises(ConfigError, match="ref_logps"):
        PolicyLoss(kl_weight=0.1)(logps, batch)
    assert batch.step is not None
    uncounted = batch.replace(step=replace(batch.step, batches=2, counts=None))
    with pytest.raises(ConfigError, match="count_step"):
        loss_fn(logps, uncounted)


@pytest.mark.parametrize("name", ["dpo", "simpo", "kto", "bradley_terry", "tokens"])
def test_log_probs_in_16_bits_are_refused(kit: SimpleNamespace, name: str) -> None:
    """Of policy and reference, of sequences and tokens; and scores."""
    batch = kit.row()
    loss_fn: Any = (
        PolicyLoss(kl_weight=0.1) if name == "tokens" else PreferenceLoss(name)
    )
    given = {"logps": torch.zeros(batch.num_segments)}
    if name == "tokens":
        given = dict.fromkeys(
            ("logps", "old_logps", "ref_logps"), torch.zeros(len(batch.targets.ids))
        )
    elif loss_fn.reference:
        given["ref_logps"] = given["logps"]
    assert torch.isfinite(loss_fn(batch=batch, **given).loss)
    for key, dtype in product(given, (torch.bfloat16, torch.float16)):
        lower = {**given, key: given[key].to(dtype)}
        with pytest.raises(ConfigError, match=rf"^{key}: .*output_dtype=None"):
            loss_fn(batch=batch, **lower)


@pytest.mark.slow
def test_the_reward_of_the_example_rises() -> None:
    example = Path(__file__).parents[3] / "examples" / "grpo.py"
    curve = runpy.run_path(str(example))["train"](30)
    assert mean(curve[:3]) < 0.2
    assert mean(curve[-3:]) > 0.4
