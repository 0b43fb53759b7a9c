"""Charts with a row for each name: bars of counts, and ranges of numbers.

Names stand above their row as text, so they may be long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from packstore.pages import frame
from packstore.pages.axes import labels, short, svg_text
from packstore.pages.frame import as_html

WIDTH = 440
"""Width of a row, in units of its view box."""

MARGIN = 14
"""Margin left and right of the axis of ranges, for its labels."""

ROW_HEIGHT = 13
"""Height of a bar, or of the line of a series, with the space around it."""


class Range(NamedTuple):
    """Percentiles of numbers."""

    p10: float
    median: float
    p90: float


Groups = Mapping[str, Mapping[str, Range]]
"""Group -> series -> range of its numbers; every group has the same series."""


def bars(title: str, counts: Mapping[str, int], *, note: str) -> str:
    """Return a bar for each count, in the order of the mapping.

    Args:
        title: the caption.
        counts: name -> count, at least one above 0.
        note: a text below the bars.
    """
    largest = max(counts.values())
    rows = []
    for name, count in counts.items():
        width = WIDTH * count / largest
        bar = f'<rect class="bar" y="2" height="9" width="{width:.1f}"/>'
        rows.append(_row(name, f"{count:,}", bar, ROW_HEIGHT))
    return _figure(title, [*rows, _note(note)])


def ranges(title: str, groups: Groups, *, x_title: str, note: str) -> str:
    """Return lines from p10 to p90 with a mark at the median, and a table of these.

    Args:
        title: the caption.
        groups: at most two series each.
        x_title: the quantity, with its unit.
        note: a text below the rows.
    """
    numbers: list[float] = []
    for group in groups.values():
        for group_range in group.values():
            numbers += group_range
    scale = _Scale.of(numbers)
    series = list(next(iter(groups.values())))

    rows = []
    for name, group in groups.items():
        lines = [
            _line(i, *(scale.place(number) for number in group_range))
            for i, group_range in enumerate(group.values())
        ]
        rows.append(_row(name, "", "".join(lines), ROW_HEIGHT * len(series)))

    table = frame.table(*_table(groups, series))
    return _figure(
        title,
        [
            _legend(series),
            *rows,
            scale.axis(x_title),
            _note(note),
            f"<details><summary>As a table</summary>{table}</details>",
        ],
    )


class _Scale(NamedTuple):
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> _Scale:
        low = min(numbers)
        high = max(numbers)
        if low == high:
            high = low + 1
        return cls(low, high)

    def place(self, number: float) -> float:
        fraction = (number - self.low) / (self.high - self.low)
        return MARGIN + (WIDTH - 2 * MARGIN) * fraction

    def axis(self, title: str) -> str:
        """Return a line with labels, and its title below."""
        elements = [
            f'<line class="axis" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="1" y2="1"/>',
            svg_text(title, WIDTH - MARGIN, 38, anchor="end"),
        ]
        for fraction, text in labels(self.low, self.high):
            x = MARGIN + (WIDTH - 2 * MARGIN) * fraction
            elements.append(svg_text(text, x, 18))
        return _svg("".join(elements), WIDTH, 44)


def _line(series: int, p10: float, median: float, p90: float) -> str:
    """Return the line of a series, with a mark at the median.

    The first has a disc, and the second a dashed line and a ring, so that colours are
    not all that tells them apart.
    """
    y = ROW_HEIGHT * series + ROW_HEIGHT / 2
    name = ("first", "second")[series]
    return (
        f'<line class="range {name}" x1="{p10:.1f}" x2="{p90:.1f}" y1="{y}" y2="{y}"/>'
        f'<circle class="median {name}" cx="{median:.1f}" cy="{y}" r="4.5"/>'
    )


def _legend(series: Sequence[str]) -> str:
    if len(series) == 1:
        return ""
    items = []
    for i, name in enumerate(series):
        line = _line(i, 2, 22, 42)
        drawing = (
            f'<svg viewBox="0 {ROW_HEIGHT * i} 44 {ROW_HEIGHT}" aria-hidden="true">'
            f"{line}</svg>"
        )
        items.append(f"<li>{drawing} {as_html(name)}</li>")
    return f'<ul class="series">{"".join(items)}</ul>'


def _table(groups: Groups, series: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    columns = [""]
    for name in series:
        columns += [f"{name}, {field}" for field in Range._fields]
    rows = []
    for name, group in groups.items():
        row = [name]
        for group_range in group.values():
            row += [short(number) for number in group_range]
        rows.append(row)
    return columns, rows


def _row(name: str, value: str, shapes: str, height: int) -> str:
    return (
        f'<div class="row"><div><span dir="auto">{as_html(name)}</span> '
        f"<strong>{as_html(value)}</strong></div>{_svg(shapes, WIDTH, height)}</div>"
    )


def _svg(shapes: str, width: int, height: int) -> str:
    return f'<svg viewBox="0 0 {width} {height}" aria-hidden="true">{shapes}</svg>'


def _note(text: str) -> str:
    return f'<p class="soft">{as_html(text)}</p>'


def _figure(title: str, content: Sequence[str]) -> str:
    caption = f"<figcaption>{as_html(title)}</figcaption>"
    return f"<figure>{caption}{''.join(content)}</figure>"
