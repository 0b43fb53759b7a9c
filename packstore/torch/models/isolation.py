"""Probes a model: its logits must not depend on packing."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packstore.errors import BackendError, CompatibilityError, sentence
from packstore.format.arrays import Int64, Packs, range_indices, to_offsets
from packstore.format.seeds import keys
from packstore.torch.batch.collate import PackedBatch, collate
from packstore.torch.models.dropout import evaluating
from packstore.torch.models.model import use_packed_attention
from packstore.torch.models.own_attention import compare_with_own
from packstore.torch.models.probe import is_half, logits_of, one_pack, rounding_of
from packstore.torch.models.unwrap import unwrapped

PROMPTS = (7, 5)
RESPONSES = ((6, 9), (1, 4))
"""Prompt and response lengths of the probe's two examples, in tokens."""

MIXES = "other tokens in one segment must not move the logits of another"
DIFFERS = "a segment must have the logits of its sequence alone"
MATTERS = "a token must move the logits of the next one, or no leak would show"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


logger = logging.getLogger("packstore")


class _UnclearError(BackendError):
    """Rounding is as large as the effect of a leak would be."""


@dataclass(frozen=True)
class _Probe:
    """One pack in one layout, and the differences of its logits."""

    model: nn.Module
    vocab_size: int
    shared: bool
    by_token: bool
    experts: bool

    def run(self) -> float:
        """Returns the largest difference seen.

        Raises:
            BackendError: it is too large, or a leak cannot be distinguished from rounding.
        """
        packs, prompts = _random_packs(self.vocab_size, self.shared)
        batch = collate(packs, "preference").to(next(self.model.parameters()).device)
        logits = logits_of(self.model, batch)
        if bool(logits.isnan().any()):
            where = f"check_isolation({type(self.model).__name__})"
            do = "Look at its weights: a training that diverged leaves such ones"
            raise CompatibilityError(sentence(where, "its logits must be finite", "nan", do))
        # Routers compute in float32 even if the weights are wider.
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
        """Median change of a token's logits when the token before it changes.

        A leak between segments would have this size.
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
        """The largest difference in a segment; the median over tokens if experts may switch."""
        rows = difference.abs().amax(1)
        return float(rows.median() if self.by_token else rows.max())

    def _others(self, batch: PackedBatch, where: Tensor) -> Tensor:
        return torch.where(where, (batch.input_ids + 1) % self.vocab_size, batch.input_ids)

    def _by_sequence(self) -> str:
        # Imported late, as it loads torch's compiler, which takes a second.
        from packstore.torch.models.mixers import mixers

        names = sorted({type(module).__name__ for module in mixers(unwrapped(self.model)).values()})
        return f" besides {', '.join(names)}, which run by sequence" if names else ""

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
                f"(a convolution, a recurrent layer){self._by_sequence()}: use "
                "backend='per_sequence'. If not, the backend leaks"
            )
        else:
            do = (
                "If backend='reference' fails as well, the model ignores position_ids, or counts "
                "positions itself: train it unpacked. If not, the backend is wrong"
            )
        kind = _UnclearError if found <= rounding else BackendError
        return kind(sentence(where, must, f"a difference of {found:.2g}", do))


def probe_model(model: nn.Module) -> None:
    """Runs :func:`check_isolation` before a model is used, and logs the result.

    With nearly random weights in half precision the result may be inconclusive, which is logged.

    Raises:
        BackendError: see :func:`check_isolation`.
    """
    try:
        logger.info("probe: packed and unpacked logits differ by %.2g", check_isolation(model))
    except _UnclearError as error:
        logger.warning("the probe gave no result: %s", error)


def check_isolation(
    model: nn.Module, backend: str | None = None, *, vocab_size: int | None = None
) -> float:
    """Runs small random packs, in both layouts, through the model and compares logits.

    For each segment: changing its tokens changes the logits of no other segment, and its logits
    equal those of the sequence alone. Differences must stay within rounding, and below a quarter of
    a token's effect on the tokens that see it. The logits must also equal those of the model's own
    attention (`eager`, or `sdpa` for long sequences), up to rounding, beyond every window and RoPE
    table of the config, as far as time and memory allow; the log says where that stops.

    The model runs in evaluation mode (no dropout, no router noise) and is restored afterwards.
    Rounding can send a token to another expert: for models with experts the median over tokens is
    compared, in half precision and against the model's own attention.

    Args:
        model: a Hugging Face causal LM, optionally inside PEFT, DDP, FSDP (then on all ranks) or
            ``torch.compile``.
        backend: attention backend to test; default: the one set by :func:`use_packed_attention`.
        vocab_size: token ids are drawn below it; default: the config's.

    Returns:
        The largest difference of logits seen (about 0).

    Raises:
        BackendError: segments see each other, positions do not restart, logits differ from the
            model's own attention, or the model cannot attend inside segments. The message names
            the likely cause.
        CompatibilityError: logits are not finite.
    """
    inner = unwrapped(model)
    config: Any = getattr(inner, "config", None)
    previous = config._attn_implementation if config is not None else None
    if backend is not None:
        use_packed_attention(model, backend, disable_dropout=False)
    try:
        text = config.get_text_config()
        size = vocab_size or text.vocab_size
        experts = any(getattr(text, name, None) for name in EXPERTS)
        by_token = experts and is_half(model)
        with evaluating(model), torch.no_grad():
            worst = [
                _Probe(model, size, shared, by_token, experts).run() for shared in (False, True)
            ]
            return max(*worst, compare_with_own(model, size, by_token=experts))
    finally:
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
    """The complete sequence of one segment as a separate pack."""
    index = range(batch.num_tokens) if batch.kv_index is None else batch.kv_index.tolist()
    starts = to_offsets(packs.lengths)
    own = range_indices(starts[segment : segment + 1], packs.lengths[segment : segment + 1])
    tokens = packs.input_ids[np.array(index)[own]]
    return one_pack(tokens, np.array([len(own)]), np.array([0, len(own)]), np.array([1]))
