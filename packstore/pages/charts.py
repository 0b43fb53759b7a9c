"""Charts as SVG with a text for each value: histograms and lines."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from packstore.pages.texts import as_html

WIDTH, HEIGHT = 440, 210
LEFT, RIGHT, TOP, BOTTOM = 56, 22, 12, 30
BARS = 48

FAR = 1.5
"""The largest 1 % are outliers if the range is this many times the range of the other values."""


def side_by_side(*figures: str) -> str:
    """Returns figures side by side where they fit."""
    return f'<div class="charts">{"".join(figures)}</div>'


def histogram(title: str, values: npt.NDArray[np.generic], unit: str) -> str:
    """Returns a histogram with bars of equal width.

    If the largest 1 % are outliers, the last bar holds them all, with a note.
    """
    numbers = np.asarray(values, np.float64)
    low, high, top = float(numbers.min()), float(np.quantile(numbers, 0.99)), float(numbers.max())
    whole = values.dtype.kind in "iub"
    if high - low < (1 if whole else 1e-12) or top - low <= FAR * (high - low):
        high = top
    step = max((high - low) / BARS, 1.0 if whole else 1e-12)
    step = float(np.ceil(step)) if whole else step
    bars = max(1, min(BARS, int((high - low) // step) + 1))
    place = np.minimum(((numbers - low) // step).astype(np.int64), bars - 1)
    counts = np.bincount(place, minlength=bars)
    width = (WIDTH - LEFT - RIGHT) / bars
    levels = [level for level in _ticks(0, int(counts.max())) if level == int(level)]
    shapes = []
    for i, count in enumerate(counts.tolist()):
        height = (HEIGHT - TOP - BOTTOM) * count / levels[-1]
        start, end = low + i * step, low + (i + 1) * step
        if i == bars - 1:
            end = max(end, top)
        name = f"{_short(start)} to {_short(end)} {unit}: {count:,}"
        shapes.append(
            f'<rect class="bar" x="{LEFT + i * width:.1f}" y="{HEIGHT - BOTTOM - height:.1f}" '
            f'width="{max(width - 1, 0.5):.1f}" height="{height:.1f}">'
            f"<title>{as_html(name)}</title></rect>"
        )
    at = np.linspace(0, bars, 5)
    if whole:  # ticks at the start of bars, or at the middle of bars with a single value
        first = np.unique(np.linspace(0, bars - 1, 5).round())
        at = first + 0.5 if step == 1 else first
    names = low + (np.floor(at) if whole else at) * step
    marks = [(float(a) / bars, _short(float(name))) for a, name in zip(at, names, strict=True)]
    heights = [(level / levels[-1], _short(level)) for level in levels]
    note = f"median {_short(float(np.median(numbers)))}, largest {_short(top)} {unit}".rstrip()
    if top > high:
        note += f"; the last bar holds all from {_short(low + (bars - 1) * step)} on"
    return _figure(title, note, marks, heights, shapes)


def lines(title: str, note: str, xs: Sequence[str], series: Mapping[str, Sequence[float]]) -> str:
    """Returns a chart with one line per series over the labels `xs`; values are fractions."""
    values = [v for ys in series.values() for v in ys]
    low = min(0.98, np.floor(min(values) * 50) / 50)
    places = [i / max(len(xs) - 1, 1) for i in range(len(xs))]
    shapes, keys = [], []
    for i, (name, ys) in enumerate(series.items()):
        points = [_point(x, (y - low) / (1 - low)) for x, y in zip(places, ys, strict=True)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        shapes.append(f'<polyline class="curve s{i % 6}" points="{path}"/>')
        shapes += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" class="point s{i % 6}">'
            f"<title>{as_html(f'{name}, {at}: {value:.2%}')}</title></circle>"
            for (x, y), at, value in zip(points, xs, ys, strict=True)
        ]
        keys.append(f'<span class="key s{i % 6}">{as_html(name)}</span>')
    heights = [(s, f"{low + s * (1 - low):.1%}") for s in np.linspace(0, 1, 5).tolist()]
    legend = f'<p class="soft keys">{"".join(keys)}</p>'
    return _figure(title, note, list(zip(places, xs, strict=True)), heights, shapes, legend)


Points = Sequence[tuple[float, float]]
"""Places and values; NaN: no value."""

POINTS = 400
"""Points of a curve; of more, each is the mean of neighbours."""


def curves(title: str, unit: str, series: Mapping[str, Points]) -> str:
    """Returns a chart with a curve for each series over numbers; empty if none has a value.

    Args:
        title: caption.
        unit: unit of the places, e.g. ``step``.
        series: name -> its points, by place.
    """
    drawn = {name: kept for name, points in series.items() if (kept := _thinned(points))}
    if not drawn:
        return ""
    xs, ys = (np.array([p[axis] for kept in drawn.values() for p in kept]) for axis in (0, 1))
    left, right = float(xs.min()), float(xs.max())
    levels = _ticks(float(ys.min()), float(ys.max()))
    low, high = levels[0], levels[-1]
    shapes, keys = [], []
    for i, (name, kept) in enumerate(drawn.items()):
        places = [
            _point((x - left) / max(right - left, 1e-12), (y - low) / (high - low)) for x, y in kept
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        shapes.append(f'<polyline class="curve s{i % 6}" points="{path}"/>')
        radius = 3 if len(kept) <= 60 else 1.5
        shapes += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" class="point s{i % 6}">'
            f"<title>{as_html(f'{name}, {unit} {at:,.0f}: {value:.6g}')}</title></circle>"
            for (x, y), (at, value) in zip(places, kept, strict=True)
        ]
        keys.append(f'<span class="key s{i % 6}">{as_html(name)}</span>')
    heights = [((y - low) / (high - low), _short(y)) for y in levels]
    steps = [x for x in _ticks(left, right) if left <= x <= right and x == int(x)] or [left]
    marks = [((x - left) / max(right - left, 1e-12), _short(x)) for x in steps]
    last = ", ".join(f"{name} {kept[-1][1]:.4g}" for name, kept in drawn.items())
    legend = f'<p class="soft keys">{"".join(keys)}</p>' if len(drawn) > 1 else ""
    return _figure(title, f"at the end: {last}", marks, heights, shapes, legend)


def _ticks(low: float, high: float) -> list[float]:
    """Returns three to seven round numbers at equal distances that span `low` to `high`."""
    if high - low <= 1e-4 * max(abs(high), abs(low)):  # as good as constant: in the middle
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (-1.0, 1.0)
    power = 10.0 ** np.floor(np.log10((high - low) / 5))
    step = power * next(m for m in (1, 2, 5, 10) if 5 * power * m >= (high - low) * (1 - 1e-9))
    first, last = np.floor(low / step + 1e-9), np.ceil(high / step - 1e-9)
    return [float(f"{step * i:.6g}") for i in np.arange(first, last + 1)]


def _thinned(points: Points) -> list[tuple[float, float]]:
    """Returns the finite points, or means of neighbours if they are many."""
    finite = [(x, y) for x, y in points if np.isfinite(y)]
    if len(finite) <= POINTS:
        return finite
    parts = np.array_split(np.array(finite), POINTS)
    return [(float(part[-1, 0]), float(part[:, 1].mean())) for part in parts]


def _figure(
    title: str,
    note: str,
    across: Iterable[tuple[float, str]],
    up: Iterable[tuple[float, str]],
    shapes: Iterable[str],
    legend: str = "",
) -> str:
    """Shapes in a frame with ticks (fraction of the axis, text)."""
    frame = []
    for share, text in up:
        _, y = _point(0, share)
        frame.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        frame.append(f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{as_html(text)}</text>')
    for share, text in across:
        x, y = _point(share, 0)
        frame.append(f'<text x="{x}" y="{y + 20}" text-anchor="middle">{as_html(text)}</text>')
    return (
        f"<figure><figcaption>{as_html(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{as_html(title)}">'
        f"{''.join(frame)}{''.join(shapes)}</svg>"
        f'{legend}<p class="soft">{as_html(note)}</p></figure>'
    )


def _point(across: float, up: float) -> tuple[float, float]:
    """Maps a point of the unit square to the drawing."""
    return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)


def _short(value: float) -> str:
    """Formats a number for an axis."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
