"""The random generators of a process as JSON values: python's, numpy's, torch's."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """Returns the state of this process's generators."""
    version, numbers, gauss = random.getstate()
    legacy: Any = np.random.get_state()  # noqa: NPY002 (models and libraries still draw from it)
    kind, keys, *rest = legacy
    state = {
        "python": [version, list(numbers), gauss],
        "numpy": [kind, keys.tolist(), *rest],
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restores the generators of this process."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    np.random.set_state(tuple(state["numpy"]))  # noqa: NPY002
    torch.set_rng_state(_tensor(state["torch"]))
    if torch.cuda.is_available() and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _text(state: torch.Tensor) -> str:
    return state.numpy().tobytes().hex()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
