"""Draws the pictures of the documentation, as SVG that is the same on every run.

python docs/pictures.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path

HERE = Path(__file__).parent / "pictures"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
COLOURS = {
    "prompt": "#b7c4d1",
    "chosen": "#5aa88f",
    "rejected": "#dd8d6c",
    "free": "#f0f2f4",
    "learned": "#5aa88f",
    "context": "#bfe0d4",
    "result": "#e9dcb8",
}
INK, QUIET = "#22303c", "#66737f"
CELL = 46


def picture(width: int, height: int, title: str, *parts: str) -> str:
    """An SVG page, white, so that it reads on any background."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'role="img" '
        f'font-family="system-ui, sans-serif" font-size="14" fill="{INK}">'
    )
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
    return "\n".join(
        [head, f"<title>{escape(title)}</title>", ground, *parts, "</svg>", ""]
    )


def text(x: float, y: float, words: str, anchor: str = "start", **style: object) -> str:
    """Words at a place; `anchor` is ``start``, ``middle`` or ``end``."""
    given = "".join(
        f' {name.replace("_", "-")}="{value}"' for name, value in style.items()
    )
    return (
        f'<text x="{x:g}" y="{y:g}" '
        f'text-anchor="{anchor}"{given}>{escape(words)}</text>'
    )


def box(
    x: float, y: float, width: float, height: float, fill: str, line: str = "#ffffff"
) -> str:
    """A rectangle."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
        f'fill="{fill}" stroke="{line}"/>'
    )


def bracket(x: float, width: float, y: float, words: str) -> str:
    """A line above a part of a row, with its name."""
    line = (
        f'<path d="M{x + 3:g} {y + 6:g}v-6h{width - 6:g}v6" fill="none" '
        f'stroke="{QUIET}"/>'
    )
    return line + text(x + width / 2, y - 6, words, "middle", fill=QUIET)


TOKENS = [(n, "prompt") for n in (11, 12, 13)]
CHOSEN = [*TOKENS, (21, "chosen"), (22, "chosen")]
REJECTED = [*TOKENS, (31, "rejected")]
SHARED = [TOKENS[-1], REJECTED[-1]]


def layouts() -> str:
    """One pair in both layouts: the worked example of the format."""
    parts: list[str] = []
    for top, name, second, offset in (
        (60, "concat", REJECTED, 0),
        (296, "shared_prefix", SHARED, 2),
    ):
        row = CHOSEN + second
        left, first = 150, len(CHOSEN)
        parts.append(text(20, top - 30, name, font_weight="bold", font_size=16))
        parts.append(bracket(left, first * CELL, top - 4, "segment 0: chosen"))
        parts.append(
            bracket(left + first * CELL, len(second) * CELL, top - 4, "1: rejected")
        )
        for i, (number, side) in enumerate(row):
            x = left + i * CELL
            parts += [
                box(x, top + 8, CELL, 34, COLOURS[side]),
                text(x + CELL / 2, top + 30, str(number), "middle"),
                text(
                    x + CELL / 2,
                    top + 66,
                    "·" if side == "prompt" else str(number),
                    "middle",
                ),
            ]
            place = i if i < first else i - first + offset
            parts.append(text(x + CELL / 2, top + 92, str(place), "middle", fill=QUIET))
        for y, label in (
            (30, "input_ids"),
            (66, "labels"),
            (92, "position_ids"),
            (122, "seq_boundaries"),
        ):
            parts.append(
                text(20, top + y, label, fill=INK if y in (30, 66, 122) else QUIET)
            )
        for edge in (0, first, len(row)):
            x = left + edge * CELL
            parts.append(
                f'<path d="M{x} {top + 44}v62" stroke="{INK}" stroke-dasharray="3 3"/>'
            )
            parts.append(text(x, top + 122, str(edge), "middle", font_weight="bold"))
        caption = f"lengths 5, 4 · tokens stored: {len(row)}"
        if offset:
            caption += " · the rejected segment leaves out 11 12, which are above"
        parts.append(text(20, top + 152, caption, fill=QUIET))
    parts.append(
        _legend(
            20, 478, {"prompt": "prompt", "chosen": "chosen", "rejected": "rejected"}
        )
    )
    return picture(680, 500, "One pair in the layouts concat and shared_prefix", *parts)


def masks() -> str:
    """Draws the attention masks of both layouts."""
    parts: list[str] = []
    for left, name, second in (
        (70, "concat", REJECTED),
        (440, "shared_prefix", SHARED),
    ):
        row, size, first = CHOSEN + second, 28, len(CHOSEN)
        parts.append(text(left, 34, name, font_weight="bold", font_size=16))
        for i, (number, _) in enumerate(row):
            y = 76 + i * size
            parts.append(text(left - 8, y + 19, str(number), "end"))
            parts.append(text(left + i * size + size / 2, 66, str(number), "middle"))
            for j in range(len(row)):
                own = j <= i and (i < first or j >= first)
                gathered = name == "shared_prefix" and i >= first and j < 2
                fill = (
                    COLOURS[row[j][1]]
                    if own
                    else "#8fa3b5"
                    if gathered
                    else COLOURS["free"]
                )
                parts.append(box(left + j * size, y, size, size, fill))
    parts.append(
        text(70, 352, "rows: queries; columns: keys; empty: not seen", fill=QUIET)
    )
    parts.append(text(440, 352, "dark: shared keys, gathered once more", fill=QUIET))
    return picture(760, 370, "Attention masks of one pair in both layouts", *parts)


TURN_PARTS = {"prompt": 6, "answer": 2, "result": 3}
"""Tokens of the parts of an agent's rows in :func:`trees`."""

TURN_ROWS = {
    "turn 1": ("p", "a1"),
    "turn 2": ("p", "a1", "r1", "a2"),
    "turn 3": ("p", "a1", "r1", "a2", "r2", "a3"),
    "fork, turn 2": ("p", "a1", "r1", "b2"),
    "fork, turn 3": ("p", "a1", "r1", "b2", "s2", "b3"),
}
"""Rows of an agent: prompt, answers and results; the last part is learned."""


def trees() -> str:
    """Five rows of one task, a turn each, and the pack that holds them as a tree."""
    left, unit, row_height = 150, 22, 34
    rows = {name: _turn_tokens(parts) for name, parts in TURN_ROWS.items()}
    stored = _stored_places(list(rows.values()))
    parts: list[str] = [
        text(20, 34, "rows, one a turn", font_weight="bold", font_size=16)
    ]
    for i, (name, tokens) in enumerate(rows.items()):
        top = 50 + i * row_height
        first, _ = stored[i]
        parts.append(text(20, top + 17, name))
        for place, (_, _, colour) in enumerate(tokens):
            x = left + place * unit
            if place < first:
                parts.append(box(x, top, unit, 26, COLOURS["free"], "#c3ccd4"))
            else:
                parts.append(box(x, top, unit, 26, COLOURS[colour]))

    top = 306
    parts.append(text(20, top - 34, "one pack", font_weight="bold", font_size=16))
    x = 20.0
    middles: list[float] = []
    for (name, tokens), (first, parent) in zip(rows.items(), stored, strict=True):
        width = (len(tokens) - first) * unit
        middles.append(x + width / 2)
        parts += [
            box(x + i * unit, top, unit, 30, COLOURS[colour])
            for i, (_, _, colour) in enumerate(tokens[first:])
        ]
        parts.append(f'<path d="M{x:g} {top - 4}v38" stroke="{INK}" stroke-width="2"/>')
        parts.append(
            text(middles[-1], top - 10, name, "middle", fill=QUIET, font_size=12)
        )
        if parent is not None:
            parts.append(_arc(middles[-1], middles[parent], top + 34))
        x += width
    parts.append(f'<path d="M{x:g} {top - 4}v38" stroke="{INK}" stroke-width="2"/>')

    whole = sum(len(tokens) for tokens in rows.values())
    left_out = sum(first for first, _ in stored)
    distances = [
        0 if parent is None else i - parent for i, (_, parent) in enumerate(stored)
    ]
    caption = f"{whole} tokens of rows, {whole - left_out} of them stored"
    parts.append(text(120, top - 34, caption, fill=QUIET))
    caption = f"parent_distances: {', '.join(map(str, distances))}"
    parts.append(text(20, top + 96, caption))
    caption = "an arrow leads to the parent, which has the tokens left out"
    parts.append(text(250, top + 96, caption, fill=QUIET))
    names = {
        "prompt": "prompt",
        "learned": "answer, learned",
        "context": "answer, context",
        "result": "tool result",
        "free": "left out",
    }
    parts.append(_legend(20, top + 132, names, 150))
    return picture(
        780,
        top + 154,
        "Five turns of an agent, and the pack that holds them as a tree",
        *parts,
    )


def _turn_tokens(parts: Sequence[str]) -> list[tuple[str, int, str]]:
    """Tokens of a row: each its part, its place in the part, and its colour."""
    kinds = {"p": "prompt", "a": "answer", "b": "answer", "r": "result", "s": "result"}
    tokens = []
    for part in parts:
        kind = kinds[part[0]]
        colour = kind
        if kind == "answer":
            colour = "learned" if part == parts[-1] else "context"
        tokens += [(part, i, colour) for i in range(TURN_PARTS[kind])]
    return tokens


def _stored_places(
    rows: Sequence[Sequence[tuple[str, int, str]]],
) -> list[tuple[int, int | None]]:
    """First token that a pack stores of each row, and its parent: the earliest of the
    rows that have the longest beginning in common with it.
    """
    placements: list[tuple[int, int | None]] = []
    for i, row in enumerate(rows):
        prompt = len(row) - TURN_PARTS["answer"]
        shared, parent = 0, None
        for j in range(i):
            common = 0
            for own, earlier in zip(row[:prompt], rows[j], strict=False):
                if own[:2] != earlier[:2]:
                    break
                common += 1
            if common > shared:
                shared, parent = common, j
        placements.append((max(shared - 1, 0), parent))
    return placements


def _arc(start: float, end: float, y: float) -> str:
    """A curve below a pack from a segment to its parent, with a point at its end."""
    depth = 26 + (start - end) / 10
    curve = f"M{start:g} {y:g}C{start:g} {y + depth:g} {end:g} {y + depth:g} {end:g} {y + 6:g}"
    point = f"M{end - 4:g} {y + 8:g}L{end:g} {y:g}L{end + 4:g} {y + 8:g}z"
    return (
        f'<path d="{curve}" fill="none" stroke="{QUIET}" stroke-width="1.5"/>'
        f'<path d="{point}" fill="{QUIET}"/>'
    )


def words() -> str:
    """Record, example, sequence, segment, pack, shard, dataset: what lies in what."""
    parts = [
        text(20, 36, "record", font_weight="bold"),
        text(130, 36, "prompt + chosen + rejected", fill=QUIET),
        text(20, 86, "example", font_weight="bold"),
        text(20, 104, "2 sequences", fill=QUIET),
        *_row(
            130, 70, [("prompt", 70), ("chosen", 60), ("prompt", 70), ("rejected", 40)]
        ),
        f'<path d="M130 112h130v5m0 -5h110v5" fill="none" stroke="{QUIET}"/>',
        text(195, 132, "sequence", "middle", fill=QUIET),
        text(315, 132, "sequence", "middle", fill=QUIET),
        text(20, 186, "pack", font_weight="bold"),
        text(20, 204, "≤ pack_size tokens", fill=QUIET, font_size=11),
        *_pack(130, 170, (240, 150, 190), 620),
        text(20, 272, "shard", font_weight="bold"),
        text(20, 290, "one file", fill=QUIET),
    ]
    for i, sizes in enumerate(((240, 150, 190), (120, 300, 170), (200, 210, 206))):
        parts += _pack(130, 250 + 26 * i, sizes, 620, height=20)
    parts += [
        text(20, 364, "dataset", font_weight="bold"),
        text(
            130,
            364,
            "shards, and a manifest that is written last: it makes them a dataset",
        ),
    ]
    return picture(780, 390, "Records, examples, sequences, packs, shards", *parts)


def weights() -> str:
    """Five pairs in two packs: what a mean per pack does to the weight of each."""
    parts: list[str] = []
    rows = (
        ("mean of each pack, then of packs", (0.5, *[0.125] * 4)),
        ("sum of all pairs, by their count", [0.2] * 5),
    )
    parts.append(text(20, 40, "packs", font_weight="bold"))
    x = 250.0
    for pairs, width in ((1, 200), (4, 50)):
        for _ in range(pairs):
            parts += _row(x, 22, [("chosen", width / 2), ("rejected", width / 2)], 26)
            x += width
        x += 24
    for i, (name, shares) in enumerate(rows):
        top = 84 + i * 92
        parts.append(text(20, top + 36, name, font_weight="bold"))
        x = 250.0
        for pair, share in enumerate(shares):
            width = 200 if pair == 0 else 50
            height = 100 * share
            parts.append(
                box(x + width / 2 - 18, top + 56 - height, 36, height, "#3d6f8e")
            )
            caption = {0.5: "1/2", 0.125: "1/8", 0.2: "1/5"}[share]
            parts.append(text(x + width / 2, top + 74, caption, "middle"))
            x += width + (24 if pair == 0 else 0)
    return picture(
        720,
        270,
        "The weight of five pairs, by a mean per pack and by sum and count",
        *parts,
    )


WAYS = {
    "padded, 16 pairs, random order": "padded_random_16",
    "padded, 4 pairs": "padded_random_4",
    "padded, 1 pair": "padded_random_1",
    "padded, 16 pairs of similar length": "length_grouped_16",
    "padding-free": "padding_free",
    "packs of whole sequences (concat)": "concat_packs",
    "packs": "packs",
}
"""Batches -> their name in the results."""


def gains() -> str:
    """Tokens of an epoch by the way it is batched: the least and the most of four sets
    of pairs.
    """
    measured = json.loads((RESULTS / "why_pack.json").read_text(encoding="utf-8"))[
        "results"
    ]
    left, unit = 290, 78
    parts = [
        text(
            20,
            36,
            "Tokens that an epoch processes, relative to packs",
            font_weight="bold",
        )
    ]
    for i, (name, way) in enumerate(WAYS.items()):
        y = 56 + i * 34
        found = [r["tokens"][way] / r["tokens"]["packs"] for r in measured]
        low, high = min(found), max(found)
        ours = name == "packs"
        fill, light = ("#5aa88f", "#a9d3c5") if ours else ("#8fa3b5", "#cdd7e0")
        caption = "1" if way == "packs" else f"{low:.2f} to {high:.2f}"
        parts += [
            text(
                left - 12, y + 18, name, "end", font_weight="bold" if ours else "normal"
            ),
            box(left, y, high * unit, 26, light),
            box(left, y, low * unit, 26, fill),
            text(left + max(high, 1) * unit + 10, y + 18, caption),
        ]
    base, bottom = left + unit, 56 + 34 * len(WAYS)
    parts.append(
        f'<path d="M{base} 48V{bottom}" stroke="{INK}" stroke-dasharray="3 3"/>'
    )
    sets = (
        f"{len(measured)} sets of real pairs, pack size 4096. Dark: the least; "
        "light: the most."
    )
    parts.append(text(20, bottom + 26, sets, fill=QUIET))
    return picture(
        780, bottom + 44, "Tokens of an epoch by how it is batched; packs are 1", *parts
    )


GREEN, ORANGE = COLOURS["chosen"], COLOURS["rejected"]


def feedback() -> str:
    """Curves of training by feedback: a reward model, KTO, GRPO."""
    found = json.loads((RESULTS / "feedback.json").read_text(encoding="utf-8"))
    of_reward, of_kto = found["reward"]["curve"], found["kto"]["curve"]
    good, bad = (of_kto[f"rewards/{side}"] for side in ("chosen", "rejected"))
    parts = [
        *_curves(
            50,
            "reward model: ranked right",
            {"": (of_reward["rewards/accuracies"], GREEN)},
        ),
        *_curves(320, "KTO: rewards", {"good": (good, GREEN), "bad": (bad, ORANGE)}),
        *_curves(610, "GRPO: reward", {"": (found["grpo"]["rewards"], GREEN)}),
        text(50, 236, "each point: the mean of six steps", fill=QUIET),
    ]
    return picture(840, 256, "Curves of a reward model, of KTO and of GRPO", *parts)


def _curves(
    left: float, title: str, series: dict[str, tuple[Sequence[float], str]]
) -> Iterator[str]:
    """A panel of curves over steps, each a name, values and a colour."""
    means = {
        name: [sum(values[i : i + 6]) / 6 for i in range(len(values) - 5)]
        for name, (values, _) in series.items()
    }
    every = [value for values in means.values() for value in values]
    low, high, width, top, height = min(every), max(every), 190.0, 60.0, 130.0
    yield text(left, 36, title, font_weight="bold")
    yield (
        f'<path d="M{left:g} {top:g}v{height:g}h{width:g}" fill="none" '
        f'stroke="{QUIET}"/>'
    )
    for value, y in ((high, top), (low, top + height)):
        yield text(left - 6, y + 5, f"{value:.2f}", "end", fill=QUIET)
    for name, values in means.items():
        xs = [left + width * i / (len(values) - 1) for i in range(len(values))]
        ys = [top + height * (high - value) / (high - low) for value in values]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(xs, ys, strict=True))
        colour = series[name][1]
        yield (
            f'<polyline points="{line}" fill="none" stroke="{colour}" '
            'stroke-width="2"/>'
        )
        yield text(left + width + 6, ys[-1] + 5, name, fill=colour)
    steps = len(next(iter(series.values()))[0])
    yield text(left + width, top + height + 20, f"{steps} steps", "end", fill=QUIET)


def _row(
    x: float, y: float, parts: Sequence[tuple[str, float]], height: float = 34
) -> list[str]:
    drawn = []
    for side, width in parts:
        drawn.append(box(x, y, width, height, COLOURS[side]))
        x += width
    return drawn


def _pack(
    x: float, y: float, sizes: Sequence[int], width: int, height: float = 34
) -> list[str]:
    """Examples of so many tokens side by side, and what is left free."""
    drawn, ends = [box(x, y, width, height, COLOURS["free"])], []
    for size in sizes:
        shares = zip(
            ("prompt", "chosen", "prompt", "rejected"),
            (0.3, 0.25, 0.3, 0.15),
            strict=True,
        )
        drawn += _row(x, y, [(side, size * share) for side, share in shares], height)
        x += size
        ends.append(
            f'<path d="M{x:g} {y:g}v{height:g}" stroke="{INK}" stroke-width="2"/>'
        )
    return drawn + ends


def _legend(x: float, y: float, names: dict[str, str], width: float = 100) -> str:
    drawn = []
    for name, words in names.items():
        drawn += [
            box(x, y - 12, 16, 16, COLOURS[name]),
            text(x + 22, y + 1, words, fill=QUIET),
        ]
        x += width
    return "\n".join(drawn)


PICTURES: dict[str, Callable[[], str]] = {
    "layouts": layouts,
    "masks": masks,
    "trees": trees,
    "words": words,
    "weights": weights,
    "gains": gains,
    "feedback": feedback,
}
"""Name of the file -> what draws it."""

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (HERE / f"{name}.svg").write_text(draw(), encoding="utf-8")
