"""The stages: which cases run, in which order, in which processes, for how many seconds."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gpu import end_to_end, fast, parts, right_kernels, right_models
from gpu.session import Part
from gpu.sizes import Sizes

BUDGETS = {0: 500, 1: 420, 2: 480}
"""Seconds of each stage: three calls and the start of a machine fit thirty minutes."""

ALWAYS, SOFT = ("plain", "frozen", "autocast"), ("softcap", "bias", "float32")


def stage(number: int, sizes: Sizes, data: Path, scratch: Path) -> list[Part]:
    """The parts of a stage; what decides most comes first."""
    return (_first, _right, _fast)[number](sizes, data, scratch)


def _first(sizes: Sizes, data: Path, scratch: Path) -> list[Part]:
    """Stage 0: are the kernels of `auto` right, and is the product's claim true?"""
    auto, *_, slowest = sizes.backends
    few, many, _ = sizes.head_tokens
    kernels = (
        parts.device,
        partial(right_kernels.attention, backends=(auto,), heads=sizes.heads[:2]),
        partial(right_kernels.head, tokens=(few, many), ways=ALWAYS),
        right_kernels.chosen,
        partial(right_models.packed_is_padded, families=("Llama", "Qwen3")),
        partial(right_models.isolation, backends=(auto,)),
        right_models.waits,
    )
    last = (
        partial(right_models.packed_is_padded, families=("Gemma2",)),
        partial(right_models.resumed, data=data, scratch=scratch),
        partial(right_models.isolation, backends=(slowest,)),
        partial(right_kernels.attention, backends=(slowest,), heads=sizes.heads[:1]),
    )
    claim = {"profile": "hh", "tokens": sizes.tokens[0]}
    pair = {"ways": (fast.OURS, fast.SAME_HEAD), "compiled": True}
    *_, small = sizes.models
    return [
        Part("kernels", 150, kernels),
        *(Part(m, 110, (partial(fast.group, model=m, **claim),)) for m in sizes.models),
        Part("heads", 80, (partial(parts.heads, tiles=False),)),
        Part("profiles", 50, (parts.profiles,)),
        Part("compiled", 120, (partial(fast.group, model=small, **claim, **pair),)),
        Part("the rest", 120, last),
    ]


def _right(sizes: Sizes, data: Path, scratch: Path) -> list[Part]:
    """Stage 1: is everything else right, and does training keep up?"""
    auto, *others, _ = sizes.backends
    few, many, edges = sizes.head_tokens
    kernels = (
        parts.device,
        partial(right_kernels.attention, backends=(auto,), heads=sizes.heads[2:]),
        partial(right_kernels.deterministic, backends=(auto, *others)),
        partial(right_kernels.head, tokens=(few, many), ways=SOFT),
        partial(right_kernels.head, tokens=edges, ways=ALWAYS[:1]),
        right_models.cuda_graph,
        partial(right_models.isolation, backends=others),
        partial(right_kernels.attention, backends=others, heads=sizes.heads),
    )
    training = (partial(end_to_end.training, data=data, scratch=scratch),)
    return [Part("kernels", 160, kernels), Part("training", 300, training)]


def _fast(sizes: Sizes, data: Path, scratch: Path) -> list[Part]:
    """Stage 2: how fast with other lengths, larger batches, compiled layers?"""
    short, long = sizes.tokens
    groups = []
    for profile, tokens in (("long", long), ("ultrafeedback", short), ("hh", long)):
        for model in sizes.models:
            group = partial(fast.group, model=model, profile=profile, tokens=tokens)
            eager = partial(group, ways=fast.WAYS[:4])
            compiled = partial(group, ways=fast.WAYS[:3], compiled=True)
            works = (eager,) if profile == "hh" else (eager, compiled)
            groups.append(Part(f"{model}/{profile}/{tokens}", 90, works))
    last = (partial(parts.heads, tiles=True), parts.attention)
    return [Part("device", 30, (parts.device,)), *groups, Part("parts", 60, last)]
