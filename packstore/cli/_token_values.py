"""Values of tokens on a terminal: as colours, or as numbers where it has none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.text import Text

from packstore.errors import visible
from packstore.format.arrays import Packs
from packstore.pages.values import Scale, numbers_of

LEVEL_STYLES = (
    "bright_white on color(90)",
    "black on color(167)",
    "black on color(215)",
    "black on color(222)",
    "black on color(230)",
)
"""Styles of the levels of a scale, the lowest first: from dark to bright, so that their
order shows without colours, too.
"""

ABSENT_STYLE = "black on color(250)"
"""Style of a token that is not among the k."""

NUMBER_STYLE = "dim"


@dataclass(frozen=True, kw_only=True)
class ValueDrawing:
    """A way to draw values of tokens: as numbers, or as colours.

    Attributes:
        column: the column of tokens.
        as_numbers: numbers follow the tokens; otherwise tokens are coloured.
    """

    column: str
    as_numbers: bool

    def pack(self, pack: Packs) -> PackValues:
        """Return the values of a pack."""
        numbers = numbers_of(pack, self.column)
        scale = Scale.of(numbers)
        levels = scale.levels(numbers, len(LEVEL_STYLES))
        return PackValues(self, numbers.tolist(), levels.tolist(), scale)


@dataclass(frozen=True)
class PackValues:
    """The values of the supervised tokens of a pack.

    Attributes:
        drawing: how they are drawn.
        numbers: `[n]`; NaN: the token is not among the k.
        levels: `[n]`, indices of `LEVEL_STYLES`.
        scale: range of the colours.
    """

    drawing: ValueDrawing
    numbers: Sequence[float]
    levels: Sequence[int]
    scale: Scale

    def legend(self) -> Text:
        """Return the line that explains the numbers, or the colours."""
        column = self.drawing.column
        has_absent = any(np.isnan(self.numbers))
        if self.drawing.as_numbers:
            line = Text(f"{column} in ⟨ ⟩ after each supervised token")
            if has_absent:
                line.append("; –: not among the top k")
            return line

        line = Text(f"{column}:")
        edges = self.scale.edges(len(LEVEL_STYLES))
        for i, style in enumerate(LEVEL_STYLES):
            line.append(" ")
            line.append(f" {_short(edges[i])} to {_short(edges[i + 1])} ", style)
        if has_absent:
            line.append(" ")
            line.append(" not among the top k ", ABSENT_STYLE)
        return line

    def append_run(
        self, line: Text, texts: Sequence[str | None], first: int, role_style: str
    ) -> None:
        """Append a run of supervised tokens to a line.

        Args:
            line: the line.
            texts: of each token; None: it is a further part of the character before.
            first: index of its first token among the supervised tokens of the pack.
            role_style: style of the tokens if they are not coloured by value.
        """
        for i, text in enumerate(texts, first):
            token_text = visible(text or "")
            if self.drawing.as_numbers:
                stripped_text = token_text.rstrip()
                line.append(stripped_text, role_style)
                line.append(f"⟨{_short(self.numbers[i])}⟩", NUMBER_STYLE)
                line.append(token_text.removeprefix(stripped_text), role_style)
            elif np.isnan(self.numbers[i]):
                line.append(token_text, ABSENT_STYLE)
            else:
                line.append(token_text, LEVEL_STYLES[self.levels[i]])


def has_scale_colours(console: Console) -> bool:
    """Return True if a console shows enough colours for the levels of a scale."""
    return has_colours(console) and console.color_system in ("256", "truecolor")


def has_colours(console: Console) -> bool:
    """Return True if a console shows colours: a terminal, and not with NO_COLOR."""
    is_coloured = console.color_system is not None and not console.no_color
    return console.is_terminal and is_coloured


def _short(number: float) -> str:
    return "–" if np.isnan(number) else f"{number:.3g}"
