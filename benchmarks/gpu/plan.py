"""The plan: which cases run, in which order, in which processes, for how many seconds
at most.

The parts of the first call and of the second have a budget, which the seconds of the
parts exhaust. The spare parts run if others end early, or in further calls.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gpu import end_to_end, fast, parts, right_kernels, right_models
from gpu.rounds import (
    GRAPHS,
    OURS,
    RANGES,
    RANGES_AND_GRAPHS,
    SAME_HEAD,
    WAYS,
    Group,
)
from gpu.session import Part
from gpu.sizes import Sizes

CALLS = (540, 170)
"""Seconds of the two calls, of which `ENDING` are for the start and the end."""

ENDING = 25

ALWAYS, SOFT = ("plain", "frozen", "autocast"), ("softcap", "bias", "float32")


def first_groups(sizes: Sizes) -> list[Group]:
    """Return the ways to train that the first call measures."""
    big, small, adapted = sizes.models
    short, _ = sizes.tokens
    return [
        Group(big, "hh", short, (OURS, RANGES, SAME_HEAD, GRAPHS), 95),
        Group(small, "hh", short, (OURS, RANGES, GRAPHS, RANGES_AND_GRAPHS), 75),
        Group(adapted, "hh", short, (OURS, RANGES), 75),
    ]


def spare_groups(sizes: Sizes) -> list[Group]:
    """Return the ways to train that are measured if there is time."""
    big, small, _ = sizes.models
    short, long = sizes.tokens
    ours = (OURS, SAME_HEAD)
    groups = [Group(small, "hh", short, WAYS, 110, is_compiled=False)]
    if sizes.cuda:  # a dry run has tried their paths
        groups += [
            Group(small, "ultrafeedback", short, (OURS, RANGES, SAME_HEAD), 80),
            Group(big, "agents", long, (OURS, RANGES, SAME_HEAD), 110),
            Group(big, "long", long, (OURS, RANGES, SAME_HEAD), 110),
            Group(big, "hh", short, ours, 60, is_compiled=False),
            Group(big, "ultrafeedback", short, ours, 110),
            Group(
                big, "hh", long, (*ours, "padding_free/trl", "padded_grouped/trl"), 110
            ),
        ]
    return groups


def groups(sizes: Sizes) -> list[Group]:
    """Return all ways to train that are measured."""
    return first_groups(sizes) + spare_groups(sizes)


def first_call(sizes: Sizes, data: Path, scratch: Path) -> list[Part]:
    """Return what decides, in the order of its value: training as users run it, is it
    right, attention, then whole models.
    """
    few, many, _ = sizes.head_tokens
    training = partial(end_to_end.training, data=data, scratch=scratch)
    head = partial(right_kernels.head, tokens=(few, many), ways=ALWAYS)
    attention = partial(right_kernels.attention, backends=sizes.backends[:2])
    right = (
        partial(attention, heads=sizes.heads[:2]),
        head,
        right_kernels.chosen,
        partial(right_models.packed_is_padded, families=("Llama", "Qwen3")),
        right_models.waits,
        right_models.cuda_graph,
    )
    return [
        Part("device", 10, (parts.device,)),
        Part("trainers", 185, (partial(training, ways=("bfloat16", "trl")),)),
        Part("right", 45, right),
        Part("attention", 30, (parts.attention_by_profile,)),
        *map(_group_part, first_groups(sizes)),
    ]


def second_call(sizes: Sizes, data: Path, scratch: Path) -> list[Part]:
    """Return the head, a profile, and a run that is killed and resumed."""
    _, small, _ = sizes.models
    resumed = partial(right_models.resumed, data=data, scratch=scratch)
    return [
        Part("heads", 30, (parts.heads,)),
        Part(f"profile of {small}", 45, (partial(parts.profiles, model=small),)),
        Part("resumed", 70, (resumed,)),
    ]


def spare(sizes: Sizes, data: Path, scratch: Path) -> list[Part]:
    """Return what is measured if there is time."""
    auto, ranges, *others, slowest = sizes.backends
    few, many, edges = sizes.head_tokens
    big, *_ = sizes.models
    attention, head = right_kernels.attention, right_kernels.head
    padded = right_models.packed_is_padded
    training = partial(end_to_end.training, data=data, scratch=scratch)
    right = (
        partial(attention, backends=(auto, ranges), heads=sizes.heads[2:]),
        partial(head, tokens=(few, many), ways=SOFT),
        partial(head, tokens=edges, ways=ALWAYS[:1]),
        partial(padded, families=("Gemma2",)),
        partial(right_kernels.deterministic, backends=(auto, ranges, *others)),
        partial(attention, backends=others, heads=sizes.heads),
        partial(attention, backends=(slowest,), heads=sizes.heads[:1]),
    )
    compiled = partial(padded, families=("Llama",), compiled=True)
    further_ways = ("graphs", "own precision", "ref-logps", "lora")
    return [
        Part("more is right", 110, right),
        Part("compiled is right", 50, (compiled,)),
        Part(f"profile of {big}", 60, (partial(parts.profiles, model=big),)),
        Part("attention by length", 40, (parts.attention_by_length,)),
        Part("more training", 160, (partial(training, ways=further_ways),)),
        *map(_group_part, spare_groups(sizes)),
    ]


def plan(sizes: Sizes, data: Path, scratch: Path) -> list[Part]:
    """Return all parts by their value."""
    return [
        part
        for parts_of_call in (first_call, second_call, spare)
        for part in parts_of_call(sizes, data, scratch)
    ]


def _group_part(group: Group) -> Part:
    """Return a part for a group, whose process has compiled for no other model."""
    name = f"{group.name}{group.end}"
    measure = partial(fast.measure_group, group=group)
    return Part(name, group.seconds, (measure,))
