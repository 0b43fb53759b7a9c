"""Parses and validates the terms of a ``PreferenceLoss``.

A term is one loss with its parameters and weight; a mix is a weighted sum of several
terms. A loss is given by its name (``formulas.py``), or as a function of the user. Such
a function declares nothing, so that it is called once with random pairs, which shows
if it couples pairs, and whether it reads rewards or the reference model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from packstore.errors import ConfigError, UnknownNameError, quote, sentence
from packstore.registry import suggest
from packstore.torch.losses.formulas import LOSSES, LossTerm, Variant, sft
from packstore.torch.losses.pairs import Pairs

Name = str | Callable[..., Tensor]
"""The name of a loss, or a function ``(pairs, **parameters)`` that returns the losses
`[n]` of n pairs.
"""

Names = Name | Mapping[Any, float | Mapping[str, float]]
"""One loss, or a mix: loss -> weight, or loss -> ``weight`` (default 1) and parameters
of that term alone, such as ``{"dpo": 0.8, "cpo": {"weight": 0.2, "beta": 0.5}}``.
"""

_COUPLES_PAIRS = (
    "it couples the pairs of a batch, so it would depend on which pairs share a pack"
)
_NEEDS_TOKENS = (
    "it weighs tokens one by one, and losses of pairs get log-probs summed over a "
    "sequence"
)

UNSUPPORTED_LOSSES: dict[str, str] = {
    "aot": f"{_COUPLES_PAIRS} (it sorts their log-ratios)",
    "aot_unpaired": f"{_COUPLES_PAIRS} (it sorts their log-ratios)",
    "beta_dpo": f"{_COUPLES_PAIRS} (its beta follows the margins of the batch)",
    "ld_dpo": _NEEDS_TOKENS,
    "wpo": _NEEDS_TOKENS,
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
    "distill": "DistillLoss, which is no member of a mix",
}
"""Other libraries' names of losses -> names here, for error messages."""


def parse_terms(
    names: Names,
    *,
    parameters: Mapping[str, float],
    average_logps: bool,
    reference: bool,
    settings: Collection[str],
) -> tuple[LossTerm, ...]:
    """Return the terms of a loss.

    Args:
        names: one loss, or a mix.
        parameters: shared parameters: each goes to every term that takes it, and at
            least one term must.
        average_logps: compare means over tokens where a loss compares sums.
        reference: False if the user's functions read no log-probs of a reference model.
        settings: the caller's other arguments, as suggestions for a mistyped parameter.

    Raises:
        UnknownNameError: a loss, or a parameter of it, is unknown.
        ConfigError: a value is out of range, two contradict each other, or a function
            does not compute one loss for each pair.
    """
    mix = _parse_mix(names)
    functions = [loss for loss in mix if callable(loss)]
    if not reference and not functions:
        raise ConfigError(
            sentence(
                where="setting reference",
                rule="False is for a function of your own that needs no reference",
                found=f"False for {quote(names)}",
                remedy="simpo, orpo and cpo need no reference",
            )
        )

    variants = _load_variants(mix, reference)
    accepted: dict[str, float] = {}
    for variant in variants.values():
        accepted |= variant.defaults
    _check_parameter_names(" + ".join(variants), parameters, accepted, settings)

    terms = []
    for loss, entry in mix.items():
        name = name_of(loss)
        term = _make_term(name, variants[name], entry, parameters, average_logps)
        terms.append(_probe_function(term) if callable(loss) else term)
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


def _parse_mix(names: Names) -> Mapping[Any, Any]:
    """Return loss -> weight, or its weight and parameters."""
    if isinstance(names, str) or callable(names):
        return {names: 1.0}
    is_mix = isinstance(names, Mapping) and len(names) > 0
    if is_mix and all(isinstance(loss, str) or callable(loss) for loss in names):
        return names
    raise ConfigError(
        f"a loss must be a name, a function, or a mix {{name: weight}}; found "
        f"{quote(names)}."
    )


def _load_variants(mix: Mapping[Any, Any], reference: bool) -> dict[str, Variant]:
    """Return name -> loss; raise ConfigError if two have the same name."""
    variants: dict[str, Variant] = {}
    for loss in mix:
        if isinstance(loss, str):
            variants[loss] = _load_variant(loss)
        else:
            variants[name_of(loss)] = _wrap_function(loss, reference)
    if len(variants) < len(mix):
        raise ConfigError(
            "the functions of a mix must differ in __name__, which names metrics."
        )
    return variants


def _load_variant(name: str) -> Variant:
    """Load a loss; for an omitted one or another library's name, raise with a hint."""
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


def _wrap_function(function: Callable[..., Tensor], reference: bool) -> Variant:
    """Return a user's function as a loss; raise if it takes other arguments."""
    try:
        signature(function).bind(None)
    except TypeError as error:
        raise ConfigError(
            sentence(
                where=f"loss {name_of(function)!r}",
                rule="it must take the pairs, and parameters with defaults",
                found=str(error),
                remedy="Name parameters behind a *",
            )
        ) from error
    except ValueError:
        pass  # some builtins have no signature
    return Variant(function, reference)


def _make_term(
    name: str,
    variant: Variant,
    entry: float | Mapping[str, float],
    parameters: Mapping[str, float],
    average_logps: bool,
) -> LossTerm:
    """Return a validated term.

    Args:
        name, variant: the loss.
        entry: its value in the mix: a weight, or ``weight`` and parameters, which
            replace the shared ones.
        parameters: shared parameters of all terms, also some that this loss lacks.
        average_logps: compare means over tokens.
    """
    entry_parameters = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
    weight = entry_parameters.pop("weight", 1.0)
    check_weight(f"loss {name!r}: its weight in a mix", weight)

    shared = {p: value for p, value in parameters.items() if p in variant.defaults}
    complete = complete_parameters(name, variant, {**shared, **entry_parameters})
    if average_logps:
        _check_averages(name, variant)

    # Each loss checks the ranges of its parameters when it is called.
    no_pairs = Pairs(*torch.zeros(8, 0))
    variant(no_pairs, **complete)
    return LossTerm(
        name=name,
        variant=variant,
        parameters=complete,
        weight=weight,
        averaged=average_logps or variant.averaged,
    )


def _check_averages(name: str, variant: Variant) -> None:
    """Raise ConfigError if a loss does not compare sums that could become means."""
    has_average = name == "sft" or variant.averaged
    if not has_average and not variant.rows.takes_scores:
        return
    remedy = "Use sft_average for it" if name == "sft" else "Leave average_logps out"
    raise ConfigError(
        sentence(
            where=f"loss {name!r}",
            rule="average_logps goes with losses on sums over tokens",
            found="one with an average of its own",
            remedy=remedy,
        )
    )


def _probe_function(term: LossTerm) -> LossTerm:
    """Return the term of a user's function, with `reads_rewards` found by calls.

    Raises:
        ConfigError: it couples pairs, or reads a reference despite reference=False.
    """

    def compute(pairs: Pairs) -> Tensor:
        return term.variant.function(pairs, **term.parameters)

    quantities = _random_quantities()
    # The first four fields of `Pairs` are log-probs, which are negative.
    quantities[:4] *= -1
    num_pairs = quantities.shape[1]
    single_pairs = [Pairs(*quantities[:, [i]]) for i in range(num_pairs)]
    check_function(f"loss {term.name!r}", compute, Pairs(*quantities), single_pairs)

    if not term.variant.reference and _depends_on(term, "ref_chosen", "ref_rejected"):
        raise ConfigError(
            sentence(
                where=f"loss {term.name!r}",
                rule=(
                    "with reference=False it must not read log-probs of a reference, "
                    "as in u, v and d"
                ),
                found="that it does",
                remedy="Compare chosen with rejected, or leave reference=False out",
            )
        )
    reads_rewards = _depends_on(term, "chosen_reward")
    return replace(term, variant=replace(term.variant, reads_rewards=reads_rewards))


def _depends_on(loss: Callable[[Pairs], Tensor], *quantities: str) -> bool:
    """Return True if the losses of random pairs change with these fields of `Pairs`."""
    pairs = Pairs(*_random_quantities())
    changes = {}
    # Different shifts, as equal ones would cancel out in a difference of two fields.
    for shift, name in enumerate(quantities, start=1):
        changes[name] = getattr(pairs, name) + shift
    return not torch.allclose(loss(pairs), loss(replace(pairs, **changes)))


def _random_quantities() -> Tensor:
    """Return numbers in 1..2 for the 8 fields of `Pairs`, for three pairs, `[8, 3]`."""
    generator = torch.Generator().manual_seed(0)
    return torch.rand(8, 3, generator=generator).double() + 1


def complete_parameters(
    name: str,
    variant: Variant,
    parameters: Mapping[str, Any],
    settings: Collection[str] = (),
) -> dict[str, Any]:
    """Return all parameters of a loss, with defaults for those that are not passed.

    Raises:
        UnknownNameError: the loss has no such parameter.
        ConfigError: a value is no number, or a beta is not above 0.
    """
    _check_parameter_names(name, parameters, variant.defaults, settings)
    for parameter, value in parameters.items():
        is_scalar = isinstance(value, Tensor) and value.dim() == 0
        if not is_scalar and not is_number(value):
            raise ConfigError(
                f"loss {name!r}: {parameter} must be a number; found {quote(value)}."
            )
        if parameter == "beta" and value <= 0:
            raise ConfigError(f"loss {name!r}: beta must be above 0; found {value}.")
    return {**variant.defaults, **parameters}


def _check_parameter_names(
    loss: str,
    parameters: Mapping[str, Any],
    accepted: Collection[str],
    settings: Collection[str],
) -> None:
    """Raise UnknownNameError for a parameter that a loss does not take."""
    for parameter in parameters:
        if parameter not in accepted:
            hint = suggest(parameter, [*accepted, *settings])
            raise UnknownNameError(
                f"loss {loss!r} has no parameter {quote(parameter)}; it takes: "
                f"{', '.join(accepted) or 'none'}.{hint}"
            )


def check_function(
    where: str,
    function: Callable[[Any], Tensor],
    batch: Any,
    parts: Sequence[Any],
) -> None:
    """Raise ConfigError if the losses of a batch differ from the losses of its parts.

    Args:
        where: the loss, for error messages.
        function: maps a batch of n pairs or tokens to their losses `[n]`.
        batch: the whole batch.
        parts: the same batch, cut into parts that must not influence each other.
    """
    losses = function(batch)
    losses_of_parts = [function(part) for part in parts]
    rule = "a function must return one value for each row of its input"
    actual = "another shape"
    if all(_is_vector(x) for x in [losses, *losses_of_parts]):
        concatenated = torch.cat(losses_of_parts)
        if concatenated.shape == losses.shape:
            if torch.allclose(losses, concatenated, equal_nan=True):
                return
            rule = "a value must not depend on what else is in the batch"
            actual = "one that does"
    remedy = "Return the losses [n], neither summed nor mean"
    raise ConfigError(sentence(where=where, rule=rule, found=actual, remedy=remedy))


def _is_vector(values: Any) -> bool:
    return isinstance(values, Tensor) and values.dim() == 1


def name_of(loss: Name) -> str:
    """Return the name of a loss or of a function."""
    if isinstance(loss, str):
        return loss
    return getattr(loss, "__name__", type(loss).__name__)


def check_weight(name: str, weight: Any) -> None:
    """Raise ConfigError unless a weight is a number of at least 0."""
    if not (is_number(weight) and weight >= 0):
        raise ConfigError(f"{name} must be at least 0; found {quote(weight)}.")


def is_number(value: Any) -> bool:
    """Return True for a finite number; a bool does not count as one."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) and math.isfinite(value)
