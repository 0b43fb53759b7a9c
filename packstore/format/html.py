"""A table and a bar in HTML: how plans, manifests, datasets and batches show in a
notebook.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

_COLOURS = ("#5aa88f", "#dd8d6c", "#7f9fc4", "#c9a84c")
_FREE = "#d9dee3"


def card(
    title: str, facts: Mapping[str, object], parts: Iterable[int] = (), size: int = 0
) -> str:
    """Returns `title`, a bar of a pack with a segment for each of `parts` of `size`,
    and `facts`.

    Parts are tokens; what is left of `size` is grey. There is no bar without parts.
    """
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(_text(value))}</td></tr>'
        for name, value in facts.items()
    )
    return (
        f"<div><b>{escape(title)}</b>{_bar([*parts], size)}<table>{rows}</table></div>"
    )


def _bar(parts: list[int], size: int) -> str:
    if not parts:
        return ""
    size = max(size, sum(parts))
    drawn = "".join(
        f'<span title="{tokens:,} tokens" '
        f'style="width:{100 * tokens / size:.3f}%;background:'
        f"{_COLOURS[i % len(_COLOURS)]};border-right:1px solid "
        '#fff;box-sizing:border-box"></span>'
        for i, tokens in enumerate(parts)
    )
    style = f"display:flex;height:16px;max-width:640px;margin:6px 0;background:{_FREE}"
    return (
        f'<div title="{sum(parts):,} of {size:,} tokens" style="{style}">{drawn}</div>'
    )


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
