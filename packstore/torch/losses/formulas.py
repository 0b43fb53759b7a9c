"""Losses on preference pairs, each a pure function of :class:`Pairs` with its formula
and source.

In the formulas, w is the chosen and l the rejected response: u = log pi_w - log ref_w
and v = log pi_l - log ref_l are their log-ratios of policy and reference (sums over
tokens, in nats), d = u - v, n_w and n_l their numbers of tokens, dr the gap between
their ground-truth rewards; s is the sigmoid, b the parameter `beta`. Losses on single
answers take the answer as w.

Losses that couple the pairs of a batch are omitted (``UNSUPPORTED_LOSSES`` of
``terms.py``), as they would depend on the packing. All losses are in
``docs/losses.md``. A new loss is one function here, and one formula in
``tests/torch/losses/test_losses.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from packstore.errors import ConfigError
from packstore.registry import Registry
from packstore.torch.losses.pairs import Answers, Lists, PairRows, Pairs, Scores


@dataclass(frozen=True)
class Variant:
    """A loss as a pure function of pairs, and the quantities that it reads.

    Attributes:
        function: ``(pairs, **parameters)`` -> losses `[n]`.
        reference: True if it compares with a reference model.
        averaged: True if its formula divides by n_w and n_l.
        rows: the kind of row that it compares: pairs, single answers, ...
        reads_rewards: True if it depends on the ground-truth rewards of its pairs.
        reward_scale: name of the parameter that rewards are multiplied by, or None; if
            the parameter is 0, the loss does not depend on rewards after all.
    """

    function: Callable[..., Tensor]
    reference: bool
    averaged: bool = False
    rows: type[PairRows] = PairRows
    reads_rewards: bool = False
    reward_scale: str | None = None

    @property
    def defaults(self) -> dict[str, float]:
        """Parameters and their default values."""
        return getattr(self.function, "__kwdefaults__", None) or {}

    def __call__(self, pairs: Pairs, **parameters: Any) -> Tensor:
        """Return the losses, `[n]`."""
        return self.function(pairs, **parameters)

    def __reduce__(self) -> str | tuple[Any, ...]:
        """Pickle a loss of this module by its name.

        Its function has no importable name: the decorator put this object there.
        """
        name = getattr(self.function, "__name__", "")
        if globals().get(name) is self:
            return name
        arguments = (
            self.function,
            self.reference,
            self.averaged,
            self.rows,
            self.reads_rewards,
            self.reward_scale,
        )
        return Variant, arguments


@dataclass(frozen=True)
class LossTerm:
    """A loss with all of its parameters, and its weight in a sum of losses.

    Attributes:
        name: name of the loss, or of the user's function.
        variant: the loss.
        parameters: all parameters, defaults included.
        weight: factor on its losses in the sum.
        averaged: True if it compares means over tokens, by its formula or because of
            the setting `average_logps`.
    """

    name: str
    variant: Variant
    parameters: Mapping[str, float]
    weight: float
    averaged: bool

    def __call__(self, pairs: Pairs) -> Tensor:
        """Return the losses without the weight, `[n]`."""
        if self.averaged and not self.variant.averaged:
            pairs = pairs.per_token()
        return self.variant.function(pairs, **self.parameters)

    @property
    def reads_rewards(self) -> bool:
        """True if the loss, with these parameters, depends on ground-truth rewards."""
        scale = self.variant.reward_scale
        if scale is not None and self.parameters[scale] == 0:
            return False
        return self.variant.reads_rewards

    def __str__(self) -> str:
        values = "".join(f", {name}={value}" for name, value in self.parameters.items())
        weight = "" if self.weight == 1 else f"{self.weight} "
        return f"{weight}{self.name}{values}"


def _loss(
    *,
    reference: bool = True,
    averaged: bool = False,
    rows: type[PairRows] = PairRows,
    reads_rewards: bool = False,
    reward_scale: str | None = None,
) -> Callable[[Callable[..., Tensor]], Variant]:
    """Make a loss of the decorated function; see `Variant` for the arguments."""

    def declare(function: Callable[..., Tensor]) -> Variant:
        return Variant(
            function=function,
            reference=reference,
            averaged=averaged,
            rows=rows,
            reads_rewards=reads_rewards,
            reward_scale=reward_scale,
        )

    return declare


def _bernoulli_kl(
    logit_p: Tensor, log_q: Tensor | float, log_not_q: Tensor | float
) -> Tensor:
    """Return ``KL(Bern p || Bern q)``, `[n]`, from the logit of p, log q, log(1 - q).

    Not from q itself, as log(1 - q) would be -inf where q rounds to 1.
    """
    if_true = logit_p.sigmoid() * (logsigmoid(logit_p) - log_q)
    if_false = (-logit_p).sigmoid() * (logsigmoid(-logit_p) - log_not_q)
    return if_true + if_false


def bounded_exp(x: Tensor) -> Tensor:
    """Return ``e^min(x, 80)``: float32 would overflow above."""
    return x.clamp(max=80).exp()


def log1mexp(x: Tensor) -> Tensor:
    """Return ``log(1 - e^x)`` for x < 0.

    Source: Mächler 2012, "Accurately computing log(1 - exp(-|a|))", a vignette of the R
    package Rmpfr.
    """
    # Each form is accurate on one side of -ln 2.
    return torch.where(
        x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-x.exp())
    )


def check_range(loss: str, name: str, value: float, low: float, high: float) -> float:
    """Return a parameter of a loss; raise ConfigError if it is out of range."""
    if not low <= value <= high:
        raise ConfigError(
            f"loss {loss!r}: {name} must lie in {low}..{high}; found {value}."
        )
    return value


@_loss()
def dpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b d)``. Rafailov et al. 2023, arXiv 2305.18290, equation 7."""
    return -logsigmoid(beta * pairs.d)


@_loss(averaged=True)
def dpo_norm(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b (u / n_w - v / n_l))``.

    Source: Lambert et al. 2024 (Tulu 3), arXiv 2411.15124, section on preference
    tuning. Also NeMo-Aligner's `preference_average_log_probs` and TRL's `sigmoid_norm`.
    """
    return -logsigmoid(beta * pairs.per_token().d)


@_loss()
def cdpo(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """``-(1 - e) log s(b d) - e log s(-b d)``, e = `label_smoothing` in 0..0.5.

    Source: Mitchell 2023, "A note on DPO with noisy preferences".
    """
    e = check_range("cdpo", "label_smoothing", label_smoothing, 0, 0.5)
    x = beta * pairs.d
    return -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)


@_loss()
def robust(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """``[-(1 - e) log s(b d) + e log s(-b d)] / (1 - 2 e)``, e = `label_smoothing` in
    0..0.49.

    Source: Chowdhury et al. 2024, arXiv 2403.00409.
    """
    e = check_range("robust", "label_smoothing", label_smoothing, 0, 0.49)
    x = beta * pairs.d
    return (-(1 - e) * logsigmoid(x) + e * logsigmoid(-x)) / (1 - 2 * e)


@_loss(averaged=True)
def ipo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``(u / n_w - v / n_l - 1 / (2 b))^2``; the paper's tau is `beta`.

    Source: Azar et al. 2023, arXiv 2310.12036, equation 17. Averaged as in TRL and
    LLaMA-Factory; NeMo-Aligner and OpenRLHF use the sums, see ``ipo_sum``.
    """
    return (pairs.per_token().d - 1 / (2 * beta)) ** 2


@_loss()
def ipo_sum(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``(d - 1 / (2 b))^2``, on sums as in the paper; source: as ``ipo``."""
    return (pairs.d - 1 / (2 * beta)) ** 2


@_loss(reads_rewards=True, reward_scale="eta")
def rpo_sq(pairs: Pairs, *, beta: float = 0.1, eta: float = 1.0) -> Tensor:
    """``(b d - eta dr)^2``: regresses the implicit margin on the reward gap.

    Source: Adler et al. 2024 (Nemotron-4 340B), arXiv 2406.11704; Sun et al. 2025,
    arXiv 2502.00203. NeMo-Aligner's `gt_reward_scale` is `eta`.
    """
    return (beta * pairs.d - eta * pairs.dr) ** 2


@_loss(reads_rewards=True, reward_scale="eta")
def rpo_bwd_kl(pairs: Pairs, *, beta: float = 0.1, eta: float = 1.0) -> Tensor:
    """``KL(Bern s(eta dr) || Bern s(b d))``; source: as ``rpo_sq``."""
    policy = beta * pairs.d
    return _bernoulli_kl(eta * pairs.dr, logsigmoid(policy), logsigmoid(-policy))


@_loss(reads_rewards=True, reward_scale="eta")
def rpo_fwd_kl(pairs: Pairs, *, beta: float = 0.1, eta: float = 1.0) -> Tensor:
    """``KL(Bern s(b d) || Bern s(eta dr))``; source: as ``rpo_sq``."""
    gap = eta * pairs.dr
    return _bernoulli_kl(beta * pairs.d, logsigmoid(gap), logsigmoid(-gap))


@_loss()
def hinge(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``max(0, 1 - b d)``.

    Source: Zhao et al. 2023 (SLiC-HF), arXiv 2305.10425; on the normalised likelihood,
    Liu et al. 2023 (RSO), arXiv 2309.06657.
    """
    return (1 - beta * pairs.d).clamp(min=0)


@_loss(reference=False, averaged=True)
def simpo(pairs: Pairs, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """``-log s(b (log pi_w / n_w - log pi_l / n_l) - gamma)``.

    Source: Meng et al. 2024, arXiv 2405.14734, equation 6. Without a likelihood term
    unless `sft_weight` is set; Liger's class adds one by default.
    """
    mean = pairs.per_token()
    return -logsigmoid(beta * (mean.chosen - mean.rejected) - gamma)


@_loss(reference=False, averaged=True)
def orpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-m_w - b log s(log odds_w - log odds_l)``, m the mean log-probs, odds = p / (1
    - p).

    The first term is the paper's likelihood loss. p = 1 (infinite odds) is clamped to 1
    - eps. Source: Hong et al. 2024, arXiv 2403.07691, equations 6 and 7; its lambda is
    `beta`.
    """
    mean = pairs.per_token()
    odds_ratio = _log_odds(mean.chosen) - _log_odds(mean.rejected)
    return -mean.chosen - beta * logsigmoid(odds_ratio)


def _log_odds(logp: Tensor) -> Tensor:
    """Return ``log(p / (1 - p))`` of ``log p``."""
    x = logp.clamp(max=-torch.finfo(logp.dtype).eps)
    return x - log1mexp(x)


@_loss(reference=False)
def cpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b (log pi_w - log pi_l))``; add the paper's likelihood term with
    `sft_weight`.

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
def exo_pair(
    pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 1e-3
) -> Tensor:
    """``KL(Bern s(b d) || Bern(1 - e))``, e = `label_smoothing` in 1e-12..0.5.

    Source: Ji et al. 2024, arXiv 2402.00856.
    """
    e = check_range("exo_pair", "label_smoothing", label_smoothing, 1e-12, 0.5)
    return _bernoulli_kl(beta * pairs.d, math.log1p(-e), math.log(e))


@_loss()
def nca_pair(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b u) - log s(-b u) / 2 - log s(-b v) / 2``.

    Source: Chen et al. 2024, arXiv 2402.05369.
    """
    u = beta * pairs.u
    v = beta * pairs.v
    return -logsigmoid(u) - 0.5 * (logsigmoid(-u) + logsigmoid(-v))


@_loss()
def bco_pair(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b u) - log s(-b v)``. Jung et al. 2024, arXiv 2404.04656.

    Omits the paper's running mean of rewards, which would couple batches. TRL and Liger
    omit it too; LLaMA-Factory and ms-swift subtract it.
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
    tau = check_range("discopop", "tau", tau, 1e-3, 1)
    x = beta * pairs.d
    # w e^-x as one exponential: for very negative x the factors would be 0 and
    # infinity.
    return -(-x / tau).sigmoid() * logsigmoid(x) + (logsigmoid(x / tau) - x).exp()


@_loss(reads_rewards=True)
def odpo(pairs: Pairs, *, beta: float = 0.1, alpha: float = 1.0) -> Tensor:
    """``-log s(b d - alpha log dr)``; a pair without a reward gap (dr <= 0) has loss 0.

    Source: Amini et al. 2024, arXiv 2402.10571, with the logarithm as its f.
    """
    alpha = check_range("odpo", "alpha", alpha, 1e-6, 1e6)
    return -logsigmoid(beta * pairs.d - alpha * pairs.dr.clamp(min=0).log())


@_loss()
def fdpo_forward_kl(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b (f'(u) - f'(v)))`` with f'(u) = 1 - e^-u, exponents cut at 80.

    Source: Wang et al. 2023, arXiv 2309.16240, table 1.
    """
    return -logsigmoid(beta * (bounded_exp(-pairs.v) - bounded_exp(-pairs.u)))


@_loss()
def fdpo_js(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """``-log s(b (f'(u) - f'(v)))``, f'(u) = ln 2 + log s(u).

    Source: as ``fdpo_forward_kl``.
    """
    return -logsigmoid(beta * (logsigmoid(pairs.u) - logsigmoid(pairs.v)))


@_loss()
def fdpo_alpha(pairs: Pairs, *, beta: float = 0.1, alpha: float = 0.5) -> Tensor:
    """``-log s(b (f'(u) - f'(v)))`` with f'(u) = (e^((a-1) u) - 1) / (a - 1), exponents
    cut at 80.

    Source: Wang et al. 2023, arXiv 2309.16240, table 1; a = `alpha` in
    0..0.999, as in TRL; the paper's alpha is 1 - a.
    """
    a = check_range("fdpo_alpha", "alpha", alpha, 0, 0.999) - 1
    return -logsigmoid(beta * (bounded_exp(a * pairs.u) - bounded_exp(a * pairs.v)) / a)


def _by_class(
    answers: Pairs,
    *,
    good: Tensor,
    bad: Tensor,
    desirable_weight: float,
    undesirable_weight: float,
) -> Tensor:
    """Return the weighted loss of each answer, `[n]`; it is good if its reward is > 0.

    Args:
        answers: the answers.
        good, bad: `[n]`, the loss of each answer if it is good, and if it is bad.
        desirable_weight, undesirable_weight: weight of good and of bad answers.
    """
    is_good = answers.chosen_reward > 0
    return torch.where(is_good, desirable_weight * good, undesirable_weight * bad)


@_loss(rows=Answers, reads_rewards=True)
def kto(
    answers: Pairs,
    *,
    beta: float = 0.1,
    baseline: float = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """``w_d s(-b (u - z))`` of a good answer, ``w_u s(b (u - z))`` of a bad one.

    z = `baseline` (nats), w_d = `desirable_weight`, w_u = `undesirable_weight`.

    Source: Ethayarajh et al. 2024, arXiv 2402.01306, equation 8. Its z is the KL of
    policy and reference, estimated over a batch, which would couple the answers that
    share it; here it is a number, or a scalar tensor that a training loop updates.
    """
    x = beta * (answers.u - baseline)
    return _by_class(
        answers,
        good=(-x).sigmoid(),
        bad=x.sigmoid(),
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )


@_loss(rows=Answers, reads_rewards=True)
def apo_zero_unpaired(
    answers: Pairs,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """``w_d s(-b u)`` of a good answer, ``w_u s(b u)`` of a bad one; weights as in
    ``kto``.

    Source: as ``apo_zero``.
    """
    x = beta * answers.u
    return _by_class(
        answers,
        good=(-x).sigmoid(),
        bad=x.sigmoid(),
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )


@_loss(rows=Answers, reads_rewards=True)
def bco(
    answers: Pairs,
    *,
    beta: float = 0.1,
    baseline: float = 0.0,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Tensor:
    """``-w_d log s(b (u - z))`` of a good answer, ``-w_u log s(-b (u - z))`` of a bad
    one.

    Weights as in ``kto``. Source: Jung et al. 2024, arXiv 2404.04656; the paper's
    reward shift delta is ``b z``, z = `baseline`. Its running mean over batches is left
    to the training loop, as for ``kto``.
    """
    x = beta * (answers.u - baseline)
    return _by_class(
        answers,
        good=-logsigmoid(x),
        bad=-logsigmoid(-x),
        desirable_weight=desirable_weight,
        undesirable_weight=undesirable_weight,
    )


@_loss(reference=False, rows=Scores, reads_rewards=True, reward_scale="margin")
def bradley_terry(pairs: Pairs, *, margin: float = 0.0, center: float = 0.0) -> Tensor:
    """``-log s(r_w - r_l - m dr) + c (r_w + r_l)^2``, m = `margin`, c = `center`.

    r_w and r_l are the scores of a reward model, which `pairs` holds as log-probs.
    Source: Bradley & Terry 1952; margins: Touvron et al. 2023 (Llama 2), arXiv
    2307.09288, equation 2; centering: Eisenstein et al. 2023, arXiv 2312.09244. TRL's
    `center_rewards_coefficient` is `center`.
    """
    c = check_range("bradley_terry", "center", center, 0, 1e6)
    gap = pairs.chosen - pairs.rejected - margin * pairs.dr
    return -logsigmoid(gap) + c * (pairs.chosen + pairs.rejected) ** 2


@_loss(reference=False, rows=Lists)
def plackett_luce(pairs: Pairs) -> Tensor:
    """``-log(e^r_w / (e^r_w + sum_l e^r_l))``, l all responses of lower reward than w.

    ``pairs.rejected`` is ``log sum_l e^r_l``, see `Lists`. Summed over the responses w
    of an example, it is the negative log-likelihood of their ranking; with two
    responses it is ``bradley_terry``. Source: Plackett 1975; Xia et al. 2008 (ListMLE),
    ICML.
    """
    return -logsigmoid(pairs.chosen - pairs.rejected)


@_loss(reference=False)
def sft(pairs: Pairs) -> Tensor:
    """``-log pi_w``, summed; `sft_average` of ``PreferenceLoss`` sets the divisor."""
    return -pairs.chosen


_LOSS_NAMES = [
    name for name, value in list(globals().items()) if isinstance(value, Variant)
]
LOSSES: Registry[Variant] = Registry(
    "loss", {name: f"{__name__}:{name}" for name in _LOSS_NAMES}
)
"""All losses, by name, in the order of this file."""
