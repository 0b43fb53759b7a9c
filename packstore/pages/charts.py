"""The page of charts: histograms drawn as SVG, with a text for each bar."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from packstore.pages import frame
from packstore.pages.frame import as_html

WIDTH = 440
HEIGHT = 210
"""Size of a drawing, in units of its view box."""

LEFT = 56
RIGHT = 22
TOP = 12
BOTTOM = 30
"""Margins of a drawing, for the texts of the axes."""

MAX_BARS = 48

OUTLIER_RANGE = 1.5
"""The largest 1 % of the values are outliers if the range of all values is more than
this many times the range without them.
"""


def charts_page(
    title: str,
    subtitle: str,
    *,
    facts: Mapping[str, str],
    charts: Iterable[str],
    tables: Mapping[str, tuple[Sequence[str], Iterable[Sequence[str]]]],
) -> str:
    """Return a page: figures, charts, and tables.

    Args:
        title, subtitle: the heading of the page, and the line below it.
        facts: name -> value, shown side by side.
        charts: drawings, as of :func:`histogram`.
        tables: title -> columns and rows.
    """
    drawings = f'<div class="charts">{"".join(charts)}</div>'
    sections = [
        frame.section("Figures", frame.facts(facts)),
        frame.section("Charts", drawings),
    ]
    for name, (columns, rows) in tables.items():
        sections.append(frame.section(name, frame.table(columns, rows)))
    return frame.page(title, subtitle, sections)


def histogram(title: str, values: npt.NDArray[np.generic]) -> str:
    """Return a histogram with bars of equal width.

    If few values are far above the others, the last bar holds all of them, and a note
    explains it.

    Args:
        title: the caption.
        values: `[n]` numbers, not all equal.
    """
    bins = _bins(values)
    ticks = [tick for tick in _ticks(0, max(bins.counts)) if tick == int(tick)]
    axis_end = ticks[-1]

    bars = []
    for i, count in enumerate(bins.counts):
        left, upper = _to_drawing(i / len(bins.counts), count / axis_end)
        right, base = _to_drawing((i + 1) / len(bins.counts), 0)
        text = f"{_short(bins.start(i))} to {_short(bins.end(i))}: {count:,}"
        bars.append(
            f'<rect class="bar" x="{left:.1f}" y="{upper:.1f}" '
            f'width="{right - left - 0.8:.1f}" '
            f'height="{base - upper:.1f}"><title>{as_html(text)}</title></rect>'
        )

    note = f"median {_short(bins.median)}, largest {_short(bins.maximum)}"
    if bins.has_outliers:
        last_start = _short(bins.start(len(bins.counts) - 1))
        note += f"; the last bar holds all from {last_start} on"

    return _figure(
        title=title,
        note=note,
        x_labels=_labels(bins.low, bins.start(len(bins.counts))),
        y_labels=[(tick / axis_end, _short(tick)) for tick in ticks],
        shapes=bars,
    )


@dataclass(frozen=True, kw_only=True)
class _Bins:
    """Bars of equal width from `low` on; the last one also holds outliers."""

    low: float
    width: float
    counts: list[int]
    median: float
    maximum: float
    has_outliers: bool

    def start(self, i: int) -> float:
        """Return the smallest value of bar `i`."""
        return self.low + i * self.width

    def end(self, i: int) -> float:
        """Return the end of bar `i`: for the last one, the largest value."""
        if i == len(self.counts) - 1:
            return self.maximum
        return self.start(i + 1)


def _bins(values: npt.NDArray[np.generic]) -> _Bins:
    """Count the values in each bar. For integers, the width of bars is an integer."""
    are_integers = values.dtype.kind in "iub"
    numbers = np.asarray(values, np.float64)
    low = float(numbers.min())
    maximum = float(numbers.max())

    high = float(np.quantile(numbers, 0.99))
    smallest_range = 1 if are_integers else 1e-12
    if high - low < smallest_range or maximum - low <= OUTLIER_RANGE * (high - low):
        high = maximum

    width = max((high - low) / MAX_BARS, 1e-12)
    if are_integers:
        width = float(np.ceil(width))
    num_bars = max(1, min(MAX_BARS, int((high - low) // width) + 1))
    places = np.minimum((numbers - low) // width, num_bars - 1).astype(np.int64)
    return _Bins(
        low=low,
        width=width,
        counts=np.bincount(places, minlength=num_bars).tolist(),
        median=float(np.median(numbers)),
        maximum=maximum,
        has_outliers=maximum > high,
    )


def _ticks(low: float, high: float) -> list[float]:
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


def _labels(low: float, high: float) -> list[tuple[float, str]]:
    """Return the labels of an axis from `low` to `high`: fraction of its length, and
    text.
    """
    ticks = [tick for tick in _ticks(low, high) if low <= tick <= high] or [low]
    return [((tick - low) / (high - low), _short(tick)) for tick in ticks]


def _figure(
    *,
    title: str,
    note: str,
    x_labels: Iterable[tuple[float, str]],
    y_labels: Iterable[tuple[float, str]],
    shapes: Iterable[str],
) -> str:
    """Return shapes with axes, a caption above and a note below.

    Args:
        title, note: texts.
        x_labels, y_labels: fraction of the axis, and text; see :func:`_labels`.
        shapes: SVG elements.
    """
    axes = []
    for fraction, text in y_labels:
        _, y = _to_drawing(0, fraction)
        axes.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
        )
        axes.append(
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{as_html(text)}</text>'
        )
    for fraction, text in x_labels:
        x, y = _to_drawing(fraction, 0)
        axes.append(
            f'<text x="{x}" y="{y + 20}" text-anchor="middle">{as_html(text)}</text>'
        )
    return (
        f"<figure><figcaption>{as_html(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{as_html(title)}">'
        f"{''.join(axes)}{''.join(shapes)}</svg>"
        f'<p class="soft">{as_html(note)}</p></figure>'
    )


def _to_drawing(x: float, y: float) -> tuple[float, float]:
    """Map a point of the unit square, with y upwards, to coordinates of the drawing."""
    return (
        LEFT + x * (WIDTH - LEFT - RIGHT),
        HEIGHT - BOTTOM - y * (HEIGHT - TOP - BOTTOM),
    )


def _short(value: float) -> str:
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
