"""Chat templates that attack: each is refused by name, within little memory and
time.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from small_jobs import trained_tokenizer, write_tokenizer

import packstore

pytestmark = pytest.mark.usefixtures("no_collector")

DOUBLING = "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
NEEDLE = "{% set x = 'a' * 1000000 ~ 'b' ~ 'a' * 1000000 %}"
COLLIDING = "{% set x = range(0, 90000 * (2**61 - 1), 2**61 - 1) %}"
ENDLESS = {
    # Memory.
    "a repeat": "{{ 'a' * 10**10 }}",
    "a repeat that is not shown": "{% set x = 'a' * 10**10 %}",
    "a repeat of a list": "{% set x = [messages] * 10**10 %}",
    "ljust": "{{ 'a'.ljust(10**10) }}",
    "zfill": "{{ 'a'.zfill(10**10) }}",
    "replace": "{{ ('a' * 99999).replace('a', 'b' * 99999) }}",
    "join": "{{ ('a' * 99999).join(['x'] * 99999) }}",
    "the filter join": "{{ range(99999) | join('a' * 99999) }}",
    "a format": "{{ '%9999999999d' % 1 }}",
    "a format that repeats": "{{ ('%s' * 9999) % (('a' * 99999,) * 9999) }}",
    "the filter format": "{{ '%9999999999d' | format(1) }}",
    "str.format": "{{ '{:>9999999999}'.format(1) }}",
    "str.format_map": "{{ '{x:9999999999}'.format_map({'x': 1}) }}",
    "doubling": DOUBLING + "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling by a macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% else "
    "%}"
    "abcd{% endif %}{% endmacro %}{{ f(60) }}",
    "a list that grows": "{% set ns = namespace(x=[0]) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "batch": "{{ [1] | batch(10**9, 'x') | list }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "indent": "{{ 'a\n\n' | indent(10**10) }}",
    "tojson": "{{ messages | tojson(indent=10**10) }}",
    "bytes": "{{ 'a'.encode().ljust(10**10) }}",
    "bytes of a number": "{{ (1).to_bytes(10**10, 'big') }}",
    # Time.
    "a power": "{{ 10 ** (10 ** 10) }}",
    "a product": "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = "
    "ns.x * ns.x %}"
    "{% endfor %}",
    "digits": "{{ 1.5 | round(10**9, 'floor') }}",
    "loops in loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor "
    "%}"
    "{% endfor %}",
    "loops that skip": "{% for i in range(99999) %}{% for j in range(99999) if false "
    "%}{% endfor %}"
    "{% endfor %}",
    "rfind": NEEDLE + "{{ ('a' * 4000000).rfind(x) }}",
    "rindex": NEEDLE + "{{ ('a' * 4000000).rindex(x) }}",
    "rsplit": NEEDLE + "{{ ('a' * 4000000).rsplit(x) }}",
    "rpartition": NEEDLE + "{{ ('a' * 4000000).rpartition(x) }}",
    "strip": "{{ ('a' * 4000000).strip('b' * 4000000 ~ 'a') }}",
    "unique": COLLIDING + "{{ x | unique | list | length }}",
    "groupby": COLLIDING + "{{ dict(x | groupby('real')) | length }}",
    "max": "{{ ('ab' * 60000000) | max }}",
    "sort of a text": "{{ ('ab' * 30000000) | sort }}",
    "title": "{{ ('a-' * 30000000) | title | length }}",
    "a constant filter": "{{ 'a'" + "|replace('a', 'aaaaaaaaaa')" * 12 + " }}",
    "lists in lists": DOUBLING.replace("'ab'", "[1]")
    + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x | tojson }}",
    "slices": "{% set x = 'a' * 20000000 %}"
    + "".join(f"{{% set x{i} = x[1:] %}}" for i in range(999)),
    "a deep key": "{% set ns = namespace(x=()) %}{% for i in range(99999) %}"
    "{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
}
RULES = {
    # Sizes that do not depend on the machine.
    "expandtabs": "{{ '\t\t'.expandtabs(10**10) }}",
    "a large output": "{% for i in range(99999) %}{{ 'a' * 9999 }}{% endfor %}",
    "range": "{% for i in range(10**9) %}{% endfor %}",
    "a macro that calls itself twice": "{% macro f(n) %}{% if n %}{% set a = f(n-1) %}"
    "{% set b = f(n-1) %}{% endif %}{% endmacro %}{% set x = f(200) %}",
    "a loop that calls itself": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% "
    "endfor %}",
    # Escapes.
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by map": "{{ [''] | map(attribute='__class__') | map(attribute='__mro__') | "
    "list }}",
    "class by item": "{{ ''['__class__']['__mro__'] }}",
    "globals of a macro": "{% macro f() %}{% endmacro %}{{ f.__call__.__globals__ }}",
    "globals of a function": "{{ raise_exception.__globals__['os'] }}",
    "globals of a filter": "{{ tojson.__globals__ }}{{ range.__globals__ }}{{ "
    "cycler.__init__ }}",
    "format to attributes": "{{ '{0.__class__.__mro__}'.format('') }}",
    "format_map to attributes": "{{ '{x.__class__.__mro__}'.format_map({'x': ''}) }}",
    "the filter format to attributes": "{{ '%(x)s' | "
    "format(x=self.__init__.__globals__) }}",
    "self": "{{ self._TemplateReference__context.environment.__class__ }}",
    "a file": "{% include '/etc/passwd' %}",
    "an import": "{% import 'os' as os %}{{ os.system('true') }}",
    "a parent": "{% extends '/etc/passwd' %}",
    "a change of the messages": "{{ messages.append(1) }}{{ messages[0].update(a=1) }}",
    "a change by do": "{{ messages.clear() }}",
    "lorem ipsum": "{{ lipsum(n=10**9) }}",
}
INVALID = {
    "chance": "{{ [1, 2] | random }}",
    "deep": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "deep lists": "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "deep blocks": "{% if a %}" * 5000 + "{% endif %}" * 5000,
    "deep loops": "{% for a in b %}" * 50 + "{% endfor %}" * 50,
    "a sum": "{{ " + "1+" * 20_000 + "1 }}",
    "filters": "{{ a" + "|upper" * 10_000 + " }}",
    "a number": "{{ " + "9" * 100_000 + " }}",
    "a comment that does not end": "{# " * 50_000,
    "too long": "{{ 1 }}" + "a" * (1 << 19),
}


CODE = """
import json, sys
import packstore
from packstore.errors import DropRateError, TokenizerError
from packstore.tokenizer.dialogue import template
import packstore.etl.pipeline, polars

template.RENDER_SECONDS, template.RENDER_MEMORY = 0.5, 512 << 20  # less than it is, to be quick
records = [{"messages": [{"role": r, "content": "hello"} for r in ("user", "assistant")]}]
for n, (name, source) in enumerate(json.load(sys.stdin).items()):
    settings = {"chat_template": source, "rejects": "rejects.jsonl", "num_workers": 1}
    try:
        found = packstore.pack(records, f"out{n}", "tokenizer.json", max_drop_rate=1, **settings)
    except DropRateError:
        found = "dropped " + open("rejects.jsonl").read()
    except TokenizerError as error:
        found = f"failed {error}"
    print(json.dumps([name, str(found)[:500]]), flush=True)
"""


def outcomes(cell: Any, tmp_path: Path, sources: dict[str, str]) -> dict[str, str]:
    """What became of a job with each template."""
    write_tokenizer(tmp_path / "tokenizer.json")
    return dict(map(json.loads, cell(CODE, json.dumps(sources)).splitlines()))


SOME = ("a repeat", "loops in loops", "rfind")


@pytest.mark.parametrize(
    "names", [SOME, pytest.param((*ENDLESS,), marks=pytest.mark.slow)]
)
def test_a_job_ends_where_a_template_needs_too_much(
    cell: Any, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """Also inside one call, and in a job of one process; no record is dropped
    for it.
    """
    ends = r"failed chat template: it must render a record (within .* time|in 512 MiB of memory)"
    found = outcomes(cell, tmp_path, {name: ENDLESS[name] for name in names})
    assert not {name: text for name, text in found.items() if not re.match(ends, text)}
    assert len(found) == len(names)


TEXT = """
import json
import packstore
from packstore.tokenizer.dialogue import template
import packstore.etl.pipeline, polars

template.RENDER_SECONDS = 0.01
pair = {"prompt": "a " * 500, "chosen": "b " * 500, "rejected": "? " * 400}
with open("pairs.jsonl", "w") as file:
    file.write((json.dumps(pair) + "\\n") * 600)
made = packstore.pack("pairs.jsonl", "out", "tokenizer.json", num_workers=2)
print(made.manifest.records.packed)
"""


def test_text_has_no_limit_of_time(cell: Any, tmp_path: Path) -> None:
    """The limit is that of templates: encoding a block of texts may take longer."""
    write_tokenizer(tmp_path / "tokenizer.json")
    assert cell(TEXT) == "600\n"


def test_refused(cell: Any, tmp_path: Path) -> None:
    """A record where it breaks a rule, and a template that is none."""
    found = outcomes(cell, tmp_path, RULES | INVALID)
    assert found.keys() == RULES.keys() | INVALID.keys()
    for name, text in found.items():
        start = "failed chat template" if name in INVALID else "dropped"
        assert text.startswith(start), (name, text)
        assert name in INVALID or '"template_refused"' in text, (name, text)


def test_ordinary_work_is_allowed(cell: Any, tmp_path: Path) -> None:
    """And attributes that Jinja hides without an error stay hidden."""
    source = (
        "{% set ns = namespace(all='') %}{% for m in messages*9 %}{% set ns.all = "
        "ns.all ~ m.role "
        "~ ': ' ~ m.content | trim %}{{ '%s %03d {:>5}'.format(1) % (m.role, 7) }}{{ m "
        "| tojson }}"
        "{% endfor %}{{ ns.all[:10] }}{{ '-' * 80 }}{{ '%s' | format(1) }}{{ [1, 2] * "
        "2 }}"
        "{{ 7 * 6 ** 2 // 5 % 4 }}{{ messages | map(attribute='role') | join(', ') | "
        "length }}"
        "{{ {'a': 1}.items() | list }}{{ 'a-b'.split('-')[0].replace('a', 'bb') | "
        "indent(2) }}"
        "{% if ''.__class__ or joiner.__globals__ or '' | attr('__class__') %}"
        "{{ raise_exception('seen') }}{% endif %}{% for m in messages %}"
        " {% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    assert outcomes(cell, tmp_path, {"": source})[""].startswith("Dataset")


@pytest.mark.slow
def test_a_dialogue_of_very_many_turns_is_refused_by_itself(tmp_path: Path) -> None:
    """Each turn is marked by characters that do not occur in it, of which there are
    65,534.
    """
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant")] * 33_000
    long = {
        "chosen": turns,
        "rejected": [*turns[:-1], {"role": "assistant", "content": "b"}],
    }
    short = {"chosen": turns[:2], "rejected": [turns[0], long["rejected"][-1]]}
    records = [short, long]
    tokenizer = trained_tokenizer(["a or b"])
    settings = {"chat_template": "chatml", "pack_size": 1 << 20, "max_drop_rate": 1.0}
    made = packstore.pack(records, tmp_path / "ds", tokenizer, **settings)
    assert made.manifest.records.dropped == {"template_refused": 1}
