"""Packed batches: one or more packs, laid end to end as one flat row of tokens.

A sequence is a prompt and a response; the K sequences of a record are an example. The
tokens of a sequence that lie in the row are its segment. In layout ``shared_prefix`` a
segment omits leading tokens that it shares with an earlier segment of its pack, its
parent, which may omit some itself; its logical sequence has them all.

Letters in shapes: T tokens, S segments, E examples, P packs, L logical tokens.
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
from torch.nn.functional import pad

from packstore.errors import ConfigError, sentence
from packstore.format.arrays import (
    IGNORE_INDEX,
    Column,
    Float32,
    Int32,
    Int64,
    Packs,
    TokenValues,
    TopK,
    concat_token_values,
    ids_of,
    key_runs,
    labels_of,
    map_token_values,
)
from packstore.format.html import card
from packstore.format.schema import require_kind
from packstore.registry import Registry
from packstore.torch.batch.layout import (
    AttentionLayout,
    Targets,
    cached_outside_inference_mode,
    range_indices,
    segment_ids,
)
from packstore.torch.batch.ranges import KeyRanges, compute_key_ranges

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
        packs: packs of the whole step, over all its batches and ranks, without fillers;
            None: unknown.
        counts: other divisors of losses for the whole step, with the names of
            :data:`packstore.format.arrays.COUNTS`; after packing in memory also
            `sequences` and their supervised `tokens`. None: unknown.
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
    "input_ids",
    "labels",
    "position_ids",
    "segment_ids",
    "target_index",
    "cu_seqlens_k",
    "key_runs",
    "kv_index",
    "weights",
    "pack_ids",
    "sources",
)
"""Fields of a batch that are computed on first access, on its device."""


class PackedBatch:
    """One or more packs as one flat row of T tokens: S segments, E examples, P packs.

    :func:`collate` makes one from packs. It stores the id and label of a token together
    in 4 bytes; the other tensors of length T are computed on first access, on the
    device where the batch is by then.

    Attributes:
        kind: ``preference``, ``sft`` or ``scored``.
        cu_seqlens: int32 `[S + 1]`, where each segment starts in the row.
        max_seqlen: longest segment.
        max_seqlen_k: longest logical sequence.
        lengths: int32 `[S]`, logical length of each sequence.
        parent_distances: int32 `[S]`, how many segments before it each segment's parent
            stands, whose sequence has the tokens that the segment omits; 0 if the
            segment omits none.
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
        token_columns: joined side data with a value for each supervised token, in the
            order of `target_index`: `[n]`, or a :class:`~packstore.torch.TopK` of
            `[n, k]`.
        step: the optimizer step that the batch belongs to, if the loader planned steps.
        cu_seqlens_unpadded: int32 `[S + 1]`, the offsets that the segments would have
            without padding at their ends; None if no segment is padded. If set,
            `cu_seqlens`, `cu_seqlens_k` and `kv_index` include the padding; `lengths`
            never does.
    """

    kind: str
    cu_seqlens: Tensor
    max_seqlen: int
    max_seqlen_k: int
    lengths: Tensor
    parent_distances: Tensor
    rewards: Tensor
    ref_logps: Tensor | None
    example_ids: Tensor
    num_responses: Tensor
    num_packs: int
    columns: Mapping[str, Tensor | Column]
    sequence_columns: Mapping[str, Tensor]
    token_columns: Mapping[str, Tensor | TopK]
    step: StepInfo | None
    cu_seqlens_unpadded: Tensor | None
    # int32 `[T]`: the token id where supervised, its bitwise complement elsewhere.
    _signed_ids: Tensor
    # Tokens that segments omit, L - T in all.
    _shared_tokens: int
    # int64 `[P]`: number of examples of each pack.
    _pack_examples: Int64
    # Indices of the packs of weight 0.
    _filler_packs: list[int]
    # int64 `[P]`: source of each pack in a mix; None: 0.
    _pack_sources: Int64 | None

    # No dataclass: FSDP copies dataclasses among the inputs of a module field by field,
    # which would lose computed tensors, and casts rewards and weights to bfloat16.
    def __init__(self, **fields: Any) -> None:
        """Make a batch from the fields above, as :func:`collate` does."""
        vars(self).update(fields)

    def __repr__(self) -> str:
        return (
            f"PackedBatch({self.kind}: {self.num_packs} packs, {self.num_examples} "
            f"examples, {self.num_segments} segments, {self.num_tokens} tokens on "
            f"{self.lengths.device})"
        )

    def _repr_html_(self) -> str:
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

        segment_lengths = np.diff(self.cu_seqlens.cpu().numpy()).astype(np.int64)
        responses = self.num_responses.cpu().numpy()
        first_segments = np.cumsum(responses) - responses
        example_lengths = np.add.reduceat(segment_lengths, first_segments)
        return card("PackedBatch", facts, example_lengths.tolist())

    def __len__(self) -> int:
        """P. transformers' Trainer asks each batch for its length."""
        return self.num_packs

    def __getitem__(self, name: str) -> Any:
        """Return a field by its name, as a mapping does."""
        names = [
            attribute
            for attribute in dir(self)
            if not attribute.startswith("_")
            and not callable(getattr(type(self), attribute, None))
        ]
        if name not in names:
            raise KeyError(f"a batch has no field {name!r}; it has: {', '.join(names)}")
        return getattr(self, name)

    # Tensors of the row. On the CPU they are computed by numpy: torch would split this
    # little work over threads, and wait for them.

    @cached_outside_inference_mode
    def input_ids(self) -> Tensor:
        """int64 `[T]`."""
        return _compute_int64(ids_of, self._signed_ids)

    @cached_outside_inference_mode
    def labels(self) -> Tensor:
        """int64 `[T]`, unshifted: the token id where supervised, -100 elsewhere."""
        return _compute_int64(labels_of, self._signed_ids)

    @cached_outside_inference_mode
    def position_ids(self) -> Tensor:
        """int64 `[T]`, position of each token in its logical sequence."""
        # The last token of a sequence of length n has position n - 1, wherever it lies.
        shifts = self.lengths - self._segment_ends
        if shifts.device.type == "cpu":
            segment_lengths = np.diff(self.cu_seqlens.numpy())
            positions = np.arange(self.num_tokens)
            positions += np.repeat(shifts.numpy().astype(np.int64), segment_lengths)
            return torch.from_numpy(positions)
        tokens = torch.arange(self.num_tokens, device=shifts.device)
        return tokens.add_(shifts.long().index_select(0, self.segment_ids))

    @cached_outside_inference_mode
    def segment_ids(self) -> Tensor:
        """int64 `[T]`, the segment of each token."""
        if self.cu_seqlens.device.type == "cpu":
            lengths = np.diff(self.cu_seqlens.numpy())
            return torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
        return segment_ids(self.cu_seqlens.diff(), self.num_tokens)

    @cached_outside_inference_mode
    def target_index(self) -> Tensor:
        """int64 `[n]`, the supervised tokens; each is predicted by the token before it.

        It may be padded with unsupervised tokens, which are ignored.
        """
        # The first token of a segment has no token before it.
        starts = self.cu_seqlens[:-1]
        if starts.device.type == "cpu":
            is_target_array = self._signed_ids.numpy() >= 0
            is_target_array[starts.numpy()] = False
            return torch.from_numpy(np.flatnonzero(is_target_array))
        is_target = self._signed_ids >= 0
        is_target[starts.long()] = False
        return is_target.nonzero().flatten()

    @cached_outside_inference_mode
    def cu_seqlens_k(self) -> Tensor:
        """int32 `[S + 1]`, offsets of the logical sequences laid end to end.

        Without shared prefixes it is `cu_seqlens`, the same tensor: torch looks for
        that identity when it selects a kernel.
        """
        if not self._shared_tokens:
            return self.cu_seqlens
        padding = self.cu_seqlens[1:] - self._segment_ends
        key_lengths = self.lengths + padding
        return pad(key_lengths.cumsum(0, dtype=torch.int32), (1, 0))

    @cached_outside_inference_mode
    def key_runs(self) -> Tensor | None:
        """int32 `[3, R]`, the runs of the row that make up the logical sequences.

        Each run starts at the beginning of a segment: first those of the ancestors,
        then the sequence's own. The first row has the sequences, in ascending order,
        the second the segments, and the third the tokens of the runs: 0 for an own
        segment, which is whole, with its padding. None if no segment omits tokens.

        It is computed on the CPU, as the number of runs depends on the parents.
        """
        if not self._shared_tokens:
            return None
        offsets = self.cu_seqlens
        if self.cu_seqlens_unpadded is not None:
            offsets = self.cu_seqlens_unpadded
        own_lengths = np.diff(offsets.cpu().numpy())
        omitted = self.lengths.cpu().numpy() - own_lengths
        parents = np.arange(len(omitted)) - self.parent_distances.cpu().numpy()
        segments, tokens = key_runs(parents, omitted, np.zeros_like(omitted))
        is_own = tokens == 0
        sequences = np.cumsum(is_own) - is_own
        runs = np.array([sequences, segments, tokens], np.int32)
        return torch.from_numpy(runs).to(self.cu_seqlens.device)

    @cached_outside_inference_mode
    def kv_index(self) -> Tensor | None:
        """int64 `[last of cu_seqlens_k]`, the token at each place of the logical
        sequences.

        None if no segment omits a shared prefix.
        """
        runs = self.key_runs
        if runs is None:
            return None
        _, segments, tokens = runs.long()
        starts = self.cu_seqlens.long()
        lengths = torch.where(tokens == 0, starts.diff()[segments], tokens)
        return range_indices(starts[segments], lengths, self.num_keys)

    @cached_outside_inference_mode
    def key_ranges(self) -> KeyRanges:
        """The rows that each segment reads, for kernels that copy no keys.

        They are computed on the CPU, as their sizes vary with the data.
        """
        runs = self.key_runs
        ranges = compute_key_ranges(
            self.cu_seqlens.cpu(),
            self.cu_seqlens_k.cpu(),
            None if runs is None else runs.cpu(),
        )
        device = self.cu_seqlens.device
        return ranges.map_tensors(lambda tensor: tensor.to(device))

    @cached_outside_inference_mode
    def layout(self) -> AttentionLayout:
        """The keys that each query may see.

        One object for each batch: backends cache their masks on it.
        """
        return AttentionLayout(
            cu_seqlens_q=self.cu_seqlens,
            cu_seqlens_k=self.cu_seqlens_k,
            max_seqlen_q=self.max_seqlen,
            max_seqlen_k=self.max_seqlen_k,
            num_queries=self.num_tokens,
            kv_index=self.kv_index,
            lengths=self.lengths,
            ranges=self.key_ranges,
        )

    @property
    def targets(self) -> Targets:
        """The tokens to predict, and the rows that predict them."""
        ids = self.labels[self.target_index]
        is_padding = ids == IGNORE_INDEX
        segments = self.segment_ids[self.target_index]
        return Targets(
            rows=(self.target_index - 1).clamp(min=0),
            ids=ids.clamp(min=0),
            segments=segments.masked_fill(is_padding, self.num_segments),
        )

    @property
    def key_places(self) -> tuple[Tensor, Tensor]:
        """int64 `[last of cu_seqlens_k]` each: the logical sequence of each key, and
        its place in the sequence.
        """
        starts = self.cu_seqlens_k.long()
        sequence = segment_ids(starts.diff(), self.num_keys)
        keys = torch.arange(len(sequence), device=starts.device)
        return sequence, keys - starts[sequence]

    @property
    def _segment_ends(self) -> Tensor:
        """int32 `[S]`, where the tokens of each segment end, and its padding begins."""
        if self.cu_seqlens_unpadded is None:
            return self.cu_seqlens[1:]
        return self.cu_seqlens[:-1] + self.cu_seqlens_unpadded.diff()

    # Values of examples.

    @cached_outside_inference_mode
    def pack_ids(self) -> Tensor:
        """int64 `[E]`, the pack of each example."""
        packs = np.arange(self.num_packs)
        return torch.from_numpy(np.repeat(packs, self._pack_examples))

    @cached_outside_inference_mode
    def weights(self) -> Tensor:
        """float32 `[E]`: 0 in fillers, which pad the last batch or replace damaged
        packs; else 1.
        """
        weights = np.ones(self.num_examples, np.float32)
        if self._filler_packs:
            is_filler = np.isin(self.pack_ids.numpy(), self._filler_packs)
            weights[is_filler] = 0
        return torch.from_numpy(weights)

    @cached_outside_inference_mode
    def sources(self) -> Tensor:
        """int64 `[E]`, the index of each example's source in the mix, else 0."""
        if self._pack_sources is None:
            return torch.zeros_like(self.pack_ids)
        return torch.from_numpy(self._pack_sources[self.pack_ids.numpy()])

    @cached_outside_inference_mode
    def cpu_rewards_and_counts(self) -> tuple[Float32, Int32]:
        """`rewards` and `num_responses` on the CPU, to rank scored responses.

        Computed once: a copy of the batch on a device has them, too.
        """
        return self.rewards.cpu().numpy(), self.num_responses.cpu().numpy()

    @property
    def segment_examples(self) -> Tensor:
        """int64 `[S]`, the example of each segment."""
        return segment_ids(self.num_responses.long(), self.num_segments)

    @property
    def num_targets(self) -> Tensor:
        """int64 `[E]`, supervised tokens of each example."""
        segments = self.targets.segments  # S for padding
        examples = pad(self.segment_examples, (0, 1), value=self.num_examples)
        zeros = segments.new_zeros(self.num_examples + 1)
        counts = zeros.index_add(0, examples[segments], torch.ones_like(segments))
        return counts[:-1]

    @property
    def num_tokens(self) -> int:
        """T."""
        ids = vars(self).get("input_ids")
        return len(self._signed_ids if ids is None else ids)

    @property
    def num_keys(self) -> int:
        """L, tokens of all logical sequences, and padding at the ends of segments."""
        return self.num_tokens + self._shared_tokens

    @property
    def num_segments(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def num_examples(self) -> int:
        """E, including fillers of weight 0."""
        return len(self.example_ids)

    # Copies and inputs.

    def replace(self, **changes: Any) -> Self:
        """Return a copy of the batch with other values of some fields.

        All other fields are computed before, from the old values. Fields that follow
        from the offsets of segments or from their parents are the exception: if
        `cu_seqlens` or `parent_distances` change, they are computed anew when they are
        needed.
        """
        outdated = {"layout"}
        if "cu_seqlens" in changes:
            outdated |= {"position_ids", "segment_ids", "cu_seqlens_k", "kv_index"}
        if "parent_distances" in changes:
            outdated |= {"key_runs", "kv_index"}
        if changes.keys() & {"cu_seqlens", "parent_distances", "key_runs"}:
            outdated.add("key_ranges")
        if "rewards" in changes or "num_responses" in changes:
            outdated.add("cpu_rewards_and_counts")

        batch = copy.copy(self)
        fields = vars(batch)
        for name in _DERIVED:
            if name not in outdated:
                fields[name] = getattr(self, name)
        for name in outdated:
            fields.pop(name, None)
        # None, not absent: FSDP reads every field of a dataclass.
        fields["_signed_ids"] = None
        fields.update(changes)
        return batch

    def to(self, device: torch.device | str | int, non_blocking: bool = False) -> Self:
        """Return the batch with all tensors on `device`; itself if they are there."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=non_blocking)

        return self._map_tensors(move)

    def pin_memory(self) -> Self:
        """Return the batch in page-locked memory, so that copies to a GPU overlap with
        work.
        """
        return self._map_tensors(Tensor.pin_memory)

    def model_inputs(self, style: Style = "hf") -> dict[str, Any]:
        """Return keyword arguments for the model's forward call.

        Args:
            style: ``hf``: for a model that :func:`use_packed_attention` prepared.
                ``flash``: for an unchanged Hugging Face model with a flash-attention
                implementation. ``megatron``: under the names that Megatron's
                packed-sequence code reads. ``padded``: the logical sequences as padded
                rows `[S, longest]` with a mask, for any model; :meth:`unpad` brings its
                output back to the flat row. ``flash`` and ``megatron`` cannot name
                shared keys, so they take the row of :meth:`to_concat`.

        Raises:
            UnknownNameError: `style` is unknown.
            ConfigError: the style needs the row of :meth:`to_concat`, which segments
                with padding do not have.
        """
        return STYLES.load(style)(self)

    def unpad(self, padded: Tensor) -> Tensor:
        """Map values of padded sequences `[S, longest, ...]` to the row `[T, ...]`."""
        return padded[self.segment_ids, self.position_ids]

    def to_concat(self) -> Self:
        """Return the batch in layout ``concat``: whole sequences, laid end to end.

        Examples, sequences and targets are the same, in the same order, and so are
        `step`, weights and all values of examples and sequences. The row has L tokens;
        those that a segment omitted have label -100. The batch itself is returned if no
        segment omits any.

        Raises:
            ConfigError: segments are padded; pad them afterwards.
        """
        if self.kv_index is None:
            return self
        if self.cu_seqlens_unpadded is not None:
            raise ConfigError(
                sentence(
                    where="batch.to_concat()",
                    rule="segments that omit tokens must not be padded yet",
                    found="a batch of pad_segments",
                    remedy="Pad whole sequences: pad_segments(batch.to_concat(), …)",
                )
            )
        sequence, place = self.key_places
        omitted = self.cu_seqlens_k.diff() - self.cu_seqlens.diff()
        is_omitted = place < omitted[sequence]
        labels = self.labels[self.kv_index].masked_fill(is_omitted, IGNORE_INDEX)
        return self.replace(
            input_ids=self.input_ids[self.kv_index],
            labels=labels,
            target_index=self.places_in_concat(self.target_index),
            cu_seqlens=self.cu_seqlens_k,
            cu_seqlens_k=self.cu_seqlens_k,
            max_seqlen=self.max_seqlen_k,
            parent_distances=torch.zeros_like(self.parent_distances),
            key_runs=None,
            kv_index=None,
            _shared_tokens=0,
        )

    def places_in_concat(self, tokens: Tensor) -> Tensor:
        """Return where tokens of the row lie in the row of :meth:`to_concat`.

        Args:
            tokens: int64 `[n]`, indices in the row.

        Returns:
            int64 `[n]`, in the row of L tokens.
        """
        # Both segments end with the same tokens.
        shifts = self.cu_seqlens_k[1:] - self.cu_seqlens[1:]
        return tokens + shifts[self.segment_ids[tokens]]

    @torch.inference_mode(False)
    def _map_tensors(self, change: Callable[[Tensor], Tensor]) -> Self:
        """Return a copy with `change` applied to all tensors that exist by now.

        Others are computed in the copy when they are needed.
        """
        # Computed now, while the batch may still be on the CPU: on a GPU the numbers of
        # targets and of runs would need a synchronisation, and weights and sources come
        # from arrays on the CPU.
        _ = self.target_index, self.key_ranges, self.weights, self.sources
        if self.kind == "scored":
            _ = self.cpu_rewards_and_counts

        fields = {name: value for name, value in vars(self).items() if name != "layout"}
        # By identity: a tensor under two names, such as cu_seqlens and cu_seqlens_k,
        # stays one.
        values = [
            *fields.values(),
            *self.columns.values(),
            *self.sequence_columns.values(),
            *_tensors_of_tokens(self.token_columns),
            *self.key_ranges,
        ]
        tensors = {id(value): value for value in values if isinstance(value, Tensor)}
        changed = {key: change(tensor) for key, tensor in tensors.items()}
        if all(changed[key] is tensor for key, tensor in tensors.items()):
            return self

        def look_up_tensor(tensor: Tensor) -> Tensor:
            return changed[id(tensor)]

        def look_up(values: Mapping[str, Any]) -> dict[str, Any]:
            return {
                name: changed.get(id(value), value) for name, value in values.items()
            }

        batch = copy.copy(self)
        vars(batch).pop("layout", None)
        vars(batch).update(look_up(fields))
        batch.columns = look_up(self.columns)
        batch.sequence_columns = look_up(self.sequence_columns)
        batch.token_columns = {
            name: map_token_values(values, look_up_tensor)
            for name, values in self.token_columns.items()
        }
        batch.key_ranges = self.key_ranges.map_tensors(look_up_tensor)
        return batch


def _tensors_of_tokens(columns: Mapping[str, Tensor | TopK]) -> list[Tensor]:
    """Return all tensors of columns of tokens."""
    tensors: list[Tensor] = []
    for values in columns.values():
        tensors += values if isinstance(values, TopK) else [values]
    return tensors


def _compute_int64(function: Callable[[Any], Any], signed_ids: Tensor) -> Tensor:
    if signed_ids.device.type == "cpu":
        return torch.from_numpy(function(signed_ids.numpy()).astype(np.int64))
    values: Tensor = function(signed_ids).long()
    return values


@torch.inference_mode(False)  # torch saves no tensor of that mode for backward
def collate(
    packs: Packs | Sequence[Packs],
    kind: str,
    *,
    ref_logps: Float32 | None = None,
    sources: Int64 | None = None,
    step: StepInfo | None = None,
    fillers: int = 0,
) -> PackedBatch:
    """Lay packs end to end as one batch.

    Args:
        packs: the packs; a sequence of them is joined first.
        kind: kind of the examples: ``preference``, ``sft`` or ``scored``.
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

    lengths = np.concatenate([part.lengths for part in parts], dtype=np.int32)
    if ref_logps is None:
        ref_logps = _stored_ref_logps(parts)
    if ref_logps is not None and len(ref_logps) != len(lengths):
        raise ConfigError(
            f"ref_logps must have one value for each of {len(lengths)} sequences; "
            f"found {len(ref_logps)}."
        )
    ref_logps_tensor = None
    if ref_logps is not None:
        # A copy, as stored columns are read-only views.
        ref_logps_tensor = torch.from_numpy(np.array(ref_logps, np.float32))

    segment_lengths = _lengths_inside([part.seq_boundaries for part in parts])
    cu_seqlens = np.zeros(len(segment_lengths) + 1, np.int32)
    np.cumsum(segment_lengths, out=cu_seqlens[1:])
    shared_tokens = int(lengths.sum(dtype=np.int64)) - int(cu_seqlens[-1])
    max_seqlen = int(segment_lengths.max())
    max_seqlen_k = int(lengths.max()) if shared_tokens else max_seqlen
    pack_examples = _lengths_inside([part.example_offsets for part in parts])

    return PackedBatch(
        kind=kind,
        cu_seqlens=torch.from_numpy(cu_seqlens),
        max_seqlen=max_seqlen,
        max_seqlen_k=max_seqlen_k,
        lengths=torch.from_numpy(lengths),
        parent_distances=_concatenate(
            [part.parent_distances for part in parts], np.int32
        ),
        rewards=_concatenate([part.reward for part in parts], np.float32),
        ref_logps=ref_logps_tensor,
        example_ids=_concatenate([part.example_ids for part in parts], np.int64),
        num_responses=_concatenate([part.num_responses for part in parts], np.int32),
        num_packs=len(pack_examples),
        columns=_join_columns(parts),
        sequence_columns=_join_sequence_columns(parts),
        token_columns=_join_token_columns(parts),
        step=step,
        cu_seqlens_unpadded=None,
        _signed_ids=_concatenate([part.signed_ids for part in parts], np.int32),
        _shared_tokens=shared_tokens,
        _pack_examples=pack_examples,
        _filler_packs=_filler_indices(parts, len(pack_examples), fillers),
        _pack_sources=sources,
    )


def _stored_ref_logps(parts: Sequence[Packs]) -> Float32 | None:
    """Return the reference log-probs of all packs; None if some have none."""
    values = [part.ref_logps for part in parts if part.ref_logps is not None]
    if len(values) < len(parts):
        return None
    return np.concatenate(values)


def _lengths_inside(offsets_of_parts: Sequence[Int32] | Sequence[Int64]) -> Any:
    """Return the lengths of the runs (segments, examples) of all packs.

    Args:
        offsets_of_parts: offsets of the runs, which begin at 0 in each pack, as ``[0,
            3, 7, 0, 5]`` for two packs: the lengths are ``[3, 4, 5]``.
    """
    offsets: Any = np.concatenate(offsets_of_parts)
    lengths = offsets[1:] - offsets[:-1]
    # A run is never empty. A difference of 0 or less is between two packs.
    return lengths[lengths > 0]


def _filler_indices(
    parts: Sequence[Packs], num_packs: int, num_fillers: int
) -> list[int]:
    """Return the indices of the packs of weight 0.

    They are the last `num_fillers` ones, and stand-ins of damaged packs.
    """
    indices = list(range(num_packs - num_fillers, num_packs))
    if any(part.stand_in for part in parts):
        packs_of_parts = [len(part) for part in parts]
        is_stand_in = np.repeat([part.stand_in for part in parts], packs_of_parts)
        indices += np.flatnonzero(is_stand_in).tolist()
    return indices


def _join_columns(parts: Sequence[Packs]) -> dict[str, Tensor | Column]:
    """Return the columns of examples that all packs have.

    Numbers are tensors; strings, for which torch has no dtype, stay arrays.
    """
    columns: dict[str, Tensor | Column] = {}
    for name in parts[0].columns:
        if all(name in part.columns for part in parts):
            values = np.concatenate([part.columns[name] for part in parts])
            is_numeric = values.dtype.kind in "biuf"
            columns[name] = torch.from_numpy(values) if is_numeric else values
    return columns


def _join_sequence_columns(parts: Sequence[Packs]) -> dict[str, Tensor]:
    """Return the columns of sequences that all packs have."""
    columns = {}
    for name in parts[0].sequence_columns:
        if all(name in part.sequence_columns for part in parts):
            arrays = [part.sequence_columns[name] for part in parts]
            columns[name] = _concatenate(arrays, np.float32)
    return columns


def _join_token_columns(parts: Sequence[Packs]) -> dict[str, Tensor | TopK]:
    """Return the columns of supervised tokens that all packs have."""
    columns = {}
    for name in parts[0].token_columns:
        if all(name in part.token_columns for part in parts):
            values_of_parts = [part.token_columns[name] for part in parts]
            _require_equal_k(name, values_of_parts)
            values = concat_token_values(values_of_parts)
            columns[name] = map_token_values(values, torch.from_numpy)
    return columns


def _require_equal_k(name: str, values_of_parts: Sequence[TokenValues]) -> None:
    """Raise ConfigError if packs, as of a mix, have a column of different types."""
    types = {
        f"the top {values.ids.shape[1]}" if isinstance(values, TopK) else "numbers"
        for values in values_of_parts
    }
    if len(types) > 1:
        raise ConfigError(
            sentence(
                where=f"column {name} of tokens",
                rule="all packs of a batch must have numbers, or ids of the same k",
                found=" and ".join(sorted(types)),
                remedy="Give columns of different types different names",
            )
        )


def _concatenate(arrays: Sequence[npt.NDArray[Any]], dtype: npt.DTypeLike) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays, dtype=dtype))
