"""The frame of every page: style, title, sections, tables; nothing is loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from packstore.errors import StorageError
from packstore.version import VERSION

_STYLE = """
:root{--ink:#1c2330;--soft:#667085;--line:#d5d9e0;--paper:#fff;--bar:#3b6fb6;
--c0:#3b6fb6;--c1:#c2571a;--c2:#2f8f5b;--c3:#8a4fb0;--c4:#b08a00;--c5:#a83253}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#9aa4b5;--line:#3a4352;--paper:#161a21;
--bar:#6d9fe0;--c0:#6d9fe0;--c1:#ea8a50;--c2:#5cc08b;--c3:#b98adb;--c4:#d8b43a;--c5:#e0708f}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
max-width:1080px;margin:2rem auto;padding:0 1.2rem}
h1{font-size:1.5rem;margin:0}h2{font-size:1.1rem;margin:2.2rem 0 .6rem}
p{margin:.3rem 0}.soft,footer{color:var(--soft)}footer{margin:3rem 0 1rem;font-size:.85rem}
.charts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,400px),1fr));gap:1.2rem}
figure{margin:0;min-width:0}
figcaption{font-weight:600;margin-bottom:.2rem}svg{width:100%;height:auto}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.92rem}
th,td{padding:.3rem .6rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}th{color:var(--soft);font-weight:600}
tr.best td{font-weight:700}text{fill:var(--soft);font:12px system-ui,sans-serif}
.axis{stroke:var(--line)}.bar{fill:var(--bar)}.key{display:inline-block;width:.8em;height:.8em;
border-radius:2px;margin:0 .35em 0 1em}
"""


def page(title: str, subtitle: str, sections: Iterable[str]) -> str:
    """Returns a whole page."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n"
        f'<h1>{escape(title)}</h1>\n<p class="soft">{escape(subtitle)}</p>\n'
        + "\n".join(sections)
        + f"\n<footer>packstore {VERSION}</footer>\n</body></html>\n"
    )


def section(title: str, *content: str) -> str:
    """Returns a heading with its content."""
    return f"<section><h2>{escape(title)}</h2>\n" + "\n".join(content) + "</section>"


def paragraph(text: str) -> str:
    """Returns a paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], best: int | None = None) -> str:
    """Returns a table; row number `best` is highlighted."""
    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    lines = []
    for i, row in enumerate(rows):
        mark = ' class="best"' if i == best else ""
        lines.append(f"<tr{mark}>{''.join(f'<td>{escape(c)}</td>' for c in row)}</tr>")
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def check_writable(path: str) -> None:
    """Refuses a path that cannot be written, before the work.

    Raises:
        StorageError: its folder does not exist, or it is a folder.
    """
    page = Path(path)
    if page.is_dir() or not page.parent.is_dir():
        reason = "Is a directory" if page.is_dir() else "No such file or directory"
        raise StorageError(f"{path}: cannot be written: {reason}.")


def write(path: str, text: str) -> None:
    """Writes a page.

    Raises:
        StorageError: the file cannot be written.
    """
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}.") from error
