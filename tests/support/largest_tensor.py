"""The size of the largest tensor of a computation."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LargestTensor(TorchDispatchMode):
    """A context that notes the elements of the largest tensor that is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **kwargs or {})
        if isinstance(out, Tensor):
            self.elements = max(self.elements, out.numel())
        return out
