"""Each loss against its formula in plain float64, and what holds for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mpmath import mp  # torch brings it, by way of sympy

from packstore.errors import ConfigError
from packstore.torch import PreferenceLoss
from packstore.torch.losses import LOSSES, Pairs

mp.dps = 40


def s(x: Any) -> Any:
    return 1 / (1 + mp.exp(-x))


def ls(x: Any) -> Any:
    return mp.log(s(x))


def kl(p: Any, q: Any) -> Any:
    return p * mp.log(p / q) + (1 - p) * mp.log((1 - p) / (1 - q))


def log_odds(x: Any) -> Any:
    return x - mp.log(1 - mp.exp(x))


def discopop(x: Any, tau: float) -> Any:
    w = s(x / tau)
    return -(1 - w) * ls(x) + w * mp.exp(-x)


B = 0.3
# Of one pair: w, l log-probs; n, m tokens; dr reward gap; u, v log-ratios; d = u - v.
FORMULAS: dict[str, tuple[dict[str, float], Callable[[Any], Any]]] = {
    "dpo": ({}, lambda p: -ls(B * p.d)),
    "dpo_norm": ({}, lambda p: -ls(B * (p.u / p.n - p.v / p.m))),
    "cdpo": (
        {"label_smoothing": 0.2},
        lambda p: -0.8 * ls(B * p.d) - 0.2 * ls(-B * p.d),
    ),
    "robust": (
        {"label_smoothing": 0.2},
        lambda p: (-0.8 * ls(B * p.d) + 0.2 * ls(-B * p.d)) / 0.6,
    ),
    "ipo": ({}, lambda p: (p.u / p.n - p.v / p.m - 1 / (2 * B)) ** 2),
    "ipo_sum": ({}, lambda p: (p.d - 1 / (2 * B)) ** 2),
    "rpo_sq": ({"eta": 1.7}, lambda p: (B * p.d - 1.7 * p.dr) ** 2),
    "rpo_bwd_kl": ({"eta": 1.7}, lambda p: kl(s(1.7 * p.dr), s(B * p.d))),
    "rpo_fwd_kl": ({"eta": 1.7}, lambda p: kl(s(B * p.d), s(1.7 * p.dr))),
    "hinge": ({}, lambda p: max(0.0, 1 - B * p.d)),
    "simpo": ({"gamma": 0.4}, lambda p: -ls(B * (p.w / p.n - p.l / p.m) - 0.4)),
    "orpo": (
        {},
        lambda p: -p.w / p.n - B * ls(log_odds(p.w / p.n) - log_odds(p.l / p.m)),
    ),
    "cpo": ({}, lambda p: -ls(B * (p.w - p.l))),
    "apo_zero": ({}, lambda p: s(-B * p.u) + s(B * p.v)),
    "apo_down": ({}, lambda p: s(B * p.u) + s(-B * p.d)),
    "exo_pair": ({"label_smoothing": 0.01}, lambda p: kl(s(B * p.d), 0.99)),
    "nca_pair": ({}, lambda p: -ls(B * p.u) - ls(-B * p.u) / 2 - ls(-B * p.v) / 2),
    "bco_pair": ({}, lambda p: -ls(B * p.u) - ls(-B * p.v)),
    "sppo_hard": ({}, lambda p: (p.u - 1 / (2 * B)) ** 2 + (p.v + 1 / (2 * B)) ** 2),
    "discopop": ({"tau": 0.5}, lambda p: discopop(B * p.d, 0.5)),
    "odpo": (
        {"alpha": 0.7},
        lambda p: -ls(B * p.d - 0.7 * mp.log(p.dr)) if p.dr > 0 else 0.0 * p.d,
    ),
    "fdpo_forward_kl": ({}, lambda p: -ls(B * (mp.exp(-p.v) - mp.exp(-p.u)))),
    "fdpo_js": ({}, lambda p: -ls(B * (ls(p.u) - ls(p.v)))),
    "fdpo_alpha": (
        {"alpha": 0.3},
        lambda p: -ls(B * (mp.exp(-0.7 * p.u) - mp.exp(-0.7 * p.v)) / -0.7),
    ),
    "kto": (
        {"baseline": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.7},
        lambda p: 1.3 * s(-B * (p.u - 0.2)) if p.good else 0.7 * s(B * (p.u - 0.2)),
    ),
    "apo_zero_unpaired": (
        {"desirable_weight": 1.3, "undesirable_weight": 0.7},
        lambda p: 1.3 * s(-B * p.u) if p.good else 0.7 * s(B * p.u),
    ),
    "bco": (
        {"baseline": 0.2, "desirable_weight": 1.3, "undesirable_weight": 0.7},
        lambda p: -1.3 * ls(B * (p.u - 0.2)) if p.good else -0.7 * ls(-B * (p.u - 0.2)),
    ),
    "bradley_terry": (
        {"margin": 0.7, "center": 0.2},
        lambda p: -ls(p.w - p.l - 0.7 * p.dr) + 0.2 * (p.w + p.l) ** 2,
    ),
    "plackett_luce": ({}, lambda p: mp.log(mp.exp(p.w) + mp.exp(p.l)) - p.w),
    "sft": ({}, lambda p: -p.w),
}


def random_pairs(n: int = 12, dtype: torch.dtype = torch.float64) -> Pairs:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 9, (2, n), generator=generator).to(dtype)
    ref = -(0.5 + torch.rand(2, n, generator=generator).to(dtype)) * tokens
    policy = ref + 0.4 * torch.randn(2, n, generator=generator).to(dtype).clamp(-1, 1)
    reward = torch.randn(2, n, generator=generator).to(dtype)
    return Pairs(*policy, *ref, *tokens, *reward)


WITHOUT_BETA = ("sft", "bradley_terry", "plackett_luce")


def parameters(name: str) -> dict[str, float]:
    special, _ = FORMULAS[name]
    return special if name in WITHOUT_BETA else {"beta": B, **special}


def test_every_loss_has_a_formula() -> None:
    assert set(FORMULAS) == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_formula_and_its_derivatives(name: str) -> None:
    pairs = random_pairs()
    leaves = [x.requires_grad_() for x in (pairs.chosen, pairs.rejected)]
    found = LOSSES.load(name)(pairs, **parameters(name))
    slopes = torch.autograd.grad(found.sum(), leaves, materialize_grads=True)
    for i in range(len(found)):
        rw, rl = float(pairs.ref_chosen[i]), float(pairs.ref_rejected[i])
        tokens = {"n": int(pairs.chosen_tokens[i]), "m": int(pairs.rejected_tokens[i])}
        rest = {
            **tokens,
            "dr": float(pairs.dr[i]),
            "good": bool(pairs.chosen_reward[i] > 0),
        }

        def formula(
            w: Any,
            l: Any,  # noqa: E741
            rw: Any = rw,
            rl: Any = rl,
            rest: Any = rest,
        ) -> Any:
            u, v = w - rw, l - rl
            return FORMULAS[name][1](
                SimpleNamespace(w=w, l=l, u=u, v=v, d=u - v, **rest)
            )

        at = tuple(mp.mpf(float(x[i].detach())) for x in leaves)
        assert abs(float(found[i].detach()) - formula(*at)) < 1e-10
        for side, slope in enumerate(slopes):
            exact = mp.diff(formula, at, tuple(int(side == j) for j in (0, 1)))
            assert abs(float(slope[i]) - exact) < 1e-10


@pytest.mark.parametrize("name", LOSSES)
def test_finite_at_any_margin(name: str) -> None:
    size = torch.tensor([0.0, 1.0, 100.0, 1e4])
    zero = torch.zeros(4)
    chosen = torch.cat([-size, zero, zero, -size])
    rejected = torch.cat([zero, -size, -size, zero])
    ref_chosen = torch.cat([zero, zero, -size, -size])
    ref_rejected = torch.cat([-size, -size, zero, zero])
    values = [chosen.requires_grad_(), rejected.requires_grad_()]
    count = torch.full_like(ref_chosen, 3)
    reward = torch.tensor([1.0, 0.0, 1.0, 0.0]).repeat_interleave(4)
    pairs = Pairs(
        *values, ref_chosen, ref_rejected, count, count, reward, reward.flip(0)
    )
    beta = {} if name in WITHOUT_BETA else {"beta": 1.0}
    losses = LOSSES.load(name)(pairs, **{**parameters(name), **beta})
    losses.sum().backward()
    assert losses.isfinite().all()
    for value in values:
        if value.grad is not None:
            assert value.grad.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_declared_quantities_are_those_that_the_formula_reads(name: str) -> None:
    """The log-probs of a reference, and rewards: of some scale, and of scale 0."""
    (term,) = PreferenceLoss(name, **parameters(name)).terms
    assert depends_on(term, "ref_chosen") == term.variant.reference
    assert depends_on(term, "chosen_reward") == term.reads_rewards
    scale = term.variant.reward_scale
    if scale is not None:
        (unscaled,) = PreferenceLoss(name, **{**parameters(name), scale: 0.0}).terms
        assert not depends_on(unscaled, "chosen_reward")
        assert not unscaled.reads_rewards


def depends_on(loss: Callable[[Pairs], Any], quantity: str) -> bool:
    pairs = random_pairs()
    changed = replace(pairs, **{quantity: getattr(pairs, quantity) + 1})
    return not torch.equal(loss(pairs), loss(changed))


def test_any_loss_on_sums_can_look_at_means() -> None:
    pairs = random_pairs()
    sums = [n for n in LOSSES if not LOSSES.load(n).averaged and n not in WITHOUT_BETA]
    for name in sums:
        (member,) = PreferenceLoss(name, average_logps=True, **parameters(name)).terms
        found = member(pairs)
        assert torch.equal(
            found, LOSSES.load(name)(pairs.per_token(), **parameters(name))
        )
        assert not torch.equal(found, LOSSES.load(name)(pairs, **parameters(name)))


def test_parameters_of_a_mix() -> None:
    mix = {"dpo": 0.7, "cdpo": {"weight": 0.2, "beta": 0.5}, "hinge": {"beta": 0.9}}
    terms = PreferenceLoss(mix, beta=0.3, label_smoothing=0.05).terms
    assert [(m.name, m.weight, m.parameters) for m in terms] == [
        ("dpo", 0.7, {"beta": 0.3}),
        ("cdpo", 0.2, {"beta": 0.5, "label_smoothing": 0.05}),
        ("hinge", 1.0, {"beta": 0.9}),
    ]
    assert repr(PreferenceLoss(mix)).startswith(
        "PreferenceLoss(0.7 dpo, beta=0.1 + 0.2 cdpo,"
    )


@pytest.mark.parametrize(
    ("name", "given", "mentioned"),
    [
        ("dop", {}, "'dpo'"),
        ("dpo", {"gamma": 1}, "gamma"),
        ("sft", {"beta": 1}, "beta"),
        ("dpo", {"beta": 0}, "beta"),
        ("dpo", {"beta": "x"}, "beta"),
        ("dpo", {"beta": math.nan}, "beta"),
        ("cdpo", {"label_smoothing": 0.6}, "label_smoothing"),
        ("robust", {"label_smoothing": 0.5}, "label_smoothing"),
        ("exo_pair", {"label_smoothing": 0}, "label_smoothing"),
        ("discopop", {"tau": 2}, "tau"),
        ("bradley_terry", {"center": -1}, "center"),
        ("dpo", {"sft_weight": -1}, "sft_weight"),
        ("dpo", {"sft_weight": "x"}, "sft_weight"),
        ("dpo", {"pairs": "some"}, "pairs"),
        ("dpo", {"reduction": "mean"}, "reduction"),
        ("dpo", {"average_logps": "yes"}, "average_logps"),
        ("dpo", {"sft_average": "pack"}, "sft_average"),
        ("sft", {"sft_weight": 1}, "sft_weight"),
        ("sft", {"average_logps": True}, "sft_average"),
        ("dpo_norm", {"average_logps": True}, "average_logps"),
        ("bradley_terry", {"average_logps": True}, "average_logps"),
        ("bradley_terry", {"sft_weight": 1}, "sft_weight"),
        ("plackett_luce", {"pairs": "all"}, "pairs"),
        ("kto", {"sft_weight": 0.1}, "sft_weight"),
        ("bco", {"reduction": "pack_mean"}, "reduction"),
        ("dpo", {"sft_weight": 1, "reduction": "pack_mean"}, "sft_average"),
        ("dpo", {"weight_field": "w", "reduction": "pack_mean"}, "weight_field"),
    ],
)
def test_refused_settings_are_named(
    name: Any, given: dict[str, Any], mentioned: str
) -> None:
    with pytest.raises(ConfigError, match=mentioned):
        PreferenceLoss(name, **given)


@pytest.mark.parametrize(
    ("mix", "given", "mentioned"),
    [
        ({"kto": 1, "dpo": 1}, {}, "mix"),
        ({"dpo": 1, "bradley_terry": 1}, {}, "mix"),
        ({"dpo": 1, "sft": 1}, {}, "sft_weight"),
        ({"dpo": 1, "simpo": 1}, {"average_logps": True}, "'simpo': average_logps"),
        ({"dpo": 1, "dop": 1}, {}, "'dop'"),
        ({"dpo": 1, "hinge": 1}, {"gamma": 1}, "gamma"),
        ({"dpo": {"tau": 1}}, {}, "tau"),
        ({"dpo": -1}, {}, "'dpo': its weight"),
        ({"dpo": {"weight": "x"}}, {}, "'dpo': its weight"),
        ({"dpo": True}, {}, "'dpo': its weight"),
        ({"dpo": 0.0}, {}, "weights"),
        ({}, {}, "mix"),
    ],
)
def test_refused_mixes_name_their_member(
    mix: Any, given: dict[str, Any], mentioned: str
) -> None:
    with pytest.raises(ConfigError, match=mentioned):
        PreferenceLoss(mix, **given)
