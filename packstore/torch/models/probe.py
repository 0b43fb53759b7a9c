"""Probes a model: packed, each sequence must have the logits of the model's own forward
call alone.

That one comparison shows a leak between segments, wrong positions, a state that is
carried over, a window, chunk, cap or sink that is dropped, and a wrong kernel. It
cannot see effects below rounding or beyond the lengths that time and memory allow (both
are reported), nor, where rounding may choose experts, what happens to less than half of
the tokens of a sequence.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from packstore.errors import BackendError, CompatibilityError
from packstore.format.arrays import Packs, to_offsets
from packstore.format.seeds import keys
from packstore.torch.batch.batch import PackedBatch, collate
from packstore.torch.models.implementations import (
    keeping_implementations,
    set_attention,
)
from packstore.torch.models.mask import PREFIX
from packstore.torch.models.model import OWN_MODEL, use_packed_attention
from packstore.torch.models.unwrap import (
    backbone_of,
    depends_on_length,
    evaluating,
    is_reward_model,
    rope_kinds,
    rope_parts,
    unwrapped,
)

logger = logging.getLogger("packstore")

LENGTHS = (13, 16, 40, 6, 9)
"""Tokens of the sequences: two pairs, and between them one that is as long as the
config asks.
"""

SHARED_TOKENS = (0, 6, 0, 0, 4)
"""Tokens of the prompt that the second of a pair takes from the first, in layout
shared_prefix.
"""

LONG, FURTHER = 2, 16
"""Index of the long sequence, and its tokens beyond the largest length of the config.
"""

ROUNDING = {False: 1e-4, True: 1e-1}
"""Tolerance between two ways to compute the same logits, relative to the largest, by
whether products have about 16 bits: by weight dtype, autocast or TF32.
"""

WORK = {"cpu": 3e12}
"""Floating-point operations allowed for the forward passes, by device; 1e15 on others.
"""

SCORES, CAPPED_SCORES, LOGITS = 2**26, 2**28, 2**30
"""Elements held at once: scores of eager attention, scores of models with a softcap
(which only eager attention supports), and logits.
"""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


class _UnclearError(BackendError):
    """Rounding is as large as the effect of a leak would be."""


def probe_model(model: nn.Module) -> None:
    """Logs the result of :func:`check_isolation`, which nearly random weights leave
    unclear.
    """
    try:
        logger.info(
            "probe: packed and unpacked logits differ by %.2g", check_isolation(model)
        )
    except _UnclearError as error:
        logger.warning("the probe gave no result: %s", error)


def check_isolation(
    model: nn.Module, backend: str | None = None, *, vocab_size: int | None = None
) -> float:
    """Runs a small random pack in both layouts, and compares it with the model's own
    forward call.

    Each sequence must have the logits that the model gives it alone, without positions
    and with its own attention (`eager`, or `sdpa` for long sequences). One sequence
    reaches beyond every window of the config, as far as time and memory allow; the log
    says where that stops. Differences must stay within rounding, and below a quarter of
    a token's effect on the next one.

    The model runs in evaluation mode (no dropout, no router noise) and is restored
    afterwards. Rounding can send a token to another expert: for models with experts the
    median over tokens is compared, in half precision and in the long sequence.

    Args:
        model: a Hugging Face causal LM, optionally inside PEFT, DDP, FSDP (then on all
            ranks) or ``torch.compile``.
        backend: attention backend to test; default: the one set by
            :func:`use_packed_attention`.
        vocab_size: token ids are drawn below it; default: the config's.

    Returns:
        The largest difference of logits seen (about 0).

    Raises:
        BackendError: logits differ, as segments see each other or positions do not
            restart, or the model cannot attend inside segments.
        CompatibilityError: logits are not finite.
    """
    inner: Any = next(
        (m for m in model.modules() if hasattr(m, "set_attn_implementation")), None
    )
    if inner is None:
        raise BackendError(
            f"check_isolation({type(model).__name__}): it must be a Hugging Face "
            "model; "
            f"found none of its methods. {OWN_MODEL}."
        )
    if is_reward_model(model):  # its output is one number: hidden states say more
        model = inner = backbone_of(unwrapped(model))
    with keeping_implementations(unwrapped(inner)), evaluating(model), torch.no_grad():
        if backend is not None:
            use_packed_attention(model, backend, disable_dropout=False)
        return _compare(model, inner, vocab_size)


def _compare(model: nn.Module, inner: Any, vocab_size: int | None) -> float:
    """Returns the largest difference of logits."""
    config = inner.config.get_text_config()
    vocab_size = vocab_size or int(config.vocab_size)
    marks = _marks(config)
    sizes = list(LENGTHS)
    sizes[LONG] = _longest(model, config, vocab_size, marks)
    ids = [keys(n, 0, "probe", i) % np.uint64(vocab_size) for i, n in enumerate(sizes)]
    for i, n in enumerate(SHARED_TOKENS):
        if n:  # of one prompt, whose last token both have
            ids[i][: n + 1] = ids[i - 1][: n + 1]
    weight = next(model.parameters())
    device = weight.device
    rows = [torch.from_numpy(x.astype(np.int64)).to(device) for x in ids]
    changed = rows[1].clone()
    changed[::2] = (changed[::2] + 1) % vocab_size
    (*own, moved), attention = _own_logits(model, inner, config, [*rows, changed])
    # Also float64 weights have the tolerance of float32, as transformers' softmax and
    # routers do.
    tf32 = device.type == "cuda" and torch.get_float32_matmul_precision() != "highest"
    half = weight.dtype.itemsize == 2 or torch.is_autocast_enabled(device.type) or tf32
    rounding = ROUNDING[half] * max(float(x.abs().max()) for x in own)
    effect = float((moved - own[1])[1::2].abs().amax(1).median())
    worst, experts = 0.0, any(getattr(config, name, None) for name in EXPERTS)
    for layout, shared_tokens in (
        ("concat", (0,) * len(sizes)),
        ("shared_prefix", SHARED_TOKENS),
    ):
        batch = _batch(ids, shared_tokens, (2, 1, 2)).to(device)
        packed: Any = _by_token(model(**batch.model_inputs())).float()
        where = f"check_isolation({type(model).__name__}), layout {layout}"
        if bool(packed.isnan().any()):
            raise CompatibilityError(
                f"{where}: its logits must be finite; found nan. "
                "Look at its weights: a training that diverged leaves such ones."
            )
        kept = [x[n:].float() for x, n in zip(own, shared_tokens, strict=True)]
        for i, logits in enumerate(packed.split([len(x) for x in kept])):
            by_token = (logits - kept[i]).abs().amax(1)
            size = float(by_token.max())
            if experts and (i == LONG or half):
                parts = [part for part in by_token.tensor_split(marks) if len(part)]
                size = max(float(part.median()) for part in parts)
            limit = rounding if i == LONG else min(rounding, effect / 4)
            if not (size <= limit and effect > 0):
                raise _failure(where, inner, attention, size, effect, rounding)
            worst = max(worst, size)
    return worst


def _failure(
    where: str, inner: Any, attention: str, size: float, effect: float, rounding: float
) -> BackendError:
    name, error = str(inner.config._attn_implementation), BackendError
    if size <= rounding:
        error = _UnclearError
        more = (
            f", and a token moves the logits of the next by {effect:.2g}. "
            "A leak would do no more: run the probe in float32, or on trained weights."
        )
    elif not name.startswith(PREFIX):
        more = (
            ". Prepare the model with use_packed_attention(model); its attention "
            f"is {name!r}."
        )
    else:
        more = (
            ". If backend='reference' fails as well, the model mixes tokens outside of "
            "attention "
            "(a convolution, a recurrent layer), counts positions itself, or has a "
            "mask of its "
            "own: use backend='per_sequence'. If not, the backend is wrong. "
            "docs/own-model.md says what a model must do."
        )
    return error(
        f"{where}: a sequence must have the logits that the model's own attention "
        f"({attention}) "
        f"gives it; found a difference of {size:.2g}, where rounding gives "
        f"{rounding:.2g}{more}"
    )


def _marks(config: Any) -> list[int]:
    """Lengths of the config beyond which the model computes differently."""
    longest = getattr(config, "max_position_embeddings", None)
    marks = {
        value
        for name, value in config.to_dict().items()
        if type(value) is int
        and ("window" in name or "chunk" in name)
        and "layers" not in name
        and not (isinstance(longest, int) and value >= longest)
    }
    for part in rope_parts(config):
        if depends_on_length(part.get("rope_type", part.get("type"))):
            marks.add(int(part.get("original_max_position_embeddings") or longest or 0))
    return sorted(mark for mark in marks if mark > 0)


def _longest(model: nn.Module, config: Any, vocab_size: int, marks: list[int]) -> int:
    """Tokens of the long sequence: beyond all marks that time, memory and positions
    allow.
    """
    weights = sum(p.numel() for p in model.parameters())
    work = WORK.get(next(model.parameters()).device.type, 1e15)
    limit = min(int(work / (6 * weights)), LOGITS // vocab_size, 2**15)
    if _capped(config):
        heads = getattr(config, "num_attention_heads", None) or 1
        limit = min(limit, int((CAPPED_SCORES / heads) ** 0.5))
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and not any(map(depends_on_length, rope_kinds(config))):
        limit = min(limit, longest)
    beyond = [mark for mark in marks if mark + FURTHER > limit]
    if beyond:
        names = ", ".join(map(str, beyond))
        logger.info(
            "the probe stops at %d tokens: nothing beyond %s was compared", limit, names
        )
    reached = [mark + FURTHER for mark in marks if mark not in beyond]
    return max(1, min(limit, max([LENGTHS[LONG], *reached])))


def _own_logits(
    model: nn.Module, inner: Any, config: Any, rows: list[Tensor]
) -> tuple[list[Tensor], str]:
    """Logits `[length, V]` of each sequence by a call of its own; and the attention's
    name.
    """
    heads = getattr(config, "num_attention_heads", None) or 1
    plain = _capped(config) or heads * max(map(len, rows)) ** 2 <= SCORES
    name = "eager" if plain else "sdpa"
    with keeping_implementations(inner):
        try:
            set_attention(inner, name)
        except ValueError:  # the model has no such attention
            name = "eager"
            set_attention(inner, name)
        # Without position_ids, so that the model counts positions itself.
        return [
            _by_token(model(input_ids=ids[None], use_cache=False)) for ids in rows
        ], name


def _by_token(outputs: Any) -> Tensor:
    """The logits, or hidden states, of one row."""
    values: Tensor = (
        outputs.logits if hasattr(outputs, "logits") else outputs.last_hidden_state
    )
    return values[0]


def _capped(config: Any) -> bool:
    """Returns True if the model softcaps attention scores, which only eager attention
    supports.
    """
    values = config.to_dict().items()
    return any(x and "softcap" in name and "final" not in name for name, x in values)


@contextmanager
def ieee_products() -> Iterator[None]:
    """Multiplies float32 matrices on a GPU in float32 instead of TF32, which has 10
    bits.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = before


def few_tokens(device: torch.device) -> PackedBatch:
    """Makes a batch of one short sequence, to try a model on."""
    return _batch([np.arange(1, 7)], [0], [1]).to(device)


def two_layouts(device: torch.device) -> list[PackedBatch]:
    """Makes batches of one pair that share a prompt, laid end to end and with it stored
    once.
    """
    pair = [np.arange(1, 9), np.array([1, 2, 3, 4, 6, 5])]
    return [_batch(pair, [0, shared], [2]).to(device) for shared in (0, 4)]


def _batch(
    ids: Sequence[Any], shared_tokens: Sequence[int], responses: Sequence[int]
) -> PackedBatch:
    """One pack of sequences, less the tokens that the first of an example has
    already.
    """
    lengths = np.array([len(x) for x in ids], np.int32)
    segments = [x[n:] for x, n in zip(ids, shared_tokens, strict=True)]
    tokens, bounds = (
        np.concatenate(segments),
        to_offsets(np.array([len(x) for x in segments])),
    )
    pack = Packs(
        signed_ids=~tokens.astype(np.int32),
        reward=np.zeros(len(ids), np.float32),
        lengths=lengths,
        seq_boundaries=bounds.astype(np.int32),
        example_ids=np.arange(len(responses)),
        num_responses=np.array(responses, np.int32),
        token_offsets=np.array([0, len(tokens)]),
        sequence_offsets=np.array([0, len(ids)]),
        example_offsets=np.array([0, len(responses)]),
    )
    return collate(pack, "scored")
