"""Charts with two axes, drawn as SVG: histograms of one number, and of a pair."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from packstore.pages.axes import Area, Label, figure, labels, short, svg_text, ticks
from packstore.pages.frame import as_html

MAX_BARS = 48

LABEL_SPACE = 0.08
"""Least distance of the label of outliers from others, as a share of the axis."""

MAX_CELLS = 24
"""Columns of a histogram of pairs, and its rows."""

COLOURS = 5
"""Colours in the legend of a histogram of pairs."""

OUTLIER_RANGE = 1.5
"""The largest 1 % of the values are outliers if the range of all values is more than
this many times the range without them.
"""


def histogram(
    title: str, values: npt.NDArray[np.generic], *, x_title: str, y_title: str
) -> str:
    """Return a histogram with bars of equal width.

    If few values are far above the others, the last bar holds all of them, and a note
    explains it.

    Args:
        title: the caption.
        values: `[n]` numbers, not all equal.
        x_title: the quantity, with its unit.
        y_title: the things that are counted.
    """
    area = Area()
    bins = _bins(values)
    count_ticks = [tick for tick in ticks(0, max(bins.counts)) if tick == int(tick)]
    axis_end = count_ticks[-1]

    bars = []
    for i, count in enumerate(bins.counts):
        left, upper = area.point(i / len(bins.counts), count / axis_end)
        right, base = area.point((i + 1) / len(bins.counts), 0)
        bars.append(
            f'<rect class="bar" x="{left:.1f}" y="{upper:.1f}" '
            f'width="{right - left - 0.8:.1f}" '
            f'height="{base - upper:.1f}"><title>{as_html(bins.describe(i))}</title>'
            "</rect>"
        )

    note = f"median {short(bins.median)}, largest {short(bins.maximum)}"
    if bins.has_outliers:
        last_start = short(bins.start(len(bins.counts) - 1))
        note += f"; the last bar holds all from {last_start} on"

    return figure(
        area,
        title=title,
        note=note,
        x_title=x_title,
        y_title=y_title,
        x_labels=bins.labels(),
        y_labels=[(tick / axis_end, short(tick)) for tick in count_ticks],
        shapes=bars,
    )


@dataclass(frozen=True, kw_only=True)
class _Bins:
    """Bars of equal width from `low` on; the last one also holds outliers.

    A bar holds a single number if all are whole numbers and its `width` is 1.
    """

    low: float
    width: float
    counts: list[int]
    median: float
    maximum: float
    has_outliers: bool
    are_single: bool

    def start(self, i: int) -> float:
        """Return the smallest value of bar `i`."""
        return self.low + i * self.width

    def end(self, i: int) -> float:
        """Return the end of bar `i`: for the last one, the largest value."""
        if i == len(self.counts) - 1:
            return self.maximum
        return self.start(i + 1)

    def describe(self, i: int) -> str:
        """Return the values of bar `i` and their number."""
        count = f"{self.counts[i]:,}"
        if self.are_single and self.end(i) <= self.start(i) + 1:
            return f"{short(self.start(i))}: {count}"
        return f"{short(self.start(i))} to {short(self.end(i))}: {count}"

    def labels(self) -> list[Label]:
        """Return the labels of the axis: in the middle of bars of a single number. The
        label of a last bar with outliers is its start with a plus sign.
        """
        if not self.has_outliers:
            return self._tick_labels()
        last_bar = len(self.counts) - 1
        position = (last_bar + 0.5) / len(self.counts)
        tick_labels = [
            (tick_position, text)
            for tick_position, text in self._tick_labels()
            if tick_position < position - LABEL_SPACE
        ]
        return [*tick_labels, (position, f"{short(self.start(last_bar))}+")]

    def _tick_labels(self) -> list[Label]:
        num_bars = len(self.counts)
        if not self.are_single:
            return labels(self.low, self.start(num_bars))
        numbers = ticks(self.low, max(self.start(num_bars - 1), self.low + 1))
        return [
            ((number - self.low + 0.5) / num_bars, short(number))
            for number in numbers
            if number == int(number) and self.low <= number < self.start(num_bars)
        ]


def _bins(values: npt.NDArray[np.generic]) -> _Bins:
    """Count the values in each bar. For whole numbers, such as most rewards, the width
    of bars is an integer, and a short range has a bar for each number.
    """
    numbers = np.asarray(values, np.float64)
    are_integers = bool((numbers == np.floor(numbers)).all())
    low = float(numbers.min())
    maximum = float(numbers.max())
    high = _high(numbers, smallest_range=1 if are_integers else 1e-12)
    if are_integers and maximum - low < MAX_BARS:
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
        are_single=are_integers and width == 1,
    )


def _high(numbers: npt.NDArray[np.float64], smallest_range: float) -> float:
    """Return the largest of the numbers that are no outliers."""
    low = float(numbers.min())
    maximum = float(numbers.max())
    high = float(np.quantile(numbers, 0.99))
    if high - low < smallest_range or maximum - low <= OUTLIER_RANGE * (high - low):
        return maximum
    return high


def pair_histogram(
    title: str,
    x: npt.NDArray[np.integer[Any]],
    y: npt.NDArray[np.integer[Any]],
    *,
    x_title: str,
    y_title: str,
    count_title: str,
    note: str,
) -> str:
    """Return a histogram of pairs of integers, with a line where both are equal.

    Both axes have the same range. Outliers are in the last column and row.

    Args:
        title: the caption.
        x, y: `[n]`, at least 0.
        x_title, y_title: the quantities, with their units.
        count_title: the name of the pairs, for the legend.
        note: a text below the drawing.
    """
    area = Area(height=400, bottom=64)
    values = np.concatenate([x, y]).astype(np.float64)
    high = max(_high(values, smallest_range=1), 1.0)
    width = float(np.ceil((high + 1) / MAX_CELLS))
    num_cells = int(high // width) + 1
    columns = np.minimum(x // width, num_cells - 1).astype(np.int64)
    rows = np.minimum(y // width, num_cells - 1).astype(np.int64)
    counts = np.bincount(rows * num_cells + columns, minlength=num_cells**2)
    largest = int(counts.max())

    shapes = []
    for cell in np.flatnonzero(counts).tolist():
        row, column = divmod(cell, num_cells)
        count = int(counts[cell])
        left, base = area.point(column / num_cells, row / num_cells)
        right, upper = area.point((column + 1) / num_cells, (row + 1) / num_cells)
        text = (
            f"{short(column * width)} to {short((column + 1) * width)}, "
            f"{short(row * width)} to {short((row + 1) * width)}: {count:,}"
        )
        shapes.append(
            f'<rect class="bar" fill-opacity="{_opacity(count, largest):.2f}" '
            f'x="{left:.1f}" y="{upper:.1f}" width="{right - left - 0.6:.1f}" '
            f'height="{base - upper - 0.6:.1f}"><title>{as_html(text)}</title></rect>'
        )

    start_x, start_y = area.point(0, 0)
    end_x, end_y = area.point(1, 1)
    shapes.append(
        f'<line class="equal" x1="{start_x}" y1="{start_y}" x2="{end_x}" y2="{end_y}"/>'
    )
    shapes += _colour_legend(area, count_title, largest)

    if values.max() > high:
        last_start = short((num_cells - 1) * width)
        note += f"; the last column and row hold all from {last_start} on"
    axis_labels = labels(0, num_cells * width)
    return figure(
        area,
        title=title,
        note=note,
        x_title=x_title,
        y_title=y_title,
        x_labels=axis_labels,
        y_labels=axis_labels,
        shapes=shapes,
    )


def _opacity(count: float, largest: int) -> float:
    return 0.15 + 0.85 * float(np.log1p(count) / np.log1p(largest))


def _colour_legend(area: Area, count_title: str, largest: int) -> list[str]:
    """Return squares of the colours, with the counts that they stand for."""
    counts = np.unique(np.geomspace(1, largest, COLOURS).round()).astype(np.int64)
    y = area.height - 16
    elements = [svg_text(count_title, 0, y + 10, anchor="start")]
    x = 12.0 + 7 * len(count_title)
    for count in counts.tolist():
        elements.append(
            f'<rect class="bar" fill-opacity="{_opacity(count, largest):.2f}" '
            f'x="{x:.1f}" y="{y}" width="12" height="12"/>'
        )
        text = short(count)
        elements.append(svg_text(text, x + 16, y + 10, anchor="start"))
        x += 28 + 7 * len(text)
    return elements
