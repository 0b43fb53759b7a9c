"""One or more packs as a flat row of tokens, with the tensors that attention and loss
need.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from packstore.errors import ConfigError
from packstore.format.arrays import (
    IGNORE_INDEX,
    Column,
    Float32,
    Int32,
    Int64,
    Packs,
    ids_of,
    labels_of,
)
from packstore.format.html import card
from packstore.format.schema import require_kind
from packstore.registry import Registry
from packstore.torch.batch.layout import (
    AttentionLayout,
    Targets,
    cached_outside_inference_mode,
    outside_inference_mode,
    segment_ids,
)

Style = Literal["hf", "flash", "megatron", "padded"]

STYLES: Registry[Callable[[PackedBatch], dict[str, Any]]] = Registry(
    "style of model_inputs",
    {name: f"packstore.torch.batch.inputs:{name}" for name in get_args(Style)},
)


@dataclass(frozen=True, slots=True)
class StepInfo:
    """The optimizer step that a batch belongs to; the same on every rank.

    Attributes:
        index: 0-based index of the step in the epoch.
        batch: 0-based index of the batch in the step.
        batches: batches of the step on each rank.
        examples: examples of the whole step, over all its batches and ranks, without
            fillers of weight 0: for pairs, the divisor of the loss.
        ranks: number of ranks that share the step.
        packs: packs of the whole step, counted alike; None: unknown.
        counts: other divisors of losses for the whole step, with the names of
            :data:`packstore.format.arrays.COUNTS`, and of what was packed in memory
            also `sequences` and their supervised `tokens`; None: unknown.
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


_DERIVED = (
    *(
        "input_ids",
        "labels",
        "position_ids",
        "segment_ids",
        "target_index",
        "cu_seqlens_k",
    ),
    *("kv_index", "weights", "pack_ids", "sources"),
)
"""Fields of a batch that are computed on first access, on its device."""


class PackedBatch:
    """One or more packs as one flat row of T tokens: S segments, E examples, P packs.

    A batch of :func:`collate` holds the id and label of a token in 4 bytes. Tensors of
    length T are computed on first access, on the device where the batch is by then.

    Attributes:
        kind: ``preference``, ``sft`` or ``scored``.
        cu_seqlens: int32 `[S + 1]`, where each segment starts in the row.
        max_seqlen: longest segment.
        max_seqlen_k: longest logical sequence.
        lengths: int32 `[S]`, logical length of each sequence.
        rewards: float32 `[S]`, ground-truth reward of each sequence: the column
            ``reward``.
        ref_logps: float32 `[S]`, log-probs of a reference model, or None.
        example_ids: int64 `[E]`.
        num_responses: int32 `[E]`, the segments of each example, which lie one after
            another.
        num_packs: P.
        columns: carried columns and joined side data, `[E]` each: tensors, or numpy
            arrays of strings.
        sequence_columns: joined side data with a value for each sequence, float32 `[S]`
            each.
        step: the optimizer step that the batch belongs to, if the loader planned steps.
        cu_seqlens_unpadded: int32 `[S + 1]`, offsets of the segments without the
            padding at their ends, laid end to end; None if no segment is padded. If
            set, `cu_seqlens`, `cu_seqlens_k` and `kv_index` include the padding;
            `lengths` never does.
    """

    kind: str
    cu_seqlens: Tensor
    max_seqlen: int
    max_seqlen_k: int
    lengths: Tensor
    rewards: Tensor
    ref_logps: Tensor | None
    example_ids: Tensor
    num_responses: Tensor
    num_packs: int
    columns: Mapping[str, Tensor | Column]
    sequence_columns: Mapping[str, Tensor]
    step: StepInfo | None
    cu_seqlens_unpadded: Tensor | None
    _signed_ids: Tensor  # int32 `[T]`, ids, ~id where unsupervised
    _shared_tokens: (
        int  # tokens that segments leave out, as the first of their example has them
    )
    _pack_examples: Int64  # int64 `[P]`, examples of each pack
    _filler_packs: list[int]  # indices of those of weight 0
    _pack_sources: Int64 | None  # int64 `[P]`, of each pack in a mix; None: 0

    def __init__(self, **fields: Any) -> None:
        """Makes a batch, as :func:`collate` does, from the fields that are not
        computed.
        """
        vars(self).update(fields)

    def __repr__(self) -> str:
        return (
            f"PackedBatch({self.kind}: {self.num_packs} packs, {self.num_examples} "
            "examples, "
            f"{self.num_segments} segments, {self.num_tokens} tokens on "
            f"{self.lengths.device})"
        )

    def _repr_html_(self) -> str:
        lengths = np.diff(self.cu_seqlens.cpu().numpy()).astype(np.int64)
        starts = (
            np.cumsum(self.num_responses.cpu().numpy())
            - self.num_responses.cpu().numpy()
        )
        facts: dict[str, object] = {
            "kind": self.kind,
            "packs": self.num_packs,
            "examples": self.num_examples,
            "segments": self.num_segments,
            "tokens": self.num_tokens,
            "device": str(self.lengths.device),
        }
        if self.step is not None:
            step = self.step
            facts["step"] = f"{step.index}: batch {step.batch + 1} of {step.batches}"
        return card("PackedBatch", facts, np.add.reduceat(lengths, starts).tolist())

    def __getitem__(self, name: str) -> Any:
        """Returns a field by its name, as a mapping does."""
        names = [
            n
            for n in dir(self)
            if n[:1] != "_" and not callable(getattr(type(self), n, 0))
        ]
        if name not in names:
            raise KeyError(f"a batch has no field {name!r}; it has: {', '.join(names)}")
        return getattr(self, name)

    @cached_outside_inference_mode
    def input_ids(self) -> Tensor:
        """int64 `[T]`."""
        return _wide(ids_of, self._signed_ids)

    @cached_outside_inference_mode
    def labels(self) -> Tensor:
        """int64 `[T]`, unshifted: the token id where supervised, -100 elsewhere."""
        return _wide(labels_of, self._signed_ids)

    @cached_outside_inference_mode
    def position_ids(self) -> Tensor:
        """int64 `[T]`, of each token in its logical sequence."""
        ends, lengths = self._ends, self.lengths
        if ends.device.type == "cpu":
            places, shifts = np.arange(self.num_tokens), lengths.numpy() - ends.numpy()
            places += np.repeat(
                shifts.astype(np.int64), np.diff(self.cu_seqlens.numpy())
            )
            return torch.from_numpy(places)
        tokens = torch.arange(self.num_tokens, device=ends.device)
        return tokens.add_((lengths - ends).long().index_select(0, self.segment_ids))

    @cached_outside_inference_mode
    def segment_ids(self) -> Tensor:
        """int64 `[T]`, the segment of each token."""
        starts = self.cu_seqlens
        if starts.device.type == "cpu":
            lengths = np.diff(starts.numpy())
            return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        return segment_ids(starts.diff(), self.num_tokens)

    @cached_outside_inference_mode
    def target_index(self) -> Tensor:
        """int64 `[n]`, the supervised tokens; each is predicted by the token before it.

        It may be padded with unsupervised tokens, which are ignored.
        """
        starts = self.cu_seqlens[:-1]
        if starts.device.type == "cpu":
            on = self._signed_ids.numpy() >= 0
            on[starts.numpy()] = False
            return torch.from_numpy(np.flatnonzero(on))
        supervised = self._signed_ids >= 0
        supervised[starts.long()] = False
        return supervised.nonzero().flatten()

    @cached_outside_inference_mode
    def cu_seqlens_k(self) -> Tensor:
        """int32 `[S + 1]`, offsets of the logical sequences laid end to end.

        Without shared prefixes it is `cu_seqlens`, the same tensor: torch looks for
        that identity when it selects a kernel.
        """
        if not self._shared_tokens:
            return self.cu_seqlens
        keys = self.lengths + self.cu_seqlens[1:] - self._ends
        return torch.nn.functional.pad(keys.cumsum(0, dtype=torch.int32), (1, 0))

    @cached_outside_inference_mode
    def kv_index(self) -> Tensor | None:
        """int64 `[last of cu_seqlens_k]`, the token at each place of the logical
        sequences.

        None if no segment leaves out a shared prefix.
        """
        if not self._shared_tokens:
            return None
        starts, (sequence, place) = self.cu_seqlens.long(), self.key_places
        shared_tokens = self.cu_seqlens_k.diff() - starts.diff()
        responses = self.num_responses.long()
        firsts = starts[responses.cumsum(0) - responses]
        first = firsts.repeat_interleave(responses, output_size=self.num_segments)
        physical = place - shared_tokens[sequence]
        return torch.where(
            physical < 0, first[sequence] + place, starts[sequence] + physical
        )

    @cached_outside_inference_mode
    def pack_ids(self) -> Tensor:
        """int64 `[E]`, the pack of each example."""
        return torch.from_numpy(
            np.repeat(np.arange(self.num_packs), self._pack_examples)
        )

    @cached_outside_inference_mode
    def weights(self) -> Tensor:
        """float32 `[E]`, 1; or 0 in fillers, which pad the last batch or replace
        damaged packs.
        """
        weights = np.ones(self.num_examples, np.float32)
        if self._filler_packs:
            weights[np.isin(self.pack_ids.numpy(), self._filler_packs)] = 0
        return torch.from_numpy(weights)

    @cached_outside_inference_mode
    def sources(self) -> Tensor:
        """int64 `[E]`, the index of each example's source in the mix, else 0."""
        if self._pack_sources is None:
            return torch.zeros_like(self.pack_ids)
        return torch.from_numpy(self._pack_sources[self.pack_ids.numpy()])

    @property
    def segment_examples(self) -> Tensor:
        """int64 `[S]`, the example of each segment."""
        return segment_ids(self.num_responses.long(), self.num_segments)

    @property
    def key_places(self) -> tuple[Tensor, Tensor]:
        """int64 `[last of cu_seqlens_k]` each: of each key its logical sequence, and
        its place.
        """
        starts = self.cu_seqlens_k.long()
        sequence = segment_ids(starts.diff(), self.num_tokens + self._shared_tokens)
        return sequence, torch.arange(len(sequence), device=starts.device) - starts[
            sequence
        ]

    @property
    def _ends(self) -> Tensor:
        """int32 `[S]`, where the tokens of each segment end, and its padding begins."""
        if self.cu_seqlens_unpadded is None:
            return self.cu_seqlens[1:]
        return self.cu_seqlens[:-1] + self.cu_seqlens_unpadded.diff()

    @property
    def num_tokens(self) -> int:
        """T."""
        ids = vars(self).get("input_ids")
        return len(self._signed_ids if ids is None else ids)

    @property
    def num_segments(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def num_examples(self) -> int:
        """E, including fillers of weight 0."""
        return len(self.example_ids)

    @cached_outside_inference_mode
    def cpu_rewards_and_counts(self) -> tuple[Float32, Int32]:
        """`rewards` and `num_responses` on the CPU, by which scored responses are
        compared.

        Read once; a batch that was copied to a device has brought them along.
        """
        return self.rewards.cpu().numpy(), self.num_responses.cpu().numpy()

    @property
    def targets(self) -> Targets:
        """The tokens to predict, and the rows that predict them."""
        ids = self.labels[self.target_index]
        fills = ids == IGNORE_INDEX
        return Targets(
            rows=(self.target_index - 1).clamp(min=0),
            ids=ids.clamp(min=0),
            segments=self.segment_ids[self.target_index].masked_fill(
                fills, self.num_segments
            ),
        )

    @cached_outside_inference_mode
    def layout(self) -> AttentionLayout:
        """The keys that each query may see; one object, on which backends cache their
        masks.
        """
        return AttentionLayout(
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens_k,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_k=self.max_seqlen_k,
            num_queries=self.num_tokens,
            kv_index=self.kv_index,
            lengths=self.lengths,
        )

    def replace(self, **changes: Any) -> Self:
        """Returns the batch with other values of these fields; all others are computed
        first.

        But for positions and keys, which follow other offsets of segments.
        """
        outdated = {"layout", "_signed_ids"}
        if "cu_seqlens" in changes:
            outdated |= {"position_ids", "segment_ids", "cu_seqlens_k", "kv_index"}
        if changes.keys() & {"rewards", "num_responses"}:
            outdated.add("cpu_rewards_and_counts")
        batch = copy.copy(self)
        vars(batch).update(
            {name: getattr(self, name) for name in _DERIVED if name not in outdated}
        )
        for name in outdated:
            vars(batch).pop(name, None)
        vars(batch).update(changes)
        return batch

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """Returns the batch with all tensors on `device`; itself if they are there."""
        return self._map(lambda x: x.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Returns the batch in page-locked memory, so that copies to a GPU overlap with
        work.
        """
        return self._map(Tensor.pin_memory)

    def model_inputs(self, style: Style = "hf") -> dict[str, Any]:
        """Returns keyword arguments for the model's forward call.

        Args:
            style: ``hf``: for a model that :func:`use_packed_attention` prepared.
                ``flash``: for an unchanged Hugging Face model with a flash-attention
                implementation. ``megatron``: under the names that Megatron's
                packed-sequence code reads. ``padded``: the logical sequences as padded
                rows `[S, longest]` with a mask, for any model; :meth:`unpad` brings its
                output back to the flat row.

        Raises:
            UnknownNameError: `style` is unknown.
            BackendError: the style cannot express the shared prefixes of this batch.
        """
        return STYLES.load(style)(self)

    def unpad(self, padded: Tensor) -> Tensor:
        """Maps values of padded sequences `[S, longest, ...]` to values of the row `[T,
        ...]`.
        """
        return padded[self.segment_ids, self.position_ids]

    @outside_inference_mode
    def _map(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Applies `change` to the tensors that exist; others are derived later."""
        # Derived first: the number of targets, derived on a GPU, would force a
        # synchronisation.
        _ = self.target_index, self.weights, self.sources
        if self.kind == "scored":
            _ = self.cpu_rewards_and_counts
        fields = {n: x for n, x in vars(self).items() if n != "layout"}
        every = (
            *fields.values(),
            *self.columns.values(),
            *self.sequence_columns.values(),
        )
        # By identity: a tensor under two names stays one.
        tensors = {id(x): x for x in every if isinstance(x, Tensor)}
        moved = {key: change(x) for key, x in tensors.items()}
        if all(moved[key] is x for key, x in tensors.items()):
            return self
        batch = copy.copy(self)
        vars(batch).pop("layout", None)
        vars(batch).update({n: moved.get(id(x), x) for n, x in fields.items()})
        batch.columns = {n: moved.get(id(x), x) for n, x in self.columns.items()}
        batch.sequence_columns = {
            n: moved[id(x)] for n, x in self.sequence_columns.items()
        }
        return batch


def _wide(change: Callable[[Any], Any], signed: Tensor) -> Tensor:
    """Uses numpy on a CPU: torch would split this little work over threads and wait for
    them.
    """
    if signed.device.type == "cpu":
        return torch.from_numpy(change(signed.numpy()).astype(np.int64))
    wide: Tensor = change(signed).long()
    return wide


@outside_inference_mode
def collate(
    packs: Packs | Sequence[Packs],
    kind: str,
    *,
    ref_logps: Float32 | None = None,
    sources: Int64 | None = None,
    step: StepInfo | None = None,
    fillers: int = 0,
) -> PackedBatch:
    """Lays packs end to end as one batch.

    Args:
        packs: the packs; a sequence of them is joined first.
        kind: what an example is: ``preference``, ``sft`` or ``scored``.
        ref_logps: float32 `[S]`, log-probs of a reference model in nats; default: the
            packs' own.
        sources: int64 `[P]`, the source of each pack in a mix; default: 0.
        step: the optimizer step that the batch belongs to.
        fillers: number of packs at the end that get weight 0.

    Raises:
        UnknownNameError: `kind` is none of those.
        ConfigError: there are no packs, or `ref_logps` has another length.
    """
    require_kind(kind)
    if not len(packs):
        raise ConfigError("a batch must hold at least one pack; found none.")
    parts = [packs] if isinstance(packs, Packs) else packs
    lengths = np.concatenate([p.lengths for p in parts], dtype=np.int32)
    if ref_logps is None:
        stored = [p.ref_logps for p in parts if p.ref_logps is not None]
        ref_logps = np.concatenate(stored) if len(stored) == len(parts) else None
    if ref_logps is not None and len(ref_logps) != len(lengths):
        raise ConfigError(
            f"ref_logps must have one value for each of {len(lengths)} sequences; "
            f"found {len(ref_logps)}."
        )
    segments = _steps([p.seq_boundaries for p in parts])
    starts = np.zeros(len(segments) + 1, np.int32)
    np.cumsum(segments, out=starts[1:])
    longest, logical = int(segments.max()), int(lengths.sum(dtype=np.int64))
    pack_examples = _steps([p.example_offsets for p in parts])
    number = len(pack_examples)
    all_fillers = list(range(number - fillers, number))
    if any(p.stand_in for p in parts):
        stand_ins = np.repeat([p.stand_in for p in parts], [len(p) for p in parts])
        all_fillers += np.flatnonzero(stand_ins).tolist()
    columns, values = [p.columns for p in parts], [p.sequence_columns for p in parts]
    return PackedBatch(
        _signed_ids=_joined([p.signed_ids for p in parts], np.int32),
        _shared_tokens=logical - int(starts[-1]),
        _pack_examples=pack_examples,
        _filler_packs=all_fillers,
        _pack_sources=sources,
        kind=kind,
        cu_seqlens=torch.from_numpy(starts),
        max_seqlen=longest,
        max_seqlen_k=longest if logical == starts[-1] else int(lengths.max()),
        lengths=torch.from_numpy(lengths),
        rewards=_joined([p.reward for p in parts], np.float32),
        # A copy, as stored columns are read-only views.
        ref_logps=None
        if ref_logps is None
        else torch.from_numpy(np.array(ref_logps, np.float32)),
        example_ids=_joined([p.example_ids for p in parts], np.int64),
        num_responses=_joined([p.num_responses for p in parts], np.int32),
        num_packs=number,
        columns={
            name: _column([c[name] for c in columns]) for name in _shared(columns)
        },
        sequence_columns={
            n: _joined([c[n] for c in values], np.float32) for n in _shared(values)
        },
        step=step,
        cu_seqlens_unpadded=None,
    )


def _steps(parts: Sequence[Int32] | Sequence[Int64]) -> Any:
    """Returns the differences inside each pack of offsets that rise strictly, from 0 in
    each.
    """
    flat: Any = np.concatenate(parts)
    steps = flat[1:] - flat[:-1]
    return steps[
        steps > 0
    ]  # the others lead from the end of a pack to the start of the next


def _shared(columns: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the names that all have."""
    return [name for name in columns[0] if all(name in c for c in columns)]


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Tensor:
    return torch.from_numpy(np.concatenate(parts, dtype=dtype))


def _column(parts: Sequence[Column]) -> Tensor | Column:
    """Returns numbers as a tensor; strings, which torch has no dtype for, stay an
    array.
    """
    values = np.concatenate(parts)
    return torch.from_numpy(values) if values.dtype.kind in "biuf" else values
