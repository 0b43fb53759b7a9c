"""Replayed graphs of a step against eager steps, on a CPU (``recorded_graph.py``)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import range_kernels
import torch
import varlen_kernels
from forests import forest_packs
from recorded_graph import RecordedGraph
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
)
from torch.nn.parallel import DistributedDataParallel

import packstore.torch
from packstore.errors import BackendError, ConfigError
from packstore.testing import random_examples
from packstore.torch import (
    DistillLoss,
    GraphedStep,
    LossOutput,
    Metrics,
    PackedBatch,
    PackedDataLoader,
    PackedDataset,
    PackedPolicy,
    PolicyLoss,
    PreferenceLoss,
    StepDivisor,
    TopK,
    collate,
    pad_batch,
    use_packed_attention,
)

PAGE = Path(__file__).parents[3] / "docs" / "parallel.md"

SIZES = {
    "num_tokens": 400,
    "num_segments": 80,
    "max_seqlen": 80,
    "num_targets": 160,
    "num_packs": 2,
}
KEYS = {"num_keys": 900, "num_runs": 400}


@pytest.fixture(autouse=True)
def _varlen_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One operator for all segments, as on a GPU, which reads no length on the host."""
    with (
        varlen_kernels.backend_on_cpu(monkeypatch),
        range_kernels.backend_on_cpu(monkeypatch),
    ):
        yield


def make_policy(
    kit: SimpleNamespace, attention: str = "torch_varlen", **settings: Any
) -> PackedPolicy:
    torch.manual_seed(0)
    model = use_packed_attention(kit.tiny_model(), attention)
    return PackedPolicy(model, **settings)


def make_batches(
    kit: SimpleNamespace, layout: str = "shared_prefix", kind: str = "preference"
) -> list[PackedBatch]:
    """Return batches of other lengths, references and weights, of one shape."""
    batches = []
    for seed in range(3):
        if layout == "forest":
            _, packs = forest_packs(seed, kind, size=8)
        else:
            examples = random_examples(5, seed=seed, kind=kind)
            packs = kit.packed(examples, [2, 3], layout)
        batch = collate(packs, kind, fillers=seed % 2)
        torch.manual_seed(seed)
        draws = torch.rand(2, batch.num_segments)
        num_targets = len(batch.target_index)
        values = torch.rand(num_targets) - 1
        ids = torch.rand(num_targets, kit.VOCAB).argsort()[:, :3].int()
        teacher = TopK(ids, torch.randn(num_targets, 4).log_softmax(-1)[:, :3])
        batches.append(
            batch.replace(
                ref_logps=-20 * draws[0],
                rewards=draws[1] - 0.5,
                columns={"w": torch.rand(batch.num_examples)},
                token_columns={
                    "old_logps": values,
                    "ref_token_logps": 2 * values,
                    "ref_top_k": teacher,
                },
            )
        )
    keys = {} if layout == "concat" else KEYS
    if kind == "scored":
        keys = keys | {"num_examples": 20}
    return [pad_batch(batch, **SIZES, **keys) for batch in batches]


DIVISORS = [StepDivisor(4, 90, 5), StepDivisor(7.5, 31, 9), StepDivisor(2, 55, 3)]


def eager_steps(
    policy: PackedPolicy, loss_fn: Any, batches: list[PackedBatch]
) -> list[tuple[LossOutput, Tensor]]:
    """Return output and gradients of each batch, with divisors of their own."""
    steps = []
    for batch, divisor in zip(batches, DIVISORS, strict=True):
        policy.zero_grad()
        output = loss_fn(policy(batch), batch, divisor=divisor)
        output.loss.backward()
        steps.append((output, gradients_of(policy)))
    return steps


def replayed_steps(
    policy: PackedPolicy,
    loss_fn: Any,
    batches: list[PackedBatch],
    graph: Any = RecordedGraph,
) -> list[tuple[LossOutput, Tensor]]:
    """Return the same by replays of one graph."""
    step = GraphedStep(policy, loss_fn, graph=graph)
    steps = []
    for batch, divisor in zip(batches, DIVISORS, strict=True):
        policy.zero_grad()
        output = step(batch, divisor=divisor)
        steps.append((output, gradients_of(policy)))
    return steps


def gradients_of(model: nn.Module) -> Tensor:
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return torch.cat(gradients).clone()


LOSSES: dict[str, tuple[Callable[[], Any], str]] = {
    "dpo": (lambda: PreferenceLoss("dpo"), "preference"),
    "mix": (
        lambda: PreferenceLoss({"dpo": 0.8, "bco_pair": 0.2}, sft_weight=0.5),
        "preference",
    ),
    "means of packs": (
        lambda: PreferenceLoss("simpo", reduction="pack_mean"),
        "preference",
    ),
    "rewards": (lambda: PreferenceLoss("rpo_sq"), "preference"),
    "sft": (lambda: PreferenceLoss("sft"), "sft"),
    "single answers": (lambda: PreferenceLoss("kto"), "scored"),
    "policy": (lambda: PolicyLoss(kl_weight=0.1), "scored"),
    "distillation": (lambda: DistillLoss(direction="reverse"), "sft"),
    "groups": (lambda: PolicyLoss(average="group"), "scored"),
}


@pytest.mark.parametrize("layout", ["concat", "shared_prefix", "forest"])
@pytest.mark.parametrize("name", LOSSES)
def test_replays_are_eager_steps(kit: SimpleNamespace, name: str, layout: str) -> None:
    """Of other tokens, references, weights, rewards and divisors than were captured."""
    make_loss, kind = LOSSES[name]
    loss_fn = make_loss()
    policy = make_policy(kit, **loss_fn.head_settings)
    batches = make_batches(kit, layout, kind)
    expected_steps = eager_steps(policy, loss_fn, batches)
    actual_steps = replayed_steps(policy, loss_fn, batches)
    for (actual, gradients), (expected, expected_gradients) in zip(
        actual_steps, expected_steps, strict=True
    ):
        assert (gradients - expected_gradients).abs().max() < 1e-12
        assert expected_gradients.abs().max() > 1e-6
        for name, (total, count) in expected.metrics.items():
            assert (actual.metrics[name][0] - total).abs() < 1e-10
            assert actual.metrics[name][1] == count
        assert actual.metrics.keys() == expected.metrics.keys()
        assert (actual.loss - expected.loss).abs() < 1e-12
        assert not actual.loss.requires_grad
        for field in ("loss_sum", "count", "sft_sum", "sft_count"):
            actual_value, expected_value = (
                getattr(output, field) for output in (actual, expected)
            )
            assert (actual_value is None) == (expected_value is None)
            if expected_value is not None:
                assert (actual_value - expected_value).abs() < 1e-10


@pytest.mark.parametrize("layout", ["concat", "shared_prefix", "forest"])
def test_replays_with_ranges_read_the_ranges_of_their_batch(
    kit: SimpleNamespace, layout: str
) -> None:
    policy = make_policy(kit, attention="ranges")
    loss_fn = PreferenceLoss("dpo")
    batches = make_batches(kit, layout)
    expected_steps = eager_steps(policy, loss_fn, batches)
    actual_steps = replayed_steps(policy, loss_fn, batches)
    for (actual, gradients), (expected, expected_gradients) in zip(
        actual_steps, expected_steps, strict=True
    ):
        assert (gradients - expected_gradients).abs().max() < 1e-12
        assert (actual.loss - expected.loss).abs() < 1e-12


@pytest.mark.parametrize("changed", ["divisor", "ref_logps", "weights", "rewards"])
def test_each_input_is_read_in_each_replay(kit: SimpleNamespace, changed: str) -> None:
    """One value changes, and all else stays."""
    policy = make_policy(kit)
    loss_fn = PreferenceLoss("rpo_sq")
    step = GraphedStep(policy, loss_fn, graph=RecordedGraph)
    first, *_ = make_batches(kit)
    second, divisor = first, StepDivisor(5)
    if changed == "divisor":
        divisor = StepDivisor(torch.tensor(2.5))
    else:
        second = first.replace(**{changed: getattr(first, changed) * 0.7})
    step(first, divisor=StepDivisor(5))
    policy.zero_grad()
    output = step(second, divisor=divisor)
    actual = gradients_of(policy)

    policy.zero_grad()
    expected = loss_fn(policy(second), second, divisor=divisor)
    expected.loss.backward()
    assert (actual - gradients_of(policy)).abs().max() < 1e-12
    assert (output.loss - expected.loss).abs() < 1e-12


def test_weights_of_a_column(kit: SimpleNamespace) -> None:
    policy = make_policy(kit)
    loss_fn = PreferenceLoss("dpo", weight_field="w")
    batches = make_batches(kit)
    expected = eager_steps(policy, loss_fn, batches)
    # On a CPU, weights are also checked.
    actual = replayed_steps(
        policy, loss_fn, batches, graph=partial(RecordedGraph, allows_reads=True)
    )
    for (_, gradients), (_, expected_gradients) in zip(actual, expected, strict=True):
        assert (gradients - expected_gradients).abs().max() < 1e-12


def test_gradients_add_up_as_those_of_backward(kit: SimpleNamespace) -> None:
    """Over the batches of a step, to gradients that are there already, and after
    optimizer steps; parameters without a gradient keep none.
    """
    losses = []
    weights = []
    for is_graphed in (False, True):
        policy = make_policy(kit)
        unused = nn.Parameter(torch.ones(3))
        policy.register_parameter("unused", unused)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2, weight_decay=0.1)
        loss_fn = PreferenceLoss("dpo")
        step = GraphedStep(policy, loss_fn, graph=RecordedGraph)
        for parameter in policy.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.01)
        for _ in range(2):
            for batch, divisor in zip(make_batches(kit), DIVISORS, strict=True):
                if is_graphed:
                    loss = step(batch, divisor=divisor).loss
                else:
                    loss = loss_fn(policy(batch), batch, divisor=divisor).loss
                    loss.backward()
                losses.append(loss.detach())
            nn.utils.clip_grad_norm_(policy.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        assert unused.tolist() == [1, 1, 1]
        weights.append(torch.cat([p.detach().flatten() for p in policy.parameters()]))
    assert (weights[0] - weights[1]).abs().max() < 1e-10
    assert (torch.stack(losses[:6]) - torch.stack(losses[6:])).abs().max() < 1e-10
    assert losses[0] != losses[3]


def test_a_graph_is_captured_once(kit: SimpleNamespace) -> None:
    graphs = []

    def make_graph(device: torch.device) -> RecordedGraph:
        graphs.append(RecordedGraph(device))
        return graphs[-1]

    policy = make_policy(kit)
    step = GraphedStep(policy, PreferenceLoss("dpo"), graph=make_graph)
    outputs = [step(batch, divisor=DIVISORS[0]) for batch in make_batches(kit)]
    assert [(graph.num_calls, graph.num_replays) for graph in graphs] == [(3, 3)]
    # Results of a replay outlive the next one.
    assert len({float(output.loss) for output in outputs}) == 3


def test_a_reference_inside_the_graph(kit: SimpleNamespace) -> None:
    policy = make_policy(kit)
    reference = copy.deepcopy(policy)
    for parameter in reference.parameters():
        parameter.data *= 0.9
    loss_fn = PreferenceLoss("dpo")
    step = GraphedStep(policy, loss_fn, reference=reference, graph=RecordedGraph)
    for batch in make_batches(kit):
        policy.zero_grad()
        step(batch, divisor=DIVISORS[0])
        actual = gradients_of(policy)
        policy.zero_grad()
        with torch.no_grad():
            ref_logps = reference(batch)
        logps = policy(batch)
        loss_fn(logps, batch, ref_logps, divisor=DIVISORS[0]).loss.backward()
        assert (actual - gradients_of(policy)).abs().max() < 1e-12


def test_dropout_draws_anew_and_a_resumed_run_draws_the_same(
    kit: SimpleNamespace,
) -> None:
    """Warm-up leaves the random state alone."""
    batch, *_ = make_batches(kit)
    policy = make_policy(kit)
    mlp = policy.model.model.layers[0].mlp
    mlp.drop = nn.Dropout(0.5)
    mlp.register_forward_hook(lambda mlp, _, output: mlp.drop(output))
    policy.train()
    step = GraphedStep(policy, PreferenceLoss("dpo"), graph=RecordedGraph)
    states = []
    losses = []
    for _ in range(3):
        states.append(torch.get_rng_state())
        losses.append(float(step(batch, divisor=DIVISORS[0]).loss))
    assert len(set(losses)) == 3

    resumed = GraphedStep(policy, PreferenceLoss("dpo"), graph=RecordedGraph)
    torch.set_rng_state(states[2])
    assert float(resumed(batch, divisor=DIVISORS[0]).loss) == losses[2]


def test_other_sizes_are_refused(kit: SimpleNamespace) -> None:
    policy = make_policy(kit)
    step = GraphedStep(policy, PreferenceLoss("dpo"), graph=RecordedGraph)
    first, second, _ = make_batches(kit)
    step(first, divisor=StepDivisor(5))
    longer = pad_batch(second, num_tokens=401)
    for batch, name in (
        (longer, "input_ids"),
        (second.replace(max_seqlen=81), "max_seqlen"),
        (second.replace(ref_logps=None), "ref_logps"),
        (second.replace(columns={}), "columns.w"),
    ):
        with pytest.raises(ConfigError, match=rf"{name}.*pad_batch"):
            step(batch, divisor=StepDivisor(5))
    with pytest.raises(ConfigError, match="divisor"):
        step(second, divisor=StepDivisor(5, 3))


def test_steps_that_no_graph_repeats_are_refused(kit: SimpleNamespace) -> None:
    policy = make_policy(kit)
    with pytest.raises(BackendError, match=r"CUDA device.*cpu"):
        GraphedStep(policy, PreferenceLoss("dpo"))
    scored = make_batches(kit, "concat", "scored")
    for loss in ("dpo", "sft"):
        step = GraphedStep(policy, PreferenceLoss(loss), graph=RecordedGraph)
        with pytest.raises(ConfigError, match=r"'scored'.*cuda_graphs"):
            step(scored[0], divisor=StepDivisor(5, 3))

    wrapped = object.__new__(DistributedDataParallel)
    nn.Module.__init__(wrapped)
    wrapped.module = policy
    with pytest.raises(ConfigError, match="DistributedDataParallel"):
        GraphedStep(wrapped, PreferenceLoss("dpo"), graph=RecordedGraph)

    policy.model.gradient_checkpointing_enable()
    GraphedStep(policy, PreferenceLoss("dpo"), graph=RecordedGraph)
    policy.model.add_module("drop", nn.Dropout(0.1))
    with pytest.raises(ConfigError, match="dropout"):
        GraphedStep(policy, PreferenceLoss("dpo"), graph=RecordedGraph)


def test_a_backend_that_reads_lengths_is_refused(kit: SimpleNamespace) -> None:
    model = use_packed_attention(kit.tiny_model(), "torch_varlen")
    policy = PackedPolicy(model)
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: int(kwargs["input_ids"].sum()) and None,
        with_kwargs=True,
    )
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 3)
    before = gradients_of(policy)
    step = GraphedStep(policy, PreferenceLoss("dpo"), graph=RecordedGraph)
    with pytest.raises(BackendError, match=r"host.*attention backend"):
        step(make_batches(kit)[0], divisor=StepDivisor(5))
    assert torch.equal(gradients_of(policy), before)


@pytest.mark.parametrize("way", ["of transformers", "of torch"])
def test_gradient_checkpointing(kit: SimpleNamespace, way: str) -> None:
    policy = make_policy(kit)
    batches = make_batches(kit)
    expected = eager_steps(policy, PreferenceLoss("dpo"), batches)
    if way == "of torch":
        layers = policy.model.model.layers
        for number, layer in enumerate(layers):
            layers[number] = checkpoint_wrapper(layer)
    else:
        policy.model.gradient_checkpointing_enable()
    policy.train()
    actual = replayed_steps(policy, PreferenceLoss("dpo"), batches)
    for (_, gradients), (_, expected_gradients) in zip(actual, expected, strict=True):
        assert (gradients - expected_gradients).abs().max() < 1e-12


def test_autocast_casts_weights_in_each_replay(kit: SimpleNamespace) -> None:
    """Also those that a call before the capture has cast, and that have changed."""
    policy = make_policy(kit).float()
    loss_fn = PreferenceLoss("dpo")
    batches = make_batches(kit)
    step = GraphedStep(policy, loss_fn, graph=RecordedGraph)
    for batch, divisor in zip(batches, DIVISORS, strict=True):
        expected_loss, expected = eager_autocast_step(policy, loss_fn, batch, divisor)
        policy.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            policy(batches[0])
            loss = step(batch, divisor=divisor).loss
        error = (gradients_of(policy) - expected).norm()
        assert error < 1e-5 * expected.norm()
        assert (loss - expected_loss).abs() < 1e-5
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter *= 1.1


def eager_autocast_step(
    policy: PackedPolicy, loss_fn: Any, batch: PackedBatch, divisor: StepDivisor
) -> tuple[Tensor, Tensor]:
    """Return loss and gradients of a batch."""
    policy.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_fn(policy(batch), batch, divisor=divisor).loss
    loss.backward()
    return loss.detach(), gradients_of(policy)


def test_the_loop_on_the_page(
    kit: SimpleNamespace,
    stored: SimpleNamespace,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It trains as a loop of eager batches does."""
    (tmp_path / "prefs-packed").symlink_to(stored.data)
    monkeypatch.chdir(tmp_path)
    section = PAGE.read_text(encoding="utf-8").partition("## A batch as a CUDA graph")[
        2
    ]
    code = section.partition("```python\n")[2].partition("```")[0]
    loss_fn = PreferenceLoss("dpo")
    policy, reference, expected = (make_policy(kit) for _ in range(3))

    metrics = Metrics()
    names = {
        **vars(packstore.torch),
        "packstore": packstore,
        "GraphedStep": partial(GraphedStep, graph=RecordedGraph),
        "model": policy.model,
        "reference": reference.model,
        "loss_fn": loss_fn,
        "metrics": metrics,
        "optimizer": torch.optim.SGD(policy.parameters(), lr=0.1),
    }
    exec(code, names)

    data = PackedDataset("prefs-packed")
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    expected_metrics = Metrics()
    for batch in PackedDataLoader(data, examples_per_step=64):
        with torch.no_grad():
            ref_logps = reference(batch)
        output = loss_fn(expected(batch), batch, ref_logps=ref_logps)
        output.loss.backward()
        expected_metrics.add(output.metrics)
        if batch.step.last:
            optimizer.step()
            optimizer.zero_grad()
    assert metrics.means() == pytest.approx(expected_metrics.means(), abs=1e-9)
    pairs = zip(policy.parameters(), expected.parameters(), strict=True)
    for parameter, expected_parameter in pairs:
        assert (parameter - expected_parameter).abs().max() < 1e-12
