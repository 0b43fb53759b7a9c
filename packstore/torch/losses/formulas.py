"""Losses on preference pairs: a pure function of :class:`Pairs` each, with its formula and source.

In the formulas: u, v log-ratios of policy and reference on the chosen and the rejected response
(sums over tokens), d = u - v, n_w and n_l their numbers of tokens, dr the gap between their
ground-truth rewards, s the sigmoid, b beta. Losses that couple the pairs of a batch are omitted
(:data:`LEFT_OUT`), as they would depend on the packing. All losses are in ``docs/losses.md``.
A new loss is one function here, and one formula in ``tests/torch/losses/test_losses.py``. The
terms of a ``PreferenceLoss``, one loss or a weighted sum of several, are at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.errors import ConfigError, UnknownNameError, quote, sentence
from packstore.registry import Registry
from packstore.torch.losses.pairs import Pairs

Name = str | Callable[..., Tensor]
"""A loss of this file, or a function ``(pairs, **parameters)`` that returns the losses `[n]`."""

Names = Name | Mapping[Any, float | Mapping[str, float]]
"""One loss; or name -> weight, or name -> ``weight`` (default 1) and parameters of that term."""


@dataclass(frozen=True)
class Variant:
    """A pure function of pairs; if it compares with a reference model, and means over tokens."""

    function: Callable[..., Tensor]
    reference: bool
    averaged: bool = False
    single: bool = False  # True: of single answers, which are both sides of their rows

    @property
    def defaults(self) -> dict[str, float]:
        """Its parameters."""
        return getattr(self.function, "__kwdefaults__", None) or {}

    def __call__(self, pairs: Pairs, **parameters: Any) -> Tensor:
        """Returns the losses, `[n]`."""
        return self.function(pairs, **parameters)


def _loss(
    *, reference: bool = True, averaged: bool = False, single: bool = False
) -> Callable[[Callable[..., Tensor]], Variant]:
    """Declares the requirements of the decorated loss; see :class:`Variant`."""
    return lambda function: Variant(function, reference, averaged, single)


def _bernoulli_kl(p: Tensor, log_q: Tensor | float, log_not_q: Tensor | float) -> Tensor:
    """``KL(Bern s(p) || Bern q)`` from a logit and the two log-probs of q, finite; `[n]`."""
    return p.sigmoid() * (logsigmoid(p) - log_q) + (-p).sigmoid() * (logsigmoid(-p) - log_not_q)


def bounded_exp(x: Tensor) -> Tensor:
    """Returns ``e^min(x, 80)``: float32 would overflow above."""
    return x.clamp(max=80).exp()


def between(loss: str, name: str, value: float, low: float, high: float) -> float:
    """Returns a parameter of a loss; refuses one outside of its range."""
    if not low <= value <= high:
        raise ConfigError(f"loss {loss!r}: {name} must lie in {low}..{high}; found {value}.")
    return value


@_loss()
def dpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b d)``. Rafailov et al. 2023, arXiv 2305.18290, equation 7."""
    return -logsigmoid(beta * pairs.d)


@_loss(averaged=True)
def dpo_norm(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b (u / n_w - v / n_l))``.

    Source: Lambert et al. 2024 (Tulu 3), arXiv 2411.15124, section on preference tuning. Also
    NeMo-Aligner's `preference_average_log_probs` and TRL's `sigmoid_norm`.
    """
    return -logsigmoid(beta * pairs.per_token().d)


@_loss()
def cdpo(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """``-(1 - e) log s(b d) - e log s(-b d)``, e = `label_smoothing` in 0..0.5."""
    e = between("cdpo", "label_smoothing", label_smoothing, 0, 0.5)
    x = beta * pairs.d
    return -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)


@_loss()
def robust(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """``[-(1 - e) log s(b d) + e log s(-b d)] / (1 - 2 e)``, e = `label_smoothing` in 0..0.49.

    Source: Chowdhury et al. 2024, arXiv 2403.00409.
    """
    e = between("robust", "label_smoothing", label_smoothing, 0, 0.49)
    x = beta * pairs.d
    return (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e)


@_loss(averaged=True)
def ipo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``(u / n_w - v / n_l - 1 / (2 b))^2``; the paper's tau is `beta`.

    Source: Azar et al. 2023, arXiv 2310.12036, equation 17. Averaged as in TRL and LLaMA-Factory;
    NeMo-Aligner and OpenRLHF use the sums, see ``ipo_sum``.
    """
    return (pairs.per_token().d - 1 / (2 * beta)) ** 2


@_loss()
def ipo_sum(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``(d - 1 / (2 b))^2``, on sums as in the paper; source: as ``ipo``."""
    return (pairs.d - 1 / (2 * beta)) ** 2


@_loss()
def rpo_sq(pairs: Pairs, *, beta: float = 0.1, eta: float = 1.0) -> Tensor:
    """``(b d - eta dr)^2``: regresses the implicit margin on the reward gap.

    Source: Adler et al. 2024 (Nemotron-4 340B), arXiv 2406.11704; Sun et al. 2025, arXiv
    2502.00203. NeMo-Aligner's `gt_reward_scale` is `eta`.
    """
    return (beta * pairs.d - eta * pairs.dr) ** 2


@_loss()
def rpo_bwd_kl(pairs: Pairs, *, beta: float = 0.1, eta: float = 1.0) -> Tensor:
    """``KL(Bern s(eta dr) || Bern s(b d))``; source: as ``rpo_sq``."""
    policy = beta * pairs.d
    return _bernoulli_kl(eta * pairs.dr, logsigmoid(policy), logsigmoid(-policy))


@_loss()
def rpo_fwd_kl(pairs: Pairs, *, beta: float = 0.1, eta: float = 1.0) -> Tensor:
    """``KL(Bern s(b d) || Bern s(eta dr))``; source: as ``rpo_sq``."""
    gap = eta * pairs.dr
    return _bernoulli_kl(beta * pairs.d, logsigmoid(gap), logsigmoid(-gap))


@_loss()
def hinge(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``max(0, 1 - b d)``.

    Source: Zhao et al. 2023 (SLiC-HF), arXiv 2305.10425; on the normalised likelihood, Liu et al.
    2023 (RSO), arXiv 2309.06657.
    """
    return (1 - beta * pairs.d).clamp(min=0)


@_loss(reference=False, averaged=True)
def simpo(pairs: Pairs, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """``-log s(b (log pi_w / n_w - log pi_l / n_l) - gamma)``.

    Source: Meng et al. 2024, arXiv 2405.14734, equation 6. Without a likelihood term unless
    `sft_weight` is set; Liger's class adds one by default.
    """
    mean = pairs.per_token()
    return -logsigmoid(beta * (mean.chosen - mean.rejected) - gamma)


@_loss(reference=False, averaged=True)
def orpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-m_w - b log s(log odds_w - log odds_l)``, m the mean log-probs, odds = p / (1 - p).

    The first term is the paper's likelihood loss. p = 1 (infinite odds) is clamped to 1 - eps.
    Source: Hong et al. 2024, arXiv 2403.07691, equations 6 and 7; its lambda is `beta`.
    """
    mean = pairs.per_token()
    odds_ratio = _log_odds(mean.chosen) - _log_odds(mean.rejected)
    return -mean.chosen - beta * logsigmoid(odds_ratio)


def _log_odds(logp: Tensor) -> Tensor:
    x = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    # Each form of log(1 - e^x) is accurate on one side of -ln 2.
    log1mexp = torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-x.exp()))
    return x - log1mexp


@_loss(reference=False)
def cpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b (log pi_w - log pi_l))``; add the paper's likelihood term with `sft_weight`.

    Source: Xu et al. 2024, arXiv 2401.08417.
    """
    return -logsigmoid(beta * (pairs.chosen - pairs.rejected))


@_loss()
def apo_zero(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``s(-b u) + s(b v)``. D'Oosterlinck et al. 2024, arXiv 2408.06266."""
    return (-beta * pairs.u).sigmoid() + (beta * pairs.v).sigmoid()


@_loss()
def apo_down(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``s(b u) + s(-b d)``. D'Oosterlinck et al. 2024, arXiv 2408.06266."""
    return (beta * pairs.u).sigmoid() + (-beta * pairs.d).sigmoid()


@_loss()
def exo_pair(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 1e-3) -> Tensor:
    """``KL(Bern s(b d) || Bern(1 - e))``, e = `label_smoothing` in 1e-12..0.5.

    Source: Ji et al. 2024, arXiv 2402.00856.
    """
    e = between("exo_pair", "label_smoothing", label_smoothing, 1e-12, 0.5)
    return _bernoulli_kl(beta * pairs.d, math.log1p(-e), math.log(e))


@_loss()
def nca_pair(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b u) - log s(-b u) / 2 - log s(-b v) / 2``. Chen et al. 2024, arXiv 2402.05369."""
    u, v = beta * pairs.u, beta * pairs.v
    return -logsigmoid(u) - 0.5 * (logsigmoid(-u) + logsigmoid(-v))


@_loss()
def bco_pair(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b u) - log s(-b v)``. Jung et al. 2024, arXiv 2404.04656.

    Omits the paper's running mean of rewards, which would couple batches. TRL and Liger omit it
    too; LLaMA-Factory and ms-swift subtract it.
    """
    return -logsigmoid(beta * pairs.u) - logsigmoid(-beta * pairs.v)


@_loss()
def sppo_hard(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``(u - 1 / (2 b))^2 + (v + 1 / (2 b))^2``. Wu et al. 2024, arXiv 2405.00675."""
    target = 1 / (2 * beta)
    return (pairs.u - target) ** 2 + (pairs.v + target) ** 2


@_loss()
def discopop(pairs: Pairs, *, beta: float = 0.1, tau: float = 0.05) -> Tensor:
    """``-(1 - w) log s(x) + w e^-x`` with x = b d and w = s(x / tau), tau in 1e-3..1.

    Source: Lu et al. 2024, arXiv 2406.08414, "log ratio modulated loss".
    """
    tau = between("discopop", "tau", tau, 1e-3, 1)
    x = beta * pairs.d
    # w e^-x as one exponential: for very negative x the factors would be 0 and infinity.
    return -(-x / tau).sigmoid() * logsigmoid(x) + (logsigmoid(x / tau) - x).exp()


@_loss()
def odpo(pairs: Pairs, *, beta: float = 0.1, alpha: float = 1.0) -> Tensor:
    """``-log s(b d - alpha log dr)``; a pair without a reward gap (dr <= 0) has loss 0.

    Source: Amini et al. 2024, arXiv 2402.10571, with the logarithm as its f.
    """
    alpha = between("odpo", "alpha", alpha, 1e-6, 1e6)
    return -logsigmoid(beta * pairs.d - alpha * pairs.dr.clamp(min=0).log())


@_loss()
def fdpo_forward_kl(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b (f'(u) - f'(v)))`` with f'(u) = 1 - e^-u, exponents cut at 80.

    Source: Wang et al. 2023, arXiv 2309.16240, table 1.
    """
    return -logsigmoid(beta * (bounded_exp(-pairs.v) - bounded_exp(-pairs.u)))


@_loss()
def fdpo_js(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b (f'(u) - f'(v)))`` with f'(u) = ln 2 + log s(u).

    Source: Wang et al. 2023, arXiv 2309.16240, table 1.
    """
    return -logsigmoid(beta * (logsigmoid(pairs.u) - logsigmoid(pairs.v)))


@_loss()
def fdpo_alpha(pairs: Pairs, *, beta: float = 0.1, alpha: float = 0.5) -> Tensor:
    """``-log s(b (f'(u) - f'(v)))`` with f'(u) = (e^((a-1) u) - 1) / (a - 1), exponents cut at 80.

    Source: Wang et al. 2023, arXiv 2309.16240, table 1, whose alpha is 1 - a; a = `alpha` in
    0..0.999, as in TRL.
    """
    a = between("fdpo_alpha", "alpha", alpha, 0, 0.999) - 1
    return -logsigmoid(beta * (bounded_exp(a * pairs.u) - bounded_exp(a * pairs.v)) / a)


def _by_class(answers: Pairs, good: Tensor, bad: Tensor, weights: tuple[float, float]) -> Tensor:
    """The weighted values of good answers, which have a reward above 0, and of bad ones."""
    return torch.where(answers.chosen_reward > 0, weights[0] * good, weights[1] * bad)


@_loss(single=True)
def kto(
    answers: Pairs,
    *,
    beta: float = 0.1,
    baseline: float = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """``w_d s(-b (u - z))`` of a good answer, ``w_u s(b (u - z))`` of a bad one, z = `baseline`.

    Source: Ethayarajh et al. 2024, arXiv 2402.01306, equation 8. Its z is the KL of policy and
    reference, estimated over a batch, which would couple the answers that share it; here it is a
    number, or a tensor of one that a training loop updates.
    """
    x, weights = beta * (answers.u - baseline), (desirable_weight, undesirable_weight)
    return _by_class(answers, (-x).sigmoid(), x.sigmoid(), weights)


@_loss(single=True)
def apo_zero_unpaired(
    answers: Pairs,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """``w_d s(-b u)`` of a good answer, ``w_u s(b u)`` of a bad one; source: as ``apo_zero``."""
    x, weights = beta * answers.u, (desirable_weight, undesirable_weight)
    return _by_class(answers, (-x).sigmoid(), x.sigmoid(), weights)


@_loss(single=True)
def bco(
    answers: Pairs,
    *,
    beta: float = 0.1,
    baseline: float = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """``-w_d log s(b (u - z))`` of a good answer, ``-w_u log s(-b (u - z))`` of a bad one.

    Source: Jung et al. 2024, arXiv 2404.04656, whose reward shift delta is ``b z``, z = `baseline`:
    the paper's running mean over batches is left to the training loop, as for ``kto``.
    """
    x, weights = beta * (answers.u - baseline), (desirable_weight, undesirable_weight)
    return _by_class(answers, -logsigmoid(x), -logsigmoid(-x), weights)


@_loss(reference=False)
def sft(pairs: Pairs) -> Tensor:
    """``-log pi_w``, summed; `sft_average` of ``PreferenceLoss`` sets the divisor."""
    return -pairs.chosen


_NAMES = [name for name, value in list(globals().items()) if isinstance(value, Variant)]
LOSSES: Registry[Variant] = Registry("loss", {name: f"{__name__}:{name}" for name in _NAMES})
"""All losses, by name, in the order of this file."""

_COUPLES = "it couples the pairs of a batch, so it would depend on which pairs share a pack"
_TOKENS = "it needs more of each token than its log-prob summed over the sequence"

LEFT_OUT: dict[str, str] = {
    "aot": f"{_COUPLES} (it sorts their log-ratios)",
    "aot_unpaired": f"{_COUPLES} (it sorts their log-ratios)",
    "beta_dpo": f"{_COUPLES} (its beta follows the margins of the batch)",
    "ld_dpo": _TOKENS,
    "wpo": _TOKENS,
}
"""Omitted losses -> reason, for error messages."""

OTHER_NAMES: dict[str, str] = {
    "sigmoid": "'dpo' ('cdpo' with label smoothing)",
    "sigmoid_norm": "'dpo_norm'",
    "dpo_avg": "'dpo_norm'",
    "rdpo": "'robust'",
    "ipo_mean": "'ipo'",
    "rebel": "'rpo_sq', which is it up to a factor",
    "forward_kl": "'fdpo_forward_kl'",
    "js_divergence": "'fdpo_js'",
    "alpha_divergence": "'fdpo_alpha'",
    "mpo": "a mix: {'dpo': 0.8, 'bco_pair': 0.2} with sft_weight=1",
    "nll": "'sft', or sft_weight beside another loss",
}
"""Other libraries' names of losses -> names here, for error messages."""


@dataclass(frozen=True)
class LossTerm:
    """A loss with all of its parameters and its weight in the sum, maybe on means over tokens."""

    name: str
    variant: Variant
    parameters: Mapping[str, float]
    weight: float
    averaged: bool

    def __call__(self, pairs: Pairs) -> Tensor:
        """Returns its losses without the weight, `[n]`."""
        seen = pairs.per_token() if self.averaged and not self.variant.averaged else pairs
        return self.variant(seen, **self.parameters)

    def __str__(self) -> str:
        values = "".join(f", {name}={value}" for name, value in self.parameters.items())
        weight = "" if self.weight == 1 else f"{self.weight} "
        return f"{weight}{self.name}{values}"


def make_terms(
    names: Names, parameters: Mapping[str, float], average_logps: bool, reference: bool
) -> tuple[LossTerm, ...]:
    """Makes the terms of a loss; at least one of them must take each of the `parameters`.

    `reference`: functions that are not of this file compare with a reference model.
    """
    mix = names if isinstance(names, Mapping) else {names: 1.0}
    if not mix or not all(isinstance(name, str) or callable(name) for name in mix):
        raise ConfigError(
            f"a loss must be a name, a function, or a mix {{name: weight}}; found {quote(names)}."
        )
    variants = {
        name_of(x): _variant(x) if isinstance(x, str) else Variant(x, reference) for x in mix
    }
    if len(variants) < len(mix):
        raise ConfigError("the functions of a mix must differ in __name__, which names metrics.")
    of_any = {p: v for each in variants.values() for p, v in each.defaults.items()}
    _check_known(" + ".join(variants), parameters, of_any)
    terms = []
    for (name, variant), entry in zip(variants.items(), mix.values(), strict=True):
        special = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
        weight = special.pop("weight", 1.0)
        if not is_number(weight) or weight < 0:
            raise ConfigError(
                f"loss {name!r}: its weight in a mix must be at least 0; found {quote(weight)}."
            )
        shared = {p: v for p, v in parameters.items() if p in variant.defaults}
        terms.append(_term(name, variant, weight, {**shared, **special}, average_logps))
    if len({term.variant.single for term in terms}) > 1:
        raise ConfigError("a mix must be of losses of pairs, or of losses of single answers.")
    if len(terms) > 1 and sft in variants.values():
        raise ConfigError("'sft' has a count of its own in a mix: give its weight as sft_weight.")
    return tuple(terms)


def _variant(name: str) -> Variant:
    """Loads a loss; refuses omitted losses and other libraries' names, with a hint."""
    if name in LEFT_OUT:
        raise UnknownNameError(
            f"loss {name!r} is left out on purpose: {LEFT_OUT[name]}; "
            f"choose one of: {', '.join(LOSSES)}."
        )
    if name in OTHER_NAMES:
        raise UnknownNameError(f"unknown loss {name!r}; here it is {OTHER_NAMES[name]}.")
    return LOSSES.load(name)


def _term(
    name: str, variant: Variant, weight: float, given: Mapping[str, float], average_logps: bool
) -> LossTerm:
    parameters = check_parameters(name, variant, given)
    if average_logps and (variant.averaged or name == "sft"):
        where, rule = f"loss {name!r}", "average_logps goes with losses on sums over tokens"
        remedy = "Use sft_average for it" if name == "sft" else "Leave average_logps out"
        raise ConfigError(sentence(where, rule, "one that says itself how it averages", remedy))
    variant(Pairs(*[torch.zeros(0)] * 8), **parameters)  # variants check the ranges themselves
    if getattr(variant.function, "__module__", None) != __name__:
        draws = torch.rand(8, 3, generator=torch.Generator().manual_seed(0)).double() + 1
        draws[:4] *= -1  # log-probs
        rows = [Pairs(*draws[:, [i]]) for i in range(3)]
        check_function(f"loss {name!r}", lambda x: variant(x, **parameters), Pairs(*draws), rows)
    return LossTerm(name, variant, parameters, weight, average_logps or variant.averaged)


def check_parameters(name: str, variant: Variant, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all parameters of a loss; refuses unknown ones and what is no number."""
    _check_known(name, given, variant.defaults)
    for parameter, value in given.items():
        if not (is_number(value) or (isinstance(value, Tensor) and value.dim() == 0)):
            raise ConfigError(f"loss {name!r}: {parameter} must be a number; found {quote(value)}.")
        if parameter == "beta" and value <= 0:
            raise ConfigError(f"loss {name!r}: beta must be above 0; found {value}.")
    return {**variant.defaults, **given}


def _check_known(name: str, given: Iterable[str], known: Mapping[str, Any]) -> None:
    for parameter in given:
        if parameter not in known:
            raise UnknownNameError(
                f"loss {name!r} has no parameter {quote(parameter)}; "
                f"it takes: {', '.join(known) or 'none'}."
            )


def check_function(
    where: str, function: Callable[[Any], Tensor], whole: Any, parts: Iterable[Any]
) -> None:
    """Refuses a function whose values of parts, concatenated, are not its values of the whole."""
    values, apart = function(whole), [function(part) for part in parts]
    fit = all(isinstance(x, Tensor) and x.dim() == 1 for x in (values, *apart))
    if fit and (alone := torch.cat(apart)).shape == values.shape:
        if torch.allclose(values, alone, equal_nan=True):
            return
        rule, value = "a value must not depend on what else is in the batch", "one that does"
    else:
        rule, value = "a function must return one value for each row of its input", "another shape"
    raise ConfigError(
        sentence(where, rule, value, "Return the losses [n], neither summed nor mean")
    )


def name_of(loss: Name) -> str:
    """Returns the name of a loss or of a function."""
    return loss if isinstance(loss, str) else getattr(loss, "__name__", type(loss).__name__)


def is_number(value: Any) -> bool:
    """Returns True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
