"""A probe of a model: in a pack, each sequence must have the logits that the model
gives it alone.

That one comparison shows many faults: a leak between segments, wrong positions, a state
that is carried over, a window, chunk, softcap or sink that is dropped, a wrong kernel.

It cannot see an effect smaller than rounding, nor one beyond the longest sequence that
time and memory allow; both limits are reported. In models with experts, rounding may
send a token to another expert. There the median over tokens is compared, so an effect
on less than half of the tokens of a sequence goes unseen.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
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

LENGTHS = (13, 16, 40, 6, 9, 12)
"""Tokens of the sequences: a pair, a long sequence, and three that extend each
other.
"""

LONG = 2
"""Index of the long sequence, which becomes longer than every window or chunk of the
model's config (if time and memory allow).
"""

SHARED_TOKENS = (0, 6, 0, 0, 4, 7)
"""In layout shared_prefix: prompt tokens that a sequence takes from the one before it,
its parent. The parent of the last one takes some itself.
"""

TOKENS_BEYOND = 16
"""Tokens of the long sequence beyond a window or chunk."""

ROUNDING_32_BITS = 1e-4
ROUNDING_16_BITS = 1e-1
"""Accepted differences of logits that are computed in two ways, relative to the largest
logit: with matrix products in float32, and in bfloat16, float16 or TF32.
"""

MAX_OPERATIONS_ON_CPU = 3e12
MAX_OPERATIONS_ELSEWHERE = 1e15
"""Floating-point operations allowed for the forward passes."""

MAX_SCORES = 2**26
"""Elements of a layer's attention scores, heads x length x length, that eager attention
may hold; for more, sdpa computes the expected logits.
"""

MAX_CAPPED_SCORES = 2**28
"""The same for a model that softcaps scores, which only eager attention supports."""

MAX_LOGITS = 2**30
"""Elements of logits, length x vocabulary, that may be held."""

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Settings of a config that count experts."""


class _UnclearError(BackendError):
    """The probe has no result: a leak would change no more than rounding does."""


def probe_model(model: nn.Module) -> None:
    """Run :func:`check_isolation` and log its result.

    With nearly random weights there may be no result, as tokens hardly affect each
    other.
    """
    try:
        difference = check_isolation(model)
    except _UnclearError as error:
        logger.warning("the probe gave no result: %s", error)
        return
    logger.info(
        "checked that sequences of a pack do not see each other: packed and unpacked "
        "logits differ by %.2g at most",
        difference,
    )


def check_isolation(
    model: nn.Module, backend: str | None = None, *, vocab_size: int | None = None
) -> float:
    """Compare the logits of a small random pack with calls of the model per sequence.

    The pack runs in both layouts. A call per sequence passes no positions, and uses
    transformers' attention (`eager`, or `sdpa` for long sequences). One sequence
    reaches beyond every window of the config, as far as time and memory allow; the log
    names the limit. Differences must stay within rounding, and below a quarter of
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
    inner = _hugging_face_model(model)
    if is_reward_model(model):
        # Its output is one number; hidden states show more.
        inner = backbone_of(unwrapped(model))
        model = inner
    with keeping_implementations(unwrapped(inner)), evaluating(model), torch.no_grad():
        if backend is not None:
            use_packed_attention(model, backend, disable_dropout=False)
        return _compare(model, inner, vocab_size)


def _hugging_face_model(model: nn.Module) -> Any:
    for module in model.modules():
        if hasattr(module, "set_attn_implementation"):
            return module
    raise BackendError(
        f"check_isolation({type(model).__name__}): it must be a Hugging Face model; "
        f"found none of its methods. {OWN_MODEL}."
    )


@dataclass(frozen=True)
class _Expected:
    """The logits of the model's own calls, and how far packed ones may be from them.

    Attributes:
        logits: `[length, V]` of each sequence.
        attention: name of the attention that computed them.
        rounding: the largest difference that rounding may cause.
        effect: the change of a token's logits when the token before it changes; the
            least that a leak would cause.
    """

    logits: list[Tensor]
    attention: str
    rounding: float
    effect: float

    def limit(self, sequence: int) -> float:
        """Return the largest difference that is accepted for a sequence."""
        if sequence == LONG:
            # `effect` was measured in a short sequence, and rounding grows with length.
            return self.rounding
        return min(self.rounding, self.effect / 4)


def _compare(model: nn.Module, inner: Any, vocab_size: int | None) -> float:
    """Return the largest difference of logits; raise if one is too large."""
    config = inner.config.get_text_config()
    vocab_size = vocab_size or int(config.vocab_size)
    thresholds = _length_thresholds(config)
    lengths = list(LENGTHS)
    lengths[LONG] = _longest(model, config, vocab_size, thresholds)
    sequences = _random_sequences(lengths, vocab_size)

    device = next(model.parameters()).device
    has_16_bits = _has_16_bits(model)
    expected = _expected(model, inner, sequences, vocab_size, has_16_bits)
    has_experts = any(getattr(config, name, None) for name in EXPERTS)

    worst = 0.0
    no_shared_tokens = (0,) * len(lengths)
    layouts = {"concat": no_shared_tokens, "shared_prefix": SHARED_TOKENS}
    for layout, shared_tokens in layouts.items():
        where = f"check_isolation({type(model).__name__}), layout {layout}"
        batch = _batch(sequences, shared_tokens, num_responses=(2, 1, 3)).to(device)
        segments = _packed_logits(model, batch, where)
        for i, segment in enumerate(segments):
            own_logits = expected.logits[i][shared_tokens[i] :].float()
            by_token = (segment - own_logits).abs().amax(1)
            difference = float(by_token.max())
            if has_experts and (i == LONG or has_16_bits):
                # Rounding may send a few tokens to other experts. Each part has its own
                # median: a fault may only show beyond a window.
                parts = by_token.tensor_split(thresholds)
                difference = max(float(part.median()) for part in parts if len(part))
            # Negated, so that nan is refused.
            if not (difference <= expected.limit(i) and expected.effect > 0):
                raise _failure(where, inner, expected, difference)
            worst = max(worst, difference)
    return worst


def _random_sequences(
    lengths: Sequence[int], vocab_size: int
) -> list[npt.NDArray[np.int64]]:
    sequences = []
    for i, length in enumerate(lengths):
        ids = keys(length, 0, "probe", i) % np.uint64(vocab_size)
        sequences.append(ids.astype(np.int64))
    for i, num_shared in enumerate(SHARED_TOKENS):
        if num_shared:
            # The prompt has one token more: layout shared_prefix stores its last token
            # with each response, as it predicts the response's first.
            end = num_shared + 1
            sequences[i][:end] = sequences[i - 1][:end]
    return sequences


def _has_16_bits(model: nn.Module) -> bool:
    """Return True if the model's products have about 16 bits.

    float64 weights have the tolerance of float32, too, as the softmax and the routers
    of transformers compute in float32.
    """
    weight = next(model.parameters())
    device_type = weight.device.type
    if weight.dtype.itemsize == 2 or torch.is_autocast_enabled(device_type):
        return True
    return device_type == "cuda" and torch.get_float32_matmul_precision() != "highest"


def _expected(
    model: nn.Module,
    inner: Any,
    sequences: Sequence[npt.NDArray[np.int64]],
    vocab_size: int,
    has_16_bits: bool,
) -> _Expected:
    device = next(model.parameters()).device
    rows = [torch.from_numpy(ids).to(device) for ids in sequences]
    # In a copy of the second sequence every other token is changed; the tokens between
    # these show the effect on the next token.
    changed = rows[1].clone()
    changed[::2] = (changed[::2] + 1) % vocab_size
    logits, attention = _own_logits(model, inner, [*rows, changed])
    changed_logits = logits.pop()
    changes = (changed_logits - logits[1])[1::2].abs().amax(1)

    rounding = ROUNDING_16_BITS if has_16_bits else ROUNDING_32_BITS
    largest = max(float(row.abs().max()) for row in logits)
    return _Expected(
        logits=logits,
        attention=attention,
        rounding=rounding * largest,
        effect=float(changes.median()),
    )


def _packed_logits(
    model: nn.Module, batch: PackedBatch, where: str
) -> Sequence[Tensor]:
    """Return the logits `[length, V]` of each segment."""
    logits: Any = _by_token(model(**batch.model_inputs())).float()
    if bool(logits.isnan().any()):
        raise CompatibilityError(
            f"{where}: its logits must be finite; found nan. "
            "Look at its weights: a training that diverged leaves such ones."
        )
    num_queries, _ = batch.layout.sizes
    segments: Sequence[Tensor] = logits.split(num_queries)
    return segments


def _failure(
    where: str, inner: Any, expected: _Expected, difference: float
) -> BackendError:
    text = (
        f"{where}: a sequence must have the logits that the model's own attention "
        f"({expected.attention}) gives it; found a difference of {difference:.2g}, "
        f"where rounding gives {expected.rounding:.2g}"
    )
    if difference <= expected.rounding:
        return _UnclearError(
            f"{text}, and a token moves the logits of the next by "
            f"{expected.effect:.2g}. A leak would do no more: run the probe in "
            "float32, or on trained weights."
        )
    attention = str(inner.config._attn_implementation)
    if not attention.startswith(PREFIX):
        return BackendError(
            f"{text}. Prepare the model with use_packed_attention(model); its "
            f"attention is {attention!r}."
        )
    return BackendError(
        f"{text}. If backend='reference' fails as well, the model mixes tokens outside "
        "of attention (a convolution, a recurrent layer), counts positions itself, or "
        "has a mask of its own: use backend='per_sequence'. If not, the backend is "
        "wrong. docs/own-model.md says what a model must do."
    )


def _length_thresholds(config: Any) -> list[int]:
    """Return the lengths beyond which the model computes differently, sorted.

    These are windows and chunks of attention, and original lengths of RoPE tables that
    depend on the length of a call.
    """
    max_positions = getattr(config, "max_position_embeddings", None)
    thresholds = set()
    for name, value in config.to_dict().items():
        is_length = "window" in name or "chunk" in name
        if type(value) is not int or not is_length or "layers" in name:
            continue  # such as max_window_layers, a number of layers
        if not isinstance(max_positions, int) or value < max_positions:
            thresholds.add(value)
    for part in rope_parts(config):
        if depends_on_length(part.get("rope_type", part.get("type"))):
            original = part.get("original_max_position_embeddings")
            thresholds.add(int(original or max_positions or 0))
    return sorted(threshold for threshold in thresholds if threshold > 0)


def _longest(
    model: nn.Module, config: Any, vocab_size: int, thresholds: list[int]
) -> int:
    """Return the length of the long sequence.

    It goes beyond all thresholds that time, memory and the model's positions allow; the
    log names the others.
    """
    limit = _length_limit(model, config, vocab_size)
    longest = LENGTHS[LONG]
    unreachable = []
    for threshold in thresholds:
        length = threshold + TOKENS_BEYOND
        if length <= limit:
            longest = max(longest, length)
        else:
            unreachable.append(str(threshold))
    if unreachable:
        logger.info(
            "the probe stops at %d tokens: nothing beyond %s was compared",
            limit,
            ", ".join(unreachable),
        )
    return max(1, min(limit, longest))


def _length_limit(model: nn.Module, config: Any, vocab_size: int) -> int:
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    is_on_cpu = next(model.parameters()).device.type == "cpu"
    max_operations = MAX_OPERATIONS_ON_CPU if is_on_cpu else MAX_OPERATIONS_ELSEWHERE
    # A token takes 2 operations per weight and pass; the passes: alone, two layouts.
    operations_per_token = 6 * num_weights
    limit = min(
        int(max_operations / operations_per_token), MAX_LOGITS // vocab_size, 2**15
    )
    if _has_capped_scores(config):
        limit = min(limit, int((MAX_CAPPED_SCORES / _num_heads(config)) ** 0.5))
    max_positions = getattr(config, "max_position_embeddings", None)
    is_extensible = any(depends_on_length(kind) for kind in rope_kinds(config))
    if isinstance(max_positions, int) and not is_extensible:
        limit = min(limit, max_positions)
    return limit


def _num_heads(config: Any) -> int:
    return getattr(config, "num_attention_heads", None) or 1


def _own_logits(
    model: nn.Module, inner: Any, rows: Sequence[Tensor]
) -> tuple[list[Tensor], str]:
    """Call the model once per sequence with transformers' attention.

    Returns:
        Logits `[length, V]` of each sequence; and the name of the attention.
    """
    config = inner.config.get_text_config()
    longest = max(len(ids) for ids in rows)
    fits_eager = _num_heads(config) * longest**2 <= MAX_SCORES
    name = "eager" if fits_eager or _has_capped_scores(config) else "sdpa"
    with keeping_implementations(inner):
        try:
            set_attention(inner, name)
        except ValueError:  # the model has no such attention
            name = "eager"
            set_attention(inner, name)
        # Without position_ids, so that the model counts positions itself.
        outputs = [model(input_ids=ids[None], use_cache=False) for ids in rows]
    return [_by_token(output) for output in outputs], name


def _by_token(output: Any) -> Tensor:
    """Return the logits, or hidden states, of the one row of an output."""
    has_logits = hasattr(output, "logits")
    values: Tensor = output.logits if has_logits else output.last_hidden_state
    return values[0]


def _has_capped_scores(config: Any) -> bool:
    """Return True if the model softcaps attention scores, which only eager attention
    supports.
    """
    # Gemma's final_logit_softcapping is of the head, not of attention.
    return any(
        value and "softcap" in name and "final" not in name
        for name, value in config.to_dict().items()
    )


@contextmanager
def ieee_products() -> Iterator[None]:
    """Multiply float32 matrices on a GPU in float32, not in TF32 with its 10 bits."""
    matmul = torch.backends.cuda.matmul
    precision = matmul.fp32_precision
    matmul.fp32_precision = "ieee"
    try:
        yield
    finally:
        matmul.fp32_precision = precision


def few_tokens(device: torch.device) -> PackedBatch:
    """Return a batch of one short sequence, to try a model on."""
    batch = _batch([np.arange(1, 7)], shared_tokens=[0], num_responses=[1])
    return batch.to(device)


def two_layouts(device: torch.device) -> list[PackedBatch]:
    """Return batches of one pair that shares a prompt, in layouts concat and
    shared_prefix.
    """
    pair = [np.arange(1, 9), np.array([1, 2, 3, 4, 6, 5])]
    concat = _batch(pair, shared_tokens=[0, 0], num_responses=[2])
    shared_prefix = _batch(pair, shared_tokens=[0, 4], num_responses=[2])
    return [concat.to(device), shared_prefix.to(device)]


def _batch(
    sequences: Sequence[npt.NDArray[np.int64]],
    shared_tokens: Sequence[int],
    num_responses: Sequence[int],
) -> PackedBatch:
    """Return a batch of one pack.

    Args:
        sequences: token ids of each logical sequence.
        shared_tokens: of each sequence, leading tokens that are not stored again, as
            they are those of the sequence before it.
        num_responses: sequences of each example.
    """
    segments = [
        ids[num_shared:]
        for ids, num_shared in zip(sequences, shared_tokens, strict=True)
    ]
    tokens = np.concatenate(segments)
    boundaries = to_offsets(np.array([len(segment) for segment in segments]))
    pack = Packs(
        signed_ids=~tokens.astype(np.int32),  # complements: no token is supervised
        reward=np.zeros(len(sequences), np.float32),
        lengths=np.array([len(ids) for ids in sequences], np.int32),
        seq_boundaries=boundaries.astype(np.int32),
        parent_distances=(np.array(shared_tokens) > 0).astype(np.int32),
        example_ids=np.arange(len(num_responses)),
        num_responses=np.array(num_responses, np.int32),
        token_offsets=np.array([0, len(tokens)]),
        sequence_offsets=np.array([0, len(sequences)]),
        example_offsets=np.array([0, len(num_responses)]),
    )
    return collate(pack, "scored")
