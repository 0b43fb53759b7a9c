"""Forward calls of prepared models, which bring the layout of a row to their layers.

Most models pass the keyword ``packed_layout`` on to their attention. Some drop it on
the way, so :class:`PackedForward` also sets it for the thread, and again where gradient
checkpointing recomputes a layer. A model that packed attention cannot serve is called
once per sequence.

Mixers, that is linear attention, Mamba, RG-LRU, xLSTM and short convolutions, carry a
state along the row, which must start at zero in each sequence. So a mixer is called
once per logical sequence (:class:`_PerSequenceForward`), with the kernels of unpacked
training. Shared tokens are computed for each sequence that has them, in mixers only.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
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

STATE_ARGUMENTS = {
    "attention_mask",
    "cache_params",
    "conv_mask",
    "mask",
    "past_key_value",
    "past_key_values",
    "seq_idx",
    "state",
}
"""Arguments of modules that look at other tokens: a cache, a state, or a mask."""

CHECKPOINT_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")
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

CALL_REMEDY = "Call the model with **batch.model_inputs(), and nothing else"


@dataclass(frozen=True)
class _Run:
    """One call of a module that runs per sequence: sizes of its logical sequence.

    A sequence is the shared prefix, if any, followed by the sequence's segment of the
    row. Padding is at the end.

    Attributes:
        segment: index of the segment in the row.
        num_queries: tokens of the segment, with padding.
        num_keys: tokens of the sequence, with padding.
        num_real: tokens of the sequence, without padding.
    """

    segment: int
    num_queries: int
    num_keys: int
    num_real: int

    def select_segment(self, rows: Tensor) -> Tensor:
        """Return the outputs of the segment, `[num_queries, ...]`, 0 at padding.

        Args:
            rows: outputs of the sequence, `[num_real, ...]`.
        """
        num_shared = self.num_keys - self.num_queries
        segment = rows[num_shared:]
        num_padding = self.num_keys - self.num_real
        if not num_padding:
            return segment
        return torch.cat([segment, segment.new_zeros(num_padding, *segment.shape[1:])])


def run_per_sequence(
    forward: Callable[..., Any],
    layout: AttentionLayout,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call `forward` once per logical sequence, and join the outputs of the segments.

    Tensors with a value per token, `[1, T, ...]` or `[T]`, are cut into sequences; all
    other arguments are passed to each call. Outputs without a value per token, such as
    a cache, become None; a scalar is returned only if there is one sequence.
    """
    if type(layout) is not AttentionLayout:
        raise BackendError(
            "packed row: modules that run per sequence must have its tokens on one "
            "rank; found a row split over ranks. Train it with data parallelism alone."
        )
    runs = _runs_of(layout)
    arguments, tree = tree_flatten((args, dict(kwargs)))
    cut_arguments = [_cut(argument, layout) for argument in arguments]
    outputs = []
    for run in runs:
        run_arguments = [parts[run.segment] for parts in cut_arguments]
        run_args, run_kwargs = tree_unflatten(run_arguments, tree)
        outputs.append(forward(*run_args, **run_kwargs))

    def join(*parts: Any) -> Tensor | None:
        return _join(parts, runs)

    output = tree_map(join, *outputs)
    if not isinstance(_first_value(output), Tensor):
        kind = getattr(outputs[0], "shape", type(outputs[0]).__name__)
        raise BackendError(
            "packed row: a module that runs per sequence must take and return "
            f"[1, {layout.num_queries}, …]; found an output of {kind}. {CALL_REMEDY}."
        )
    return output


def _runs_of(layout: AttentionLayout) -> list[_Run]:
    query_lengths, key_lengths = layout.sizes
    real_lengths = layout.real_sizes
    runs = []
    for segment, num_queries in enumerate(query_lengths):
        if num_queries:  # empty segments pad the number of segments
            run = _Run(
                segment=segment,
                num_queries=num_queries,
                num_keys=key_lengths[segment],
                num_real=real_lengths[segment],
            )
            runs.append(run)
    return runs


def _cut(value: Any, layout: AttentionLayout) -> list[Any]:
    """Return an argument for the call of each sequence, without padding.

    A tensor with a value per token is cut; any other value stays as it is.
    """
    num_tokens = layout.num_queries
    _, key_lengths = layout.sizes
    if not isinstance(value, Tensor):
        return [value] * len(key_lengths)
    has_batch_axis = value.shape[:2] == (1, num_tokens)
    if not has_batch_axis and value.shape != (num_tokens,):
        return [value] * len(key_lengths)

    shape_per_token = value.shape[2:] if has_batch_axis else ()
    # The tokens of all sequences, with a shared prefix before each of its segments.
    keys = layout.keys(value.reshape(num_tokens, 1, -1))
    parts = []
    for rows, num_real in zip(
        torch.split(keys, key_lengths), layout.real_sizes, strict=True
    ):
        part = rows[:num_real].reshape(num_real, *shape_per_token)
        parts.append(part[None] if has_batch_axis else part)
    return parts


def _join(parts: Sequence[Any], runs: list[_Run]) -> Tensor | None:
    """Join one output of all calls into the row's; None if it has no value per token.

    Args:
        parts: the output of each call.
        runs: the calls.
    """
    first = parts[0]
    if not isinstance(first, Tensor):
        return None
    pairs = list(zip(parts, runs, strict=True))
    if all(part.shape[:2] == (1, run.num_real) for part, run in pairs):
        return torch.cat([run.select_segment(part[0]) for part, run in pairs])[None]
    # Routers of experts return `[tokens, E]`, without a batch axis.
    if all(part.shape == (run.num_real, *part.shape[1:2]) for part, run in pairs):
        return torch.cat([run.select_segment(part) for part, run in pairs])
    is_scalar_of_one_call = len(parts) == 1 and first.ndim == 0
    return first if is_scalar_of_one_call else None


def _first_value(output: Any) -> Any:
    """Return the first value of an output, which may be a mapping or a tuple."""
    values = tuple(output.values()) if isinstance(output, Mapping) else output
    if isinstance(values, tuple) and values:
        return values[0]
    return values


def run_mixers_per_sequence(model: nn.Module, config: Any) -> None:
    """Make the mixers of a model run per sequence.

    A mixer is a module whose forward call takes a state or a mask, which calls no
    attention, and has no such module inside.
    """
    stateful = {
        path: module
        for path, module in model.named_modules()
        if path and _takes_state(module)
    }
    for path, module in stateful.items():
        is_innermost = not any(
            inner_path.startswith(f"{path}.") for inner_path in stateful
        )
        is_mixer = is_innermost and not _attends(module)
        if is_mixer and replaced_forward(module) is None:
            replace_forward(module, _PerSequenceForward(module, config))


def _takes_state(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding):
        return False  # it takes a mask to compute positions
    if hasattr(type(module), "gradient_checkpointing"):
        return False  # a decoder layer
    parameters = inspect.signature(type(module).forward).parameters
    return not STATE_ARGUMENTS.isdisjoint(parameters)


def _attends(module: nn.Module) -> bool:
    """Return True if a module calls attention by transformers' registry."""
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


class _PerSequenceForward(ReplacedForward):
    """The forward call of a mixer: once per sequence of a packed row."""

    def __init__(self, module: nn.Module, config: Any) -> None:
        super().__init__(module)
        self.config = config

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, packed_layout: Any = None, **kwargs: Any) -> Any:
        if not _has_packed_attention(self.config):
            return self.original_forward(*args, **kwargs)
        layout = layout_of(packed_layout)
        if layout is None:
            raise BackendError(
                f"packed row: {type(self.module).__name__} must know the segments; "
                "found no layout. Call the model with **batch.model_inputs(), and "
                "recompute layers by gradient_checkpointing_enable(); for calls "
                "without packs, give the model back its own attention: "
                "model.set_attn_implementation('sdpa')."
            )
        return run_per_sequence(self.original_forward, layout, args, kwargs)


def _has_packed_attention(config: Any) -> bool:
    """Return True while a model has packed attention, not one of its own again."""
    return str(config._attn_implementation).startswith(PREFIX)


@dataclass
class PackedForwardState:
    """State of a prepared model, which its replaced methods share.

    Attributes:
        model: the model.
        original: the attention of its configs before the preparation.
        backend: backend of packed attention; empty: none was set.
        reason: why the model runs once per sequence, with its original attention;
            empty: it runs on packed rows.
        is_known_causal: True once a trial has shown that no token changes the output of
            earlier ones.
    """

    model: Any
    original: Implementations
    backend: str = ""
    reason: str = ""
    is_known_causal: bool = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy or pickle.

        Another process must register packed attention with transformers first.
        """
        vars(self).update(state)
        if self.backend:
            register(self.backend)

    @property
    def is_packed(self) -> bool:
        """True while the model has packed attention; its user may set another one."""
        return _has_packed_attention(self.model.config.get_text_config())

    def run_whole(self, reason: str) -> None:
        """Run the whole model once per sequence from now on, and log why."""
        self.reason = reason
        write_implementations(self.original)
        text = "%s runs whole once per sequence, so packing saves padding only: %s"
        logger.warning(text, type(self.model).__name__, reason)


def install_packed_forward(model: Any) -> PackedForwardState:
    """Replace `generate` and the forward calls of a model and its backbone, in place.

    A model that was prepared before keeps its replacements, and its state is reset.
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
    # All modules that are called with a row: log-probs call the backbone without the
    # model, and OPT's causal LM calls the decoder in its backbone.
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
    """Give a prepared model packed attention again, after its user set another one."""
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
    """Method `generate` of a prepared model: runs with the original attention.

    Only this method switches attention by itself. Packed attention refuses every other
    call without a layout, as its input may be a packed row by mistake.
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
        """The `generate` that this object replaces; `inspect` takes its signature."""
        return self.before or type(self.state.model).generate.__get__(self.state.model)


class BatchForward(ReplacedForward):
    """A forward call that also takes a packed batch, as a Trainer calls its model.

    Attributes:
        batch_call: called with the module and the batch; None: the module takes no
            batches.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.batch_call: Callable[[Any, PackedBatch], Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call `batch_call` with a batch; run any other input."""
        if self.batch_call is not None and args and isinstance(args[0], PackedBatch):
            return self.batch_call(self.module, args[0])
        return self.run(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the output of the model."""
        return self.original_forward(*args, **kwargs)


class PackedForward(BatchForward):
    """The forward call of a prepared model or its backbone, which takes packed rows."""

    def __init__(self, module: nn.Module, state: PackedForwardState) -> None:
        super().__init__(module)
        self.state = state

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Compute a packed row by its layout, and any other input as before."""
        layout = kwargs.get("packed_layout")
        if layout is None:
            return self.original_forward(*args, **kwargs)
        for name in OTHER_INPUTS:
            if kwargs.get(name) is not None:
                raise BackendError(
                    f"packed row: inputs must be text; found {name}. {CALL_REMEDY}."
                )
        if not torch.compiler.is_compiling():
            # Adapters may be new, and PEFT leaves their configs on the model.
            check_adapters(self.state.model)
        if self.state.reason:
            return self._run_per_sequence(layout, args, kwargs)
        # A context variable would break the graph of a compiled model.
        if torch.compiler.is_compiling() or not self.state.is_packed:
            return self.original_forward(*args, **kwargs)
        return self._run_packed(layout, args, kwargs)

    def _run_packed(
        self, layout: AttentionLayout, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """Run with packed attention; run per sequence for good if that is refused."""
        is_outermost = LAYOUT.get() is None  # the call of the backbone is inside
        if self.module.training and is_outermost:
            _wrap_checkpoint_functions(self.module)
        try:
            with using_layout(layout):
                return self.original_forward(*args, **kwargs)
        except UnservedError as error:
            if kwargs.get("attention_mask") is not None or not is_outermost:
                raise
            reason, _, _ = str(error).partition(". ")  # without its remedies
            self.state.run_whole(reason)
            return self._run_per_sequence(layout, args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _run_per_sequence(
        self, layout: AttentionLayout, args: Any, kwargs: dict[str, Any]
    ) -> Any:
        kwargs = dict(kwargs)
        kwargs.pop("packed_layout", None)
        kwargs.pop("position_ids", None)  # the model counts them itself
        kwargs.pop("logits_to_keep", None)  # it counts tokens of the packed row
        if not self.state.is_known_causal and "input_ids" in kwargs:
            _check_causal(self.original_forward, self.state.model, kwargs["input_ids"])
            self.state.is_known_causal = True
        return run_per_sequence(self.original_forward, layout, args, kwargs)


@torch.no_grad()
def _check_causal(
    forward: Callable[..., Any], model: nn.Module, ids_1T: Tensor
) -> None:
    """Raise if the last of a few tokens changes the output of earlier ones."""
    ids = ids_1T[:, :8]
    changed_ids = ids.clone()
    changed_ids[:, -1] = (ids[:, -1] - 1).abs()  # another id of the vocabulary
    with evaluating(model):
        output = forward(input_ids=ids, use_cache=False)
        changed_output = forward(input_ids=changed_ids, use_cache=False)

    logits = next(iter(output.values()))[:, :-1].float()
    changed_logits = next(iter(changed_output.values()))[:, :-1].float()
    difference = (logits - changed_logits).abs().max()
    if bool(difference > 1e-2 * logits.abs().max()):
        raise BackendError(
            f"use_packed_attention({type(model).__name__}): a token must not see later "
            "ones; found a model that looks ahead. Set is_decoder=True in its config "
            "if it has such a mode, or choose a causal LM."
        )


def _wrap_checkpoint_functions(model: nn.Module) -> None:
    """Wrap checkpoint functions that were set since the last call.

    Gradient checkpointing runs a layer again in the backward pass, when no layout is
    set. Each call looks at all modules, as any may be replaced, or given a checkpoint
    function, between two calls.
    """
    # Not by `modules()`, which builds the name of each module: it takes three times as
    # long, 0.3 ms a batch for 28 layers.
    visited: set[nn.Module] = set()
    pending: list[nn.Module | None] = [model]
    while pending:
        module = pending.pop()
        if module is None or module in visited:
            continue
        visited.add(module)
        pending.extend(module._modules.values())
        attributes = vars(module)
        for name in CHECKPOINT_FUNCTIONS:
            checkpoint = attributes.get(name)
            if checkpoint is None:
                continue
            if getattr(checkpoint, "func", None) is not _checkpoint_with_layout:
                setattr(module, name, partial(_checkpoint_with_layout, checkpoint))


def _checkpoint_with_layout(
    checkpoint: Any, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a checkpoint function so that the second run has the layout of the first.

    Args:
        checkpoint: the original checkpoint function.
        function: the function that it runs twice.
        args: arguments of both.
        kwargs: arguments of both.
    """
    if torch.compiler.is_compiling():
        # The layout is an input of the graph, which holds both runs.
        return checkpoint(function, *args, **kwargs)
    layout = LAYOUT.get()

    def run(*args: Any, **kwargs: Any) -> Any:
        with using_layout(layout):
            return function(*args, **kwargs)

    return checkpoint(run, *args, **kwargs)
