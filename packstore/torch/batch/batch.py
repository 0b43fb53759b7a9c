"""One or more packs as a flat row of tokens, with the tensors that attention and loss need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from packstore.format.arrays import IGNORE_INDEX, Column, Int64
from packstore.io.shards.signed_packs import labels_of, unsigned
from packstore.registry import Registry
from packstore.torch.batch.layout import AttentionLayout, shared_lengths
from packstore.torch.batch.targets import Targets
from packstore.torch.schedule.steps import StepInfo

Style = Literal["hf", "flash", "megatron", "padded"]

STYLES: Registry[Callable[[PackedBatch], dict[str, Any]]] = Registry(
    "style of model_inputs",
    {
        "hf": "packstore.torch.batch.inputs:hf",
        "flash": "packstore.torch.batch.inputs:flash",
        "megatron": "packstore.torch.batch.inputs:megatron",
        "padded": "packstore.torch.batch.inputs:padded",
    },
)


class _Derived:
    """A field computed from others on first access, on their device."""

    def __init__(self, make: Callable[[PackedBatch], Tensor | None]) -> None:
        self._make = make

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, batch: PackedBatch | None, owner: type) -> Any:
        if batch is None:  # so that the dataclass finds no default
            raise AttributeError(self._name)
        value = vars(batch)[self._name] = self._make(batch)
        return value


def _derived(make: Callable[[PackedBatch], Tensor | None]) -> Any:
    return _Derived(make)


def _input_ids(batch: PackedBatch) -> Tensor:
    return _wide(unsigned, batch._signed)


def _labels(batch: PackedBatch) -> Tensor:
    return _wide(labels_of, batch._signed)


def _wide(change: Callable[[Any], Any], signed: Tensor) -> Tensor:
    """Uses numpy on a CPU: torch would split this little work over threads and wait for them."""
    if signed.device.type == "cpu":
        return torch.from_numpy(change(signed.numpy()).astype(np.int64))
    wide: Tensor = change(signed).long()
    return wide


def _segment_ids(batch: PackedBatch) -> Tensor:
    starts = batch.cu_seqlens
    if starts.device.type == "cpu":
        return torch.from_numpy(np.repeat(np.arange(batch.num_segments), np.diff(starts.numpy())))
    segments = torch.arange(batch.num_segments, device=starts.device)
    return segments.repeat_interleave(starts.diff(), output_size=batch.num_tokens)


def _position_ids(batch: PackedBatch) -> Tensor:
    ends, lengths = batch.cu_seqlens[1:], batch.lengths
    if ends.device.type == "cpu":
        places, shifts = np.arange(batch.num_tokens), lengths.numpy() - ends.numpy()
        places += np.repeat(shifts.astype(np.int64), np.diff(batch.cu_seqlens.numpy()))
        return torch.from_numpy(places)
    tokens = torch.arange(batch.num_tokens, device=ends.device)
    return tokens.add_((lengths - ends).long().index_select(0, batch.segment_ids))


def _target_index(batch: PackedBatch) -> Tensor:
    joint = "_signed" in vars(batch)
    tokens, starts = batch._signed if joint else batch.labels, batch.cu_seqlens[:-1]
    if tokens.device.type == "cpu":
        on = tokens.numpy() >= 0
        on[starts.numpy()] = False
        return torch.from_numpy(np.flatnonzero(on))
    supervised = tokens >= 0
    supervised[starts.long()] = False
    return supervised.nonzero().flatten()


def _pack_ids(batch: PackedBatch) -> Tensor:
    counts = batch._examples
    return torch.from_numpy(np.repeat(np.arange(len(counts)), counts))


def _weights(batch: PackedBatch) -> Tensor:
    weights = np.ones(batch.num_examples, np.float32)
    if batch._void:
        weights[np.isin(batch.pack_ids.numpy(), batch._void)] = 0
    return torch.from_numpy(weights)


def _sources(batch: PackedBatch) -> Tensor:
    packs, sources = batch.pack_ids, batch._pack_sources
    if sources is None:
        return torch.zeros_like(packs)
    return torch.from_numpy(sources[packs.numpy()])


def _cu_seqlens_k(batch: PackedBatch) -> Tensor:
    return torch.nn.functional.pad(batch.lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _kv_index(batch: PackedBatch) -> Tensor | None:
    """The token at each place of the logical sequences; a shared prefix is stored once."""
    size = batch._logical_tokens
    if size == batch.num_tokens:
        return None
    starts, keys = batch.cu_seqlens.long(), batch.cu_seqlens_k.long()
    left_out = batch.lengths - starts.diff()
    device = starts.device
    responses = batch.num_responses.long()
    firsts = starts[responses.cumsum(0) - responses]
    first = firsts.repeat_interleave(responses, output_size=batch.num_segments)
    sequences = torch.arange(batch.num_segments, device=device)
    sequence = sequences.repeat_interleave(batch.lengths, output_size=size)
    place = torch.arange(size, device=device) - keys[sequence]
    own = place - left_out[sequence]
    return torch.where(own < 0, first[sequence] + place, starts[sequence] + own)


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedBatch:
    """One or more packs as one flat row of T tokens: S segments, E examples, P packs.

    A batch of :func:`collate` holds the id and label of a token in 4 bytes. Tensors of length T are
    computed on first access, on the device where the batch is by then.

    Attributes:
        kind: ``dpo``, ``sft`` or ``ranked``.
        input_ids: int64 `[T]`.
        labels: int64 `[T]`, unshifted: the token id where supervised, -100 elsewhere.
        position_ids: int64 `[T]`, of each token in its logical sequence.
        segment_ids: int64 `[T]`, the segment of each token.
        target_index: int64 `[n]`, the supervised tokens; each is predicted by the token before it.
            It may be padded with unsupervised tokens, which are ignored.
        cu_seqlens: int32 `[S + 1]`, where each segment starts in the row.
        cu_seqlens_k: int32 `[S + 1]`, offsets of the logical sequences laid end to end.
        kv_index: int64 `[sum of lengths]`, the token of the row at each place of the logical
            sequences; None if no segment leaves out a shared prefix.
        max_seqlen: longest segment.
        max_seqlen_k: longest logical sequence.
        lengths: int32 `[S]`, logical length of each sequence.
        rewards: float32 `[S]`, ground-truth reward of each sequence.
        ref_logps: float32 `[S]`, log-probs of a reference model, or None.
        example_ids: int64 `[E]`.
        num_responses: int32 `[E]`, the segments of each example, which lie one after another.
        weights: float32 `[E]`, 1; or 0 for a pack that only pads the last batch.
        pack_ids: int64 `[E]`, the pack of each example.
        sources: int64 `[E]`, the index of each example's source in the mix, else 0.
        num_packs: P.
        columns: carried columns and joined side data, `[E]` each: tensors, or numpy arrays of
            strings.
        step: the optimizer step that the batch belongs to, if the loader planned steps.
        cu_seqlens_unpadded: int32 `[S + 1]`, offsets of the segments without the padding at their
            ends, laid end to end; None if no segment is padded. If set, `cu_seqlens`,
            `cu_seqlens_k` and `kv_index` include the padding; `lengths` never does.
    """

    kind: str
    input_ids: Tensor = _derived(_input_ids)  # noqa: RUF009
    labels: Tensor = _derived(_labels)  # noqa: RUF009
    position_ids: Tensor = _derived(_position_ids)  # noqa: RUF009
    segment_ids: Tensor = _derived(_segment_ids)  # noqa: RUF009
    target_index: Tensor = _derived(_target_index)  # noqa: RUF009
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor = _derived(_cu_seqlens_k)  # noqa: RUF009
    kv_index: Tensor | None = _derived(_kv_index)  # noqa: RUF009
    max_seqlen: int
    max_seqlen_k: int
    lengths: Tensor
    rewards: Tensor
    ref_logps: Tensor | None
    example_ids: Tensor
    num_responses: Tensor
    weights: Tensor = _derived(_weights)  # noqa: RUF009
    pack_ids: Tensor = _derived(_pack_ids)  # noqa: RUF009
    sources: Tensor = _derived(_sources)  # noqa: RUF009
    num_packs: int
    columns: Mapping[str, Tensor | Column] = field(default_factory=dict)
    step: StepInfo | None = None
    cu_seqlens_unpadded: Tensor | None = None

    if TYPE_CHECKING:
        _signed: ClassVar[Tensor]
        _logical_tokens: ClassVar[int]
        _examples: ClassVar[list[int]]
        _void: ClassVar[list[int]]
        _pack_sources: ClassVar[Int64 | None]

    @classmethod
    def of(cls, logical_tokens: int, signed: Tensor | None = None, **fields: Any) -> Self:
        """Makes a batch from the fields that cannot be derived.

        Args:
            logical_tokens: sum of the lengths.
            signed: int32 `[T]`, ids, ``~id`` where unsupervised; None: `fields` hold ids, labels.
            fields: the other fields; for packs ``_examples`` (examples per pack), ``_void`` (the
                packs of weight 0) and ``_pack_sources`` (int64 `[P]`, or None).
        """
        batch = object.__new__(cls)
        if signed is not None:
            fields["_signed"] = signed
        vars(batch).update(fields, _logical_tokens=logical_tokens)
        return batch

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self._signed if "_signed" in vars(self) else self.input_ids)

    @property
    def num_segments(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def num_examples(self) -> int:
        """E, including fillers of weight 0."""
        return len(self.example_ids)

    @property
    def targets(self) -> Targets:
        """The tokens to predict, and the rows that predict them."""
        ids = self.labels[self.target_index]
        fills = ids == IGNORE_INDEX
        return Targets(
            rows=(self.target_index - 1).clamp(min=0),
            ids=ids.clamp(min=0),
            segments=self.segment_ids[self.target_index].masked_fill(fills, self.num_segments),
        )

    @property
    def layout(self) -> AttentionLayout:
        """The keys that each query may see."""
        return AttentionLayout(
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens_k,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_k=self.max_seqlen_k,
            num_queries=self.num_tokens,
            kv_index=self.kv_index,
            lengths=self.lengths if self.kv_index is None else shared_lengths(self),
        )

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """Returns the batch with all tensors on `device`."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Returns the batch in page-locked memory, so that copies to a GPU overlap with work."""
        return self._map(Tensor.pin_memory)

    def model_inputs(self, style: Style = "hf") -> dict[str, Any]:
        """Returns keyword arguments for the model's forward call.

        Args:
            style: ``hf``: for a model that :func:`use_packed_attention` prepared. ``flash``: for an
                unchanged Hugging Face model with a flash-attention implementation. ``megatron``:
                under the names that Megatron's packed-sequence code reads. ``padded``: the logical
                sequences as padded rows `[S, longest]` with a mask, for any model; :meth:`unpad`
                brings its output back to the flat row.

        Raises:
            UnknownNameError: `style` is unknown.
            BackendError: the style cannot express the shared prefixes of this batch.
        """
        return STYLES.load(style)(self)

    def unpad(self, padded: Tensor) -> Tensor:
        """Maps values of padded sequences `[S, longest, ...]` to values of the row `[T, ...]`."""
        return padded[self.segment_ids, self.position_ids]

    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Applies `change` to the tensors that exist; others are derived later."""
        # Derived first: the number of targets, derived on a GPU, would force a synchronisation.
        _ = self.target_index, self.weights, self.sources
        fields = {n: change(x) if isinstance(x, Tensor) else x for n, x in vars(self).items()}
        columns = {n: change(x) if isinstance(x, Tensor) else x for n, x in self.columns.items()}
        batch = object.__new__(type(self))
        vars(batch).update(fields, columns=columns)
        return batch
