"""The frame of every HTML page: head, style, sections, tables.

A page is one file that loads nothing from elsewhere. Texts of a dataset are shown as
text: HTML in them is escaped, and so are invisible characters.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from packstore.errors import StorageError
from packstore.version import VERSION

_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Controls, marks of direction, other characters without a shape, and surrogates."""

_ESCAPES = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}


def escape_invisible(text: str) -> str:
    """Return `text` with invisible characters as ``\\x1b``, ``\\u202e``."""
    return _INVISIBLE.sub(lambda match: ascii(match[0])[1:-1], text)


def as_html(text: str) -> str:
    """Return `text` as HTML that is only text."""
    return escape(escape_invisible(text))


def page(
    title: str,
    subtitle: str,
    sections: Iterable[str],
    *,
    style: str = "",
    script: str = "",
    data: object = None,
    connect: bool = False,
) -> str:
    """Return a complete page. Its policy (CSP) permits its own style and script only.

    Args:
        title, subtitle: the heading, and the line below it.
        sections: HTML, as of :func:`section`.
        style: CSS beside the common one.
        script: JavaScript that must not contain ``</script``.
        data: a JSON value for the script.
        connect: the script may send requests to the server of the page.
    """
    css = asset("style.css") + style
    policy = [
        "default-src 'none'",
        f"style-src '{_digest(css)}'",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    scripts = ""
    if script:
        policy.append(f"script-src '{_digest(script)}'")
        scripts = (
            f'<script type="application/json" id="data">{embedded(data)}</script>\n'
            f"<script>{script}</script>\n"
        )
    if connect:
        policy.append("connect-src 'self'")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{"; ".join(policy)}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{as_html(title)}</title>\n<style>{css}</style></head><body>\n"
        f'<h1 dir="auto">{as_html(title)}</h1>\n'
        f'<p class="soft" dir="auto">{as_html(subtitle)}</p>\n'
        + "\n".join(sections)
        + f"\n<footer>packstore {VERSION}</footer>\n{scripts}</body></html>\n"
    )


def embedded(value: object) -> str:
    """Return `value` as JSON that can stand in a script element.

    It is ASCII, and ``<``, ``>`` and ``&`` are escaped, so no text ends the element.
    """
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.translate(_ESCAPES)


def asset(name: str) -> str:
    """Return the text of a style sheet or script of this folder."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def section(title: str, *content: str) -> str:
    """Return a heading with its content, which is HTML."""
    return f"<section><h2>{as_html(title)}</h2>\n" + "\n".join(content) + "</section>"


def facts(values: Mapping[str, str]) -> str:
    """Return names with their values, side by side."""
    pairs = [
        f"<div><dt>{as_html(name)}</dt><dd>{as_html(value)}</dd></div>"
        for name, value in values.items()
    ]
    return f'<dl class="facts">{"".join(pairs)}</dl>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table that scrolls if it is wider than the page."""
    head = "".join(f'<th scope="col">{as_html(column)}</th>' for column in columns)
    body = "".join(_table_row(cells) for cells in rows)
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _table_row(cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<td>{as_html(cell)}</td>' for cell in cells)}</tr>"


def check_writable(path: str) -> None:
    """Raise StorageError if a file cannot be written there, before the work begins."""
    if Path(path).is_dir():
        raise StorageError(f"{path}: cannot be written: Is a directory.")
    if not Path(path).parent.is_dir():
        raise StorageError(f"{path}: cannot be written: No such file or directory.")


def write(path: str, text: str) -> None:
    """Write a page to a file."""
    try:
        Path(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}.") from error


def _digest(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()
