"""The page of statistics: facts, charts under headings, and tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from packstore.pages import frame
from packstore.pages.frame import as_html


def statistics_page(
    title: str,
    subtitle: str,
    *,
    facts: Mapping[str, Mapping[str, str]],
    charts: Mapping[str, Sequence[str]],
    tables: Mapping[str, tuple[Sequence[str], Iterable[Sequence[str]]]],
) -> str:
    """Return a page of facts, charts and tables, each with a heading.

    Args:
        title, subtitle: the heading of the page, and the line below it.
        facts: heading -> name -> value, shown side by side.
        charts: heading -> drawings and paragraphs; a heading without any is left out.
        tables: heading -> columns and rows.
    """
    sections = [
        frame.section(heading, frame.facts(values)) for heading, values in facts.items()
    ]
    for heading, drawings in charts.items():
        if drawings:
            content = f'<div class="charts">{"".join(drawings)}</div>'
            sections.append(frame.section(heading, content))
    for heading, (columns, rows) in tables.items():
        sections.append(frame.section(heading, frame.table(columns, rows)))
    return frame.page(title, subtitle, sections)


def paragraph(text: str) -> str:
    """Return a text that stands in place of a chart."""
    return f'<p class="soft">{as_html(text)}</p>'
