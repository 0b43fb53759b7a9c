"""Compiles the layers of a model for a GPU, without one: ``layer_kernels.py MODEL
LAYOUT SM``.

The layers are traced on a CPU, as ``compile_layers`` has it. Their graphs are moved to
a CUDA device that only torch's compiler sees, lowered, and their kernels compiled for
compute capability SM by Triton. Prints, as JSON: frames and graph breaks of the trace;
kernels, the most registers and bytes of stack of one; bytes by token that all kernels
read and write.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo.device_interface as interfaces
import torch._inductor.config as inductor
import torch._subclasses.fake_tensor as fakes
import torch.utils._triton
import triton
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import TracingContext, tracing
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.runtime import triton_helpers
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.scheduler import (
    ExternKernelSchedulerNode,
    NopKernelSchedulerNode,
    Scheduler,
)
from torch.fx import GraphModule
from torch.fx.node import map_arg
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOKENS = 1024
CUDA = torch.device("cuda", 0)


def hint(size: Any) -> int:
    """The value of a size that is a symbol, which stays one."""
    return size if isinstance(size, int) else size.node.hint


def trace(
    name: str, layout: str, attention: str = "auto"
) -> tuple[list[tuple[str, GraphModule, list[Any]]], int]:
    """Graphs of a layer's forward and backward pass with their inputs; tokens of the
    row.
    """
    import transformers
    from gpu.predictions import MODELS
    from gpu.sizes import batch_of, cut, lengths

    from packstore.torch import compile_layers, use_packed_attention
    from packstore.torch.attention import flash

    flash.runs_on, flash.capability = lambda _: True, lambda _: (9, 0)
    flash.DEVICES = ("cpu", "cuda")
    graphs: list[tuple[str, GraphModule, list[Any]]] = []

    def keep(which: str) -> Any:
        def compiler(graph: GraphModule, inputs: list[Any]) -> Any:
            graphs.append((which, graph, inputs))
            (outputs,) = next(
                node for node in graph.graph.nodes if node.op == "output"
            ).args
            values = [x if x is None else x.meta["val"] for x in outputs]

            def zeros(*_: Any) -> list[Any]:
                return [
                    torch.zeros([hint(n) for n in x.shape], dtype=x.dtype)
                    if isinstance(x, Tensor)
                    else x
                    if x is None
                    else hint(x)
                    for x in values
                ]

            return make_boxed_func(zeros)

        return compiler

    rows = cut(lengths("hh", 500, 500), layout, TOKENS)[0]
    batch, family = batch_of(rows, layout, 64), name.split("-")[0]
    config = {
        **MODELS[name],
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "use_cache": False,
    }
    settings = getattr(transformers, f"{family}Config")(**config)
    model = getattr(transformers, f"{family}ForCausalLM")(settings).bfloat16().train()
    backend = aot_autograd(
        fw_compiler=keep("forward"),
        bw_compiler=keep("backward"),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    compile_layers(use_packed_attention(model, attention), backend=backend)
    model.model(**batch.model_inputs()).last_hidden_state.sum().backward()
    return graphs, batch.num_tokens


def pretend(capability: int) -> None:
    """Lets torch's compiler see a CUDA device, which can be asked but not used."""
    card = SimpleNamespace(
        name="no GPU", major=capability // 10, warp_size=32, multi_processor_count=132,
        max_threads_per_block=1024, max_threads_per_multi_processor=2048,
        regs_per_multiprocessor=65536,
    )  # fmt: skip
    driver = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", capability, 32)
    )
    triton.runtime.driver.set_active(driver)
    triton_helpers.set_driver_to_gpu = lambda: None
    torch.version.cuda = "13.0"
    torch._C._cuda_getCurrentRawStream = lambda _: 0
    fakes.init_gpu_context = lambda *_: None
    interfaces._device_initialized = True
    answers: dict[str, Any] = {
        "is_available": True, "device_count": 1, "current_device": 0, "device": nullcontext(),
        "get_device_properties": card, "get_device_capability": (card.major, 0),
        "get_device_name": card.name, "set_rng_state": None,
        "get_rng_state": torch.zeros(16, dtype=torch.uint8),
    }  # fmt: skip
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    interface = interfaces.CudaInterface
    interface.is_available = staticmethod(lambda: True)
    interface.get_compute_capability = staticmethod(lambda *_: capability)
    for place in (interface, interface.Worker):
        place.get_device_properties = staticmethod(lambda *_: card)
    for asked in vars(torch.utils._triton).values():  # what was found without a device
        getattr(asked, "cache_clear", lambda: None)()
    # The method, unlike the operator, asks for a device also of tensors without values.
    torch.Tensor.copy_ = lambda *args: torch.ops.aten.copy_(*args)


def move(graph: GraphModule, inputs: list[Any]) -> tuple[Any, list[Any]]:
    """Moves a graph to the device; returns the mode of its tensors without values, and
    inputs.
    """
    mode = next(x.fake_mode for x in inputs if isinstance(x, Tensor))
    with mode:
        given = [
            torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=CUDA)
            if isinstance(x, Tensor)
            else x
            for x in inputs
        ]
        values, rest = {}, iter(given)
        for node in graph.graph.nodes:
            if "device" in node.kwargs:
                node.kwargs = {**node.kwargs, "device": CUDA}
            node.args = tuple(
                CUDA if isinstance(x, torch.device) else x for x in node.args
            )
            if node.op == "placeholder":
                values[node] = next(rest)
            elif node.op == "get_attr":
                values[node] = getattr(graph, node.target)
            elif node.op == "call_function":
                args, named = map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **named)
            if node in values:
                node.meta["val"] = values[node]
    graph.recompile()
    return mode, given


def compile_for(
    capability: int, graphs: list[tuple[str, GraphModule, list[Any]]]
) -> Any:
    """Lowers and compiles the graphs; returns all kernels, and the bytes that they
    move.
    """
    kernels: list[Any] = []
    moved = 0
    codegen = Scheduler.codegen

    def count(self: Any) -> Any:
        nonlocal moved
        for node in self.nodes:
            if not isinstance(node, ExternKernelSchedulerNode | NopKernelSchedulerNode):
                moved += node.get_read_write_buffers_sizes()
        return codegen(self)

    def take(self: Any) -> None:
        kernels.extend(result.kernel for result in self.compile_results)
        self.launchers = [lambda *_, **__: None]

    Scheduler.codegen, CachingAutotuner._make_launchers = count, take
    pretend(capability)
    inductor.compile_threads = 1
    inductor.force_disable_caches = True
    inductor.use_static_cuda_launcher = inductor.use_static_triton_launcher = False
    for which, graph, inputs in graphs:
        mode, given = move(graph, inputs)
        with tracing(TracingContext(mode)), mode:
            compile_fx_inner(graph, given, is_backward=which == "backward")
    return kernels, moved


def usage(kernel: Any) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile() as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        told = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True
        )
    found = re.search(r"REG:(\d+) STACK:(\d+)", told.stdout + told.stderr)
    assert found, told
    return int(found[1]), int(found[2])


def usage_for(
    capability: int,
    kernel: Any,
    types: dict[str, str],
    fixed: dict[str, Any],
    aligned: Sequence[str] = (),
    **options: Any,
) -> tuple[int, int]:
    """The usage of one of our kernels, compiled for a GPU without one.

    `aligned` names arguments that are multiples of 16.
    """
    places = {name: i for i, name in enumerate(types)}
    attributes = {(places[name],): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=kernel, signature=types, constexprs=fixed, attrs=attributes)
    target = GPUTarget("cuda", capability, 32)
    return usage(triton.compile(source, target=target, options=options))


def main(name: str, layout: str, capability: int) -> None:
    graphs, tokens = trace(name, layout)
    frames = dict(counters["frames"]), sum(counters["graph_break"].values())
    kernels, moved = compile_for(capability, graphs)
    registers, stack = map(max, zip(*map(usage, kernels), strict=True))
    names = ("frames", "graph_breaks", "kernels", "registers", "stack", "bytes")
    figures = (*frames, len(kernels), registers, stack, moved / tokens)
    print(json.dumps(dict(zip(names, figures, strict=True))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
