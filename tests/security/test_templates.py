"""Chat templates that attack: each is refused by name, within little memory and time.

What is endless inside a single call ends with the worker process (tests/etl)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from packstore.tokenizer.chat.template import ChatTemplate
from packstore.tokenizer.refusals import Refused

pytestmark = pytest.mark.usefixtures("no_collector")

DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
ATTACKS = {
    # Memory.
    "a repeat": "{{ 'a' * 10**10 }}",
    "a repeat that is not shown": "{% set x = 'a' * 10**10 %}",
    "a repeat of a list": "{% set x = [messages] * 10**10 %}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(10**10) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "join": "{{ ('a' * 99999).join(['x'] * 99999) }}",
    "the filter join": "{{ range(99999) | join('a' * 99999) }}",
    "a format": "{{ '%9999999999d' % 1 }}",
    "a format that repeats": "{{ ('%s' * 9999) % (('a' * 99999,) * 9999) }}",
    "the filter format": "{{ '%9999999999d' | format(1) }}",
    "str.format": "{{ '{:>9999999999}'.format(1) }}",
    "str.format_map": "{{ '{x:9999999999}'.format_map({'x': 1}) }}",
    "doubling": DOUBLING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by a macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% else %}"
    "abcd{% endif %}{% endmacro %}{{ f(60) }}",
    "a list that grows": "{% set ns = namespace(x=[0]) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "indent": "{{ 'a\n\n' | indent(10**10) }}",
    "tojson": "{{ messages | tojson(indent=10**10) }}",
    "a large output": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "bytes": "{{ 'a'.encode().ljust(10**10) }}",
    "bytes of a number": "{{ (1).to_bytes(10**10, 'big') }}",
    "translate": "{{ 'aaa'.translate({97: 'b' * 99999}) }}",
    # Time.
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a product": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}"
    "{% endfor %}",
    "digits": "{{ 1.5 | round(10**9, 'floor') }}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}"
    "{% endfor %}",
    "loops that skip": "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}"
    "{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{% set a = f(n-1) %}"
    "{% set b = f(n-1) %}{% endif %}{% endmacro %}{% set x = f(200) %}",
    "a loop that calls itself": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
    # Escapes.
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by map": "{{ [''] | map(attribute='__class__') | map(attribute='__mro__') | list }}",
    "class by item": "{{ ''['__class__']['__mro__'] }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f.__call__.__globals__ }}",
    "globals of a function": "{{ raise_exception.__globals__['os'] }}",
    "globals of a filter": "{{ tojson.__globals__ }}{{ range.__globals__ }}{{ cycler.__init__ }}",
    "format to attributes": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format_map to attributes": "{{ '{x.__class__.__mro__}'.format_map({'x': ''}) }}",
    "the filter format to attributes": "{{ '%(x)s' | format(x=self.__init__.__globals__) }}",
    "self": "{{ self._TemplateReference__context.environment.__class__ }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.system('true') }}",
    "a parent": "{% extends '/etc/passwd' %}",
    "a change of the messages": "{{ messages.append(1) }}{{ messages[0].update(a=1) }}",
    "a change by do": "{{ messages.clear() }}",
    "chance": "{{ [1, 2] | random }}",
    "slices": "{% set x = 'a' * 20000000 %}"
    + "".join(f"{{% set x{i} = x[1:] %}}" for i in range(999)),
    "a deep key": "{% set ns = namespace(x=()) %}{% for i in range(99999) %}"
    "{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
    "lorem ipsum": "{{ lipsum(n=10**9) }}",
}
LONG = {
    "deep": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "deep lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep blocks": "{% if a %}" * 5000 + "{% endif %}" * 5000,
    "deep loops": "{% for a in b %}" * 50 + "{% endfor %}" * 50,
    "a sum": "{{ " + "1+" * 20_000 + "1 }}",
    "filters": "{{ a" + "|upper" * 10_000 + " }}",
    "a number": "{{ " + "9" * 100_000 + " }}",
    "a comment that does not end": "{# " * 50_000,
    "too long": "a" * (1 << 19),
}
TALK: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


CODE = """
import json, sys
from packstore.errors import TokenizerError
from packstore.tokenizer.chat import sandbox
from packstore.tokenizer.refusals import Refused
from packstore.tokenizer.chat.template import ChatTemplate

sandbox.MAX_SECONDS = 0.5
for name, source in json.load(sys.stdin).items():
    try:
        talk = [{"role": "user", "content": "hello"}]
        found = "rendered " + ChatTemplate(source, {}).render(talk)
    except (Refused, TokenizerError) as error:
        found = f"refused: {error}"
    print(json.dumps([name, found[:500]]))
"""


def test_refused(cell: Any) -> None:
    """By a record's refusal, or as an error of the job: in less time than there is, to be quick."""
    sources = ATTACKS | LONG
    lines = cell(CODE, json.dumps(sources)).splitlines()
    found = dict(map(json.loads, lines))
    assert found.keys() == sources.keys()
    wrong = {n: text for n, text in found.items() if not text.startswith("refused")}
    assert not wrong


def test_nothing_but_undefined_is_seen_of_the_inside() -> None:
    """Attributes that Jinja hides without an error stay hidden."""
    for source in (
        "{{ ''.__class__ }}",
        "{{ joiner.__globals__ }}",
        "{{ '' | attr('__class__') }}",
    ):
        try:
            assert ChatTemplate(source, {}).render(TALK) == ""
        except Refused as error:
            assert "unsafe" in str(error)  # noqa: PT017


def test_ordinary_work_is_allowed() -> None:
    text = "word " * 4000
    talk = [{"role": "user", "content": text}, {"role": "assistant", "content": text}] * 20
    source = (
        "{% set ns = namespace(all='') %}{% for m in messages %}{% set ns.all = ns.all + m.role "
        "~ ': ' ~ m.content | trim %}{{ '%s %03d {:>5}'.format(1) % (m.role, 7) }}{{ m | tojson }}"
        "{% endfor %}{{ ns.all[:10] }}{{ '-' * 80 }}{{ '%s' | format(1) }}{{ [1, 2] * 2 }}"
        "{{ 7 * 6 ** 2 // 5 % 4 }}{{ messages | map(attribute='role') | join(', ') | length }}"
        "{{ {'a': 1}.items() | list }}{{ 'a-b'.split('-')[0].replace('a', 'bb') | indent(2) }}"
    )
    assert "word" in ChatTemplate(source, {}).render(talk)
