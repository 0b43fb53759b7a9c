"""Each loss against TRL's own function, and the traps between its names and ours."""

from __future__ import annotations

import warnings
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from packstore.testing import random_examples
from packstore.torch import PackedBatch, PreferenceLoss, collate
from packstore.torch import segment_token_counts as token_counts

BETA = 0.3
FP32 = 3e-6
SAME: dict[str, tuple[Any, dict[str, Any], dict[str, Any], float]] = {
    # TRL's loss types: our loss, our parameters, its settings, tolerance
    "sigmoid": ("dpo", {}, {}, 1e-10),
    "sigmoid_norm": ("dpo_norm", {}, {}, 1e-10),
    "hinge": ("hinge", {}, {}, 1e-10),
    "ipo": ("ipo", {}, {}, 1e-10),
    "exo_pair": (
        "exo_pair",
        {"label_smoothing": 0.01},
        {"label_smoothing": 0.01},
        1e-7,
    ),
    "nca_pair": ("nca_pair", {}, {}, 1e-10),
    "robust": ("robust", {"label_smoothing": 0.2}, {"label_smoothing": 0.2}, 1e-10),
    "bco_pair": ("bco_pair", {}, {}, 1e-10),
    "sppo_hard": ("sppo_hard", {}, {}, 1e-10),
    "apo_zero": ("apo_zero", {}, {}, 1e-10),
    "apo_down": ("apo_down", {}, {}, 1e-10),
    "discopop": (
        "discopop",
        {"tau": 0.2},
        {"args": SimpleNamespace(discopop_tau=0.2)},
        1e-10,
    ),
    "forward_kl": ("fdpo_forward_kl", {}, {"f_divergence_type": "forward_kl"}, 1e-10),
    "js_divergence": ("fdpo_js", {}, {"f_divergence_type": "js_divergence"}, 1e-10),
    "alpha_divergence": (
        "fdpo_alpha",
        {"alpha": 0.3},
        {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.3},
        FP32,  # its table of dtypes has no float64
    ),
    "sft": ("sft", {}, {}, 1e-10),
    "mpo": (
        {"dpo": 0.8, "bco_pair": 0.2},
        {"sft_weight": 1.0},
        {"loss_types": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
        1e-10,
    ),
}


@pytest.fixture(scope="module")
def batch(kit: SimpleNamespace) -> PackedBatch:
    return collate(
        kit.packed(random_examples(6, seed=2), [4, 2], "concat"), "preference"
    )


@pytest.fixture(scope="module")
def trl() -> Any:
    module = pytest.importorskip("trl.trainer.dpo_trainer", reason="TRL's own losses")
    return module.DPOTrainer


def rows(batch: PackedBatch, seed: int) -> Tensor:
    """Log-probs of each token `[S, longest]`, 0 behind the end."""
    generator = torch.Generator().manual_seed(seed)
    counts = token_counts(batch)
    values = -torch.rand(
        len(counts), int(counts.max()), generator=generator, dtype=torch.float64
    )
    return values * (torch.arange(values.shape[1]) < counts[:, None])


def trainer_with(**settings: Any) -> Any:
    """What TRL's losses read of their trainer."""
    accelerator = {
        "device": "cpu",
        **dict.fromkeys(("gather", "gather_for_metrics"), lambda x: x),
    }
    common: dict[str, Any] = {
        "model": SimpleNamespace(training=True),
        "accelerator": SimpleNamespace(**accelerator),
        "aux_loss_enabled": False,
        "precompute_ref_logps": True,
        "beta": BETA,
        "_metrics": {"train": defaultdict(list)},
        "_total_train_tokens": 0,
        "_tp_size": 1,
    }
    return SimpleNamespace(**common | settings)


def computed(
    trl: Any, trainer: Any, policy: Tensor, counts: Tensor, **inputs: Tensor
) -> Tensor:
    """The loss of a trainer on a model that answers with given log-probs."""
    zeros, at = torch.zeros_like(policy), torch.arange(policy.shape[1] + 1)
    mask = (at >= 1) & (at <= counts[:, None])
    answer = SimpleNamespace(
        log_probs=policy, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool()
    )
    ids = {"input_ids": torch.zeros(mask.shape, dtype=torch.long)}
    rest = {"attention_mask": torch.ones_like(mask), "completion_mask": mask, **inputs}
    loss: Tensor = trl._compute_loss(trainer, lambda **_: answer, ids | rest, False)
    return loss


def theirs(
    trl: Any,
    batch: PackedBatch,
    policy: Tensor,
    ref: Tensor,
    kind: str,
    settings: dict[str, Any],
) -> Tensor:
    """The loss as TRL's trainer computes it."""
    apart = torch.cat(
        [torch.arange(0, len(policy), 2), torch.arange(1, len(policy), 2)]
    )
    common = {
        "ld_alpha": None,
        "f_divergence_type": "reverse_kl",
        "loss_types": [kind if kind in LOSS_TYPES else "sigmoid"],
        "loss_weights": [1.0],
        "label_smoothing": 0.0,
        "use_weighting": False,
    }
    sums = ref.sum(1)
    reference = {"ref_chosen_logps": sums[0::2], "ref_rejected_logps": sums[1::2]}
    trainer, counts = trainer_with(**common | settings), token_counts(batch)[apart]
    return computed(trl, trainer, policy[apart], counts, **reference)


LOSS_TYPES = set(SAME) - {"forward_kl", "js_divergence", "alpha_divergence", "mpo"}


def ours(
    batch: PackedBatch, policy: Tensor, ref: Tensor, name: Any, **parameters: Any
) -> Tensor:
    beta = {} if name == "sft" else {"beta": BETA}
    loss_fn = PreferenceLoss(name, **beta, **parameters)
    return loss_fn(policy.sum(1), batch, ref.sum(1)).loss


@pytest.mark.parametrize("kind", SAME)
def test_trl(trl: Any, batch: PackedBatch, kind: str) -> None:
    name, parameters, settings, tolerance = SAME[kind]
    dtype = torch.float32 if tolerance == FP32 else torch.float64
    policy, ref = rows(batch, 0).to(dtype).requires_grad_(), rows(batch, 1).to(dtype)
    expected = theirs(trl, batch, policy, ref, kind, settings)
    found = ours(batch, policy, ref, name, **parameters)
    assert abs(float((found - expected).detach())) < tolerance
    (a,), (b,) = (torch.autograd.grad(x, policy) for x in (found, expected))
    real = policy.detach() != 0
    assert ((a - b) * real).abs().max() < tolerance
    assert b.abs().max() > 1e-4


def test_trl_ignores_label_smoothing_for_the_sigmoid_loss(
    trl: Any, batch: PackedBatch
) -> None:
    policy, ref = rows(batch, 0), rows(batch, 1)
    expected = theirs(trl, batch, policy, ref, "sigmoid", {"label_smoothing": 0.2})
    assert abs(ours(batch, policy, ref, "dpo") - expected) < 1e-10
    assert abs(ours(batch, policy, ref, "cdpo", label_smoothing=0.2) - expected) > 1e-2


@pytest.mark.parametrize("kind", ["cpo", "simpo", "orpo"])
def test_trl_without_a_reference(batch: PackedBatch, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that trl.experimental is experimental
        from trl.experimental.cpo.cpo_trainer import CPOTrainer
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer
    policy = rows(batch, 0)
    sums, means = policy.sum(1), policy.sum(1) / token_counts(batch)
    trainer = SimpleNamespace(
        alpha=0.0,
        beta=BETA,
        simpo_gamma=0.4,
        label_smoothing=0.0,
        loss_type="simpo" if kind == "simpo" else "sigmoid",
        accelerator=SimpleNamespace(device="cpu"),
    )
    if kind == "orpo":
        ratio = ORPOTrainer.odds_ratio_loss(trainer, means[0::2], means[1::2])[0]
        expected = (
            -means[0::2] - ratio
        ).mean()  # it adds the likelihood itself, a token mean
        assert (
            abs(ours(batch, policy, policy, "orpo") - expected) < FP32
        )  # it goes to float32
        return
    seen = means if kind == "simpo" else sums
    expected = CPOTrainer.cpo_loss(trainer, seen[0::2], seen[1::2])[0].mean()
    gamma = {"gamma": 0.4} if kind == "simpo" else {}
    assert abs(ours(batch, policy, policy, kind, **gamma) - expected) < 1e-10


@pytest.mark.parametrize(
    ("name", "kl"), [("kto", 0.0), ("kto", 0.7), ("apo_zero_unpaired", 0.0)]
)
def test_trl_of_single_answers(kit: SimpleNamespace, name: str, kl: float) -> None:
    """TRL's loss of a batch is ours with its KL as the baseline."""
    module = pytest.importorskip("trl.trainer.kto_trainer", reason="TRL's own losses")
    examples = random_examples(7, seed=3, kind="sft")
    examples.reward[:] = [1, 0, 0, 1, 0, 1, 0]
    batch = collate(kit.packed(examples, [4, 3], "concat"), "scored")
    policy, ref = rows(batch, 0).requires_grad_(), rows(batch, 1)
    trainer = trainer_with(
        calculate_KL=name == "kto",
        _compute_kl_logps=lambda *_: torch.full((7,), kl),
        loss_type=name,
        desirable_weight=1.0,
        undesirable_weight=1.4,
    )
    inputs = {
        "label": batch.rewards > 0,
        "ref_logps": ref.sum(1),
        "ref_KL_logps": torch.zeros(7),
    }
    counts = token_counts(batch)
    expected = computed(module.KTOTrainer, trainer, policy, counts, **inputs)
    parameters = {"baseline": kl} if name == "kto" else {}
    found = ours(batch, policy, ref, name, undesirable_weight=1.4, **parameters)
    assert abs(float((found - expected).detach())) < 1e-6  # TRL's KL is float32
    (a,), (b,) = (torch.autograd.grad(x, policy) for x in (found, expected))
    assert ((a - b) * (policy != 0)).abs().max() < 1e-6
    assert b.abs().max() > 1e-4
