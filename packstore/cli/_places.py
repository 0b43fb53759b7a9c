"""Reports how randomly packs mix the input, for the commands that read a whole dataset."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packstore.io.dataset.places import Places

FEW = 640
"""Number of packs (ten steps of 64) below which differences between steps are chance."""


def place_rows(places: Places | None) -> list[tuple[str, str, str]]:
    """Returns name, value, and value of random packs, for each defined figure."""
    if places is None:
        return []
    effect, step = places.design_effect, places.step_design_effect
    found = []
    if effect is not None:
        random = f"1 ± {places.deviation:.2g}"
        found.append(("design effect of places in the input on packs", f"{effect:.2f}", random))
    if step is not None and places.packs >= FEW:
        random = f"1 ± {places.step_deviation:.2g}"
        found.append(("design effect of places on steps of 64 packs", f"{step:.2f}", random))
    if places.sources_per_example is not None:
        own, random = f"{places.sources_per_example:.3f}", f"{places.sources_of_a_draw:.3f}"
        found.append(("distinct sources of a pack per example", own, random))
    return found


def sentences(figures: list[tuple[str, str, str]], places: Places | None) -> Iterator[str]:
    """Yields one line per figure, and a remedy if packs hold neighbours."""
    for name, found, random in figures:
        yield f"{name}: {found} (random: {random})"
    if places is not None and places.neighbours:
        yield (
            "packs hold neighbours of the input, so steps see less of it than without packs: pack "
            "the dataset again with shuffle (`packstore pack DATASET OUT`)"
        )
