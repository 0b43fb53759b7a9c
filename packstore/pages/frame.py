"""The frame of every page: texts, style, sections, tables; nothing is loaded from
elsewhere.
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

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)

_ESCAPED = {ord(c): f"\\u{ord(c):04x}" for c in "<>&"}


def shown(text: str) -> str:
    """Returns `text` with controls, marks of direction, surrogates as ``\\x1b``,
    ``\\u202e``.
    """
    return _HIDDEN.sub(lambda match: ascii(match[0])[1:-1], text)


def as_html(text: str) -> str:
    """Returns `text` as HTML that is only text."""
    return escape(shown(text))


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
    """Returns a whole page, whose policy (CSP) permits its own style and script only.

    `data` is a JSON value for the script, which may not contain ``</script``; with
    `connect` it may ask the server that the page came from.
    """
    css = asset("style.css") + style
    policy = (
        f"default-src 'none'; style-src '{_digest(css)}'; base-uri 'none'; "
        "form-action 'none'"
    )
    scripts = ""
    if script:
        policy += f"; script-src '{_digest(script)}'" + (
            "; connect-src 'self'" if connect else ""
        )
        scripts = (
            f'<script type="application/json" id="data">{embedded(data)}</script>\n'
        )
        scripts += f"<script>{script}</script>\n"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{as_html(title)}</title>\n<style>{css}</style></head><body>\n"
        f'<h1 dir="auto">{as_html(title)}</h1>\n'
        f'<p class="soft" dir="auto">{as_html(subtitle)}</p>\n'
        + "\n".join(sections)
        + f"\n<footer>packstore {VERSION}</footer>\n{scripts}</body></html>\n"
    )


def embedded(value: object) -> str:
    """Returns `value` as JSON in ASCII that cannot end its script element, or open
    another.
    """
    return json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_ESCAPED)


def asset(name: str) -> str:
    """Returns the text of a style sheet or script of this folder."""
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def section(title: str, *content: str) -> str:
    """Returns a heading with its content."""
    return f"<section><h2>{as_html(title)}</h2>\n" + "\n".join(content) + "</section>"


def facts(values: Mapping[str, str]) -> str:
    """Returns names with their values, side by side."""
    pairs = (
        f"<div><dt>{as_html(n)}</dt><dd>{as_html(v)}</dd></div>"
        for n, v in values.items()
    )
    return f'<dl class="facts">{"".join(pairs)}</dl>'


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a table."""
    head = "".join(f'<th scope="col">{as_html(c)}</th>' for c in columns)
    body = "".join(
        f"<tr>{''.join(f'<td>{as_html(c)}</td>' for c in row)}</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def check_writable(path: str) -> None:
    """Refuses a path that cannot be written, before the work."""
    page = Path(path)
    if page.is_dir() or not page.parent.is_dir():
        reason = "Is a directory" if page.is_dir() else "No such file or directory"
        raise StorageError(f"{path}: cannot be written: {reason}.")


def write(path: str, text: str) -> None:
    """Writes a page."""
    try:
        Path(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}.") from error


def _digest(text: str) -> str:
    return "sha256-" + b64encode(hashlib.sha256(text.encode()).digest()).decode()
