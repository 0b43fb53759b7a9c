"""The terms of a loss: one variant, or a weighted sum of several, each with its parameters."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from packstore.errors import ConfigError, UnknownNameError, quote, sentence
from packstore.torch.losses.formulas import LEFT_OUT, LOSSES, OTHER_NAMES, Variant
from packstore.torch.losses.pairs import Pairs

Mix = Mapping[str, float | Mapping[str, float]]
Names = str | Mix


@dataclass(frozen=True)
class LossTerm:
    """A variant with its parameters and its weight in the sum.

    Attributes:
        name: name of the variant.
        variant: the variant.
        parameters: all of its parameters, defaults included.
        weight: factor on its losses.
        averaged: compares means over tokens, by definition or by `average_logps`.
    """

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
    names: Names, parameters: Mapping[str, float], average_logps: bool
) -> tuple[LossTerm, ...]:
    """Makes the terms of a loss.

    Args:
        names: one name; or name -> weight, or name -> a mapping of ``weight`` (default 1) and
            parameters of that term alone.
        parameters: passed to every term that takes them; at least one must.
        average_logps: terms compare means over tokens.

    Raises:
        UnknownNameError: a loss is unknown, or no term takes a parameter.
        ConfigError: a weight or value is out of range, or `average_logps` goes to a loss that
            averages by definition.
    """
    mix = {names: 1.0} if isinstance(names, str) else names
    if not isinstance(mix, Mapping) or not mix:
        raise ConfigError(
            f"a loss must be a name, or a mix {{name: weight}}; found {quote(names)}."
        )
    entries = {name: _entry(name, entry) for name, entry in mix.items()}
    known = {name: _defaults(name) for name in entries}
    for parameter in parameters:
        if not any(parameter in defaults for defaults in known.values()):
            takes = dict.fromkeys(p for defaults in known.values() for p in defaults)
            raise _no_parameter(" + ".join(entries), parameter, takes)
    terms = []
    for name, (weight, own) in entries.items():
        given = {p: v for p, v in parameters.items() if p in known[name]} | own
        terms.append(_term(name, weight, known[name], given, average_logps))
    if len(terms) > 1 and any(m.name == "sft" for m in terms):
        raise ConfigError("'sft' has a count of its own in a mix: give its weight as sft_weight.")
    return tuple(terms)


def _entry(name: str, entry: Any) -> tuple[float, dict[str, float]]:
    """Weight and own parameters of one entry of a mix."""
    own = dict(entry) if isinstance(entry, Mapping) else {"weight": entry}
    weight = own.pop("weight", 1.0)
    if not is_number(weight) or weight < 0:
        raise ConfigError(
            f"loss {name!r}: its weight in a mix must be at least 0; found {quote(weight)}."
        )
    return weight, own


def _defaults(name: str) -> dict[str, float]:
    """The parameters of a loss; refuses omitted losses and other libraries' names, with a hint."""
    if name in LEFT_OUT:
        raise UnknownNameError(
            f"loss {name!r} is left out on purpose: {LEFT_OUT[name]}; "
            f"choose one of: {', '.join(LOSSES)}."
        )
    if name in OTHER_NAMES:
        raise UnknownNameError(f"unknown loss {name!r}; here it is {OTHER_NAMES[name]}.")
    known = inspect.signature(LOSSES.load(name).function).parameters
    return {n: p.default for n, p in known.items() if p.kind is p.KEYWORD_ONLY}


def _term(
    name: str,
    weight: float,
    defaults: Mapping[str, float],
    given: Mapping[str, float],
    average_logps: bool,
) -> LossTerm:
    variant = LOSSES.load(name)
    for parameter, value in given.items():
        if parameter not in defaults:
            raise _no_parameter(name, parameter, defaults)
        if not is_number(value):
            raise ConfigError(f"loss {name!r}: {parameter} must be a number; found {quote(value)}.")
        if parameter == "beta" and value <= 0:
            raise ConfigError(f"loss {name!r}: beta must be above 0; found {value}.")
    if average_logps and (variant.averaged or name == "sft"):
        raise ConfigError(
            sentence(
                f"loss {name!r}",
                "average_logps goes with losses on sums over tokens",
                "one that says itself how it averages",
                "Use sft_average for it" if name == "sft" else "Leave average_logps out",
            )
        )
    parameters = {**defaults, **given}
    variant(Pairs(*[torch.zeros(0)] * 8), **parameters)  # variants check the ranges themselves
    return LossTerm(name, variant, parameters, weight, average_logps or variant.averaged)


def _no_parameter(name: str, parameter: str, known: Iterable[str]) -> UnknownNameError:
    return UnknownNameError(
        f"loss {name!r} has no parameter {quote(parameter)}; "
        f"it takes: {', '.join(known) or 'none'}."
    )


def is_number(value: Any) -> bool:
    """Returns True for a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
