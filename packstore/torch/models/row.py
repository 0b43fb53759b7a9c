"""Runs a module once per sequence of a packed row: cuts its arguments and joins its outputs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from packstore.errors import BackendError, sentence
from packstore.torch.batch.layout import AttentionLayout

LAYOUT: ContextVar[AttentionLayout | None] = ContextVar("packed_layout", default=None)
"""The layout of the row that this thread computes, for modules whose callers do not pass it on."""


@contextmanager
def computing(layout: AttentionLayout | None) -> Iterator[None]:
    """Sets :data:`LAYOUT` while a block runs."""
    token = LAYOUT.set(layout)
    try:
        yield
    finally:
        LAYOUT.reset(token)


class Replaced:
    """The forward call of one module, in place of its own; copied and pickled with the module.

    Not a hook, as PEFT calls `forward` directly, past the hooks.

    Attributes:
        module: the module.
        before: a forward call that was set on the module earlier, such as Accelerate's, or None.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module, self.before = module, vars(module).get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the module's own forward; nn.Module takes any callable in its place."""
        return self.own(*args, **kwargs)

    def own(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the forward without ours; of the module's present class, which FSDP2 replaces."""
        if args and args[0] is self.module:  # Accelerate makes a method of what it finds
            args = args[1:]
        if self.before is not None:
            return self.before(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.before or type(self.module).forward.__get__(self.module))


def run_each(
    forward: Callable[..., Any],
    layout: AttentionLayout,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls `forward` once per logical sequence, and returns the row's output.

    Arguments by token, `[1, T, ...]` or `[T]`, also inside tuples and mappings, are cut; others are
    passed as they are. With shared prefixes each sequence gets its whole prompt; of its output,
    the tokens of its own segment are kept. Padding at the end of a segment is left out, and its
    output is zero. Outputs by token are `[1, T, ...]`, or `[T, E]` as those
    of routers. Others, such as a state, become None; a number is kept if there is one sequence.

    Raises:
        BackendError: the output is not by token; or the row is split over context-parallel ranks.
    """
    if type(layout) is not AttentionLayout:
        must = "modules that run per sequence must have its tokens on one rank"
        do = "Train it with data parallelism alone"
        raise BackendError(sentence("packed row", must, "a row split over ranks", do))
    # Empty segments pad the number of segments.
    sizes = [(n, m, real) for n, m, real in zip(*layout.sizes, layout.real_sizes, strict=True) if n]
    cut = zip(layout.sizes[0], _cut((args, kwargs), layout), strict=True)
    outputs = [forward(*args_, **kwargs_) for n, (args_, kwargs_) in cut if n]
    joined = _joined(outputs, sizes)
    if not _has_tensor(joined):
        must = f"a module that runs per sequence must take and return [1, {layout.num_queries}, …]"
        found = f"an output of {type(outputs[0]).__name__}"
        if isinstance(outputs[0], Tensor):
            found = f"an output of shape {tuple(outputs[0].shape)}"
        do = "Call the model with **batch.model_inputs(), and nothing else"
        raise BackendError(sentence("packed row", must, found, do))
    return joined


def _cut(value: Any, layout: AttentionLayout) -> list[Any]:
    """The value for each sequence."""
    tokens, runs = layout.num_queries, layout.sizes[1]
    if isinstance(value, Tensor) and (value.shape[:2] == (1, tokens) or value.shape == (tokens,)):
        by_run = torch.split(layout.keys(value.reshape(tokens, 1, -1)), runs)
        shape = value.shape[1 + (value.ndim > 1) :]
        rows = (x[:n].reshape(n, *shape) for x, n in zip(by_run, layout.real_sizes, strict=True))
        return [x[None] if value.ndim > 1 else x for x in rows]
    elif type(value) is dict:
        cut = {name: _cut(part, layout) for name, part in value.items()}
        return [{name: part[i] for name, part in cut.items()} for i in range(len(runs))]
    elif type(value) in (tuple, list):
        parts = [_cut(part, layout) for part in value]
        return [type(value)(part[i] for part in parts) for i in range(len(runs))]
    return [value] * len(runs)


def _joined(parts: list[Any], sizes: list[tuple[int, int, int]]) -> Any:
    """The row's value of each sequence's; None for what is not by token."""
    first = parts[0]
    if isinstance(first, Tensor):
        pairs = [*zip(parts, sizes, strict=True)]
        if all(part.shape[:2] == (1, real) for part, (_, _, real) in pairs):
            return torch.cat([_kept(part[0], *size) for part, size in pairs])[None]
        # Routers return theirs without the dimension of rows.
        if all(part.shape == (real, *part.shape[1:2]) for part, (_, _, real) in pairs):
            return torch.cat([_kept(part, *size) for part, size in pairs])
        return first if len(parts) == 1 and first.ndim == 0 else None
    if isinstance(first, Mapping):  # also the outputs of transformers' models
        return type(first)(**{k: _joined([p[k] for p in parts], sizes) for k in first})
    if isinstance(first, tuple):
        return tuple(_joined([*each], sizes) for each in zip(*parts, strict=True))
    return None


def _kept(rows: Tensor, queries: int, keys: int, real: int) -> Tensor:
    """The rows of a sequence's own segment, and zeros for its padding."""
    mine = rows[keys - queries :]
    return mine if keys == real else torch.cat([mine, mine.new_zeros(keys - real, *mine.shape[1:])])


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        value = tuple(value.values())
    return isinstance(value[0] if isinstance(value, tuple) and value else value, Tensor)
