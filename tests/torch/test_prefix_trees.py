"""Sequences of a prefix tree: log-probs, gradients and losses are those that they have
alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import range_kernels
import torch
import torch.distributed as dist
import varlen_kernels
from forests import forest_packs
from gradients import recompute_layers, scores_alone, take_gradients, tokens_alone
from ranks import launch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from packstore.errors import CompatibilityError
from packstore.format import Examples, Packs
from packstore.pack.fill import convert, fill
from packstore.torch import (
    PackedBatch,
    PackedPolicy,
    PolicyLoss,
    PreferenceLoss,
    collate,
    context_shard,
    count_step,
    packed_logps,
    pad_segments,
    padding_multiple,
    reduce_segment_sums,
    segment_logps,
    segment_scores,
    use_packed_attention,
)
from packstore.torch.losses import LOSSES

KINDS = ("sft", "preference", "scored")
FAMILIES = ("llama", "qwen3")
WAYS = ("plain", "gradient checkpointing", "LoRA")
BACKENDS = ("reference", "sdpa", "torch_varlen", "ranges", "per_sequence")
FORESTS = 200


def seeds(number: int) -> Any:
    """Some forests for `make test`, and all."""
    every = pytest.param(range(FORESTS), marks=pytest.mark.slow, id="all")
    return pytest.mark.parametrize(
        "seeds", [pytest.param(range(number), id="some"), every]
    )


class Forest(NamedTuple):
    """Random sequences that begin alike.

    Attributes:
        kind: the kind of the examples.
        examples: the sequences.
        packs: two packs of them, in layout ``shared_prefix``.
        ref_logps: log-probs of a reference model.
    """

    kind: str
    examples: Examples
    packs: Packs
    ref_logps: np.ndarray[Any, np.dtype[np.float32]]

    @classmethod
    def random(cls, seed: int, kind: str) -> Forest:
        """Half of the forests share as packstore does; the others leave out less, and
        name any parents that the format allows.
        """
        examples, packs = forest_packs(seed, kind)
        if seed % 2:
            edges = packs.example_offsets
            packs = fill(examples, edges, "shared_prefix", share="pack")
        rng = np.random.default_rng(seed)
        ref_logps = rng.normal(-8, 2, examples.num_sequences).astype(np.float32)
        return cls(kind, examples, packs, ref_logps)

    def tree(self) -> PackedBatch:
        """Both packs as one batch."""
        return collate(self.packs, self.kind, ref_logps=self.ref_logps)

    def whole(self) -> PackedBatch:
        """The same batch in layout concat."""
        packs = convert(self.packs, "concat")
        return collate(packs, self.kind, ref_logps=self.ref_logps)

    def trees(self) -> list[PackedBatch]:
        """A batch of each pack."""
        edges = self.packs.sequence_offsets
        return [
            collate(
                self.packs.row(i),
                self.kind,
                ref_logps=self.ref_logps[edges[i] : edges[i + 1]],
            )
            for i in range(len(self.packs))
        ]


def with_lora(model: Any) -> Any:
    """The model with adapters in all its layers, of random weights."""
    peft = pytest.importorskip("peft", reason="adapters")
    config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear", r=2)
    adapted = peft.get_peft_model(model, config).double()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator)
                parameter += 0.3 * noise.double()
    return adapted


Outcome = tuple[Tensor, dict[str, Tensor]]
"""Log-probs or a loss, and gradients."""


def outcome_alone(model: Any, forest: Forest, seed: int) -> Outcome:
    """Of each sequence, fed to the model by itself."""
    logps = torch.cat(list(tokens_alone(model, forest.examples)))
    return outcome(model, logps, seed)


def outcome_of_tree(model: Any, forest: Forest, seed: int) -> Outcome:
    logps = packed_logps(model, forest.tree(), per_token=True)
    return outcome(model, logps, seed)


def outcome(model: Any, logps: Tensor, seed: int) -> Outcome:
    """Each token's log-prob has a random gradient, so that no two errors cancel."""
    generator = torch.Generator().manual_seed(seed)
    slopes = torch.randn(logps.shape, generator=generator, dtype=torch.float64)
    (logps * slopes).sum().backward()
    return logps.detach(), take_gradients(model)


def differences(actual: Outcome, wanted: Outcome) -> tuple[float, float]:
    """The largest of log-probs, and of gradients over the largest gradient."""
    assert actual[0].shape == wanted[0].shape
    of_logps = float((actual[0] - wanted[0]).abs().max())
    assert actual[1].keys() == wanted[1].keys()
    scale = max(float(gradient.abs().max()) for gradient in wanted[1].values())
    of_gradients = max(
        float((actual[1][name] - gradient).abs().max()) / scale
        for name, gradient in wanted[1].items()
    )
    return of_logps, of_gradients


@pytest.fixture
def kernels_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backends `torch_varlen` and `ranges` run on a CPU, by plain kernels."""
    with (
        varlen_kernels.backend_on_cpu(monkeypatch),
        range_kernels.backend_on_cpu(monkeypatch),
    ):
        yield


@seeds(4)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.usefixtures("kernels_on_cpu")
@pytest.mark.filterwarnings("ignore::UserWarning:peft")
def test_log_probs_and_gradients_are_those_of_each_sequence_alone(
    kit: SimpleNamespace, way: str, seeds: range
) -> None:
    models = {}
    for family in FAMILIES:
        model = kit.tiny_model(family).train()
        models[family] = with_lora(model) if way == "LoRA" else model
    prepared = {}
    for family, model in models.items():
        packed_model = use_packed_attention(deepcopy(model), BACKENDS[0])
        if way == "gradient checkpointing":
            recompute_layers(packed_model)
        prepared[family] = packed_model

    for seed in seeds:
        forest = Forest.random(seed, KINDS[seed % 3])
        family = FAMILIES[seed // 2 % 2]
        wanted = outcome_alone(models[family], forest, seed)
        for backend in BACKENDS:
            model = use_packed_attention(prepared[family], backend)
            found = differences(outcome_of_tree(model, forest, seed), wanted)
            assert max(found) < 1e-12, (seed, family, backend, found)


@seeds(3)
@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.float64, 2e-7), (torch.float32, 1e-5)]
)
def test_gradients_with_the_norms_of_transformers(
    kit: SimpleNamespace, dtype: torch.dtype, limit: float, seeds: range
) -> None:
    """Norms compute in float32: the gradient of a token is rounded once, and not once
    for each sequence that has the token.
    """
    models = {}
    for family in FAMILIES:
        models[family] = kit.tiny_family(family, dtype)
        models[family].set_attn_implementation("sdpa")
    prepared = {
        family: use_packed_attention(deepcopy(model), "sdpa")
        for family, model in models.items()
    }
    for seed in seeds:
        forest = Forest.random(seed, KINDS[seed % 3])
        family = FAMILIES[seed // 2 % 2]
        wanted = outcome_alone(models[family], forest, seed)
        found = outcome_of_tree(prepared[family], forest, seed)
        assert differences(found, wanted)[1] < limit, (seed, family)


def test_padded_inputs_of_an_unchanged_model(kit: SimpleNamespace) -> None:
    model = kit.tiny_model()
    for seed in range(3):
        forest = Forest.random(seed, KINDS[seed])
        batch = forest.tree()
        logits = batch.unpad(model(**batch.model_inputs("padded")).logits)
        logps = segment_logps(batch, logits=logits, per_token=True)
        wanted = torch.cat(list(tokens_alone(model, forest.examples)))
        # transformers' own mask adds float32 constants.
        assert (logps - wanted).abs().max() < 1e-6


@seeds(6)
@torch.no_grad()
def test_log_probs_by_flex(kit: SimpleNamespace, seeds: range) -> None:
    """Which has no gradients on a CPU."""
    torch._dynamo.reset()  # compiled kernels of other tests count against a limit
    models = {family: kit.tiny_model(family) for family in FAMILIES}
    prepared = {
        family: use_packed_attention(deepcopy(model), "flex")
        for family, model in models.items()
    }
    for seed in seeds:
        forest = Forest.random(seed, KINDS[seed % 3])
        batch = forest.tree()
        family = FAMILIES[seed // 2 % 2]
        wanted = torch.cat(list(tokens_alone(models[family], forest.examples)))
        logps = packed_logps(prepared[family], batch, per_token=True)
        assert (logps - wanted).abs().max() < 1e-12, (seed, family)


def loss_functions() -> dict[str, PreferenceLoss]:
    """Every loss by name, and settings that choose other rows of a batch."""
    functions = {name: PreferenceLoss(name) for name in LOSSES}
    for pairs in ("all", "adjacent"):
        functions[f"dpo of {pairs}"] = PreferenceLoss("dpo", pairs=pairs)
    for average in ("token", "sequence_sum", "sequence_mean"):
        functions[f"sft by {average}"] = PreferenceLoss("sft", sft_average=average)
        functions[f"dpo and sft by {average}"] = PreferenceLoss(
            "dpo", sft_weight=0.5, sft_average=average
        )
    functions["mean of packs"] = PreferenceLoss("dpo", reduction="pack_mean")
    functions["means of tokens"] = PreferenceLoss("dpo", average_logps=True)
    functions["mix"] = PreferenceLoss({"dpo": 0.8, "nca_pair": 0.2})
    return functions


def assert_same_step(model: Any, outputs: list[Any], where: object) -> None:
    """Loss, metrics and gradients of two outputs agree to rounding."""
    losses, metrics, gradients = [], [], []
    for output in outputs:
        parameters = [p for p in model.parameters() if p.requires_grad]
        grads = torch.autograd.grad(
            output.loss, parameters, retain_graph=True, materialize_grads=True
        )
        losses.append(output.loss.detach())
        metrics.append(
            {name: (float(a), float(b)) for name, (a, b) in output.metrics.items()}
        )
        gradients.append(grads)
    rounding = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(*losses, **rounding)
    assert metrics[0].keys() == metrics[1].keys()
    for name, values in metrics[0].items():
        assert values == pytest.approx(metrics[1][name], rel=1e-12, abs=1e-12), (
            where,
            name,
        )
    scale = max(float(gradient.abs().max()) for gradient in gradients[0])
    for a, b in zip(*gradients, strict=True):
        assert (a - b).abs().max() <= 1e-12 * scale, where


@pytest.mark.parametrize("kind", KINDS)
def test_every_loss_is_that_of_the_layout_concat(
    kit: SimpleNamespace, kind: str
) -> None:
    forest = Forest.random(3, kind)
    batches = [forest.tree(), forest.whole()]
    model = use_packed_attention(kit.tiny_model("qwen3"), "sdpa")
    logps = [packed_logps(model, batch) for batch in batches]
    compared = 0
    for name, loss_fn in loss_functions().items():
        if loss_fn.scores:
            continue
        try:
            expected = loss_fn(logps[1], batches[1])
        except CompatibilityError:  # kind sft has no judged responses
            with pytest.raises(CompatibilityError):
                loss_fn(logps[0], batches[0])
            continue
        assert_same_step(model, [loss_fn(logps[0], batches[0]), expected], name)
        compared += 1
    assert compared >= (4 if kind == "sft" else 30)


@pytest.mark.parametrize("average", ["token", "sequence", "group"])
@pytest.mark.parametrize("ratio", ["token", "sequence"])
def test_policy_losses_are_those_of_the_layout_concat(
    kit: SimpleNamespace, average: Any, ratio: Any
) -> None:
    forest = Forest.random(4, "scored")
    batches = [forest.tree(), forest.whole()]
    model = use_packed_attention(kit.tiny_model(), "sdpa")
    logps = [packed_logps(model, batch, per_token=True) for batch in batches]
    loss_fn = PolicyLoss(average=average, ratio=ratio, kl_weight=0.3)
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(3, len(logps[0]), generator=generator, dtype=torch.float64)
    old_logps = logps[1].detach() + 0.3 * noise[0]
    ref_logps = logps[1].detach() + 0.3 * noise[1]
    for advantages in (None, noise[2]):
        outputs = [
            loss_fn(values, batch, advantages, old_logps, ref_logps)
            for values, batch in zip(logps, batches, strict=True)
        ]
        assert_same_step(model, outputs, (average, ratio))


@pytest.mark.parametrize("pad_token_id", [None, 3])
@pytest.mark.parametrize("kind", ["preference", "scored"])
def test_scores_and_their_losses(
    kit: SimpleNamespace, exact: None, kind: str, pad_token_id: int | None
) -> None:
    """The last token that is no padding may be one that a segment leaves out."""
    forest = Forest.random(3, kind)
    batches = [forest.tree(), forest.whole()]
    model = kit.tiny_family("llama", head="score", pad_token_id=pad_token_id)
    with torch.no_grad():
        wanted = torch.stack(list(scores_alone(model, forest.examples)))
    use_packed_attention(model, "sdpa")
    scores = [segment_scores(model, batch) for batch in batches]
    assert (scores[0] - wanted).abs().max() < 1e-12
    compared = 0
    for name, loss_fn in loss_functions().items():
        if loss_fn.scores and (kind == "scored" or name != "plackett_luce"):
            outputs = [
                loss_fn(values, batch)
                for values, batch in zip(scores, batches, strict=True)
            ]
            assert_same_step(model, outputs, name)
            compared += 1
    assert compared >= 1


OF_KIND = {
    "preference": PreferenceLoss("dpo", sft_weight=0.3),
    "sft": PreferenceLoss("sft"),
}
SPLITS = ("zigzag", "contiguous")


def on_rank(task: dict[str, Any]) -> dict[str, Any]:
    """Loss and gradients of a step on one of the ranks: with a pack of its own, and
    with its share of every pack.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    results = {}
    for kind, batches in task["packs"].items():
        loss_fn = OF_KIND[kind]
        divisor = count_step([batches[rank]], loss_fn).averaged(world)
        policy = DistributedDataParallel(PackedPolicy(task["model"]))
        loss = loss_fn(policy(batches[rank]), batches[rank], divisor=divisor).loss
        loss.backward()
        loss = loss.detach() / world
        dist.all_reduce(loss)
        results["a pack a rank", kind] = (loss, take_gradients(task["model"]))

    for kind, batch in task["batches"].items():
        for split in SPLITS:
            row = pad_segments(batch, padding_multiple(context_parallel=world))
            shard = context_shard(row, how=split)
            logits = task["model"](**shard.model_inputs()).logits
            logps = reduce_segment_sums(segment_logps(shard, logits=logits))
            loss = OF_KIND[kind](logps, row).loss
            loss.backward()
            gradients = take_gradients(task["model"])
            for gradient in gradients.values():
                dist.all_reduce(gradient)
                gradient /= world
            results[split, kind] = (loss.detach(), gradients)
    return results


def test_two_ranks(kit: SimpleNamespace, tmp_path: Path) -> None:
    """Trees on each rank, and trees that two ranks share."""
    model = use_packed_attention(kit.tiny_model().train(), "sdpa")
    forests = [Forest.random(5, kind) for kind in OF_KIND]
    wanted = {}
    for forest in forests:
        batch = forest.whole()
        loss = OF_KIND[forest.kind](packed_logps(model, batch), batch).loss
        loss.backward()
        wanted[forest.kind] = (loss.detach(), take_gradients(model))
    task = {
        "model": model,
        "packs": {forest.kind: forest.trees() for forest in forests},
        "batches": {forest.kind: forest.tree() for forest in forests},
    }
    for results in launch(__file__, task, 2, tmp_path):
        assert len(results) == 3 * len(OF_KIND)
        for (way, kind), result in results.items():
            assert max(differences(result, wanted[kind])) < 1e-11, (way, kind)
