"""Control strings (``<|im_end|>``) inside texts: finding them, and encoding around
them.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from packstore.format.arrays import Int32, Int64, to_offsets
from packstore.tokenizer.refusals import Refused

Encode = Callable[[Sequence[str]], tuple[Int32, Int64]]

TEMPLATE_CONTROLS: dict[str, tuple[str, ...]] = {
    "ChatML": ("<|im_start|>", "<|im_sep|>", "<|im_end|>"),
    "Llama 2": ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
    "Llama 3": (
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|python_tag|>",
        "<|eom_id|>",
        "<|eot_id|>",
    ),
    "Llama 4": ("<|header_start|>", "<|header_end|>", "<|eom|>", "<|eot|>"),
    "Mistral": (
        "[SYSTEM_PROMPT]",
        "[/SYSTEM_PROMPT]",
        "[AVAILABLE_TOOLS]",
        "[/AVAILABLE_TOOLS]",
        "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
        "[/TOOL_RESULTS]",
    ),
    "Gemma": ("<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>"),
    "Phi, Zephyr, GLM": (
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<|end|>",
        "<|endoftext|>",
        "[gMASK]",
    ),
    "gpt-oss": (
        "<|start|>",
        "<|channel|>",
        "<|constrain|>",
        "<|message|>",
        "<|call|>",
        "<|return|>",
    ),
    "DeepSeek": (
        "<｜begin▁of▁sentence｜>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "Command R": (
        "<|START_OF_TURN_TOKEN|>",
        "<|SYSTEM_TOKEN|>",
        "<|USER_TOKEN|>",
        "<|CHATBOT_TOKEN|>",
        "<|END_OF_TURN_TOKEN|>",
    ),
    "Granite": (
        "<|start_of_role|>",
        "<|end_of_role|>",
        "<|tool_call|>",
        "<|end_of_text|>",
    ),
    "OpenChat": ("<|end_of_turn|>",),
    "OpenAssistant": ("<|prompter|>",),
    "EXAONE": ("[|system|]", "[|user|]", "[|assistant|]", "[|tool|]", "[|endofturn|]"),
    "Kimi": ("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>"),
}
"""Chat template -> control strings that it writes; the page *Tokenizing* names their
sources.

The list is fixed: no setting adds to it. It leaves out `<s>`, `</s>`, `<bos>` and
`<eos>`, which are common in other texts.
"""


def _patterns(names: Iterable[str]) -> tuple[re.Pattern[str], ...]:
    """Return patterns that together match any of `names`, one for each first character.

    A pattern that begins with one certain character is looked for a hundred times
    faster.
    """
    remainders: dict[str, list[str]] = {}
    for name in sorted(names, key=len, reverse=True):
        remainders.setdefault(name[0], []).append(re.escape(name[1:]))
    return tuple(
        re.compile(f"{re.escape(first)}(?:{'|'.join(parts)})")
        for first, parts in remainders.items()
    )


_ALL_TEMPLATE_CONTROLS = tuple(
    itertools.chain.from_iterable(TEMPLATE_CONTROLS.values())
)

TEMPLATE_PATTERNS = _patterns(_ALL_TEMPLATE_CONTROLS)
"""Patterns that together match any of `TEMPLATE_CONTROLS`."""

_TEMPLATE_BEGINNING = re.compile(
    r"\s*(?:<s>|<bos>|<BOS_TOKEN>)?\s*"
    rf"({'|'.join(p.pattern for p in TEMPLATE_PATTERNS)})"
)


def beginning_of_template(text: str) -> str:
    """Return the control string at the beginning of a text that a well-known template
    has rendered; for other texts an empty one.

    BOS may stand before it.
    """
    match = _TEMPLATE_BEGINNING.match(text)
    return match[1] if match else ""


def foreign_patterns(is_foreign: Callable[[str], bool]) -> tuple[re.Pattern[str], ...]:
    """Return patterns of those `TEMPLATE_CONTROLS` that `is_foreign` accepts."""
    return _patterns(name for name in _ALL_TEMPLATE_CONTROLS if is_foreign(name))


@functools.lru_cache(maxsize=8)
def control_pattern(specials: frozenset[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of `specials`, the longest first; nothing if
    empty.
    """
    if not specials:
        return re.compile(r"([^\s\S])")  # no character is neither
    names = sorted(specials, key=len, reverse=True)
    alternatives = "|".join([re.escape(name) for name in names])
    return re.compile(f"({alternatives})")


def holds(text: str, hint: str) -> bool:
    """Return ``hint in text``; fast if the first character of `hint` is rare."""
    return hint[:1] in text and hint in text


def encode_around_controls(
    texts: Sequence[str],
    specials: Mapping[str, int],
    encode: Encode,
    guards: Sequence[str] = (),
) -> tuple[Int32, Int64]:
    """Encode texts: control strings become their ids, all other text is encoded by
    `encode`.

    Args:
        texts: the texts.
        specials: control string -> id.
        encode: returns flat ids and offsets of texts without control strings.
        guards: a character for each text. Where it stands inside a control string, that
            is plain text, such as ``<|im_^end|>`` with the guard ``^``; it is removed
            before the text is encoded.
    """
    pattern = control_pattern(frozenset(specials))
    # Each text is split into plain text and control strings, in turn.
    split_texts = [pattern.split(text) for text in texts]
    if guards:
        split_texts = [
            [part.replace(guard, "") for part in parts]
            for parts, guard in zip(split_texts, guards, strict=True)
        ]
    plain: list[str] = []
    for parts in split_texts:
        plain.extend(part for part in parts[::2] if part)
    plain_ids, plain_offsets = encode(plain)
    plain_parts = iter(np.split(plain_ids, plain_offsets[1:-1]))

    pieces = [plain_ids[:0]]
    lengths = []
    for parts in split_texts:
        length = 0
        for i, part in enumerate(parts):
            if not part:
                continue
            is_control = i % 2 == 1
            if is_control:
                piece = np.array([specials[part]], np.int32)
            else:
                piece = next(plain_parts)
            pieces.append(piece)
            length += len(piece)
        lengths.append(length)
    return np.concatenate(pieces), to_offsets(np.array(lengths, np.int64))


def free_characters(text: str, count: int) -> list[str]:
    """Return `count` characters of Unicode's last private-use area that do not occur in
    `text`, to mark places in a copy of it.

    Raises:
        Refused: there are fewer, as a dialogue of tens of thousands of turns needs
            several for each turn.
    """
    used_characters = frozenset() if text.isascii() else frozenset(text)
    characters: list[str] = []
    for code_point in range(0x100000, 0x10FFFE):
        if len(characters) == count:
            break
        if chr(code_point) not in used_characters:
            characters.append(chr(code_point))
    if len(characters) < count:
        detail = (
            f"{count:,} places to mark, and {len(characters):,} unused characters to "
            "mark them"
        )
        raise Refused("template_refused", detail, "Split the record")
    return characters
