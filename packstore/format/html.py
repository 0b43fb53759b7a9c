"""A table and a bar in HTML, for the objects that notebooks show."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

_COLOURS = ("#5aa88f", "#dd8d6c", "#7f9fc4", "#c9a84c")
_FREE_COLOUR = "#d9dee3"


def card(
    title: str, facts: Mapping[str, object], parts: Iterable[int] = (), size: int = 0
) -> str:
    """Return a title, a bar for a pack, and a table.

    Args:
        title: text of the title.
        facts: name -> value, a row of the table each; whole numbers get separators.
        parts: tokens of each segment of the bar; without parts there is no bar.
        size: tokens that the bar stands for; the free part is grey.
    """
    rows = "".join(
        f'<tr><th style="text-align:left">{escape(name)}</th>'
        f'<td style="text-align:left">{escape(_text(value))}</td></tr>'
        for name, value in facts.items()
    )
    bar = _bar(list(parts), size)
    return f"<div><b>{escape(title)}</b>{bar}<table>{rows}</table></div>"


def _bar(parts: list[int], size: int) -> str:
    if not parts:
        return ""
    size = max(size, sum(parts))
    segments = []
    for i, tokens in enumerate(parts):
        width = f"width:{100 * tokens / size:.3f}%"
        colour = f"background:{_COLOURS[i % len(_COLOURS)]}"
        border = "border-right:1px solid #fff;box-sizing:border-box"
        segments.append(
            f'<span title="{tokens:,} tokens" style="{width};{colour};{border}"></span>'
        )
    title = f"{sum(parts):,} of {size:,} tokens"
    layout = "display:flex;height:16px;max-width:640px;margin:6px 0"
    style = f"{layout};background:{_FREE_COLOUR}"
    bar = f'<div title="{title}" style="{style}">{"".join(segments)}</div>'
    return f"{bar}<div>{_text(len(parts))} examples, {title}</div>"


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)
