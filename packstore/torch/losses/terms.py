"""The terms of a ``PreferenceLoss``: one loss, or a weighted sum of several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from packstore.errors import ConfigError, UnknownNameError, quote, sentence
from packstore.registry import meant
from packstore.torch.losses import formulas
from packstore.torch.losses.formulas import LOSSES, Variant, sft
from packstore.torch.losses.pairs import Pairs

Name = str | Callable[..., Tensor]
"""A loss of this folder, or a function ``(pairs, **parameters)`` that returns the
losses `[n]`.
"""

Names = Name | Mapping[Any, float | Mapping[str, float]]
"""One loss; or name -> weight, or name -> ``weight`` (default 1) and parameters of that
term.
"""

_COUPLES = (
    "it couples the pairs of a batch, so it would depend on which pairs share a pack"
)
_TOKENS = "it needs more of each token than its log-prob summed over the sequence"

UNSUPPORTED_LOSSES: dict[str, str] = {
    "aot": f"{_COUPLES} (it sorts their log-ratios)",
    "aot_unpaired": f"{_COUPLES} (it sorts their log-ratios)",
    "beta_dpo": f"{_COUPLES} (its beta follows the margins of the batch)",
    "ld_dpo": _TOKENS,
    "wpo": _TOKENS,
}
"""Omitted losses -> reason, for error messages."""

LOSS_ALIASES: dict[str, str] = {
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
    """A loss with all of its parameters and its weight in the sum, maybe on means over
    tokens.
    """

    name: str
    variant: Variant
    parameters: Mapping[str, float]
    weight: float
    averaged: bool

    def __call__(self, pairs: Pairs) -> Tensor:
        """Returns its losses without the weight, `[n]`."""
        seen = (
            pairs.per_token() if self.averaged and not self.variant.averaged else pairs
        )
        return self.variant(seen, **self.parameters)

    def reads(self, *names: str) -> bool:
        """Returns True if a value of its pairs depends on these quantities."""
        pairs = Pairs(
            *torch.rand(8, 3, generator=torch.Generator().manual_seed(0)).double() + 1
        )
        moved = {name: getattr(pairs, name) + i for i, name in enumerate(names, 1)}
        return not torch.allclose(self(pairs), self(replace(pairs, **moved)))

    def __str__(self) -> str:
        values = "".join(f", {name}={value}" for name, value in self.parameters.items())
        weight = "" if self.weight == 1 else f"{self.weight} "
        return f"{weight}{self.name}{values}"


def make_terms(
    names: Names,
    parameters: Mapping[str, float],
    average_logps: bool,
    reference: bool,
    settings: Iterable[str],
) -> tuple[LossTerm, ...]:
    """Makes the terms of a loss; at least one of them must take each of the
    `parameters`.

    `reference`: functions of one's own compare with a reference model. `settings`: what
    else the caller takes, and an unknown parameter may mean.
    """
    one = isinstance(names, str) or callable(names)
    mix: Any = {names: 1.0} if one else names if isinstance(names, Mapping) else {}
    if not mix or not all(isinstance(name, str) or callable(name) for name in mix):
        raise ConfigError(
            f"a loss must be a name, a function, or a mix {{name: weight}}; found "
            f"{quote(names)}."
        )
    if not reference and not any(map(callable, mix)):
        rule = "it is for a function of your own, which compares with none"
        remedy = "simpo, orpo and cpo need no reference"
        raise ConfigError(
            sentence("setting reference", rule, f"False for {quote(names)}", remedy)
        )
    variants = {
        name_of(x): _variant(x) if isinstance(x, str) else _own(x, reference)
        for x in mix
    }
    if len(variants) < len(mix):
        raise ConfigError(
            "the functions of a mix must differ in __name__, which names metrics."
        )
    of_any = {p: v for each in variants.values() for p, v in each.defaults.items()}
    _check_known(" + ".join(variants), parameters, of_any, settings)
    terms = []
    for (name, variant), entry in zip(variants.items(), mix.values(), strict=True):
        special = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
        weight = special.pop("weight", 1.0)
        check_weight(f"loss {name!r}: its weight in a mix", weight)
        shared = {p: v for p, v in parameters.items() if p in variant.defaults}
        terms.append(_term(name, variant, weight, {**shared, **special}, average_logps))
    if len({term.variant.rows for term in terms}) > 1:
        raise ConfigError(
            "a mix must be of losses of pairs, of single answers, or of a reward "
            "model's scores."
        )
    if len(terms) > 1 and sft in variants.values():
        raise ConfigError(
            "'sft' has a count of its own in a mix: give its weight as sft_weight."
        )
    return tuple(terms)


def _own(function: Any, reference: bool) -> Variant:
    """Takes a function of one's own; refuses one that takes something else than
    pairs.
    """
    try:
        signature(function).bind(None)
    except TypeError as error:
        rule = "it must take the pairs, and parameters with defaults"
        where, remedy = f"loss {name_of(function)!r}", "Name parameters behind a *"
        raise ConfigError(sentence(where, rule, str(error), remedy)) from error
    except ValueError:  # of some builtins nothing is known
        pass
    return Variant(function, reference)


def _variant(name: str) -> Variant:
    """Loads a loss; refuses omitted losses and other libraries' names, with a hint."""
    if name in UNSUPPORTED_LOSSES:
        raise UnknownNameError(
            f"loss {name!r} is left out on purpose: {UNSUPPORTED_LOSSES[name]}; "
            f"choose one of: {', '.join(LOSSES)}."
        )
    if name in LOSS_ALIASES:
        raise UnknownNameError(
            f"unknown loss {name!r}; here it is {LOSS_ALIASES[name]}."
        )
    return LOSSES.load(name)


def _term(
    name: str,
    variant: Variant,
    weight: float,
    given: Mapping[str, float],
    average_logps: bool,
) -> LossTerm:
    parameters = check_parameters(name, variant, given)
    averages = variant.averaged or variant.rows.scores
    if average_logps and (averages or name == "sft"):
        where, rule = (
            f"loss {name!r}",
            "average_logps goes with losses on sums over tokens",
        )
        remedy = (
            "Use sft_average for it" if name == "sft" else "Leave average_logps out"
        )
        raise ConfigError(
            sentence(where, rule, "one that says itself how it averages", remedy)
        )
    variant(
        Pairs(*[torch.zeros(0)] * 8), **parameters
    )  # variants check the ranges themselves
    if getattr(variant.function, "__module__", None) != formulas.__name__:
        draws = (
            torch.rand(8, 3, generator=torch.Generator().manual_seed(0)).double() + 1
        )
        draws[:4] *= -1  # log-probs
        rows = [Pairs(*draws[:, [i]]) for i in range(3)]
        check_function(
            f"loss {name!r}", lambda x: variant(x, **parameters), Pairs(*draws), rows
        )
    term = LossTerm(
        name, variant, parameters, weight, average_logps or variant.averaged
    )
    if not variant.reference and term.reads("ref_chosen", "ref_rejected"):
        rule = (
            "with reference=False it must not read log-probs of a reference, as in "
            "u, v and d"
        )
        remedy = "Compare chosen with rejected, or leave reference=False out"
        raise ConfigError(sentence(f"loss {name!r}", rule, "that it does", remedy))
    return term


def check_parameters(
    name: str, variant: Variant, given: Mapping[str, Any], settings: Iterable[str] = ()
) -> dict[str, Any]:
    """Returns all parameters of a loss; refuses unknown ones and what is no number."""
    _check_known(name, given, variant.defaults, settings)
    for parameter, value in given.items():
        if not (is_number(value) or (isinstance(value, Tensor) and value.dim() == 0)):
            raise ConfigError(
                f"loss {name!r}: {parameter} must be a number; found {quote(value)}."
            )
        if parameter == "beta" and value <= 0:
            raise ConfigError(f"loss {name!r}: beta must be above 0; found {value}.")
    return {**variant.defaults, **given}


def _check_known(
    name: str, given: Iterable[str], known: Mapping[str, Any], settings: Iterable[str]
) -> None:
    for parameter in given:
        if parameter not in known:
            raise UnknownNameError(
                f"loss {name!r} has no parameter {quote(parameter)}; "
                "it takes: "
                f"{', '.join(known) or 'none'}.{meant(parameter, [*known, *settings])}"
            )


def check_function(
    where: str, function: Callable[[Any], Tensor], whole: Any, parts: Iterable[Any]
) -> None:
    """Refuses a function whose values of parts, concatenated, are not its values of the
    whole.
    """
    values, apart = function(whole), [function(part) for part in parts]
    fit = all(isinstance(x, Tensor) and x.dim() == 1 for x in (values, *apart))
    if fit and (alone := torch.cat(apart)).shape == values.shape:
        if torch.allclose(values, alone, equal_nan=True):
            return
        rule, found = (
            "a value must not depend on what else is in the batch",
            "one that does",
        )
    else:
        rule, found = (
            "a function must return one value for each row of its input",
            "another shape",
        )
    raise ConfigError(
        sentence(where, rule, found, "Return the losses [n], neither summed nor mean")
    )


def name_of(loss: Name) -> str:
    """Returns the name of a loss or of a function."""
    return (
        loss
        if isinstance(loss, str)
        else getattr(loss, "__name__", type(loss).__name__)
    )


def check_weight(name: str, weight: Any) -> None:
    """Refuses a weight of a term that is no number of at least 0."""
    if not (is_number(weight) and weight >= 0):
        raise ConfigError(f"{name} must be at least 0; found {quote(weight)}.")


def is_number(value: Any) -> bool:
    """Returns True for a finite number."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )
