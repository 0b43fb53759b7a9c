"""The forward calls of prepared models: modules know the row, or run once per sequence
of it.

Most models pass ``packed_layout`` on to their attention. Some drop it on the way, and
some call modules without it, so it is also set for the thread, and set again where
gradient checkpointing recomputes a layer. Models that packed attention cannot serve run
whole, once per sequence.

Linear attention, Mamba, RG-LRU, xLSTM and short convolutions carry a state along the
row, which must start at zero in each sequence. So these modules alone are called once
per logical sequence, with the kernels of unpacked training. A shared prefix is computed
again for each of its responses, in these modules only.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from packstore.errors import BackendError
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.batch.layout import AttentionLayout
from packstore.torch.models.implementations import (
    Implementations,
    keeping_implementations,
    read_implementations,
    set_attention,
    write_implementations,
)
from packstore.torch.models.mask import (
    LAYOUT,
    PREFIX,
    UnservedError,
    layout_of,
    using_layout,
)
from packstore.torch.models.registered import register
from packstore.torch.models.replaced import (
    ReplacedForward,
    put_back_forward,
    replace_forward,
    replaced_forward,
)
from packstore.torch.models.unwrap import (
    backbone_of,
    check_adapters,
    evaluating,
    text_config,
    uncompiled,
    unwrapped,
)

logger = logging.getLogger("packstore")

STATES = {
    *("attention_mask", "conv_mask", "mask", "seq_idx", "state"),
    *("cache_params", "past_key_value", "past_key_values"),
}
"""Arguments of modules that look at other tokens: a cache, a state, or a mask."""

CHECKPOINTS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Attributes that hold the checkpoint function: of transformers' layers, of torch's
wrapper.
"""

OTHER_INPUTS = (
    "pixel_values",
    "pixel_values_videos",
    "input_features",
    "mm_encoder_outputs",
)
"""Arguments of models that take images, videos or sound beside text."""

ONLY = "Call the model with **batch.model_inputs(), and nothing else"


def run_per_sequence(
    forward: Callable[..., Any],
    layout: AttentionLayout,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Calls `forward` once per logical sequence, and joins the outputs of their own
    segments.

    Arguments by token, `[1, T, ...]` or `[T]`, are cut. Outputs that are not by token
    become None; a number is kept if there is one sequence.
    """
    if type(layout) is not AttentionLayout:
        raise BackendError(
            "packed row: modules that run per sequence must have its tokens on one "
            "rank; found a "
            "row split over ranks. Train it with data parallelism alone."
        )
    # Empty segments pad the number of segments.
    sizes = [
        (n, m, real)
        for n, m, real in zip(*layout.sizes, layout.real_sizes, strict=True)
        if n
    ]
    leaves, tree = tree_flatten((args, dict(kwargs)))
    outputs = []
    for n, *cut in zip(
        layout.sizes[0], *(_cut(leaf, layout) for leaf in leaves), strict=True
    ):
        if n:
            args, kwargs = tree_unflatten(cut, tree)
            outputs.append(forward(*args, **kwargs))
    joined = tree_map(lambda *parts: _joined(parts, sizes), *outputs)
    values = tuple(joined.values()) if isinstance(joined, Mapping) else joined
    if not isinstance(
        values[0] if isinstance(values, tuple) and values else values, Tensor
    ):
        kind = getattr(outputs[0], "shape", type(outputs[0]).__name__)
        raise BackendError(
            "packed row: a module that runs per sequence must take and return "
            f"[1, {layout.num_queries}, …]; found an output of {kind}. {ONLY}."
        )
    return joined


def _cut(value: Any, layout: AttentionLayout) -> list[Any]:
    """The value for each sequence: the rows of a tensor by token, anything else
    whole.
    """
    tokens, runs = layout.num_queries, layout.sizes[1]
    shapes = (value.shape, value.shape[:2]) if isinstance(value, Tensor) else ()
    if (tokens,) not in shapes and (1, tokens) not in shapes:
        return [value] * len(runs)
    by_run = torch.split(layout.keys(value.reshape(tokens, 1, -1)), runs)
    shape = value.shape[1 + (value.ndim > 1) :]
    rows = (
        x[:n].reshape(n, *shape) for x, n in zip(by_run, layout.real_sizes, strict=True)
    )
    return [x[None] if value.ndim > 1 else x for x in rows]


def _joined(parts: tuple[Any, ...], sizes: list[tuple[int, int, int]]) -> Tensor | None:
    """The row's value of each sequence's; None for what is not by token."""
    first = parts[0]
    if not isinstance(first, Tensor):
        return None
    pairs = [*zip(parts, sizes, strict=True)]
    if all(part.shape[:2] == (1, real) for part, (_, _, real) in pairs):
        return torch.cat([_kept(part[0], *size) for part, size in pairs])[None]
    # Routers return theirs without the dimension of rows.
    if all(part.shape == (real, *part.shape[1:2]) for part, (_, _, real) in pairs):
        return torch.cat([_kept(part, *size) for part, size in pairs])
    return first if len(parts) == 1 and first.ndim == 0 else None


def _kept(rows: Tensor, queries: int, keys: int, real: int) -> Tensor:
    """The rows of a sequence's own segment, and zeros for its padding."""
    mine = rows[keys - queries :]
    return (
        mine
        if keys == real
        else torch.cat([mine, mine.new_zeros(keys - real, *mine.shape[1:])])
    )


def run_mixers_per_sequence(model: nn.Module, config: Any) -> None:
    """Makes mixers run per sequence: innermost modules that take a state but do not
    attend.
    """

    def takes(module: nn.Module) -> bool:
        if isinstance(module, nn.Embedding) or hasattr(
            type(module), "gradient_checkpointing"
        ):
            return False  # positions from a mask; and whole layers
        return not STATES.isdisjoint(inspect.signature(type(module).forward).parameters)

    takers = {
        path: module for path, module in model.named_modules() if path and takes(module)
    }
    for path, module in takers.items():
        code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
        attends = (
            code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names
        )  # by the registry
        innermost = not any(other.startswith(f"{path}.") for other in takers)
        if innermost and not attends and replaced_forward(module) is None:
            replace_forward(module, _PerSequenceForward(module, config))


class _PerSequenceForward(ReplacedForward):
    """The forward call of a mixer."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        super().__init__(module)
        self.config = config

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, packed_layout: Any = None, **kwargs: Any) -> Any:
        if not _is_ours(self.config):
            return self.original_forward(*args, **kwargs)
        layout = layout_of(packed_layout)
        if layout is None:
            raise BackendError(
                f"packed row: {type(self.module).__name__} must know the segments; "
                "found no "
                "layout. Call the model with **batch.model_inputs(), and recompute "
                "layers by "
                "gradient_checkpointing_enable(); for calls without packs, give the "
                "model back its "
                "own attention: model.set_attn_implementation('sdpa')."
            )
        return run_per_sequence(self.original_forward, layout, args, kwargs)


def _is_ours(config: Any) -> bool:
    """Returns True while a model has packed attention, not one of its own again."""
    return str(config._attn_implementation).startswith(PREFIX)


@dataclass
class PackedForwardState:
    """The attention of a prepared model, and why it runs once per sequence, if
    it does.
    """

    model: Any
    original: Implementations
    """The attention that its configs named before."""
    backend: str = ""
    """Backend of packed attention; empty: none was set."""
    reason: str = ""
    """Why the whole model runs once per sequence, with that attention; empty: it does
    not.
    """
    causal: bool = False
    """It was seen that no token changes the output of those before it."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy; in another process, transformers must know its attention
        first.
        """
        vars(self).update(state)
        if self.backend:
            register(self.backend)

    @property
    def is_packed(self) -> bool:
        """True if the model has packed attention now, not its original one again."""
        return _is_ours(self.model.config.get_text_config())

    def run_whole(self, reason: str) -> None:
        """Run the whole model once per sequence from now on, and log why."""
        self.reason = reason
        write_implementations(self.original)
        text = "%s runs whole once per sequence, so packing saves padding only: %s"
        logger.warning(text, type(self.model).__name__, reason)


def install_packed_forward(model: Any) -> PackedForwardState:
    """Replace the forward calls of a model and of what `find_head` calls, and
    `generate`, in place.

    Those of a model that was prepared before stay.
    """
    replacement = replaced_forward(model)
    if replacement is None:
        state = PackedForwardState(model, read_implementations(model))
    else:
        state = replacement.state
        state.reason = ""
        if not state.is_packed:
            state.original = read_implementations(model)

    backbone = backbone_of(model)
    for module in {model, backbone, getattr(backbone, "decoder", backbone)}:
        replacement = replaced_forward(module)
        if replacement is None:
            replace_forward(module, PackedForward(module, state))
        else:
            replacement.state = state
            put_back_forward(module)
    if hasattr(type(model), "generate") and not isinstance(
        model.generate, UnpackedGenerate
    ):
        model.generate = UnpackedGenerate(state, vars(model).get("generate"))
    return state


def take_back_attention(model: Any) -> None:
    """Give a prepared model packed attention again, where its user has set another
    since.
    """
    inner = unwrapped(model)
    state = replaced_forward(backbone_of(inner)).state
    if not (state.reason or state.is_packed):
        name = text_config(inner)._attn_implementation
        logger.info(
            "attention %r was set meanwhile; training goes on with packed attention",
            name,
        )
        set_attention(inner, register(state.backend))


class UnpackedGenerate:
    """Method `generate` of a prepared model, which runs with the model's original
    attention.

    Every other call without a layout is refused: it may be of a packed row, by mistake.
    """

    def __init__(
        self, state: PackedForwardState, before: Callable[..., Any] | None
    ) -> None:
        self.state = state
        self.before = before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; packed attention is back at the end, also after an error."""
        model = self.state.model
        with keeping_implementations(model), uncompiled(model):
            if self.state.is_packed:
                write_implementations(self.state.original)
            return self.__wrapped__(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.before or type(self.state.model).generate.__get__(self.state.model)


class PackedForward(ReplacedForward):
    """The forward call of a model or backbone; of a PEFT model, which has no state.

    Attributes:
        batch_call: called with the module and a packed batch, where a trainer passes
            one to the model; None: the module takes no batch.
    """

    def __init__(
        self, module: nn.Module, state: PackedForwardState | None = None
    ) -> None:
        super().__init__(module)
        self.state: Any = state
        self.batch_call: Callable[[Any, PackedBatch], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a packed row by its layout, a batch by the call for it, and the rest as
        before.
        """
        if self.batch_call is not None and args and isinstance(args[0], PackedBatch):
            return self.batch_call(self.module, args[0])
        layout = kwargs.get("packed_layout")
        if layout is None or self.state is None:
            return self.original_forward(*args, **kwargs)
        for name in OTHER_INPUTS:
            if kwargs.get(name) is not None:
                raise BackendError(
                    f"packed row: inputs must be text; found {name}. {ONLY}."
                )
        if not torch.compiler.is_compiling():
            check_adapters(self.state.model)  # PEFT leaves its configs there
        if self.state.reason:
            return self._run_per_sequence(layout, args, kwargs)
        # In a graph, a variable of the thread would break it.
        config = self.state.model.config.get_text_config()
        if torch.compiler.is_compiling() or not _is_ours(config):
            return self.original_forward(*args, **kwargs)
        if self.module.training and LAYOUT.get() is None:
            _wrap_checkpoints(self.module)
        try:
            with using_layout(layout):
                return self.original_forward(*args, **kwargs)
        except UnservedError as error:
            if kwargs.get("attention_mask") is not None or LAYOUT.get() is not None:
                raise
            self.state.run_whole(str(error).partition(". ")[0])
            return self._run_per_sequence(layout, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_per_sequence(
        self, layout: AttentionLayout, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        # Without positions, so that the model counts them itself; and with all logits,
        # as the rows to keep are those of the packed row.
        dropped = ("packed_layout", "position_ids", "logits_to_keep")
        kwargs = {name: value for name, value in kwargs.items() if name not in dropped}
        if not self.state.causal and "input_ids" in kwargs:
            _check_causal(self.original_forward, self.state.model, kwargs["input_ids"])
            self.state.causal = True
        return run_per_sequence(self.original_forward, layout, args, kwargs)


@torch.no_grad()
def _check_causal(
    forward: Callable[..., Any], model: nn.Module, ids_1T: Tensor
) -> None:
    """Refuses a model whose output changes with later tokens: in one call, the last of
    a few.
    """
    first = ids_1T[:, :8]
    other = first.clone()
    other[:, -1] = (other[:, -1] - 1).abs()
    with evaluating(model):
        outputs = [forward(input_ids=ids, use_cache=False) for ids in (first, other)]
    a, b = (next(iter(output.values()))[:, :-1].float() for output in outputs)
    if bool((a - b).abs().max() > 1e-2 * a.abs().max()):
        raise BackendError(
            f"use_packed_attention({type(model).__name__}): a token must not see those "
            "after it; "
            "found a model that looks ahead. Set is_decoder=True in its config if it "
            "has such a "
            "mode, or choose a causal LM."
        )


def _wrap_checkpoints(model: nn.Module) -> None:
    """Wraps the checkpoint functions that were set since the last call."""
    for module in model.modules():
        for name in CHECKPOINTS:
            checkpoint = vars(module).get(name)
            if (
                checkpoint is not None
                and getattr(checkpoint, "func", None) is not _checkpoint_with_layout
            ):
                setattr(module, name, partial(_checkpoint_with_layout, checkpoint))


def _checkpoint_with_layout(
    checkpoint: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls a checkpoint function so that the second run has the layout of the
    first.
    """
    if (
        torch.compiler.is_compiling()
    ):  # the layout is an input of the graph that holds both runs
        return checkpoint(function, *args, **kwargs)
    layout = LAYOUT.get()

    def run(*args: Any, **kwargs: Any) -> Any:
        with using_layout(layout):
            return function(*args, **kwargs)

    return checkpoint(run, *args, **kwargs)
