"""A probe that anyone can run on their own model: does packing stay invisible to it?"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packstore.errors import BackendError, CompatibilityError, sentence
from packstore.records import Int64, Packs, range_indices, to_offsets
from packstore.seeds import keys
from packstore.torch.collate import PackedBatch, collate
from packstore.torch.model import unwrapped, use_packed_attention
from packstore.torch.own_attention import compare_with_own
from packstore.torch.probe import is_half, logits_of, one_pack, rounding_of

PROMPTS = (7, 5)
RESPONSES = ((6, 9), (1, 4))
"""Tokens of the prompts and of both responses of the two examples of the probe."""

MIXES = "other tokens in one segment must not move the logits of another"
DIFFERS = "a segment must have the logits of its sequence alone"
MATTERS = "a token must move the logits of the next one, or no leak would show"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


logger = logging.getLogger("packstore")


class _UnclearError(BackendError):
    """Rounding hides what a leak would do."""


@dataclass(frozen=True)
class _Probe:
    """One pack in one layout, and what its logits may differ by."""

    model: nn.Module
    vocab_size: int
    shared: bool
    by_token: bool
    experts: bool

    def run(self) -> float:
        """The largest difference seen.

        Raises:
            BackendError: it is too large, or too small to tell a leak from rounding.
        """
        packs, prompts = _random_packs(self.vocab_size, self.shared)
        batch = collate(packs, "dpo").to(next(self.model.parameters()).device)
        logits = logits_of(self.model, batch)
        if bool(logits.isnan().any()):
            where = f"check_isolation({type(self.model).__name__})"
            do = "Look at its weights: a training that diverged leaves such ones"
            raise CompatibilityError(sentence(where, "its logits must be finite", "nan", do))
        # Routers compute in float32, also with wider weights.
        rounding = rounding_of(self.model, logits, bits=32 if self.experts else 64)
        effect = self._effect(batch, logits)
        if not effect > 0:
            raise self._failure(MATTERS, effect, rounding)
        worst = 0.0
        for must, found in self._differences(packs, prompts, batch, logits.float()):
            if not found <= min(rounding, effect / 4):
                raise self._failure(must, found, rounding)
            worst = max(worst, found)
        return worst

    def _effect(self, batch: PackedBatch, logits: Tensor) -> float:
        """How far a changed token moves the logits of the next one, which sees it: the median.

        That is what a leak would do.
        """
        odd = (batch.position_ids % 2).bool()
        moved = logits_of(self.model, batch, self._others(batch, ~odd)).float() - logits.float()
        return float(moved[odd].abs().amax(1).median())

    def _differences(
        self, packs: Packs, prompts: Int64, batch: PackedBatch, logits: Tensor
    ) -> Iterator[tuple[str, float]]:
        private = prompts - 1 if self.shared else 0 * prompts
        for segment in range(batch.num_segments):
            mine = batch.segment_ids == segment
            own = mine & (batch.position_ids >= int(private[segment]))
            moved = logits_of(self.model, batch, self._others(batch, own)).float() - logits
            for other in {*batch.segment_ids[~mine].tolist()}:
                yield MIXES, self._size(moved[batch.segment_ids == other])
            alone = collate(_alone(packs, batch, segment), "sft").to(logits.device)
            apart = logits_of(self.model, alone).float()[-int(mine.sum()) :] - logits[mine]
            yield DIFFERS, self._size(apart)

    def _size(self, difference: Tensor) -> float:
        """Of one segment: the largest; or the median over tokens, where single ones may jump."""
        rows = difference.abs().amax(1)
        return float(rows.median() if self.by_token else rows.max())

    def _others(self, batch: PackedBatch, where: Tensor) -> Tensor:
        return torch.where(where, (batch.input_ids + 1) % self.vocab_size, batch.input_ids)

    def _failure(self, must: str, found: float, rounding: float) -> BackendError:
        layout = "shared_prefix" if self.shared else "concat"
        where = f"check_isolation({type(self.model).__name__}), layout {layout}"
        name = getattr(unwrapped(self.model).config, "_attn_implementation", None)
        if found <= rounding:
            do = (
                "That is within rounding, but a leak would do no more: run the probe in "
                "float32, or on trained weights"
            )
        elif not str(name).startswith("packstore_"):
            do = f"Prepare the model with use_packed_attention(model); its attention is {name!r}"
        elif must == MIXES:
            do = (
                "If backend='reference' fails as well, the model mixes tokens outside of attention "
                "(a convolution, a recurrent layer): train it unpacked. If not, the backend leaks"
            )
        else:
            do = (
                "If backend='reference' fails as well, the model ignores position_ids, or counts "
                "positions itself: train it unpacked. If not, the backend is wrong"
            )
        kind = _UnclearError if found <= rounding else BackendError
        return kind(sentence(where, must, f"a difference of {found:.2g}", do))


def probe_model(model: nn.Module) -> None:
    """Runs :func:`check_isolation` before a model is used, and logs what it finds.

    Weights that are all but random, in half precision, may leave it open: that is logged.

    Raises:
        BackendError: as :func:`check_isolation`.
    """
    try:
        logger.info("probe: packed and unpacked logits differ by %.2g", check_isolation(model))
    except _UnclearError as error:
        logger.warning("the probe cannot tell: %s", error)


def check_isolation(
    model: nn.Module, backend: str | None = None, *, vocab_size: int | None = None
) -> float:
    """Feeds small random packs, in both layouts, and compares logits.

    For each segment: other tokens in it move the logits of no other segment, and its logits are
    those of the sequence by itself. What may differ is a quarter of what a token does to those that
    see it, and not more than rounding. The logits are also those of the model's own attention
    (`eager`, or `sdpa` for long sequences), up to rounding, beyond every window and RoPE table that
    the config names, as far as time and memory allow; a note in the log tells where that stops.

    The model is put in evaluation mode for it (no dropout, no noise in routers), and left as it
    was. Rounding can send a token to another expert: if the model has experts, the median over
    tokens counts, in half precision and beside its own attention.

    Args:
        model: a Hugging Face causal LM, also inside PEFT, DistributedDataParallel, FSDP (then on
            all ranks) or ``torch.compile``.
        backend: attention backend to try; default: as :func:`use_packed_attention` left the model.
        vocab_size: token ids are drawn below it; default: the config's.

    Returns:
        The largest difference of logits that was seen, for the record (about 0).

    Raises:
        BackendError: segments see each other, or positions do not start anew; the model computes
            something else than by itself; or it cannot attend inside segments at all. The message
            names the likely cause.
        CompatibilityError: logits that are not finite.
    """
    inner = unwrapped(model)
    config: Any = getattr(inner, "config", None)
    previous = config._attn_implementation if config is not None else None
    training = model.training
    if backend is not None:
        use_packed_attention(model, backend, disable_dropout=False)
    try:
        model.eval()
        text = config.get_text_config()
        size = vocab_size or text.vocab_size
        experts = any(getattr(text, name, None) for name in EXPERTS)
        by_token = experts and is_half(model)
        with torch.no_grad():
            worst = [
                _Probe(model, size, shared, by_token, experts).run() for shared in (False, True)
            ]
            return max(*worst, compare_with_own(model, size, by_token=experts))
    finally:
        model.train(training)
        if backend is not None:
            inner.set_attn_implementation(previous)


def _random_packs(vocab_size: int, shared: bool) -> tuple[Packs, Int64]:
    """One pack of two examples, and the prompt length of each sequence."""
    prompts = np.repeat(np.array(PROMPTS), 2)
    lengths = prompts + np.array(RESPONSES).ravel()
    ids = [keys(n, 0, "probe", i) % np.uint64(vocab_size) for i, n in enumerate(lengths)]
    for first in (0, 2):
        ids[first + 1][: prompts[first]] = ids[first][: prompts[first]]
    left_out = (prompts - 1) * np.array([0, 1, 0, 1]) * shared
    tokens = np.concatenate([x[n:] for x, n in zip(ids, left_out, strict=True)]).astype(np.int32)
    bounds = to_offsets(lengths - left_out)
    return one_pack(tokens, lengths, bounds, np.array([2, 2])), prompts


def _alone(packs: Packs, batch: PackedBatch, segment: int) -> Packs:
    """The whole sequence of one segment as a pack of its own."""
    index = range(batch.num_tokens) if batch.kv_index is None else batch.kv_index.tolist()
    starts = to_offsets(packs.lengths)
    own = range_indices(starts[segment : segment + 1], packs.lengths[segment : segment + 1])
    tokens = packs.input_ids[np.array(index)[own]]
    return one_pack(tokens, np.array([len(own)]), np.array([0, len(own)]), np.array([1]))
