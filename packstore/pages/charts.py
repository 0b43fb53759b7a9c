"""The page of charts, and charts as SVG with a text for each value: histograms and
curves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from packstore.pages import frame
from packstore.pages.frame import as_html

WIDTH, HEIGHT = 440, 210
LEFT, RIGHT, TOP, BOTTOM = 56, 22, 12, 30
BARS = 48
POINTS = 400
"""Points of a curve; of more, each is the mean of neighbours."""

FAR = 1.5
"""The largest 1 % are outliers if the range is this many times the range of the other
values.
"""

Points = Sequence[tuple[float, float]]
"""Places and values; NaN: no value."""

RUN = {
    "Loss": {"training": "loss", "validation": "eval_loss"},
    "Accuracy": {
        "training": "rewards/accuracies",
        "validation": "eval_rewards/accuracies",
    },
    "Margin": {"training": "rewards/margins", "validation": "eval_rewards/margins"},
    "Rewards": {"chosen": "rewards/chosen", "rejected": "rewards/rejected"},
    "Gradient norm": {"gradient norm": "grad_norm"},
    "Learning rate": {"learning rate": "learning_rate"},
    "Tokens per second": {"tokens per second": "tokens_per_second"},
    "Fill, and share of the time that waits for data": {
        "fill": "fill",
        "wait": "data_wait",
    },
}
"""Title of a chart of a training run -> name and metric of each curve."""

RUN_COLUMNS = ("metric", "first", "last", "lowest", "at step", "highest", "at step")


def charts_page(
    title: str,
    subtitle: str,
    *,
    facts: Mapping[str, str] | None = None,
    note: str = "",
    charts: Iterable[str] = (),
    tables: Mapping[str, tuple[Sequence[str], Iterable[Sequence[str]]]] | None = None,
) -> str:
    """Returns a page: figures, charts, and tables of columns and rows, each with its
    title.
    """
    sections = [frame.section("Charts", f'<div class="charts">{"".join(charts)}</div>')]
    if facts or note:
        content = frame.facts(facts or {}), f"<p>{as_html(note)}</p>"
        sections.insert(0, frame.section("Figures", *content))
    for name, (columns, rows) in (tables or {}).items():
        sections.append(frame.section(name, frame.table(columns, rows)))
    return frame.page(title, subtitle, sections)


def train_page(
    title: str, subtitle: str, records: Iterable[Mapping[str, float]]
) -> str:
    """Returns the page of a training run from its records, the Trainer's
    `log_history`.
    """
    points: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        for name in record.keys() - {"step", "epoch"}:
            if np.isfinite(record[name]):
                points.setdefault(name, []).append((record["step"], record[name]))
    rows = []
    for name, curve in sorted(points.items()):
        (low_step, low), (high_step, high) = (
            f(curve, key=lambda p: p[1]) for f in (min, max)
        )
        values = [f"{value:.5g}" for value in (curve[0][1], curve[-1][1], low)]
        rows.append(
            [name, *values, f"{low_step:,.0f}", f"{high:.5g}", f"{high_step:,.0f}"]
        )
    return charts_page(
        title,
        subtitle,
        facts={
            f"last {name}": f"{curve[-1][1]:.5g}"
            for name, curve in sorted(points.items())
            if name.endswith("loss")
        },
        charts=[
            curves(
                chart,
                "step",
                {name: points.get(metric, []) for name, metric in named.items()},
            )
            for chart, named in RUN.items()
        ],
        tables={"All metrics": (RUN_COLUMNS, rows)},
    )


def histogram(title: str, values: npt.NDArray[np.generic], unit: str) -> str:
    """Returns a histogram with bars of equal width; its last bar holds outliers, with a
    note.
    """
    numbers, whole = np.asarray(values, np.float64), values.dtype.kind in "iub"
    low, high, top = (
        float(numbers.min()),
        float(np.quantile(numbers, 0.99)),
        float(numbers.max()),
    )
    if high - low < (1 if whole else 1e-12) or top - low <= FAR * (high - low):
        high = top
    step = max((high - low) / BARS, 1e-12)
    step = float(np.ceil(step)) if whole else step
    bars = max(1, min(BARS, int((high - low) // step) + 1))
    places = np.minimum((numbers - low) // step, bars - 1).astype(np.int64)
    counts = np.bincount(places, minlength=bars).tolist()
    levels = [level for level in _ticks(0, max(counts)) if level == int(level)]
    shapes = []
    for i, count in enumerate(counts):
        left, upper = _point(i / bars, count / levels[-1])
        right, base = _point((i + 1) / bars, 0)
        end = top if i == bars - 1 else low + (i + 1) * step
        name = f"{_short(low + i * step)} to {_short(end)} {unit}: {count:,}"
        shapes.append(
            f'<rect class="bar" x="{left:.1f}" y="{upper:.1f}" '
            f'width="{right - left - 0.8:.1f}" '
            f'height="{base - upper:.1f}"><title>{as_html(name)}</title></rect>'
        )
    note = (
        f"median {_short(float(np.median(numbers)))}, largest {_short(top)} {unit}"
    ).rstrip()
    if top > high:
        note += f"; the last bar holds all from {_short(low + (bars - 1) * step)} on"
    return _figure(
        title,
        note,
        _marks(low, low + bars * step),
        _marks(0, levels[-1], levels),
        shapes,
    )


def curves(title: str, unit: str, series: Mapping[str, Points]) -> str:
    """Returns a chart with a curve for each series by place, whose unit is `unit`; else
    empty.
    """
    drawn: dict[str, list[tuple[float, float]]] = {}
    last_values: dict[str, float] = {}
    for name, points in series.items():
        if kept := [(x, y) for x, y in points if np.isfinite(y)]:
            last_values[name] = kept[-1][
                1
            ]  # the last point may be a mean of neighbours
            if len(kept) > POINTS:
                parts = np.array_split(np.array(kept), POINTS)
                kept = [
                    (float(part[-1, 0]), float(part[:, 1].mean())) for part in parts
                ]
            drawn[name] = kept
    if not drawn:
        return ""
    xs, ys = (
        np.array([p[axis] for kept in drawn.values() for p in kept]) for axis in (0, 1)
    )
    left, right = float(xs.min()), max(float(xs.max()), float(xs.min()) + 1e-12)
    levels = _ticks(float(ys.min()), float(ys.max()))
    low, high = levels[0], levels[-1]
    shapes, keys = [], []
    for i, (name, kept) in enumerate(drawn.items()):
        places = [
            _point((x - left) / (right - left), (y - low) / (high - low))
            for x, y in kept
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        shapes.append(f'<polyline class="curve s{i % 6}" points="{path}"/>')
        shapes += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2" class="point s{i % 6}">'
            f"<title>{as_html(f'{name}, {unit} {place:,.0f}: {value:.6g}')}</title>"
            "</circle>"
            for (x, y), (place, value) in zip(places, kept, strict=True)
        ]
        text = as_html(f"{name}, at the end {last_values[name]:.4g}")
        keys.append(f'<span class="key s{i % 6}">{text}</span>')
    legend = f'<p class="soft keys">{"".join(keys)}</p>'
    return _figure(
        title, "", _marks(left, right), _marks(low, high, levels), shapes, legend
    )


def _ticks(low: float, high: float) -> list[float]:
    """Returns three to seven round numbers at equal distances that span `low` to
    `high`.
    """
    if high - low <= 1e-4 * max(
        abs(high), abs(low)
    ):  # as good as constant: in the middle
        low, high = (low - abs(low) / 2, high + abs(high) / 2) if low else (-1.0, 1.0)
    power = 10.0 ** np.floor(np.log10((high - low) / 5))
    step = power * next(
        m for m in (1, 2, 5, 10) if 5 * power * m >= (high - low) * (1 - 1e-9)
    )
    first, last = np.floor(low / step + 1e-9), np.ceil(high / step - 1e-9)
    return [float(f"{step * i:.6g}") for i in np.arange(first, last + 1)]


def _marks(
    low: float, high: float, levels: Sequence[float] = ()
) -> list[tuple[float, str]]:
    """Returns place (a fraction of the axis) and text of each tick from `low` to
    `high`.
    """
    inside = [x for x in levels or _ticks(low, high) if low <= x <= high] or [low]
    return [((x - low) / (high - low), _short(x)) for x in inside]


def _figure(
    title: str,
    note: str,
    across: Iterable[tuple[float, str]],
    up: Iterable[tuple[float, str]],
    shapes: Iterable[str],
    legend: str = "",
) -> str:
    """Returns shapes in a frame with ticks (fraction of the axis, text)."""
    axes = []
    for share, text in up:
        _, y = _point(0, share)
        axes.append(
            f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
        )
        axes.append(
            f'<text x="{LEFT - 8}" y="{y + 4}" text-anchor="end">{as_html(text)}</text>'
        )
    for share, text in across:
        x, y = _point(share, 0)
        axes.append(
            f'<text x="{x}" y="{y + 20}" text-anchor="middle">{as_html(text)}</text>'
        )
    return (
        f"<figure><figcaption>{as_html(title)}</figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{as_html(title)}">'
        f"{''.join(axes)}{''.join(shapes)}</svg>"
        f'{legend}<p class="soft">{as_html(note)}</p></figure>'
    )


def _point(across: float, up: float) -> tuple[float, float]:
    """Maps a point of the unit square to the drawing."""
    return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (
        HEIGHT - TOP - BOTTOM
    )


def _short(value: float) -> str:
    """Formats a number for an axis."""
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    return (
        f"{value:,.0f}" if value == int(value) or abs(value) >= 100 else f"{value:.3g}"
    )
