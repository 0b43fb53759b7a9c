"""One or more packs as a flat row of tokens, with the tensors that attention and loss need."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from packstore.format.arrays import IGNORE_INDEX, Column, Float32, Int32, Int64, ids_of, labels_of
from packstore.registry import Registry
from packstore.torch.batch.layout import AttentionLayout
from packstore.torch.batch.targets import Targets

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


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The optimizer step that a batch belongs to; the same on every rank.

    Attributes:
        index: 0-based index of the step in the epoch.
        batch: 0-based index of the batch in the step.
        batches: batches of the step on each rank.
        examples: examples of the whole step, over all its batches and ranks, without fillers of
            weight 0: for pairs, the divisor of the loss.
        ranks: number of ranks that share the step.
        packs: packs of the whole step, counted alike; None: unknown.
        counts: other divisors of losses for the whole step, with the names of
            :mod:`packstore.format.loss_counts`; None: unknown.
    """

    index: int
    batch: int
    batches: int
    examples: int
    ranks: int = 1
    packs: int | None = None
    counts: Mapping[str, int] | None = None

    @property
    def last(self) -> bool:
        """True for the last batch of the step, after which the optimizer steps."""
        return self.batch == self.batches - 1


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
    tokens, starts = vars(batch).get("_signed_ids"), batch.cu_seqlens[:-1]
    tokens = batch.labels if tokens is None else tokens
    if tokens.device.type == "cpu":
        on = tokens.numpy() >= 0
        on[starts.numpy()] = False
        return torch.from_numpy(np.flatnonzero(on))
    supervised = tokens >= 0
    supervised[starts.long()] = False
    return supervised.nonzero().flatten()


def _pack_ids(batch: PackedBatch) -> Tensor:
    return torch.from_numpy(np.repeat(np.arange(batch.num_packs), batch._pack_examples))


def _weights(batch: PackedBatch) -> Tensor:
    weights = np.ones(batch.num_examples, np.float32)
    if batch._unweighted_packs:
        weights[np.isin(batch.pack_ids.numpy(), batch._unweighted_packs)] = 0
    return torch.from_numpy(weights)


def _sources(batch: PackedBatch) -> Tensor:
    packs, sources = batch.pack_ids, batch._pack_sources
    return torch.zeros_like(packs) if sources is None else torch.from_numpy(sources[packs.numpy()])


def _cu_seqlens_k(batch: PackedBatch) -> Tensor:
    if batch._logical_tokens == batch.num_tokens:
        return batch.cu_seqlens
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


_DERIVED: dict[str, Callable[[PackedBatch], Tensor | None]] = {
    "input_ids": lambda batch: _wide(ids_of, batch._signed_ids),
    "labels": lambda batch: _wide(labels_of, batch._signed_ids),
    "position_ids": _position_ids,
    "segment_ids": _segment_ids,
    "target_index": _target_index,
    "cu_seqlens_k": _cu_seqlens_k,
    "kv_index": _kv_index,
    "weights": _weights,
    "pack_ids": _pack_ids,
    "sources": _sources,
}
"""Fields of a batch of :func:`collate` that are computed on first access, on its device."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedBatch:
    """One or more packs as one flat row of T tokens: S segments, E examples, P packs.

    A batch of :func:`collate` holds the id and label of a token in 4 bytes. Tensors of length T are
    computed on first access, on the device where the batch is by then.

    Attributes:
        kind: ``preference``, ``sft`` or ``ranked``.
        input_ids: int64 `[T]`.
        labels: int64 `[T]`, unshifted: the token id where supervised, -100 elsewhere.
        position_ids: int64 `[T]`, of each token in its logical sequence.
        segment_ids: int64 `[T]`, the segment of each token.
        target_index: int64 `[n]`, the supervised tokens; each is predicted by the token before it.
            It may be padded with unsupervised tokens, which are ignored.
        cu_seqlens: int32 `[S + 1]`, where each segment starts in the row.
        cu_seqlens_k: int32 `[S + 1]`, offsets of the logical sequences laid end to end. Without
            shared prefixes it is `cu_seqlens`, the same tensor: torch looks for that identity when
            it selects a kernel.
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
    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    segment_ids: Tensor
    target_index: Tensor
    cu_seqlens: Tensor
    cu_seqlens_k: Tensor
    kv_index: Tensor | None
    max_seqlen: int
    max_seqlen_k: int
    lengths: Tensor
    rewards: Tensor
    ref_logps: Tensor | None
    example_ids: Tensor
    num_responses: Tensor
    weights: Tensor
    pack_ids: Tensor
    sources: Tensor
    num_packs: int
    columns: Mapping[str, Tensor | Column] = field(default_factory=dict)
    step: StepInfo | None = None
    cu_seqlens_unpadded: Tensor | None = None

    if TYPE_CHECKING:
        _signed_ids: ClassVar[Tensor]
        _logical_tokens: ClassVar[int]
        _pack_examples: ClassVar[Int64]
        _unweighted_packs: ClassVar[list[int]]
        _pack_sources: ClassVar[Int64 | None]
        _ranks: ClassVar[tuple[Float32, Int32]]
    else:

        def __getattr__(self, name):
            """Computes a field that is not there yet."""
            if name not in _DERIVED:
                raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
            value = vars(self)[name] = _DERIVED[name](self)
            return value

    @classmethod
    def of(
        cls,
        signed_ids: Tensor,
        *,
        logical_tokens: int,
        pack_examples: Int64,
        unweighted_packs: list[int],
        pack_sources: Int64 | None,
        **fields: Any,
    ) -> Self:
        """Makes a batch from all `fields` but those that are computed on first access.

        Args:
            signed_ids: int32 `[T]`, ids, ``~id`` where unsupervised.
            logical_tokens: sum of the lengths.
            pack_examples: int64 `[P]`, examples of each pack.
            unweighted_packs: indices of the packs of weight 0.
            pack_sources: int64 `[P]`, the source of each pack in a mix; None: 0.
        """
        batch = object.__new__(cls)
        vars(batch).update(
            fields,
            _signed_ids=signed_ids,
            _logical_tokens=logical_tokens,
            _pack_examples=pack_examples,
            _unweighted_packs=unweighted_packs,
            _pack_sources=pack_sources,
        )
        return batch

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self._signed_ids if "_signed_ids" in vars(self) else self.input_ids)

    @property
    def num_segments(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def num_examples(self) -> int:
        """E, including fillers of weight 0."""
        return len(self.example_ids)

    @property
    def ranks(self) -> tuple[Float32, Int32]:
        """`rewards` and `num_responses` on the CPU, by which ranked responses are compared.

        Read once; a batch that was copied to a device has brought them along.
        """
        if "_ranks" not in vars(self):
            both = self.rewards.cpu().numpy(), self.num_responses.cpu().numpy()
            vars(self)["_ranks"] = both
        return self._ranks

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

    @cached_property
    def layout(self) -> AttentionLayout:
        """The keys that each query may see; one object, on which backends cache their masks."""
        return AttentionLayout(
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens_k,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_k=self.max_seqlen_k,
            num_queries=self.num_tokens,
            kv_index=self.kv_index,
            lengths=self.lengths,
        )

    def with_weights(self, weights: Tensor) -> Self:
        """Returns the batch with other weights of its examples, `[E]`."""
        batch = replace(self, weights=weights)
        if self.kind == "ranked":
            vars(batch)["_ranks"] = self.ranks
        return batch

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """Returns the batch with all tensors on `device`; itself if they are there."""
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
        if self.kind == "ranked":
            _ = self.ranks
        own = {n: x for n, x in vars(self).items() if n != "layout"}
        every = (*own.values(), *self.columns.values())
        # By identity: a tensor under two names stays one.
        tensors = {id(x): x for x in every if isinstance(x, Tensor)}
        moved = {key: change(x) for key, x in tensors.items()}
        if all(moved[key] is x for key, x in tensors.items()):
            return self
        fields = {n: moved.get(id(x), x) for n, x in own.items()}
        columns = {n: moved.get(id(x), x) for n, x in self.columns.items()}
        batch = object.__new__(type(self))
        vars(batch).update(fields, columns=columns)
        return batch
