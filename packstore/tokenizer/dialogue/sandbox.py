"""The sandbox of chat templates, which are untrusted code.

Jinja's immutable sandbox protects Python's internals and the records. Time and memory are limited
in the process that renders (``limits.py``), so nothing of a template may run elsewhere.
"""

from __future__ import annotations

import json
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_SOURCE = 1 << 18
"""Maximum characters of a template, ten times the longest in use."""
MAX_RENDERED = 1 << 26
"""Maximum characters of a rendered dialogue."""

_SAFE_METHODS = {"endswith", "lstrip", "rstrip", "split", "startswith", "strip"}
_OF_DICTS = frozenset(dir(dict))
_OF_JINJA = {"_loop_vars", "_block_vars"}


class _Generator(CodeGenerator):
    """Reads fields of dicts without a call; leaves constant expressions to the rendering.

    ``'a' * 10**10`` would be computed here.
    """

    def visit_Getattr(self, node: nodes.Getattr, frame: Frame) -> None:
        """Overrides Jinja's method: a third of a rendering is to read messages."""
        if node.attr in _OF_DICTS:
            super().visit_Getattr(node, frame)
            return
        name = repr(node.attr)
        self.write(f"(of[{name}] if type(of := ")
        self.visit(node.node, frame)
        self.write(f") is dict and {name} in of else environment.getattr(of, {name}))")

    def _output_child_to_const(self, node: nodes.Expr, *others: Any) -> str:
        if not isinstance(node, nodes.TemplateData):
            raise nodes.Impossible
        return super()._output_child_to_const(node, *others)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox without chance, and with a short way to what is certainly safe."""

    code_generator_class = _Generator

    def __init__(self, **settings: Any) -> None:
        super().__init__(optimized=False, **settings)
        del self.globals["lipsum"]
        del self.filters["random"]
        self.filters["tojson"] = as_json

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Overrides Jinja's method with a short way for the most common attributes."""
        kind = type(obj)
        if kind is str:
            if attribute in _SAFE_METHODS:
                return getattr(obj, attribute)
        elif kind in (LoopContext, Namespace) and attribute[:1] != "_":
            value = getattr(obj, attribute, obj)
            if isinstance(value, (str, int, type(None))):
                return value
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls `__obj` if it is safe."""
        of_text = type(getattr(__obj, "__self__", None)) is str and kwargs.keys() <= _OF_JINJA
        if of_text and __obj.__name__ in _SAFE_METHODS:
            return __obj(*args)
        return super().call(__context, __obj, *args, **kwargs)


def as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Returns JSON text; as the filter ``tojson`` it escapes neither HTML nor non-ASCII letters."""
    settings: Any = {"separators": separators, "sort_keys": sort_keys, "indent": indent}
    return json.dumps(value, ensure_ascii=ensure_ascii, **settings)
