"""Batches as CUDA graphs: forward pass, loss and backward pass, captured once and then
replayed.

The host launches the few thousand kernels of a small model one by one, and takes longer
than the device that runs them. A graph is one launch. It repeats the captured kernels
with the same numbers, on the same memory. So batches have fixed shapes
(:func:`~packstore.torch.pad_batch`), and all that differs between them is copied into
tensors that the graph reads: the batch with its reference and weights, and the divisor
of the step. Numbers of Python, such as `max_seqlen`, must be the same in all batches.

The batch that kernels see is made anew in each call of the captured function, so that
what follows from it, such as the layout, is computed inside the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_unflatten

from packstore.errors import BackendError, ConfigError, quote, sentence
from packstore.torch.batch.batch import PackedBatch
from packstore.torch.losses.step_loss import LossOutput, StepDivisor, StepLoss

WARM_UPS = 3
"""Calls before the capture, as torch's documentation advises: kernels are compiled and
chosen, and workspaces allocated.
"""

NUMBERS = ("kind", "max_seqlen", "max_seqlen_k", "num_packs", "_shared_tokens")
"""Fields of a batch that are part of the graph, and must not change."""

TENSORS = (
    "input_ids",
    "labels",
    "position_ids",
    "segment_ids",
    "target_index",
    "cu_seqlens",
    "cu_seqlens_unpadded",
    "lengths",
    "parent_distances",
    "key_runs",
    "key_ranges",
    "rewards",
    "ref_logps",
    "example_ids",
    "num_responses",
    "weights",
    "pack_ids",
    "sources",
    "columns",
    "sequence_columns",
    "token_columns",
)
"""Fields of a batch that hold the inputs of the graph; all others follow from them."""

REDUCERS = (
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed._composable",
)
"""Modules of DDP and FSDP, which reduce gradients outside the graph."""

ALIGNMENT = 64
"""Bytes that inputs begin at multiples of; kernels load up to 16 at once."""

PAD = "Pad all batches: pad_batch(batch, **static_sizes(manifest, packs_per_batch))"


class StepGraph(Protocol):
    """Captures the work of a function, and replays it."""

    def warm_up(self, function: Callable[[], Any]) -> None:
        """Call the function as often as it takes until it repeats itself."""

    def capture(self, function: Callable[[], Any]) -> None:
        """Capture a call, without its effects."""

    def replay(self) -> None:
        """Repeat the captured work."""


class CudaGraph:
    """A CUDA graph of torch.

    Args:
        device: the CUDA device of all tensors.

    Raises:
        BackendError: the device is another.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise BackendError(
                sentence(
                    where="CUDA graphs",
                    rule="the model must be on a CUDA device",
                    found=device.type,
                    remedy="Leave cuda_graphs out",
                )
            )
        self._graph = torch.cuda.CUDAGraph()
        # One stream for warm-up and capture: autograd adds gradients on the stream
        # where it first met a parameter.
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm_up(self, function: Callable[[], Any]) -> None:
        """See :class:`StepGraph`."""
        # Of the model's device, which need not be the current one.
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                function()
        current.wait_stream(self._stream)

    def capture(self, function: Callable[[], Any]) -> None:
        """See :class:`StepGraph`."""
        # Other threads, as of a loader that pins memory, may go on.
        with torch.cuda.graph(
            self._graph, stream=self._stream, capture_error_mode="thread_local"
        ):
            function()

    def replay(self) -> None:
        """See :class:`StepGraph`."""
        self._graph.replay()


class _Inputs:
    """The tensors that a graph reads, in one allocation, which one copy fills.

    Args:
        fields: the first batch and its divisor, as :func:`_fields_of` returns them.
        device: device of the graph.
    """

    def __init__(self, fields: dict[str, Any], device: torch.device) -> None:
        paths_and_leaves, self._spec = tree_flatten_with_path(fields)
        self._names = [_name_of(path) for path, _ in paths_and_leaves]
        self._first_leaves = [leaf for _, leaf in paths_and_leaves]
        self._descriptions = [_describe(leaf) for leaf in self._first_leaves]
        self._places: list[slice] = []
        size = 0
        for tensor in _tensors(self._first_leaves):
            self._places.append(slice(size, size + tensor.nbytes))
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._memory = torch.empty(size, dtype=torch.uint8, device=device)
        self._tensors = self._views(self._memory)
        self.copy(fields)

    def copy(self, fields: dict[str, Any]) -> None:
        """Copy the values of another batch; raise ConfigError if its sizes differ."""
        paths_and_leaves, spec = tree_flatten_with_path(fields)
        if spec != self._spec:
            names = [_name_of(path) for path, _ in paths_and_leaves]
            differing = sorted({*names} ^ {*self._names})
            raise _shape_error(", ".join(differing), "a batch without it, or with it")
        leaves = [leaf for _, leaf in paths_and_leaves]
        for name, leaf, expected in zip(
            self._names, leaves, self._descriptions, strict=True
        ):
            if _describe(leaf) != expected:
                raise _shape_error(name, f"{_describe(leaf)} after {expected}")

        # Copies from other than page-locked memory would wait for the replay before.
        is_pinned = self._memory.is_cuda
        size = len(self._memory)
        on_host = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
        on_device = []
        for tensor, host_view, view in zip(
            _tensors(leaves), self._views(on_host), self._tensors, strict=True
        ):
            if tensor.device.type == "cpu":
                host_view.copy_(tensor)
            else:
                on_device.append((view, tensor))
        self._memory.copy_(on_host, non_blocking=True)
        for view, tensor in on_device:
            view.copy_(tensor, non_blocking=True)

    def read(self) -> tuple[PackedBatch, StepDivisor]:
        """Return a new batch and divisor of the tensors that the graph reads."""
        tensors = iter(self._tensors)
        leaves = [
            next(tensors) if isinstance(leaf, Tensor) else leaf
            for leaf in self._first_leaves
        ]
        fields = tree_unflatten(leaves, self._spec)
        divisor = StepDivisor(**fields.pop("divisor"))
        # What the host reads of scored batches would be that of the first.
        batch = PackedBatch(
            **fields, step=None, _signed_ids=None, cpu_rewards_and_counts=None
        )
        return batch, divisor

    def _views(self, memory: Tensor) -> list[Tensor]:
        """Return the tensors that lie in an allocation."""
        return [
            memory[place].view(tensor.dtype).view(tensor.shape)
            for place, tensor in zip(
                self._places, _tensors(self._first_leaves), strict=True
            )
        ]


class GraphedStep:
    """Forward pass, loss and backward pass of batches of one shape, as a CUDA graph.

    The first call captures the graph, and every call replays it. Gradients are added to
    those of the parameters, as ``loss.backward()`` does; a gradient that is None, as
    after ``zero_grad()``, starts at 0. Parameters must stay in their memory, and keep
    whether they are trained.

    Example::

        step = GraphedStep(PackedPolicy(model), loss_fn)
        manifest = packstore.open("prefs-8k").manifest
        sizes = static_sizes(manifest, packs_per_batch)  # as of the loader
        for batch in loader:
            output = step(
                pad_batch(batch, **sizes), divisor=count_step([batch], loss_fn)
            )
            if batch.step.last:
                optimizer.step()
                optimizer.zero_grad()

    Dropout draws anew in each replay: torch's default generators are safe in graphs.

    Args:
        model: called with a batch, it returns the log-probs that the loss takes, such
            as :class:`~packstore.torch.PackedPolicy`; not in DDP or FSDP, whose
            gradients are reduced outside the graph.
        loss_fn: the loss.
        reference: called with a batch inside the graph, it returns the log-probs of the
            reference, or None; default: those of the batch.
        backward: called with the loss of a batch; default: ``loss.backward()``.
        graph: called with the device of the model, it returns the mechanism of capture
            and replay.

    Raises:
        ConfigError: the model is inside DDP or FSDP, or has both dropout and gradient
            checkpointing; at the first call, the loss ranks responses on the host.
        BackendError: the model is not on a CUDA device, or the step cannot be captured.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: StepLoss,
        *,
        reference: Callable[[PackedBatch], Tensor | None] | None = None,
        backward: Callable[[Tensor], Any] = Tensor.backward,
        graph: Callable[[torch.device], StepGraph] = CudaGraph,
    ) -> None:
        self._model: Any = model
        self._loss_fn: Any = loss_fn
        self._reference = reference
        self._backward = backward
        self._device = next(model.parameters()).device
        self._graph = graph(self._device)
        _check_model(model)
        self._inputs: _Inputs | None = None
        # dtype -> the scalar results, `[n]`, which the graph overwrites.
        self._results: dict[torch.dtype, Tensor] = {}
        self._result_names: dict[torch.dtype, list[str]] = {}
        self._trained: list[nn.Parameter] = []
        self._gradients: list[Tensor] = []

    def __call__(self, batch: PackedBatch, *, divisor: StepDivisor) -> LossOutput:
        """Add the gradients of a batch to those of the parameters.

        Args:
            batch: a batch on any device, of the same sizes in each call.
            divisor: the divisor of its step, see :func:`count_step`.

        Returns:
            The loss of the batch, its sums and metrics, without gradients.

        Raises:
            ConfigError: a tensor has another shape than in the first call, or a number
                another value.
        """
        if self._inputs is None:
            check_graphed_loss(self._loss_fn, batch.kind)
        fields = _fields_of(batch, divisor)
        if self._inputs is None:
            self._inputs = self._capture(fields)
        else:
            self._inputs.copy(fields)
        self._attach_gradients()
        self._graph.replay()
        return self._read_results()

    # The captured work.

    def _capture(self, fields: dict[str, Any]) -> _Inputs:
        """Warm up, and capture the graph; gradients are afterwards as before."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        gradients_before = [p.grad for p in parameters]
        inputs = _Inputs(fields, self._device)

        def run() -> None:
            self._store_results(self._run(inputs))

        devices = [self._device] if self._device.type == "cuda" else []
        for parameter in parameters:
            parameter.grad = None
        try:
            # A run that resumes warms up once more, and must draw the same numbers.
            with torch.random.fork_rng(devices):
                self._graph.warm_up(run)
            # The others have no gradient, and an optimizer leaves them as they are.
            self._trained = [p for p in parameters if p.grad is not None]
            self._gradients = [torch.zeros_like(p) for p in self._trained]
            for parameter, gradient in zip(self._trained, self._gradients, strict=True):
                parameter.grad = gradient
            self._capture_or_raise(run)
        finally:
            # Also after an error, so that a caller may go on without the graph.
            for parameter, gradient in zip(parameters, gradients_before, strict=True):
                parameter.grad = gradient
        return inputs

    def _capture_or_raise(self, run: Callable[[], None]) -> None:
        """Capture a call; raise BackendError if it cannot be captured."""
        try:
            self._graph.capture(run)
        except RuntimeError as error:
            raise BackendError(
                sentence(
                    where="CUDA graph of a step",
                    rule="model and loss must run without the host reading tensors",
                    found=quote(str(error), 300),
                    remedy="Take an attention backend that docs/parallel.md names, or "
                    "leave cuda_graphs out",
                )
            ) from error

    def _run(self, inputs: _Inputs) -> dict[str, Tensor]:
        """Run forward pass, loss and backward pass; return the scalar results."""
        batch, divisor = inputs.read()
        # Weights that autocast has cast before would stay in the graph, and those that
        # it casts here belong to the graph.
        torch.clear_autocast_cache()
        ref_logps = None
        if self._reference is not None:
            with torch.no_grad():
                ref_logps = self._reference(batch)
        logps = self._model(batch)
        output = self._loss_fn(logps, batch, ref_logps=ref_logps, divisor=divisor)
        with torch.autocast(self._device.type, enabled=False):
            self._backward(output.loss)
        torch.clear_autocast_cache()
        return _flatten_output(output)

    def _store_results(self, results: Mapping[str, Tensor]) -> None:
        """Gather the results in one tensor of each dtype, to be read by one copy."""
        names: dict[torch.dtype, list[str]] = {}
        for name, value in results.items():
            names.setdefault(value.dtype, []).append(name)
        self._result_names = names
        self._results = {
            dtype: torch.stack([results[name].detach() for name in names_of_dtype])
            for dtype, names_of_dtype in names.items()
        }

    def _attach_gradients(self) -> None:
        """Let the parameters have the gradients that the graph adds to."""
        cleared = []
        for parameter, gradient in zip(self._trained, self._gradients, strict=True):
            if parameter.grad is None:
                cleared.append(gradient)
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient
        if cleared:
            torch._foreach_zero_(cleared)

    def _read_results(self) -> LossOutput:
        results: dict[str, Tensor] = {}
        for dtype, values in self._results.items():
            # A copy, as the next replay overwrites them.
            scalars = values.clone().unbind()
            results.update(zip(self._result_names[dtype], scalars, strict=True))
        return _unflatten_output(results)


def check_graphed_loss(loss_fn: StepLoss, kind: str) -> None:
    """Raise ConfigError for a loss that compares batches of this kind on the host."""
    if not loss_fn.ranks_on_host(kind):
        return
    raise ConfigError(
        sentence(
            where=f"CUDA graph of {loss_fn!r}",
            rule="its comparisons must not be chosen on the host",
            found=f"responses of kind {kind!r}, which it ranks by their rewards",
            remedy="Leave cuda_graphs out, or take a loss of single answers",
        )
    )


def _check_model(model: nn.Module) -> None:
    """Raise ConfigError for a model whose graph would not do what its calls do."""
    modules = list(model.modules())
    wrappers = [
        type(module).__name__
        for module in modules
        if any(x.__module__.startswith(REDUCERS) for x in type(module).__mro__)
    ]
    if wrappers:
        raise ConfigError(
            sentence(
                where="CUDA graph of a step",
                rule="weights and gradients must be whole, on one rank",
                found=wrappers[0],
                remedy="Give the model inside, and reduce gradients after the last "
                "batch of a step",
            )
        )
    # The second forward pass of a layer must draw what the first drew. It sets the
    # state of the generator back, which torch does not document inside graphs.
    is_checkpointed = any(
        getattr(module, "gradient_checkpointing", False)
        or hasattr(module, "checkpoint_fn")  # torch's CheckpointWrapper
        for module in modules
    )
    has_dropout = any(isinstance(x, _DropoutNd) and x.p > 0 for x in modules)
    if is_checkpointed and has_dropout:
        raise ConfigError(
            sentence(
                where="CUDA graph of a step",
                rule="gradient checkpointing must not repeat dropout",
                found="a model with both",
                remedy="Set the dropout of the adapter to 0, or leave one of them out",
            )
        )


def _fields_of(batch: PackedBatch, divisor: StepDivisor) -> dict[str, Any]:
    """Return the inputs of a graph by name: fields of the batch, without texts, and
    tensors of the divisor.
    """
    fields = {name: getattr(batch, name) for name in (*NUMBERS, *TENSORS)}
    fields["columns"] = {
        name: values
        for name, values in batch.columns.items()
        if isinstance(values, Tensor)
    }
    fields["divisor"] = {
        name: torch.as_tensor(value, dtype=torch.float64).reshape(())
        for name, value in vars(divisor).items()
        if value is not None
    }
    return fields


def _tensors(leaves: list[Any]) -> list[Tensor]:
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _name_of(path: Any) -> str:
    """Return the name of a field, such as ``columns.weight``."""
    return keystr(path).replace("['", ".").replace("']", "").lstrip(".")


def _describe(leaf: Any) -> Any:
    """Return what must not change of a field: shape and dtype, or a number's value."""
    if isinstance(leaf, Tensor):
        return f"{tuple(leaf.shape)} of {leaf.dtype}"
    return leaf


def _shape_error(name: str, actual: str) -> ConfigError:
    return ConfigError(
        sentence(
            where=f"CUDA graph of a step, {name}",
            rule="each batch must have the sizes of the first",
            found=actual,
            remedy=PAD,
        )
    )


def _flatten_output(output: LossOutput) -> dict[str, Tensor]:
    """Return all scalars of an output by name."""
    results = {
        name: value for name, value in vars(output).items() if isinstance(value, Tensor)
    }
    for name, (total, count) in output.metrics.items():
        results[f"sum of {name}"] = total
        results[f"count of {name}"] = count
    return results


def _unflatten_output(results: Mapping[str, Tensor]) -> LossOutput:
    """Return the output that :func:`_flatten_output` took apart."""
    metrics = {
        name.removeprefix("sum of "): (
            value,
            results[name.replace("sum of", "count of", 1)],
        )
        for name, value in results.items()
        if name.startswith("sum of ")
    }
    names = LossOutput.__dataclass_fields__.keys() - {"metrics"}
    fields = {name: results.get(name) for name in names}
    return LossOutput(**fields, metrics=metrics)  # type: ignore[arg-type]
