"""Renders chat templates, which are untrusted code, within limits of time and size.

Jinja's immutable sandbox protects Python's internals and the records, but not processor time and
memory: it allows ``'a' * 10**10``. Here every text, list and dict that a template creates counts
against a budget, and every loop checks the time.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2 import nodes, pass_context, pass_environment
from jinja2.environment import Environment
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer

from packstore.errors import TokenizerError, sentence
from packstore.tokenizer.refusals import Refused

MAX_SOURCE = 1 << 18
"""Maximum characters of a template, ten times the longest in use."""
MAX_MADE = 1 << 27
"""Maximum characters that a rendering may create, intermediate ones included. Counted, not
measured, so that all machines refuse the same records."""
MAX_RENDERED = 1 << 26
"""Maximum characters of a rendered dialogue."""
MAX_SECONDS = 20.0
"""Maximum seconds of a rendering, which mostly takes milliseconds; beyond it the job fails."""

_NODE = 64  # approximate memory of a value besides its characters
_MAX_BITS = 1 << 12
_WIDE = re.compile(r"[0-9]{4}|\*|\{[^{}]*\{")  # widths in format strings
_FREE = (int, float, type(None))
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_HOLDERS = (list, tuple, set, frozenset, *_VIEWS)
_NO_FILTERS = {"batch", "center", "pprint", "random", "round", "slice", "urlize", "wordwrap"}
_NO_FILTERS |= {"xmlattr"}
_NO_METHODS = {"center", "encode", "expandtabs", "ljust", "maketrans", "rjust", "to_bytes"}
_NO_METHODS |= {"translate", "zfill"}
_QUICK = {"endswith", "lstrip", "rstrip", "split", "startswith", "strip"}
_OF_DICTS = frozenset(dir(dict))
_OF_JINJA = {"_loop_vars", "_block_vars"}


class Budget:
    """The remaining size and the deadline of a rendering."""

    __slots__ = ("end", "left")

    def __init__(self) -> None:
        self.left, self.end = MAX_MADE, time.monotonic() + MAX_SECONDS

    def spend(self, size: int) -> None:
        """Counts characters; raises :class:`Refused` beyond the limit."""
        self.left -= size
        if self.left < 0:
            raise Refused("template_refused", f"more than {MAX_MADE} characters made")

    def count(self, value: Any) -> Any:
        """Counts a created value and returns it."""
        if not isinstance(value, _FREE):
            self.spend(self.size(value))
        elif isinstance(value, int):
            check_bits(value.bit_length())
        return value

    def size(self, value: object) -> int:
        """Returns the characters of a value and its parts, repeated ones counted each time."""
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
                stack += top
            elif isinstance(top, Namespace):
                stack.append(object.__getattribute__(top, "_Namespace__attrs"))
            if total > self.left:
                self.spend(total)
        return total

    def listed(self, values: Iterable[Any], between: str = "") -> list[Any]:
        """Counts a join of texts in advance; returns the texts as a list."""
        items = list(values)
        self.spend(sum(map(self.size, items)) + len(items) * len(between))
        return items

    def check_time(self) -> None:
        """Raises :class:`TokenizerError` after the deadline."""
        if time.monotonic() > self.end:
            must = f"a dialogue must be rendered within {MAX_SECONDS:g} s"
            raise TokenizerError(sentence("chat template", must, "no end", "Correct its loops"))


def check_bits(bits: int) -> None:
    """Refuses a huge integer."""
    if bits > _MAX_BITS:
        raise Refused("template_refused", f"a number of more than {_MAX_BITS} bits")


class _Here(threading.local):
    """The budget of the rendering in this thread."""

    budget = Budget()


HERE = _Here()


def as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON text; as the filter ``tojson`` it escapes neither HTML nor non-ASCII letters."""
    if indent is not None and (not isinstance(indent, int) or indent > 16):
        raise Refused("template_refused", "an indent of more than 16")
    settings: Any = {"separators": separators, "sort_keys": sort_keys, "indent": indent}
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, **settings)
    if indent is None:
        return encoder.encode(value)
    return "".join(map(HERE.budget.count, encoder.iterencode(value)))


@pass_environment
def _join(environment: Environment, value: Any, d: str = "", attribute: Any = None) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return d.join(map(str, HERE.budget.listed(value, d)))


def _size_of_format(text: str, *args: Any, **kwargs: Any) -> int:
    if _WIDE.search(text.replace("{{", "")):
        raise Refused("template_refused", "a format with a large or given width")
    fields = text.count("%") + text.count("{")
    return len(text) + fields * (HERE.budget.size([args, kwargs]) + 1000)


def _size_of_replace(s: Any, old: Any, new: Any, count: object = None) -> int:
    text, old = str(s), str(old)
    return len(text) + (text.count(old) if old else len(text) + 1) * len(str(new))


def _size_of_indent(s: str, width: int | str = 4, *_: object, **_more: object) -> int:
    return len(s) + (s.count("\n") + 1) * (width if isinstance(width, int) else len(width))


_SIZES: dict[str, Callable[..., int]] = {
    "format": _size_of_format,
    "indent": _size_of_indent,
    "replace": _size_of_replace,
}
"""Filters and methods of texts with results much larger than their input -> size of the result."""


class _Guards(NodeTransformer):
    """Wraps expressions that Jinja evaluates without a hook in filters that count."""

    def generic_visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> nodes.Node:
        super().generic_visit(node, *args, **kwargs)
        if isinstance(node, nodes.For):
            look = nodes.ExprStmt(_apply("look", nodes.Const(None), node), lineno=node.lineno)
            node.body.insert(0, look)
        elif isinstance(node, nodes.Concat):
            return _apply("join", nodes.Tuple(node.nodes, "load", lineno=node.lineno), node)
        elif isinstance(node, nodes.Getitem):
            return _apply("count", node, node) if isinstance(node.arg, nodes.Slice) else node
        elif isinstance(node, nodes.List | nodes.Tuple | nodes.Dict):
            loaded = getattr(node, "ctx", "load") == "load"
            if loaded and any(node.find_all((nodes.Name, nodes.Call, nodes.Filter))):
                return _apply("count", node, node)
        return node


def _apply(name: str, value: nodes.Expr, at: nodes.Node) -> nodes.Filter:
    return nodes.Filter(value, f"packstore {name}", [], [], None, None, lineno=at.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget: ``HERE.budget``, set before each rendering."""

    intercepted_binops = frozenset(("+", "*", "%", "**"))

    def __init__(self, **settings: Any) -> None:
        # No constant folding, in the optimizer or in output: folded values would not be counted.
        finalize = pass_context(lambda _, value: HERE.budget.count(value))
        super().__init__(optimized=False, finalize=finalize, **settings)
        del self.globals["lipsum"]
        filters = {n: f for n, f in self.filters.items() if n not in _NO_FILTERS}
        filters |= {"tojson": as_json, "join": _join}
        self.filters = {n: _counted(n, f) for n, f in filters.items()}
        self.filters["packstore look"] = lambda _: HERE.budget.check_time()
        self.filters["packstore count"] = lambda value: HERE.budget.count(value)
        self.filters["packstore join"] = _join

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Guards().visit(super()._parse(source, name, filename))
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Overrides Jinja's method with a fast path for the most common attributes."""
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _OF_DICTS:
                return obj[attribute]
        elif kind is str:
            if attribute in _QUICK:
                return getattr(obj, attribute)
        elif kind in (LoopContext, Namespace) and attribute[:1] != "_":
            value = getattr(obj, attribute, obj)
            if isinstance(value, (str, *_FREE)):
                return value
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Extends Jinja's check: refuses methods with results much larger than their input."""
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Wraps ``str.format`` and ``str.format_map``, to count in advance."""
        wrapped = super().wrap_str_format(value)
        return wrapped and _counted("format", wrapped, value.__self__)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls `__obj` if it is safe; counts its result and checks the time."""
        budget = HERE.budget
        budget.check_time()
        if isinstance(text := getattr(__obj, "__self__", None), str):
            name = __obj.__name__
            if name in _QUICK and kwargs.keys() <= _OF_JINJA:
                return budget.count(__obj(*args))
            if name == "join":
                args = tuple(budget.listed(values, text) for values in args)
            elif name in _SIZES:
                budget.spend(_SIZES[name](text, *args))
        return budget.count(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Evaluates an operator if its result fits the budget."""
        budget = HERE.budget
        if operator == "+":
            return budget.count(left + right)
        if operator == "%":
            if isinstance(left, str):
                budget.spend(_size_of_format(left, right))
        elif isinstance(left, int) and isinstance(right, int):
            factor = max(right, 0) if operator == "**" else 1
            check_bits(left.bit_length() * factor + right.bit_length())
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    budget.spend(budget.size(value) * max(times, 0))
        return super().call_binop(context, operator, left, right)


def _counted(name: str, function: Callable[..., Any], *first: Any) -> Callable[..., Any]:
    """Wraps a filter or function so that its results are counted."""
    size = _SIZES.get(name)
    skipped = 0 if first else int(_PassArg.from_obj(function) is not None)

    @functools.wraps(function)  # keeps Jinja's mark of the first argument to pass
    def counted(*args: Any, **kwargs: Any) -> Any:
        budget = HERE.budget
        budget.check_time()
        if size is not None:
            budget.spend(size(*first, *args[skipped:], **kwargs))
        return budget.count(function(*args, **kwargs))

    return counted
