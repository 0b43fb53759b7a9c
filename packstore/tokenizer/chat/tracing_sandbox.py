"""A sandbox whose templates also take the stand-ins of :mod:`.traced_text` for strings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import pass_context, pass_environment
from jinja2.environment import Environment
from jinja2.filters import make_attrgetter

from packstore.tokenizer.chat.sandbox import HERE, Sandbox
from packstore.tokenizer.chat.traced_text import Length, Output, Text, Untraceable, joined

_OF_TYPES = {"boolean", "callable", "defined", "escaped", "false", "float", "integer", "iterable"}
_OF_TYPES |= {"mapping", "none", "number", "sequence", "string", "true", "undefined"}
_METHODS = {"endswith", "lstrip", "rstrip", "split", "startswith", "strip"}


class TracingSandbox(Sandbox):
    """A sandbox whose templates also take :class:`Text` for strings."""

    concat = staticmethod(joined)

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.finalize = pass_context(lambda _, value: _output(HERE.budget.count(value)))
        for name in ("string", "trim"):
            self.filters[name] = _text_filter(self.filters[name], name)
        self.filters["length"] = self.filters["count"] = _length_filter(self.filters["length"])
        self.filters["join"] = self.filters["packstore join"] = _join
        for name in _OF_TYPES:
            self.tests[name] = _type_test(self.tests[name])

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Looks up an attribute; of a text only known methods, and names that no string has."""
        if type(obj) is not Text:
            return super().getattr(obj, attribute)
        if attribute in _METHODS:
            return getattr(obj, attribute)
        if hasattr(str, attribute):
            raise Untraceable
        return super().getattr("", attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        """Looks up an item, but not of or by a text."""
        if Text in (type(obj), type(argument)):
            raise Untraceable
        return super().getitem(obj, argument)


def _output(value: object) -> object:
    return Output(value) if type(value) is Text else value


def _text_filter(usual: Callable[..., Any], name: str) -> Callable[..., Any]:
    def apply(value: Any, *args: Any, **kwargs: Any) -> Any:
        if type(value) is not Text:
            return usual(value, *args, **kwargs)
        return value.strip(*args, **kwargs) if name == "trim" else value

    return apply


def _length_filter(usual: Callable[..., Any]) -> Callable[..., Any]:
    return lambda value: Length(value) if type(value) is Text else usual(value)


def _type_test(usual: Any) -> Callable[..., Any]:
    return lambda value, *args: usual("" if type(value) is Text else value, *args)


@pass_environment
def _join(environment: Environment, value: Any, d: str = "", attribute: Any = None) -> Any:
    if type(d) is not str:
        raise Untraceable
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return joined(HERE.budget.listed(value, d), d)
