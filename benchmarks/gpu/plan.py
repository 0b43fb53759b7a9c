"""The plan: which cases run, in which order, in which processes, for how many seconds
at most.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from gpu import end_to_end, fast, parts, right_kernels, right_models
from gpu.session import Part
from gpu.sizes import Sizes

ALWAYS, SOFT = ("plain", "frozen", "autocast"), ("softcap", "bias", "float32")


def plan(sizes: Sizes, data: Path, scratch: Path) -> list[Part]:
    """All parts by their value: is it right, is the claim true as users run it, then
    the rest.
    """
    auto, *others, slowest = sizes.backends
    few, many, edges = sizes.head_tokens
    short, long = sizes.tokens
    big, small = sizes.models
    attention, head = right_kernels.attention, right_kernels.head
    padded, training = right_models.packed_is_padded, end_to_end.training
    training = partial(training, data=data, scratch=scratch)

    def group(
        model: str, profile: str, tokens: int, ways: int, compiled: bool = True
    ) -> Part:
        """The first of the ways; a process for each, which has compiled for no other
        model.
        """
        works = partial(
            fast.group, tokens=tokens, ways=fast.WAYS[:ways], compiled=compiled
        )
        name = f"{model}/{profile}/{tokens}{'/compiled' if compiled else ''}"
        return Part(name, 110, (partial(works, model=model, profile=profile),))

    right = (
        parts.device,
        partial(attention, backends=(auto,), heads=sizes.heads[:2]),
        partial(head, tokens=(few, many), ways=ALWAYS),
        right_kernels.chosen,
        partial(padded, families=("Llama", "Qwen3")),
        right_models.waits,
    )
    more = (
        partial(attention, backends=(auto,), heads=sizes.heads[2:]),
        partial(head, tokens=(few, many), ways=SOFT),
        partial(head, tokens=edges, ways=ALWAYS[:1]),
        partial(padded, families=("Gemma2",)),
        partial(right_kernels.deterministic, backends=(auto, *others)),
        right_models.cuda_graph,
        partial(attention, backends=others, heads=sizes.heads),
        partial(attention, backends=(slowest,), heads=sizes.heads[:1]),
    )
    last = [group(big, "ultrafeedback", short, 3), group(small, "long", long, 2)]
    last.append(group(big, "hh", long, 4))
    return [
        Part("right", 80, right),
        Part(
            "compiled is right",
            50,
            (partial(padded, families=("Llama",), compiled=True),),
        ),
        group(big, "hh", short, 4),
        Part(
            "trainers",
            130,
            (partial(training, ways=("bfloat16", "trl", "own precision")),),
        ),
        group(small, "ultrafeedback", short, 3),
        group(big, "long", long, 2),
        group(big, "hh", short, 2, compiled=False),
        Part("heads", 60, (parts.heads,)),
        *(
            Part(f"profile of {m}", 60, (partial(parts.profiles, model=m),))
            for m in sizes.models
        ),
        Part(
            "resumed", 70, (partial(right_models.resumed, data=data, scratch=scratch),)
        ),
        Part("more is right", 110, more),
        Part("attention", 40, (parts.attention,)),
        group(small, "hh", short, 9, compiled=False),
        Part("more training", 110, (partial(training, ways=("ref-logps", "lora")),)),
        *(last if sizes.cuda else ()),  # a dry run has tried their paths
    ]
