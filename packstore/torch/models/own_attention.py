"""Compares packed attention with transformers' own attention of the model.

Packed and single sequences can agree and both be wrong, for example if both ignore a window. So a
packed row is also compared with transformers' own attention on each sequence alone, beyond every
length at which the config changes something: a window, a chunk, a RoPE table.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packstore.errors import BackendError, sentence
from packstore.format.arrays import to_offsets
from packstore.format.seeds import keys
from packstore.torch.batch.collate import PackedBatch, collate
from packstore.torch.models.probe import logits_of, one_pack, rounding_of
from packstore.torch.models.unwrap import by_length, rope_kinds, rope_parts

logger = logging.getLogger("packstore")

SHORT = (9, 14)
"""Lengths in tokens of the sequences before and after the long one."""

AT_LEAST, FURTHER = 40, 16
"""Least length of the long sequence, and its tokens beyond the largest length of the config."""

WORK = {"cpu": 2e12}
"""Floating-point operations allowed for both forward passes, by device; 1e15 on others."""

SCORES, CAPPED_SCORES, LOGITS = 2**26, 2**28, 2**30
"""Elements held at once: scores of eager attention, scores of models with a softcap (which only
eager attention supports), and logits."""

AS_OWN = "a sequence must have the logits that the model's own attention gives it"


def compare_with_own(model: nn.Module, vocab_size: int, by_token: bool) -> float:
    """Returns the largest difference between packed and own attention; 0 if the model has none.

    Args:
        model: in evaluation mode, prepared by :func:`~packstore.torch.use_packed_attention`.
        vocab_size: token ids are drawn below it.
        by_token: compare medians over tokens, as rounding may send single ones to other experts.

    Raises:
        BackendError: the two differ by more than rounding.
    """
    inner: Any = next((m for m in model.modules() if hasattr(m, "set_attn_implementation")), None)
    if inner is None:
        return 0.0
    config = inner.config.get_text_config()
    marks = _marks(config)
    limit = _limit(model, config, vocab_size)
    beyond = [mark for mark in marks if mark + FURTHER > limit]
    if beyond:
        found = ", ".join(map(str, beyond))
        logger.info("the probe stops at %d tokens: nothing beyond %s was compared", limit, found)
    long = min(limit, max([AT_LEAST, *(mark + FURTHER for mark in marks if mark not in beyond)]))
    device = next(model.parameters()).device
    batch = _batch((SHORT[0], long, SHORT[1]), vocab_size).to(device)
    with torch.no_grad():
        packed = logits_of(model, batch)
        own, name = _own_logits(model, inner, config, batch)
    # transformers' eager attention computes its softmax in float32 even with wider weights.
    rounding = rounding_of(model, own, bits=32)
    rows = (packed.float() - own.float()).abs().amax(1)
    worst = max(_sizes(rows, batch, marks, by_token))
    if not worst <= rounding:
        where = f"check_isolation({type(model).__name__}), beside attention {name!r}"
        found = f"a difference of {worst:.2g}, where rounding gives {rounding:.2g}"
        do = (
            "If backend='reference' fails as well, the model's attention does something that "
            "packed attention does not see (a mask of its own): train it unpacked. If not, the "
            "backend is wrong"
        )
        raise BackendError(sentence(where, AS_OWN, found, do))
    return worst


def _marks(config: Any) -> list[int]:
    """Lengths of the config beyond which the model computes differently."""
    longest = getattr(config, "max_position_embeddings", None)
    marks = set()
    for name, value in config.to_dict().items():
        size = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if size and ("window" in name or "chunk" in name) and "layers" not in name:
            marks.add(value)
    if isinstance(longest, int):
        marks = {mark for mark in marks if mark < longest}
    for part in rope_parts(config):
        if by_length(part.get("rope_type", part.get("type"))):
            marks.add(int(part.get("original_max_position_embeddings") or longest or 0))
    return sorted(marks - {0})


def _limit(model: nn.Module, config: Any, vocab_size: int) -> int:
    """Largest length of the long sequence that time, memory and positions allow, in tokens."""
    weights = sum(p.numel() for p in model.parameters())
    work = WORK.get(next(model.parameters()).device.type, 1e15)
    limit = min(int(work / (4 * weights)), LOGITS // vocab_size, 2**15)
    if _capped(config):
        limit = min(limit, int((CAPPED_SCORES / _heads(config)) ** 0.5))
    longest = getattr(config, "max_position_embeddings", None)
    extends = any(map(by_length, rope_kinds(config)))
    if isinstance(longest, int) and not extends:
        limit = min(limit, longest)
    return max(limit, 1)


def _own_logits(
    model: nn.Module, inner: Any, config: Any, batch: PackedBatch
) -> tuple[Tensor, str]:
    """The row's logits `[T, V]`, from one call per sequence; and the name of the attention."""
    tokens = int(batch.lengths.max())
    plain = _capped(config) or _heads(config) * tokens**2 <= SCORES
    before = inner.config._attn_implementation
    name = _choose(inner, "eager" if plain else "sdpa")
    try:
        # Without position_ids, so that the model counts positions itself.
        rows = [
            model(input_ids=ids[None], use_cache=False).logits[0]
            for ids in torch.split(batch.input_ids, batch.lengths.tolist())
        ]
    finally:
        inner.set_attn_implementation(before)
    return torch.cat(rows), name


def _choose(inner: Any, name: str) -> str:
    try:
        inner.set_attn_implementation(name)
    except ValueError:  # the model has no such attention
        name = "eager"
        inner.set_attn_implementation(name)
    return name


def _sizes(rows_T: Tensor, batch: PackedBatch, marks: list[int], by_token: bool) -> Iterator[float]:
    """The largest difference of each sequence; by token, the median between marked lengths."""
    for rows in torch.split(rows_T, batch.lengths.tolist()):
        cuts = [mark for mark in marks if mark < len(rows)] if by_token else []
        for part in rows.tensor_split(cuts):
            yield float(part.median() if by_token else part.max())


def _capped(config: Any) -> bool:
    """Returns True if the model softcaps attention scores, which only eager attention supports."""
    return any(
        value and "softcap" in name and "final" not in name
        for name, value in config.to_dict().items()
    )


def _heads(config: Any) -> int:
    return int(getattr(config, "num_attention_heads", None) or 1)


def _batch(lengths: tuple[int, ...], vocab_size: int) -> PackedBatch:
    """One pack of sequences of random tokens."""
    rows = [keys(n, 1, "probe", i) % np.uint64(vocab_size) for i, n in enumerate(lengths)]
    tokens = np.concatenate(rows).astype(np.int32)
    sizes = np.array(lengths)
    return collate(one_pack(tokens, sizes, to_offsets(sizes), np.ones(len(sizes), int)), "sft")
