"""A probe that anyone can run on their own model: does packing stay invisible to it?"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packstore.errors import BackendError, sentence
from packstore.records import Int64, Packs, range_indices, to_offsets
from packstore.seeds import keys
from packstore.torch.collate import PackedBatch, collate
from packstore.torch.model import use_packed_attention

PROMPTS = (7, 5)
RESPONSES = ((6, 9), (1, 4))
"""Tokens of the prompts and of both responses of the two examples of the probe."""


def check_isolation(
    model: nn.Module, backend: str | None = None, *, vocab_size: int | None = None
) -> float:
    """Feeds a small random pack, in both layouts, and compares logits.

    For each segment: other tokens in it move the logits of no other segment, and its logits are
    those of the sequence by itself.

    Args:
        model: a Hugging Face causal LM.
        backend: attention backend to try; default: as :func:`use_packed_attention` left the model.
        vocab_size: token ids are drawn below it; default: the config's.

    Returns:
        The largest difference of logits that was seen, for the record (about 0).

    Raises:
        BackendError: segments see each other, or positions do not start anew; or the model cannot
            attend inside segments at all.
    """
    config: Any = getattr(model, "config", None)
    previous = config._attn_implementation if config is not None else None
    training = model.training
    if backend is not None:
        use_packed_attention(model, backend)
    try:
        model.eval()
        size = vocab_size or config.get_text_config().vocab_size
        with torch.no_grad():
            return max(_probe(model, size, shared) for shared in (False, True))
    finally:
        model.train(training)
        if backend is not None:
            model.set_attn_implementation(previous)  # type: ignore[operator]


def _probe(model: nn.Module, vocab_size: int, shared: bool) -> float:
    device = next(model.parameters()).device
    packs, prompts = _random_packs(vocab_size, shared)
    batch = collate(packs, "dpo").to(device)
    logits = _logits(model, batch)
    half = torch.finfo(next(model.parameters()).dtype).bits < 32
    allowed = (5e-2 if half else 1e-4) * float(logits.abs().max())
    private = prompts - 1 if shared else 0 * prompts
    worst = 0.0
    for segment in range(batch.num_segments):
        mine = batch.segment_ids == segment
        own = mine & (batch.position_ids >= int(private[segment]))
        ids = torch.where(own, (batch.input_ids + 1) % vocab_size, batch.input_ids)
        moved = _logits(model, batch, ids)[~mine] - logits[~mine]
        alone = collate(_alone(packs, batch, segment), "sft").to(device)
        apart = _logits(model, alone)[-int(mine.sum()) :] - logits[mine]
        for must, difference in (
            ("other tokens in one segment must not move the logits of another", moved),
            ("a segment must have the logits of its sequence alone", apart),
        ):
            found = float(difference.abs().max())
            if not found <= allowed:
                layout = "shared_prefix" if shared else "concat"
                where = f"check_isolation({type(model).__name__}), layout {layout}"
                do = "Prepare the model with use_packed_attention, or train it unpacked"
                raise BackendError(sentence(where, must, f"a difference of {found:.2g}", do))
            worst = max(worst, found)
    return worst


def _logits(model: nn.Module, batch: PackedBatch, input_ids: Tensor | None = None) -> Tensor:
    inputs = batch.model_inputs()
    if input_ids is not None:
        inputs["input_ids"] = input_ids[None]
    logits: Tensor = model(**inputs).logits[0]
    return logits.float()


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
    return _one_pack(tokens, lengths, bounds, np.array([2, 2])), prompts


def _alone(packs: Packs, batch: PackedBatch, segment: int) -> Packs:
    """The whole sequence of one segment as a pack of its own."""
    index = range(batch.num_tokens) if batch.kv_index is None else batch.kv_index.tolist()
    starts = to_offsets(packs.lengths)
    own = range_indices(starts[segment : segment + 1], packs.lengths[segment : segment + 1])
    tokens = packs.input_ids[np.array(index)[own]]
    return _one_pack(tokens, np.array([len(own)]), np.array([0, len(own)]), np.array([1]))


def _one_pack(tokens: Any, lengths: Any, bounds: Any, responses: Any) -> Packs:
    sizes = (len(tokens), len(lengths), len(responses))
    offsets = [np.array([0, n]) for n in sizes]
    return Packs(
        input_ids=tokens,
        labels=np.full_like(tokens, -100),
        reward=np.zeros(len(lengths), np.float32),
        lengths=lengths.astype(np.int32),
        seq_boundaries=bounds.astype(np.int32),
        example_ids=np.arange(len(responses)),
        num_responses=responses.astype(np.int32),
        token_offsets=offsets[0],
        sequence_offsets=offsets[1],
        example_offsets=offsets[2],
    )
