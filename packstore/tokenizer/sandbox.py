"""What a chat template may do: foreign code on foreign data, within stated time and size.

Jinja's sandbox keeps templates away from Python's insides, but not from the processor or the
memory: ``'a' * 10**10`` is allowed there. Here everything that can make a value larger than what
it is made of is charged to an account (:mod:`.account`), beforehand where it can be told.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer

from packstore.tokenizer.account import (
    CURRENT,
    FILTER_GUARDS,
    check_bits,
    check_format,
    paid,
)
from packstore.tokenizer.refusals import Refused

MAX_SOURCE = 1 << 18
"""Characters of a template; the longest that are in use have a tenth of it."""

_REFUSED = ("encode", "maketrans", "translate")
_STRING = frozenset(n for n in dir(str) if not n.startswith("_")).difference(_REFUSED)
_ATTRIBUTES: tuple[tuple[type, frozenset[str]], ...] = (
    (str, _STRING),
    (int, frozenset(("is_integer",))),
    (float, frozenset(("is_integer",))),
    (bytes, frozenset()),
    (dict, frozenset(("copy", "get", "items", "keys", "values"))),
    (list, frozenset(("copy", "count", "index"))),
    (tuple, frozenset(("count", "index"))),
)
_OF_DICTS = frozenset(dir(dict))
_QUICK = frozenset(("endswith", "lstrip", "replace", "rstrip", "split", "startswith", "strip"))
_HELPERS, _PLAIN = (LoopContext, Namespace), (bool, int, str, type(None))
_JINJAS = frozenset(("_loop_vars", "_block_vars"))
_SMALL = 1 << 30
_WEIGHED = (str, list, tuple, dict, Namespace)
_NO_FILTERS = ("center", "pprint", "random", "urlize", "wordwrap", "xmlattr")


def tick(_value: object) -> None:
    """Stands in every loop."""
    CURRENT.account.check_time()


def made(value: Any) -> Any:
    """Charges for a list, tuple or dict."""
    CURRENT.account.charge(value)
    return value


def joined(*parts: object) -> str:
    """``a ~ b``."""
    account = CURRENT.account
    for part in parts:
        account.charge(part)
    return "".join(map(str, parts))


_OWN: dict[str, Callable[..., Any]] = {f"packstore {f.__name__}": f for f in (tick, made, joined)}


class _Guards(NodeTransformer):
    """Puts the functions above in their places, as filters: those are called without ado."""

    def visit_For(self, node: nodes.For, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        step = nodes.ExprStmt(_apply(tick, [nodes.Const(None)], node), lineno=node.lineno)
        node.body.insert(0, step)
        return node

    def visit_Concat(self, node: nodes.Concat, *args: Any, **kwargs: Any) -> nodes.Node:
        self.generic_visit(node, *args, **kwargs)
        return _apply(joined, node.nodes, node)

    def visit_List(self, node: nodes.List, *args: Any, **kwargs: Any) -> nodes.Node:
        constant = not any(node.find_all((nodes.Name, nodes.Call, nodes.Filter)))
        self.generic_visit(node, *args, **kwargs)
        stored = getattr(node, "ctx", "load") != "load"
        return node if constant or stored else _apply(made, [node], node)

    visit_Tuple = visit_Dict = visit_List


def _apply(function: Callable[..., Any], args: list[nodes.Expr], at: nodes.Node) -> nodes.Filter:
    name = f"packstore {function.__name__}"
    return nodes.Filter(args[0], name, args[1:], [], None, None, lineno=at.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with an account."""

    intercepted_binops = frozenset(("+", "-", "*", "/", "//", "%", "**"))

    def __init__(self, **settings: Any) -> None:
        # Without constants folded: at compile time nobody counts.
        super().__init__(optimized=False, finalize=_output, **settings)
        del self.globals["lipsum"]
        for name in _NO_FILTERS:
            del self.filters[name]
        self.filters["tojson"] = as_json
        self.filters = {n: _filter(f, FILTER_GUARDS.get(n)) for n, f in self.filters.items()}
        self.filters |= _OWN

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Guards().visit(tree)
        return tree

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As Jinja's own; what nearly all templates ask nearly always takes a shorter way there."""
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _OF_DICTS:
                return obj[attribute]
        elif kind is str:
            if attribute in _QUICK:
                return getattr(obj, attribute)
        elif kind in _HELPERS and attribute[:1] != "_":
            value = getattr(obj, attribute, _HELPERS)
            if type(value) in _PLAIN:
                return value
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Few methods of plain values, and of others what Jinja allows."""
        for kind, allowed in _ATTRIBUTES:
            if isinstance(obj, kind):
                return attr in allowed
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format``, without widths, and charged for."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        text: str = value.__self__

        def guarded(*args: Any, **kwargs: Any) -> str:
            check_format(text.replace("{{", ""), text.count("{"), [args, kwargs])
            return wrapped(*args, **kwargs)

        return guarded

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls `__obj`, if it is safe, and there is time and room for its result."""
        account = CURRENT.account
        account.check_time()
        if type(__obj) is BuiltinMethodType and type(__obj.__self__) is str:
            name = __obj.__name__
            if name in _QUICK and kwargs.keys() <= _JINJAS:
                result = __obj(*paid(__obj.__self__, name, args))
                if type(result) is not bool:
                    account.charge(result)
                return result
        text = getattr(__obj, "__self__", None)
        if isinstance(text, str):
            args = paid(text, __obj.__name__, args)
        result = super().call(__context, __obj, *args, **kwargs)
        if isinstance(result, _WEIGHED):
            account.charge(result)
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """An operator, if there is room for its result."""
        if operator == "+" and isinstance(left, str):
            result = left + right
            CURRENT.account.spend(len(result))
            return result
        small = type(left) is int and type(right) is int
        if small and operator in "+-" and max(left, right) < _SMALL and min(left, right) > -_SMALL:
            return left + right if operator == "+" else left - right
        if isinstance(left, int) and isinstance(right, int):
            check_bits(operator, left, right)
        elif operator == "*":
            account = CURRENT.account
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    account.spend(account.weigh(value) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            check_format(left, left.count("%"), right)
        result = super().call_binop(context, operator, left, right)
        if operator == "+":
            CURRENT.account.charge(result)
        return result


def as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON text; as the filter ``tojson`` it escapes neither HTML nor letters."""
    settings: dict[str, Any] = {
        "ensure_ascii": ensure_ascii,
        "indent": indent,
        "separators": separators,
        "sort_keys": sort_keys,
    }
    if indent is None:
        return json.dumps(value, **settings)
    if not isinstance(indent, int) or indent > 16:
        raise Refused("template_refused", "an indent of more than 16")
    parts = []
    for part in json.JSONEncoder(**settings).iterencode(value):
        CURRENT.account.spend(len(part))
        parts.append(part)
    return "".join(parts)


@pass_context
def _output(_context: Context, value: Any) -> Any:
    CURRENT.account.charge(value)
    return value


def _filter(inner: Callable[..., Any], guard: Callable[..., Any] | None) -> Callable[..., Any]:
    """A filter that charges for what it makes, and that is not evaluated beforehand."""
    wanted = _PassArg.from_obj(inner)

    @functools.wraps(inner)
    def charged(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        account = CURRENT.account
        account.check_time()
        if guard is not None:
            value = guard(value, *args, **kwargs)
        if wanted is None:
            result = inner(value, *args, **kwargs)
        else:
            first = {
                _PassArg.context: context,
                _PassArg.eval_context: context.eval_ctx,
                _PassArg.environment: context.environment,
            }[wanted]
            result = inner(first, value, *args, **kwargs)
        if isinstance(result, _WEIGHED):
            account.charge(result)
        return result

    return pass_context(charged)
