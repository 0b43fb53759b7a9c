"""Packs -> one :class:`PackedBatch`: all of it derived from the columns, without token loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packstore.errors import ConfigError
from packstore.records import (
    IGNORE_INDEX,
    Column,
    Float32,
    Int64,
    Packs,
    concat_offsets,
    to_offsets,
)
from packstore.torch.inputs import STYLES
from packstore.torch.layout import AttentionLayout
from packstore.torch.steps import StepInfo
from packstore.torch.targets import Targets

Style = Literal["hf", "flash", "megatron", "padded"]


@dataclass(frozen=True, eq=False, kw_only=True)
class PackedBatch:
    """One or more packs as one flat row of T tokens: S segments, E examples, P packs.

    Attributes:
        kind: ``dpo``, ``sft`` or ``ranked``.
        input_ids: int64 `[T]`.
        labels: int64 `[T]`, unshifted: the token id where supervised, -100 elsewhere.
        position_ids: int64 `[T]`, of each token in its logical sequence.
        segment_ids: int64 `[T]`, the segment of each token.
        target_index: int64 `[n]`, the supervised tokens; each is predicted by the token before it.
            Tokens that are not supervised may fill it up: they count nowhere.
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
        weights: float32 `[E]`, 1, or 0 where a pack only fills up the last batch.
        pack_ids: int64 `[E]`, the pack of each example.
        sources: int64 `[E]`, where each example came from: its place in the mix, else 0.
        num_packs: P.
        columns: carried columns and joined side data, `[E]` each: tensors, or numpy arrays of
            strings.
        step: the optimizer step that the batch belongs to, if the loader planned steps.
        cu_seqlens_unpadded: int32 `[S + 1]`, offsets of the segments without the padding at their
            ends, laid end to end; None if no segment was padded. Where it is not, `cu_seqlens`,
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

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def num_segments(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def num_examples(self) -> int:
        """E, fillers of weight 0 included."""
        return len(self.example_ids)

    @property
    def targets(self) -> Targets:
        """What is to be predicted, and where."""
        ids = self.labels[self.target_index]
        fills = ids == IGNORE_INDEX
        return Targets(
            rows=(self.target_index - 1).clamp(min=0),
            ids=ids.clamp(min=0),
            segments=self.segment_ids[self.target_index].masked_fill(fills, self.num_segments),
        )

    @property
    def layout(self) -> AttentionLayout:
        """Which tokens see which."""
        return AttentionLayout(
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens_k,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_k=self.max_seqlen_k,
            num_queries=self.num_tokens,
            kv_index=self.kv_index,
        )

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """The batch with all tensors on `device`."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """The batch in page-locked memory, from which copies to a GPU can overlap with work."""
        return self._map(Tensor.pin_memory)

    def model_inputs(self, style: Style = "hf") -> dict[str, Any]:
        """Keyword arguments for the model's forward call.

        Args:
            style: ``hf``: for a model that :func:`use_packed_attention` prepared. ``flash``: for an
                unchanged Hugging Face model with a flash-attention implementation. ``megatron``:
                under the names that Megatron's packed-sequence code reads. ``padded``: the logical
                sequences as padded rows `[S, longest]` with a mask, for any model; bring its output
                back to the flat row with :meth:`unpad`.

        Raises:
            ConfigError: no such style.
            BackendError: a style that cannot express the shared prefixes of this batch.
        """
        if style not in STYLES:
            raise ConfigError(
                f"model_inputs style must be one of: {', '.join(STYLES)}; found {style!r}."
            )
        return STYLES[style](self)

    def unpad(self, padded: Tensor) -> Tensor:
        """Values at padded sequences `[S, longest, ...]` as values at the row `[T, ...]`."""
        return padded[self.segment_ids, self.position_ids]

    def _map(self, change: Any) -> Self:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        tensors = {name: change(x) for name, x in fields.items() if isinstance(x, Tensor)}
        columns = {n: change(x) if isinstance(x, Tensor) else x for n, x in self.columns.items()}
        return dataclasses.replace(self, **tensors, columns=columns)


def collate(
    packs: Packs | Sequence[Packs],
    kind: str,
    *,
    ref_logps: Float32 | None = None,
    sources: Int64 | None = None,
    step: StepInfo | None = None,
    fillers: int = 0,
) -> PackedBatch:
    """One batch of all packs, laid end to end.

    Args:
        packs: the packs; a sequence of them is joined first.
        kind: what an example is: ``dpo``, ``sft`` or ``ranked``.
        ref_logps: float32 `[S]`, log-probs of a reference model; default: those of the packs.
        sources: int64 `[P]`, where each pack came from; default: 0.
        step: the optimizer step that the batch belongs to.
        fillers: how many packs at the end get weight 0.

    Raises:
        ConfigError: no packs, or `ref_logps` of another length.
    """
    if not len(packs):
        raise ConfigError("a batch must hold at least one pack; found none.")
    parts = [packs] if isinstance(packs, Packs) else packs
    packs = parts[0] if len(parts) == 1 else _join(parts)
    ref_logps = packs.ref_logps if ref_logps is None else ref_logps
    if ref_logps is not None and len(ref_logps) != len(packs.lengths):
        raise ConfigError(
            f"ref_logps must have one value for each of {len(packs.lengths)} sequences; "
            f"found {len(ref_logps)}."
        )
    lengths = packs.segment_lengths
    starts = to_offsets(lengths)
    segment = np.repeat(np.arange(len(lengths)), lengths)
    place = np.arange(starts[-1]) - np.repeat(starts[:-1] - packs.lengths + lengths, lengths)
    supervised = packs.labels != IGNORE_INDEX
    supervised[starts[:-1]] = False
    pack_ids = np.repeat(np.arange(len(packs)), np.diff(packs.example_offsets))
    counts = np.repeat([not p.stand_in for p in parts], [len(p) for p in parts])
    counts[len(packs) - fillers :] = False
    logical = to_offsets(packs.lengths)
    return PackedBatch(
        kind=kind,
        input_ids=_tensor(packs.input_ids, np.int64),
        labels=_tensor(packs.labels, np.int64),
        position_ids=torch.from_numpy(place),
        segment_ids=torch.from_numpy(segment),
        target_index=torch.from_numpy(np.flatnonzero(supervised)),
        cu_seqlens=_tensor(starts, np.int32),
        cu_seqlens_k=_tensor(logical, np.int32),
        kv_index=_kv_index(packs, starts, logical),
        max_seqlen=int(lengths.max()),
        max_seqlen_k=int(packs.lengths.max()),
        lengths=_tensor(packs.lengths, np.int32),
        rewards=_tensor(packs.reward, np.float32),
        ref_logps=None if ref_logps is None else _tensor(ref_logps, np.float32),
        example_ids=_tensor(packs.example_ids, np.int64),
        num_responses=_tensor(packs.num_responses, np.int32),
        weights=_tensor(counts[pack_ids], np.float32),
        pack_ids=_tensor(pack_ids, np.int64),
        sources=_tensor(0 * pack_ids if sources is None else sources[pack_ids], np.int64),
        num_packs=len(packs),
        columns={name: _column(values) for name, values in packs.columns.items()},
        step=step,
    )


def _join(parts: Sequence[Packs]) -> Packs:
    """The packs of `parts`, in order, with the carried columns that all of them have."""
    carried = [n for n in parts[0].columns if all(n in p.columns for p in parts)]
    ref_logps = [p.ref_logps for p in parts if p.ref_logps is not None]
    return Packs(
        input_ids=np.concatenate([p.input_ids for p in parts]),
        labels=np.concatenate([p.labels for p in parts]),
        reward=np.concatenate([p.reward for p in parts]),
        lengths=np.concatenate([p.lengths for p in parts]),
        seq_boundaries=np.concatenate([p.seq_boundaries for p in parts]),
        example_ids=np.concatenate([p.example_ids for p in parts]),
        num_responses=np.concatenate([p.num_responses for p in parts]),
        token_offsets=concat_offsets([p.token_offsets for p in parts]),
        sequence_offsets=concat_offsets([p.sequence_offsets for p in parts]),
        example_offsets=concat_offsets([p.example_offsets for p in parts]),
        columns={name: np.concatenate([p.columns[name] for p in parts]) for name in carried},
        ref_logps=np.concatenate(ref_logps) if len(ref_logps) == len(parts) else None,
    )


def _kv_index(packs: Packs, starts: Int64, logical: Int64) -> Tensor | None:
    """The token of the row at each place of the logical sequences, if any of them is not whole.

    Args:
        packs: the packs.
        starts: where each segment starts in the row.
        logical: offsets of the logical sequences.
    """
    left_out = packs.lengths.astype(np.int64) - np.diff(starts)
    if not left_out.any():
        return None
    responses = packs.num_responses
    first = np.repeat(starts[np.cumsum(responses) - responses], responses)
    sequence = np.repeat(np.arange(len(left_out)), packs.lengths)
    place = np.arange(len(sequence)) - logical[sequence]
    own = place - left_out[sequence]
    return _tensor(np.where(own < 0, first[sequence] + place, starts[sequence] + own), np.int64)


def _column(values: Column) -> Tensor | Column:
    """A tensor of numbers; what torch has no type for (strings) stays an array."""
    return torch.from_numpy(np.array(values)) if values.dtype.kind in "biuf" else values


def _tensor(values: npt.NDArray[Any], dtype: npt.DTypeLike) -> Tensor:
    """A tensor that owns its memory (stored columns are read-only views)."""
    return torch.from_numpy(np.array(values, dtype))
