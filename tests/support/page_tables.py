"""Reads the tables of a page, and compares their figures with the JSON of the same
command.
"""

from __future__ import annotations

import re
from decimal import Decimal
from html import unescape

Tables = dict[str, dict[str, list[str]]]


def tables_of(page: str) -> Tables:
    """Returns heading -> first cell of a row -> its other cells; `` `` is the row of
    the titles.

    A first cell that repeats gets the number of its row.
    """
    found: Tables = {}
    for title, body in re.findall(
        r"<section><h2>(.*?)</h2>\n(.*?)</section>", page, re.S
    ):
        rows = found.setdefault(unescape(title), {})
        for row in re.findall(r"<tr.*?</tr>", body, re.S):
            name, *cells = map(
                unescape, re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.S)
            )
            rows[f"{name} {len(rows)}" if name in rows else name] = cells
    return found


def assert_shows(text: str, value: float) -> None:
    """Asserts that `text` is `value`, rounded to the digits that it has."""
    shown = Decimal(text.strip("+%").replace(",", ""))
    if text.endswith("%"):
        shown /= 100
    digits = shown.as_tuple().exponent
    assert isinstance(digits, int), text
    assert abs(float(shown) - value) <= 0.5001 * 10.0**digits + 1e-12, (text, value)


def assert_closed(page: str) -> None:
    """Asserts that a page loads nothing, and that its policy says so."""
    (policy,) = re.findall(r'"Content-Security-Policy" content="([^"]*)"', page)
    assert policy.startswith("default-src 'none'; style-src 'sha256-")
    assert "connect-src" not in policy
    assert "unsafe" not in policy
    assert (
        re.search(r"https?:|//\w|url\(|@import|<link|<img|<iframe|\bsrc=|\bhref=", page)
        is None
    )
