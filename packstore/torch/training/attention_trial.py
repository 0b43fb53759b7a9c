"""A trial on a GPU: which of the backends `torch_varlen` and `ranges` is faster.

Which one is faster depends on the GPU, on the lengths of segments and on the heads, so
both run on random queries, keys and values in the layout of a batch of the run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from packstore.torch.attention import ATTENTION, Attend, Settings
from packstore.torch.attention.auto import Call
from packstore.torch.batch.layout import AttentionLayout

Choice = Literal["auto_varlen", "auto_ranges"]

MIN_GAIN = 0.03
"""Part of the time that `ranges` must save: more than two timings differ by chance."""

ROUNDING = 2e-2
"""Accepted difference of outputs and gradients: ``|ranges - varlen| / |varlen|``, with
the Euclidean norm. Half precision gives about 5e-3.
"""

WARM_UP_RUNS = 3
TIMED_RUNS = 10

DELAY_CYCLES = 10_000_000
"""Cycles that the GPU waits before each timed run, about 5 ms. The host enqueues the
whole run meanwhile, so that its own time is not measured: compiled layers have less.
"""


class Trial(NamedTuple):
    """Result of a trial.

    Attributes:
        varlen_seconds: time of a forward and backward pass with `torch_varlen`.
        ranges_seconds: time of the same with `ranges`.
        difference: the largest difference of output and gradients, as :data:`ROUNDING`
            defines it.
    """

    varlen_seconds: float
    ranges_seconds: float
    difference: float

    @property
    def choice(self) -> Choice:
        """The backend to use: `ranges` only if it is right, and faster."""
        if not self.is_equal:
            return "auto_varlen"
        threshold = (1 - MIN_GAIN) * self.varlen_seconds
        return "auto_ranges" if self.ranges_seconds <= threshold else "auto_varlen"

    @property
    def is_equal(self) -> bool:
        """True if both backends computed the same, up to rounding."""
        return self.difference <= ROUNDING  # False for nan


def run_trial(call: Call, layout: AttentionLayout) -> Trial:
    """Run both backends forward and backward; return times and difference.

    Any error of Triton's compiler or driver is raised as it is.

    Args:
        call: heads, dtype, scale and window of a layer.
        layout: the layout of a row, on a CUDA device.
    """
    device = layout.cu_seqlens_q.device
    generator = torch.Generator(device).manual_seed(0)  # not the training's

    def draw(num_heads: int) -> Tensor:
        shape = (layout.num_queries, num_heads, call.head_size)
        values = torch.randn(shape, generator=generator, device=device)
        return values.to(call.dtype).requires_grad_()

    q = draw(call.num_heads)
    k = draw(call.num_key_heads)
    v = draw(call.num_key_heads)
    upstream = draw(call.num_heads).detach()
    settings = Settings(call.scale, call.window)

    def run(attend: Attend) -> tuple[Tensor, ...]:
        with torch.enable_grad():
            output = attend(q, k, v, layout, settings)
        return output.detach(), *torch.autograd.grad(output, (q, k, v), upstream)

    varlen: Attend = ATTENTION.load("torch_varlen")
    ranges: Attend = ATTENTION.load("ranges")
    difference = largest_difference(run(ranges), run(varlen))
    return Trial(
        varlen_seconds=median_seconds(partial(run, varlen)),
        ranges_seconds=median_seconds(partial(run, ranges)),
        difference=difference,
    )


def largest_difference(
    actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]
) -> float:
    """Return the largest ``|actual - expected| / |expected|`` of pairs of tensors; nan
    if one is not finite.
    """
    differences = []
    for actual_values, expected_values in zip(actual, expected, strict=True):
        error = (actual_values.double() - expected_values.double()).norm()
        norm = expected_values.double().norm().clamp(min=1e-30)
        differences.append(float(error / norm))
    # max() alone may pass over nan.
    return math.nan if any(math.isnan(x) for x in differences) else max(differences)


def median_seconds(run: Callable[[], object]) -> float:
    """Return the median duration of `run` on the current CUDA device, in seconds."""
    for _ in range(WARM_UP_RUNS):
        run()
    seconds = []
    for _ in range(TIMED_RUNS):
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        torch.cuda._sleep(DELAY_CYCLES)  # type: ignore[no-untyped-call]
        start.record()
        run()
        end.record()
        end.synchronize()
        seconds.append(start.elapsed_time(end) / 1000)
    return float(statistics.median(seconds))
