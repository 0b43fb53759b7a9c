"""The sandbox of chat templates, which are untrusted code.

Jinja's immutable sandbox protects Python's internals and the records. Loops and calls check the
time, as it does not; what is endless inside one call ends with the worker process that renders.
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

from jinja2 import nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from packstore.errors import TokenizerError, sentence
from packstore.tokenizer.refusals import Refused

MAX_SOURCE = 1 << 18
"""Maximum characters of a template, ten times the longest in use."""
MAX_RENDERED = 1 << 26
"""Maximum characters of a rendered dialogue, and of a text or list that is repeated by ``*``."""
MAX_BITS = 1 << 12
"""Maximum bits of a product or power."""
MAX_SECONDS = 20.0
"""Maximum seconds of a rendering, which mostly takes milliseconds; beyond it the job fails."""

_NO_FILTERS = {"batch", "center", "pprint", "random", "round", "slice", "urlize", "wordwrap"}
_NO_METHODS = {"center", "encode", "expandtabs", "ljust", "maketrans", "rjust", "to_bytes"}
_NO_METHODS |= {"translate", "zfill"}
"""Filters and methods with results much larger than their input, or left to chance."""

_SAFE_METHODS = {"endswith", "lstrip", "rstrip", "split", "startswith", "strip"}
_OF_DICTS = frozenset(dir(dict))
_OF_JINJA = {"_loop_vars", "_block_vars"}


class Deadline(threading.local):
    """The end of the rendering in this thread."""

    end = 0.0

    def start(self) -> None:
        """Begins a rendering."""
        self.end = time.monotonic() + MAX_SECONDS

    def check(self, _: object = None) -> None:
        """Raises :class:`TokenizerError` after the end."""
        if time.monotonic() > self.end:
            must = f"a dialogue must be rendered within {MAX_SECONDS:g} s"
            raise TokenizerError(sentence("chat template", must, "no end", "Correct its loops"))


DEADLINE = Deadline()


class _Checks(NodeTransformer):
    """Inserts a check of the time into every loop."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        nothing = nodes.Const(None, lineno=node.lineno)
        check = nodes.Filter(nothing, "packstore check", [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(check, lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(nodes.Not(check, lineno=node.lineno), node.test)
        return node


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a deadline, and a short way to what is certainly safe."""

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self, **settings: Any) -> None:
        super().__init__(optimized=False, **settings)  # operators on constants would be computed
        del self.globals["lipsum"]
        self.filters = {n: f for n, f in self.filters.items() if n not in _NO_FILTERS}
        self.filters |= {"tojson": as_json, "packstore check": DEADLINE.check}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Checks().visit(super()._parse(source, name, filename))
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Overrides Jinja's method with a short way for the most common attributes."""
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _OF_DICTS:
                return obj[attribute]
        elif kind is str:
            if attribute in _SAFE_METHODS:
                return getattr(obj, attribute)
        elif kind in (LoopContext, Namespace) and attribute[:1] != "_":
            value = getattr(obj, attribute, obj)
            if isinstance(value, (str, int, type(None))):
                return value
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Extends Jinja's check: refuses methods with results much larger than their input."""
        return attr not in _NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls `__obj` if it is safe; checks the time."""
        of_text = type(getattr(__obj, "__self__", None)) is str and kwargs.keys() <= _OF_JINJA
        if of_text and __obj.__name__ in _SAFE_METHODS:
            return __obj(*args)
        DEADLINE.check()
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Multiplies, or raises to a power, if the result is not huge."""
        size = 0
        if isinstance(left, int) and isinstance(right, int):
            times = right if operator == "**" else 1
            size = left.bit_length() * times + right.bit_length()
            size *= MAX_RENDERED // MAX_BITS
        elif operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    size = len(value) * times
        if size > MAX_RENDERED:
            raise Refused("template_refused", f"a result of {operator} that is too large")
        return super().call_binop(context, operator, left, right)


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
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)
