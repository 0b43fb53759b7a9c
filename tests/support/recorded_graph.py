"""CUDA graphs on a CPU: operators are recorded with the tensors that they read and
write, and repeated on these.

As in a CUDA graph, results keep their memory, and numbers of Python stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class RecordedGraph(TorchDispatchMode):
    """Captures a function, and replays it; see ``StepGraph``.

    Args:
        device: the CPU.
        allows_reads: the host may read tensors whose values are the same in all
            replays, as in a check that a GPU leaves out.

    Attributes:
        num_calls: how often functions were called for warm-up and capture.
        num_replays: how often the graph was replayed.
    """

    def __init__(self, device: torch.device, *, allows_reads: bool = False) -> None:
        super().__init__()
        assert device.type == "cpu"
        self.allows_reads = allows_reads
        self.num_calls = 0
        self.num_replays = 0
        self._operators: list[tuple[Any, Any, Any, Any, list[Tensor]]] = []
        self._made: set[int] = set()
        self._overwritten: dict[int, tuple[Tensor, Tensor]] = {}

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Call the function twice."""
        for _ in range(2):
            self.num_calls += 1
            function()

    def capture(self, function: Callable[[], Any]) -> None:
        """Record a call, and undo it: while a CUDA graph is captured, nothing runs."""
        self.num_calls += 1
        with torch.random.fork_rng([]), self:
            function()
        for tensor, value in self._overwritten.values():
            tensor.detach().copy_(value)
        for *_, new_results in self._operators:
            for tensor in new_results:
                tensor.detach().zero_()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and record it with its new results."""
        kwargs = kwargs or {}
        if _reads(func) and not self.allows_reads:
            raise RuntimeError("the host reads a tensor while a graph is captured")
        if func._schema.is_mutable:
            for tensor in _tensors((args, kwargs)):
                key = _memory(tensor)
                if key not in self._made and key not in self._overwritten:
                    self._overwritten[key] = (tensor, tensor.detach().clone())
        results = func(*args, **kwargs)
        new_results = _new_results(results, args, kwargs)
        self._made.update(_memory(tensor) for tensor in new_results)
        self._operators.append((func, args, kwargs, results, new_results))
        return results

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat all operators on the memory of the record."""
        self.num_replays += 1
        # Casts are among the operators, as they are in a CUDA graph.
        with torch.autocast("cpu", enabled=False):
            self._repeat_operators()

    def _repeat_operators(self) -> None:
        for func, args, kwargs, first_results, new_results in self._operators:
            results = func(*args, **kwargs)
            if _reads(func):
                assert results == first_results
            repeated = _new_results(results, args, kwargs)
            for tensor, value in zip(new_results, repeated, strict=True):
                tensor.detach().copy_(value)


def _reads(operator: Any) -> bool:
    """Return True for the operator under ``item()``."""
    return operator.overloadpacket.__name__ == "_local_scalar_dense"


def _new_results(results: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the results with memory of their own: not views, nor written in place."""
    memory = {_memory(tensor) for tensor in _tensors((args, kwargs))}
    return [tensor for tensor in _tensors(results) if _memory(tensor) not in memory]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]
