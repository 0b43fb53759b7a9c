"""The Triton kernels of attention by ranges of keys: equal to `reference` under the
interpreter, and compiled for GPUs without spills.

Needs no GPU, and proves no speed; ``make kernels`` installs Triton.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from itertools import accumulate, chain, groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from children import run_python
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from packstore.torch.attention import Settings
from packstore.torch.attention.plain import reference
from packstore.torch.batch import ranges as batch_ranges
from packstore.torch.batch.layout import AttentionLayout

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None,
    reason="triton is not installed: make kernels",
)
CAPABILITIES = (80, 90, 100)
HEAD_SIZES = (64, 80, 96, 128, 256)
LAYERS = ((4, None), (6, None), (7, None), (4, 100))
"""Query heads of a key head, and window, of the layers that are compiled."""

ROUNDING = {torch.float16: 1e-3, torch.float32: 1e-6}


class Segment(NamedTuple):
    """Tokens of a segment, and the tokens that it omits: the first of its parent's."""

    length: int
    parent: int = 0
    omitted: int = 0


class Case(NamedTuple):
    """A row of segments, and the tensors and settings of a layer.

    Attributes:
        segments: the segments.
        num_heads: query heads.
        num_key_heads: key heads.
        head_size: size of all heads.
        window: tokens that a query sees; None: all.
        dtype: dtype of all tensors.
        is_strided: heads are the first dimension in memory, with gaps between rows.
        min_item: least queries of an item: at 1, tiles of keys are divided.
    """

    segments: list[Segment]
    num_heads: int = 1
    num_key_heads: int = 1
    head_size: int = 64
    window: int | None = None
    dtype: torch.dtype = torch.float32
    is_strided: bool = False
    min_item: int = 1


def concat(*lengths: int) -> list[Segment]:
    """Return segments that share nothing."""
    return [Segment(length) for length in lengths]


def answers(prompt: int, *lengths: int) -> list[Segment]:
    """Return a prompt with the first answer, and the other answers."""
    first = Segment(prompt + lengths[0])
    return [first, *(Segment(length, 0, prompt) for length in lengths[1:])]


def turns(*lengths: int) -> list[Segment]:
    """Return a path: each segment continues the one before it."""
    totals = accumulate(lengths, initial=0)
    parents = chain([0], range(len(lengths)))
    return [Segment(*x) for x in zip(lengths, parents, totals, strict=False)]


def forest(seed: int, *, size: int = 10, longest: int = 70) -> list[Segment]:
    """Return random trees to depth 8, with segments of no token and of one."""
    rng = np.random.default_rng(seed)
    segments: list[Segment] = []
    totals: list[int] = []
    depths: list[int] = []
    for i in range(size):
        length = int(rng.choice([0, 1, rng.integers(2, longest)], p=[0.1, 0.2, 0.7]))
        parents = [j for j in range(i) if depths[j] < 8 and totals[j]]
        parent = omitted = 0
        if parents and rng.random() < 0.9:
            # Mostly one of the last, so that trees grow deep.
            parent = parents[-min(int(rng.geometric(0.6)), len(parents))]
            omitted = totals[parent]
            if rng.random() < 0.4:
                omitted = int(rng.integers(1, omitted + 1))
        segments.append(Segment(length, parent, omitted))
        totals.append(omitted + length)
        depths.append(depths[parent] + 1 if omitted else 0)
    return segments


PAIRS = [*answers(67, 60, 59), *concat(70, 1, 0), Segment(7, 0, 120)]
PATH = turns(50, 1, 30, 2, 70, 1, 1, 9, 20)
CASES = {
    "concat": [Case(concat(70, 1, 0, 64, 130), 2, 2), Case(concat(1))],
    "pairs": [
        Case(PAIRS, 4, 2),
        Case(PAIRS, 4, 2, min_item=512),
        # Not bfloat16, of which the interpreter has no products.
        Case(PAIRS, 4, 2, is_strided=True, dtype=torch.float16),
    ],
    "answers": [Case(answers(130, *range(1, 40, 4)), 2, 1)],
    "path": [Case(PATH, 2, 1)],
    "windows": [
        Case(segments, 2, 1, window=window)
        for segments in (PAIRS, PATH, forest(1, longest=40))
        for window in (1, 33, 100)
    ],
    "groups": [
        Case(forest(group, longest=40), group, 1, is_strided=group % 2 == 0)
        for group in range(1, 9)
    ],
    "heads": [
        Case(forest(seed, size=6, longest=40), 2, 1, head_size=size)
        for seed, size in enumerate((8, 16, 24, *HEAD_SIZES))
    ],
}


def rows_of(segments: list[Segment]) -> list[list[int]]:
    """Return the rows of each segment's logical sequence."""
    rows: list[list[int]] = []
    starts = accumulate((segment.length for segment in segments), initial=0)
    for start, segment in zip(starts, segments, strict=False):
        prefix = rows[segment.parent][: segment.omitted] if segment.omitted else []
        rows.append([*prefix, *range(start, start + segment.length)])
    return rows


def layout_of(segments: list[Segment]) -> AttentionLayout:
    """Return the layout of a row, with an index of keys and with ranges."""
    rows = rows_of(segments)
    lengths_q = [segment.length for segment in segments]
    lengths_k = [len(sequence) for sequence in rows]
    cu_seqlens_q = torch.tensor([0, *accumulate(lengths_q)], dtype=torch.int32)
    cu_seqlens_k = torch.tensor([0, *accumulate(lengths_k)], dtype=torch.int32)
    segment_of_row = np.repeat(np.arange(len(segments)), lengths_q)

    runs = []
    for i, sequence in enumerate(rows):
        owners = segment_of_row[sequence[: segments[i].omitted]]
        runs += [(i, owner, len(list(group))) for owner, group in groupby(owners)]
        runs.append((i, i, 0))
    key_runs = None
    if len(runs) > len(segments):
        key_runs = torch.tensor(runs, dtype=torch.int32).t().contiguous()
    return AttentionLayout(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max(lengths_q),
        max_seqlen_k=max(lengths_k),
        num_queries=sum(lengths_q),
        kv_index=torch.tensor([row for sequence in rows for row in sequence]),
        ranges=batch_ranges.compute_key_ranges(cu_seqlens_q, cu_seqlens_k, key_runs),
    )


def random_tensors(case: Case) -> list[Tensor]:
    """Return queries, keys, values and the output's gradient."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(segment.length for segment in case.segments)
    tensors: list[Tensor] = []
    for heads in (case.num_heads, case.num_key_heads, case.num_key_heads):
        shape = (num_tokens, heads, case.head_size)
        if case.is_strided:
            shape = (heads, num_tokens, case.head_size + 8)
        values = torch.randn(shape, generator=generator).to(case.dtype)
        if case.is_strided:
            values = values.transpose(0, 1)[..., : case.head_size]
        tensors.append(values)
    grad = torch.randn(tensors[0].shape, generator=generator).to(case.dtype)
    return [*tensors, grad]


class CountBytes(TorchDispatchMode):
    """A context that counts the bytes of the tensors that are made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **kwargs or {})
        # The interpreter copies tables, which are integers.
        if isinstance(result, Tensor) and result.is_floating_point():
            self.num_bytes += result.nbytes
        return result


def compare(case: Case) -> None:
    """Compare output, log-sum-exp and gradients with `reference` in float64."""
    from packstore.torch.attention._ranges import attend_backward, attend_forward

    batch_ranges.MIN_ITEM = case.min_item
    layout = layout_of(case.segments)
    assert layout.ranges is not None
    q, k, v, grad = random_tensors(case)
    settings = Settings(case.head_size**-0.5, window=case.window)
    keys_before = -1 if case.window is None else case.window - 1
    arguments = (layout.ranges, settings.scale, keys_before)

    out, lse = attend_forward(q, k, v, *arguments)
    gradients = attend_backward(grad, q, k, v, out, lse, *arguments)
    exact = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    expected = reference(*exact, layout, settings)
    exact_gradients = torch.autograd.grad(expected, exact, grad.double())
    pairs = zip([out, *gradients], [expected, *exact_gradients], strict=True)
    for result, exact_result in pairs:
        assert result.dtype == case.dtype
        assert result.shape == exact_result.shape
        error = (result.double() - exact_result.detach()).norm()
        # Relative to the gradient of the output, as that of queries may be 0.
        limit = max(exact_result.detach().norm(), grad.double().norm())
        assert error < ROUNDING[case.dtype] * limit, (case, error / limit)


def run_twice() -> None:
    """Check that a second run has the same bits, where tiles of keys are divided."""
    from packstore.torch.attention._ranges import attend_backward, attend_forward

    batch_ranges.MIN_ITEM = 1
    case = Case(answers(100, *range(1, 40, 4)), 4, 2, dtype=torch.float16)
    q, k, v, grad = random_tensors(case)
    layout = layout_of(case.segments)
    assert layout.ranges is not None
    assert (layout.ranges.splits[2] > 2).any()
    results = []
    for _ in range(2):
        out, lse = attend_forward(q, k, v, layout.ranges, 0.1, -1)
        gradients = attend_backward(grad, q, k, v, out, lse, layout.ranges, 0.1, -1)
        results.append([out, lse, *gradients])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


def isolate() -> None:
    """Check that NaN in a segment does not reach segments of other trees."""
    from packstore.torch.attention._ranges import attend_backward, attend_forward

    case = Case([*answers(20, 30, 40), *concat(50), *answers(10, 9, 8)], 2, 1)
    ranges = layout_of(case.segments).ranges
    assert ranges is not None
    tensors = random_tensors(case)
    results = []
    for value in (0.0, float("nan")):
        for tensor in tensors:
            tensor[90:140] = value
        q, k, v, grad = tensors
        out, lse = attend_forward(q, k, v, ranges, 0.1, -1)
        gradients = attend_backward(grad, q, k, v, out, lse, ranges, 0.1, -1)
        results.append([out, *gradients])
    for with_zeros, with_nan in zip(*results, strict=True):
        assert torch.equal(with_zeros[:90], with_nan[:90])
        assert torch.equal(with_zeros[140:], with_nan[140:])


def count_bytes() -> None:
    """Check that memory depends on rows and segments, and not on the depth of trees."""
    from packstore.torch.attention._ranges import attend_backward, attend_forward

    lengths = [20] * 9
    num_bytes = []
    for segments in (answers(1, 19, *lengths[1:]), turns(*lengths)):
        q, k, v, grad = random_tensors(Case(segments))
        arguments: Any = (layout_of(segments).ranges, 0.1, -1)
        with CountBytes() as counter:
            out, lse = attend_forward(q, k, v, *arguments)
            attend_backward(grad, q, k, v, out, lse, *arguments)
        num_bytes.append(counter.num_bytes)
    assert num_bytes[0] == num_bytes[1]


class Launch(NamedTuple):
    """A call of a kernel."""

    kernel: Any
    arguments: tuple[Any, ...]
    options: dict[str, int]


class Recorder:
    """Stands for a kernel, and records its launches."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self.kernel = kernel
        self.launches = launches

    def __getitem__(self, _grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: int) -> None:
            self.launches.append(Launch(self.kernel, arguments, options))

        return launch


def record_launches(case: Case, capability: int) -> list[Launch]:
    """Return the launches of a forward and a backward pass on a device."""
    from packstore.torch.attention import _ranges, flash

    launches: list[Launch] = []
    kernels = ("forward_kernel", "queries_kernel", "keys_kernel", "sum_kernel")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash, "capability", lambda _device: divmod(capability, 10))
        for name in kernels:
            recorder = Recorder(getattr(_ranges, name), launches)
            patch.setattr(_ranges, name, recorder)
        q, k, v, grad = random_tensors(case)
        keys_before = -1 if case.window is None else case.window - 1
        arguments: Any = (layout_of(case.segments).ranges, 0.1, keys_before)
        out, lse = _ranges.attend_forward(q, k, v, *arguments)
        _ranges.attend_backward(grad, q, k, v, out, lse, *arguments)
    assert len(launches) == 4
    return launches


def usage_of(launch: Launch, capability: int) -> tuple[int, int]:
    """Compile the kernel of a launch; return registers and bytes of stack."""
    from layer_kernels import usage_for

    types = {
        torch.bfloat16: "*bf16",
        torch.float32: "*fp32",
        torch.int32: "*i32",
        int: "i32",
        float: "fp32",
    }
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    aligned: list[str] = []
    for parameter, value in zip(launch.kernel.params, launch.arguments, strict=True):
        name = parameter.name
        if parameter.is_constexpr or value is None:
            signature[name] = "constexpr"
            constants[name] = value
            continue
        is_tensor = isinstance(value, Tensor)
        signature[name] = types[value.dtype if is_tensor else type(value)]
        is_multiple = is_tensor or (isinstance(value, int) and value % 16 == 0)
        if is_multiple and not parameter.do_not_specialize:
            aligned.append(name)
    return usage_for(
        capability, launch.kernel, signature, constants, aligned, **launch.options
    )


def compile_for(capability: int) -> None:
    """Compile all kernels for GPUs of a compute capability; print registers."""
    spills = []
    for size in HEAD_SIZES:
        for group, window in LAYERS:
            case = Case(PAIRS, 8 * group, 8, size, window, torch.bfloat16)
            for launch in record_launches(case, capability):
                registers, stack = usage_of(launch, capability)
                name = launch.kernel.__name__
                line = f"sm_{capability} {name} {size=} {group=} {window=} {registers=}"
                print(line, flush=True)
                if stack:
                    spills.append(f"{line} {stack=}")
    assert not spills, spills


def run_case(name: str, tmp_path: Path, *, is_interpreted: bool) -> None:
    """Run this file as a program, and show its output."""
    environment = {
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": str(int(is_interpreted)),
        "PYTHONPATH": os.pathsep.join(sys.path),
        "PYTHONUTF8": "1",  # torch's compiler reads its files as the locale's text
    }
    process = run_python(__file__, name, env=environment)
    print(process.stdout)
    assert process.returncode == 0, process.stderr


@needs_triton
@pytest.mark.parametrize("name", [*CASES, "run_twice", "isolate", "count_bytes"])
def test_interpreted_kernels(name: str, tmp_path: Path) -> None:
    run_case(name, tmp_path, is_interpreted=True)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_compiled_kernels_spill_no_registers(capability: int, tmp_path: Path) -> None:
    run_case(str(capability), tmp_path, is_interpreted=False)


if __name__ == "__main__":
    name = sys.argv[1]
    if name in CASES:
        for case in CASES[name]:
            compare(case)
    elif name == "run_twice":
        run_twice()
    elif name == "isolate":
        isolate()
    elif name == "count_bytes":
        count_bytes()
    else:
        compile_for(int(name))
