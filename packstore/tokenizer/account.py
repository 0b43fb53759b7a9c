"""What one rendering of a chat template may make, and what its operations cost beforehand.

Sizes are counted and not measured in time, so that the same record is refused on every machine; the
time limit is for the rest, and ends the job.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jinja2.utils import Namespace

from packstore.errors import TokenizerError, sentence
from packstore.tokenizer.refusals import Refused

MAX_MADE = 1 << 27
"""Characters that one rendering may make, intermediate ones included."""

MAX_SECONDS = 20.0
"""That one rendering may take; it takes some thousandths of a second mostly."""

_NODE = 64  # what a value weighs apart from its characters, as its memory would be
_MAX_BITS = 1 << 12
_WIDE = re.compile(r"\d{4}|\*|\{[^{}]*\{")  # widths in format strings
_HOLDERS: tuple[type, ...] = (
    list,
    tuple,
    set,
    frozenset,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)


class Account:
    """What a rendering may still make, and until when."""

    __slots__ = ("end", "left")

    def __init__(self) -> None:
        self.left, self.end = MAX_MADE, time.monotonic() + MAX_SECONDS

    def charge(self, value: object) -> None:
        """Charges for a value that was made; raises :class:`Refused` beyond its end."""
        self.spend(len(value) if type(value) is str else self.weigh(value))

    def spend(self, size: int) -> None:
        """Charges for `size` characters; raises as :meth:`charge`."""
        self.left -= size
        if self.left < 0:
            raise Refused("template_refused", f"more than {MAX_MADE} characters made")

    def weigh(self, value: object) -> int:
        """Characters of a value and of all in it, however often it is in it."""
        if isinstance(value, str):
            return len(value)
        total, stack = 0, [value]
        while stack:
            top = stack.pop()
            total += _NODE
            if isinstance(top, str):
                total += len(top)
            elif isinstance(top, Mapping):
                stack += [*top.keys(), *top.values()]
            elif isinstance(top, _HOLDERS):
                stack += list(top)  # type: ignore[call-overload]
            elif isinstance(top, Namespace):
                stack.append(object.__getattribute__(top, "_Namespace__attrs"))
            if total > self.left:
                self.spend(total)
        return total

    def check_time(self) -> None:
        """Raises :class:`TokenizerError` if the time is over."""
        if time.monotonic() > self.end:
            must = f"a dialogue must be rendered within {MAX_SECONDS:g} s"
            raise TokenizerError(sentence("chat template", must, "no end", "Correct its loops"))


class Current(threading.local):
    """The account of the rendering that this thread is at."""

    def __init__(self) -> None:
        self.account = Account()


CURRENT = Current()


def _guard_join(value: Any, d: str = "", attribute: object = None) -> Any:
    items = list(value)
    account = CURRENT.account
    account.spend(sum(map(account.weigh, items)) + len(items) * account.weigh(d))
    return items


def _guard_replace(value: Any, old: str, new: str, count: object = None) -> Any:
    paid(str(value), "replace", (str(old), str(new)))
    return value


def _guard_indent(value: Any, width: Any = 4, first: bool = False, blank: bool = False) -> Any:
    size = width if isinstance(width, int) else len(width)
    CURRENT.account.spend(str(value).count("\n") * max(size, 0) + max(size, 0))
    return value


def _guard_count(value: Any, count: Any, fill_with: object = None) -> Any:
    if not isinstance(count, int) or count > 10_000:
        raise Refused("template_refused", "lists of more than 10000 in batch or slice")
    return value


def _guard_round(value: Any, precision: Any = 0, method: str = "common") -> Any:
    if not isinstance(precision, int) or abs(precision) > 100:
        raise Refused("template_refused", "more than 100 digits in round")
    return value


def _guard_format(value: Any, *args: Any, **kwargs: Any) -> Any:
    check_format(str(value), str(value).count("%"), [args, kwargs])
    return value


FILTER_GUARDS: dict[str, Callable[..., Any]] = {
    "join": _guard_join,
    "replace": _guard_replace,
    "indent": _guard_indent,
    "batch": _guard_count,
    "slice": _guard_count,
    "round": _guard_round,
    "format": _guard_format,
}
"""Filters that may make much of little: what looks at their arguments beforehand."""


def paid(text: str, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a method of a string, charged for beforehand where it may make much."""
    if method in ("ljust", "rjust", "center", "zfill", "expandtabs"):
        sizes = [a for a in args[:1] if isinstance(a, int)]
        CURRENT.account.spend(
            max([0, *sizes]) * (text.count("\t") if method == "expandtabs" else 1)
        )
    elif method == "join" and len(args) == 1:
        args = (_guard_join(args[0], text),)
    elif method == "replace" and len(args) > 1 and all(isinstance(a, str) for a in args[:2]):
        times = text.count(args[0]) if args[0] else len(text) + 1
        CURRENT.account.spend(len(text) + times * len(args[1]))
    return args


def check_format(text: str, fields: int, values: object) -> None:
    """Refuses a format string whose result may be large; charges for the others."""
    if _WIDE.search(text):
        raise Refused("template_refused", "a format with a large or given width")
    account = CURRENT.account
    account.spend(len(text) + fields * (account.weigh(values) + 1000))


def check_bits(operator: str, left: int, right: int) -> None:
    """Refuses an operation that gives a huge number."""
    bits = left.bit_length(), right.bit_length()
    size = bits[0] * max(right, 0) if operator == "**" else sum(bits)
    if size > _MAX_BITS:
        raise Refused("template_refused", f"a number of more than {_MAX_BITS} bits")
