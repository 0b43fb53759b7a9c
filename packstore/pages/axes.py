"""Axes of drawings: the area between them, ticks, labels and titles."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from packstore.pages.frame import as_html

Label = tuple[float, str]
"""Fraction of an axis, and the text there."""


@dataclass(frozen=True, kw_only=True)
class Area:
    """The size of a drawing and its margins, in units of its view box.

    The margins hold the labels and titles of the axes.
    """

    width: int = 440
    height: int = 244
    left: int = 56
    right: int = 22
    top: int = 30
    bottom: int = 46

    def point(self, x: float, y: float) -> tuple[float, float]:
        """Map a point of the unit square, with y upwards, to the drawing."""
        return (
            self.left + x * (self.width - self.left - self.right),
            self.height - self.bottom - y * (self.height - self.top - self.bottom),
        )


def figure(
    area: Area,
    *,
    title: str,
    note: str,
    x_title: str,
    y_title: str,
    x_labels: Iterable[Label],
    y_labels: Iterable[Label],
    shapes: Iterable[str],
) -> str:
    """Return shapes with axes, a caption above and a note below.

    Args:
        area: the size of the drawing.
        title, note: texts.
        x_title, y_title: the quantities of the axes.
        x_labels, y_labels: as of :func:`labels`.
        shapes: SVG elements.
    """
    elements = []
    for fraction, text in y_labels:
        left, y = area.point(0, fraction)
        right, _ = area.point(1, fraction)
        elements.append(
            f'<line class="axis" x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        elements.append(svg_text(text, left - 8, y + 4, anchor="end"))
    for fraction, text in x_labels:
        x, base = area.point(fraction, 0)
        elements.append(svg_text(text, x, base + 18))

    end, base = area.point(1, 0)
    elements.append(svg_text(y_title, 0, 12, anchor="start"))
    elements.append(svg_text(x_title, end, base + 38, anchor="end"))
    description = as_html(f"{title}: {note}")
    return (
        f"<figure><figcaption>{as_html(title)}</figcaption>"
        f'<svg viewBox="0 0 {area.width} {area.height}" role="img" '
        f'aria-label="{description}">{"".join(elements)}{"".join(shapes)}</svg>'
        f'<p class="soft">{as_html(note)}</p></figure>'
    )


def svg_text(text: str, x: float, y: float, anchor: str = "middle") -> str:
    """Return a text of a drawing; `anchor` is ``start``, ``middle`` or ``end``."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{as_html(text)}</text>'
    )


def ticks(low: float, high: float) -> list[float]:
    """Return three to seven round numbers, equally far apart, that span `low` to
    `high`.
    """
    if high - low <= 1e-4 * max(abs(high), abs(low)):
        # Six digits would not distinguish such numbers: put them in the middle.
        low -= abs(low) / 2
        high += abs(high) / 2

    power = 10.0 ** np.floor(np.log10((high - low) / 5))
    for multiple in (1, 2, 5, 10):
        step = power * multiple
        if 5 * step >= (high - low) * (1 - 1e-9):
            break

    first = np.floor(low / step + 1e-9)
    last = np.ceil(high / step - 1e-9)
    return [float(f"{step * i:.6g}") for i in np.arange(first, last + 1)]


def labels(low: float, high: float) -> list[Label]:
    """Return the labels of an axis from `low` to `high`."""
    inside = [tick for tick in ticks(low, high) if low <= tick <= high] or [low]
    return [((tick - low) / (high - low), short(tick)) for tick in inside]


def short(value: float) -> str:
    """Format a number for an axis: `1.5M`, `12k`, `3,000`, `0.25`."""
    if abs(value) >= 1e9:
        return f"{value / 1e9:.3g}G"
    if abs(value) >= 1e6:
        return f"{value / 1e6:.3g}M"
    if abs(value) >= 1e4:
        return f"{value / 1e3:.3g}k"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"
