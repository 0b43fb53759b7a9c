"""Kernel launches of a compiled layer, and the bytes that its backward pass needs, with
attention by `torch_varlen` and by `ranges`. Needs Triton, and no GPU:

    make kernels
    .venv/bin/python benchmarks/launches.py

The layers are traced on a CPU and lowered for an H100, as in
``tests/support/layer_kernels.py``; the operators of attention run on tensors without
values, and what they launch is counted. FlashAttention 2 has one kernel forward and
three backward, and sums the gradients of grouped heads in two more. This shows
launches and bytes, not time.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import layer_kernels
import torch
import torch._inductor.config as inductor
import triton
from common import RESULTS, parser, provenance, save, show
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.scheduler import (
    ExternKernelSchedulerNode,
    NopKernelSchedulerNode,
    Scheduler,
)
from torch.fx import GraphModule
from torch.nn.attention import varlen
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from packstore.torch.attention import ranges, torch_varlen

MODELS = ("Qwen3-0.6B", "Llama-3.2-1B")
LAYOUTS = ("shared_prefix", "concat")
BACKENDS = ("auto_varlen", "auto_ranges")

OPERATORS: dict[str, Any] = {
    "packstore::varlen": torch_varlen.attend_gathered,
    "packstore::varlen_backward": torch_varlen.attend_gathered_backward,
    "packstore::ranges": ranges.attend_ranges,
    "packstore::ranges_backward": ranges.attend_ranges_backward,
    "torch_attn::_varlen_attn": varlen._varlen_attn,
    "torch_attn::_varlen_attn_backward": varlen._varlen_attn_backward,
}
"""Operators of attention in graphs -> their Python functions."""


class Graph(NamedTuple):
    """A graph of a layer: ``forward`` or ``backward``, and its inputs."""

    direction: str
    module: GraphModule
    inputs: list[Any]


class LaunchCounter(TorchDispatchMode):
    """Counts kernels that operators launch on tensors without values."""

    def __init__(self) -> None:
        super().__init__()
        self.launches = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name == "_flash_attention_forward":
            self.launches += 1
        elif name == "_flash_attention_backward":
            _, query, key = args[:3]
            is_grouped = query.shape[1] != key.shape[1]
            self.launches += 3 + 2 * is_grouped
        elif not (func.is_view or "empty" in name):
            self.launches += 1
        return func(*args, **(kwargs or {}))

    def count_triton(self, *_: Any, **__: Any) -> None:
        """Count a launch of a Triton kernel, in place of it."""
        self.launches += 1


def count_attention(graph: Graph) -> int:
    """Return the launches of the operators of attention in a graph."""
    with LaunchCounter() as counter:
        triton.JITFunction.run = counter.count_triton
        for node in graph.module.graph.nodes:
            operator = _operator_of(node)
            if operator is not None:
                args, kwargs = tree_map(_without_values, (node.args, node.kwargs))
                operator._init_fn(*args, **kwargs)
    return counter.launches


def _operator_of(node: torch.fx.Node) -> Any:
    """Return the Python function of an operator of attention; None for other nodes."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return None
    return OPERATORS.get(node.target.name().removesuffix(".default"))


def _without_values(value: Any) -> Any:
    """Return an argument of a node, as a tensor without values if it is a tensor."""
    if isinstance(value, torch.fx.Node):
        value = value.meta["val"]
    if isinstance(value, Tensor):
        shape = [layer_kernels.hint(size) for size in value.shape]
        strides = [layer_kernels.hint(stride) for stride in value.stride()]
        return torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
    return layer_kernels.hint(value) if isinstance(value, torch.SymInt) else value


def count_saved_bytes(graph: Graph) -> int:
    """Return the bytes that a forward graph keeps, without its inputs and its output."""
    (outputs,) = next(n for n in graph.module.graph.nodes if n.op == "output").args
    total = 0
    for node in {*outputs[1:]}:
        value = node.meta["val"] if isinstance(node, torch.fx.Node) else None
        if isinstance(value, Tensor) and node.op != "placeholder":
            shape = [layer_kernels.hint(size) for size in value.shape]
            total += math.prod(shape) * value.dtype.itemsize
    return total


def count_lowered(graphs: list[Graph]) -> list[Counter[str]]:
    """Lower each graph for a GPU; count its fused kernels and its products."""
    counters: list[Counter[str]] = []
    codegen = Scheduler.codegen

    def count(self: Any) -> Any:
        for node in self.nodes:
            if isinstance(node, NopKernelSchedulerNode):
                continue
            if not isinstance(node, ExternKernelSchedulerNode):
                counters[-1]["fused"] += 1
            elif "mm" in str(getattr(node.node, "python_kernel_name", "")):
                counters[-1]["products"] += 1
        return codegen(self)

    Scheduler.codegen = count
    AsyncCompile.triton = lambda self, *_, **__: lambda *_, **__: None
    layer_kernels.pretend(90)
    inductor.compile_threads = 1
    inductor.force_disable_caches = True
    for graph in graphs:
        counters.append(Counter())
        mode, inputs = layer_kernels.move(graph.module, graph.inputs)
        with tracing(TracingContext(mode)), mode:
            compile_fx_inner(
                graph.module, inputs, is_backward=graph.direction == "backward"
            )
    return counters


def measure() -> list[dict[str, Any]]:
    """Return a record for each model, layout and backend."""
    cases = [(m, y, b) for m in MODELS for y in LAYOUTS for b in BACKENDS]
    records = []
    graphs: list[Graph] = []
    for model, layout, backend in cases:
        torch._dynamo.reset()
        traced, num_tokens = layer_kernels.trace(model, layout, backend)
        forward, backward = (Graph(*parts) for parts in traced)
        graphs += forward, backward
        record = {
            "model": model,
            "layout": layout,
            "attention": backend,
            "kernels of attention": [
                count_attention(forward),
                count_attention(backward),
            ],
            "saved bytes a token": count_saved_bytes(forward) / num_tokens,
        }
        records.append(record)

    # After all traces: it changes torch for good.
    lowered = count_lowered(graphs)
    for i, record in enumerate(records):
        for name in ("fused", "products"):
            record[name] = [counter[name] for counter in lowered[2 * i : 2 * i + 2]]
        record["launches"] = sum(
            sum(record[name]) for name in ("fused", "products", "kernels of attention")
        )
    return records


def main() -> None:
    """Print the table."""
    arguments = parser(__doc__)
    arguments.add_argument("--json", default=str(RESULTS / "launches.json"))
    args = arguments.parse_args()
    torch_varlen._load_sum_copies = _triton_sum
    records = measure()
    columns = ["model", "layout", "attention", "fused", "products"]
    columns += ["kernels of attention", "launches"]
    columns += ["saved bytes a token"]
    show(columns, ([record[name] for name in columns] for record in records))
    save(
        args.json, {**provenance("torch", "triton", "transformers"), "records": records}
    )


def _triton_sum(_device: torch.device) -> Any:
    """Return the kernel that sums copies on a GPU."""
    module: Any = importlib.import_module("packstore.torch.attention._copies")
    return module.sum_copies


if __name__ == "__main__":
    main()
