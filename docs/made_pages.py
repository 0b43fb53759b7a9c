"""Generates pages of the site at build time: the API, the commands, the forms, the
dependencies.

The text of the API is that of the docstrings, by mkdocstrings; settings are tables made
from the fields of their dataclasses, commands from their parsers, and forms from their
decorators. No page is stored in a file, so none can differ from the code.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NAMESPACES = {
    "packstore": "reference/packstore.md",
    "packstore.torch": "reference/torch.md",
    "packstore.torch.parallel": "reference/parallel.md",
    "packstore.config": "reference/config.md",
    "packstore.testing": "reference/testing.md",
}
"""A public namespace -> its page."""

COMMANDS_PAGE = "reference/commands.md"
FORMS_PAGE = "reference/forms.md"

FORM_GROUPS = {
    "preference": "Pairs (preference)",
    "scored": "Scored answers (scored)",
    "sft": "Text to learn (sft)",
    "": "Forms that are refused",
}
"""Kind of a form's records -> the title of its section."""

_ABOUT_FORMS = """\
# Forms

A form is the structure of a public set, or of another trainer's records, with the function that
reads it ([Records](../records.md)). A record has a form if all required fields are there, with
values of these types. It needs no flag then. `--form NAME` reads all records by one form, and
`--form none` by packstore's [own names](#own-names) alone. The manifest records the form's name and
version.

System prompts, tools, `chat_template_kwargs` and rewards under their own names are read beside
every form. *Not read*: columns that the form leaves, because they change nothing of what is
learned; `*` stands for any text, and `?` for one character.
"""

_ABOUT_LISTS = """
## Names and words with a meaning

If nothing reads a column with such a name, or with such a word beside a single answer, the job
stops ([Records](../records.md)). Names are compared as a whole, in small letters and with `_`
between their words (`passRate` is `pass_rate`); inside objects, by the last key. At least two
public sets or trainers use a name so. Messages and tool schemas stop it under any name. Any other
column is announced with its value, and stops nothing.
"""

CLOSED_LISTS = {
    "JUDGEMENTS": "Judgements",
    "GOOD_WORDS": "Good words",
    "BAD_WORDS": "Bad words",
    "WEIGHTS": "Weights",
    "MEDIA": "Media",
    "HISTORIES": "Earlier rounds",
    "SYSTEM_PROMPTS": "System prompts",
    "MASKS": "Masks",
    "PLACES": "Padding and places",
    "VARIABLES": "Variables of the template",
    "IDS_AND_SOURCES": "Ids and sources",
}
"""Name of a list of closed names or words -> its title."""

_DEPENDENCIES = re.compile(r"<!-- dependencies -->.*<!-- /dependencies -->", re.S)
_ROLE = re.compile(
    r":(?:class|meth|func|attr|data|mod):(<code>|`)(?:~[\w.]+\.(?=\w+(?:<|`)))?"
)
"""A role of reStructuredText in a docstring, up to the name that it shows."""


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the namespaces, of the commands and of the forms."""
    from mkdocs.structure.files import File

    for place, make in pages().items():
        files.append(File.generated(config, place, content="\n".join(make()) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Puts the table of dependencies into its page."""
    if page.file.src_uri != "support.md":
        return markdown
    return _DEPENDENCIES.sub(lambda _: "\n".join(dependencies()), markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Strips roles of reStructuredText in docstrings, leaving the names."""
    return _ROLE.sub(r"\1", html) if page.file.src_uri in NAMESPACES.values() else html


def pages() -> dict[str, Callable[[], Iterable[str]]]:
    """Place of a page -> its lines of Markdown."""
    made: dict[str, Callable[[], Iterable[str]]] = {
        COMMANDS_PAGE: commands,
        FORMS_PAGE: forms,
    }
    for name, place in NAMESPACES.items():
        made[place] = lambda name=name: namespace(name)
    return made


def namespace(name: str) -> Iterator[str]:
    """Yields a page of a namespace: all names with a sentence each, then each
    in full.
    """
    yield f"# `{name}`\n"
    yield (inspect.getdoc(importlib.import_module(name)) or "").split("\n\n")[0] + "\n"
    found, entries = homes(name), []
    yield "| name | |"
    yield "|---|---|"
    for n, home in found.items():
        other = next((o for o in NAMESPACES if _belongs(home, name, o)), name)
        page = "" if other == name else Path(NAMESPACES[other]).name
        where = f" (`{other}`)" if page else ""
        anchor = homes(other)[n] if page else home
        yield f"| [`{n}`]({page}#{anchor}) | {_cell(_first_sentence(home))}{where} |"
        if not page:
            entries += [*_entry(n, home)]
    yield from entries


def homes(name: str) -> dict[str, str]:
    """Returns each public name of a namespace -> the dotted path of its definition.

    Read from the imports of its ``__init__``, also those only for type checkers.
    """
    module = importlib.import_module(name)
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    own = [
        n
        for n, value in vars(module).items()
        if getattr(value, "__module__", "") == name
    ]
    public = [n for n in getattr(module, "__all__", own) if not n.startswith("_")]
    return {n: imported.get(n, f"{name}.{n}") for n in sorted(public, key=str.lower)}


def commands() -> Iterator[str]:
    """Yields the page of the command line: each command with all its arguments and
    defaults.
    """
    from packstore.cli import build_parser

    top = build_parser()
    (subs,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    yield "# Commands\n"
    yield f"{top.description}\n"
    yield (
        "`packstore COMMAND --help` shows the same in a terminal. A flag is a "
        "setting of the "
    )
    yield (
        "[Python call](packstore.md) with `_` for `-`. Exit codes: 0 success, 1 a "
        "named error or "
    )
    yield "a failed check, 2 wrong usage, 130 interrupted.\n"
    yield from _table(
        ("command", ""),
        ((f"[`{n}`](#packstore-{n})", _cell(s.description)) for n, s in _each(subs)),
    )
    for name, command in _each(subs):
        yield f"\n## packstore {name}\n"
        yield f"{_cell(command.description)}\n"
        examples = inspect.cleandoc((command.epilog or "").partition("\n")[2])
        yield f"```sh\n{examples}\n```\n"
        for group in command._action_groups:
            rows = [_argument(a) for a in group._group_actions if a.dest != "help"]
            if rows:
                yield f"**{(group.title or '').capitalize()}**\n"
                yield from _table(("argument", "default", ""), rows)
                yield ""


def forms() -> Iterator[str]:
    """Yield the page of forms: each with its structures, then own names and closed
    lists.
    """
    from packstore.tokenizer.records.forms import load

    yield _ABOUT_FORMS
    for kind, title in FORM_GROUPS.items():
        yield f"\n## {title}\n"
        for each in load().values():
            if each.structures[0].kind == kind:
                yield from _form(each)
    yield from _field_types()
    yield from _own_names()
    yield from _closed_lists()


def _form(form: Any) -> Iterator[str]:
    """Yield one form: its first line, or why it is refused, and a row for each
    structure.
    """
    yield f"\n### {form.name}\n"
    text = form.summary or f"{form.refusal[0].upper()}{form.refusal[1:]}."
    yield f"{_cell(text)}\n"
    rows = []
    for structure in form.structures:
        fields = (structure.required, structure.optional)
        required, optional = ("<br>".join(map(_field, f, f.values())) for f in fields)
        leaves = ", ".join(f"`{path}`" for path in structure.leaves)
        sets = ", ".join(f"`{name}`" for name in structure.sets)
        source = f"[source]({structure.source})" if structure.source else ""
        rows.append(
            (required, optional, leaves, " ".join(filter(None, (sets, source))))
        )
    head = ("required", "optional", "not read", "sets")
    filled = [i for i, _ in enumerate(head) if any(row[i] for row in rows)]
    yield from _table(
        [head[i] for i in filled], ([row[i] for i in filled] for row in rows)
    )


def _field(path: str, field_type: Any) -> str:
    return f"`{path}` {_type_names()[id(field_type)]}"


@functools.cache
def _type_names() -> dict[int, str]:
    """Return the id of each type of fields -> its name in the code."""
    from packstore.tokenizer.records import types

    return {
        id(value): name
        for name, value in vars(types).items()
        if isinstance(value, types.FieldType)
    }


def _field_types() -> Iterator[str]:
    """Yield the table of the types of fields."""
    from packstore.tokenizer.records import types

    yield "\n## Types of fields\n"
    rows = [
        (name, _cell(getattr(types, name).description))
        for name in _type_names().values()
    ]
    yield from _table(("type", "value"), rows)


def _own_names() -> Iterator[str]:
    """Yield the table of roles and of the column names that have them."""
    from packstore.config.record_fields import ID_ROLES, SPELLINGS, id_spellings

    yield "\n## Own names\n"
    yield (
        "A record without a form is read by the names of its columns, the first of "
        "a "
        "row before "
    )
    yield "the next. `--field ROLE=NAME` gives a role to any other column or path.\n"
    rows = []
    for role, spellings in SPELLINGS.items():
        names = [*spellings, *(id_spellings(role) if role in ID_ROLES else ())]
        listed = ", ".join(f"`{name}`" for name in names)
        rows.append((f"`{role}`", listed or "none: only with `--field`"))
    yield from _table(("role", "names"), rows)


def _closed_lists() -> Iterator[str]:
    """Yield the names and words that mean something in every set, with their
    sources.
    """
    home = "packstore.tokenizer.records.judgements"
    yield _ABOUT_LISTS
    for name, title in CLOSED_LISTS.items():
        values = getattr(importlib.import_module(home), name)
        first, _, further = _beside(f"{home}.{name}").partition("\n\n")
        yield f"\n### {title}\n"
        yield f"{first.partition(' -> ')[0].rstrip('.')}. {further}\n"
        if not isinstance(values, Mapping):
            words = sorted(values) if isinstance(values, frozenset) else values
            yield ", ".join(f"`{word}`" for word in words) + "\n"
            continue
        rows = [
            (", ".join(f"`{word}`" for word in words), ", ".join(sources))
            for words, sources in values.items()
        ]
        yield from _table(("names", "used by"), rows)


def dependencies() -> Iterator[str]:
    """Yields the table of dependencies: bounds of pyproject.toml, and installed
    versions.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))[
        "project"
    ]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    rows = []
    for extra, names in groups.items():
        for wanted in names if extra != "dev" else ():
            name, bounds = re.match(r"([\w.-]+(?:\[[\w,-]+\])?)(.*)", wanted).groups()  # type: ignore[union-attr]
            oldest, below = (
                re.search(rf"{sign}([\w.]+)", bounds) for sign in (">=", "<")
            )
            if oldest:
                told = (
                    oldest[1],
                    below[1] if below else "",
                    _installed(name.partition("[")[0]),
                )
                rows.append((name, extra and f"`{extra}`", *told))
    yield from _table(("package", "extra", "oldest", "below", "newest tried"), rows)


def _entry(n: str, home: str) -> Iterator[str]:
    """Yields one name in full: its docstring, and the table of settings or tree of
    errors.
    """
    settings = _settings(_value(home))
    yield f"\n::: {home}"
    yield "    options:"
    yield f"      heading: {n}"
    yield f"      toc_label: {n}"
    if settings:
        yield "      members: []"
        yield "      separate_signature: false"
        yield "      show_signature: false"
        yield ""
        yield from _table(("setting", "type", "default", ""), settings)
    if home == "packstore.errors.PackstoreError":
        drawn = (
            inspect.getdoc(importlib.import_module("packstore.errors")) or ""
        ).split("\n\n")
        tree = textwrap.dedent(next(part for part in drawn if "├──" in part))
        yield f"\n``` {{ .text .tree }}\n{tree}\n```"
    yield ""


def _value(home: str) -> Any:
    module, _, n = home.rpartition(".")
    return getattr(importlib.import_module(module), n)


def _settings(value: object) -> list[tuple[str, str, str, str]]:
    """Rows of a dataclass whose fields have a line of help each; else none."""
    if not (isinstance(value, type) and dataclasses.is_dataclass(value)):
        return []
    fields = dataclasses.fields(value)
    return [
        (f"`{f.name}`", f"`{f.type}`", _default(f), _cell(f.metadata["help"]))
        for f in fields
        if all("help" in field.metadata for field in fields)
    ]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return f"`{field.default!r}`"
    made = field.default_factory is not dataclasses.MISSING
    return f"`{field.default_factory()!r}`" if made else ""  # type: ignore[misc]


def _argument(action: argparse.Action) -> tuple[str, str, str]:
    """Returns the spelling of an argument, its default, and its help."""
    help_ = (action.help or "").replace("%%", "%")
    at_end = re.search(r" ?\(default: ([^()]*)\)$", help_)
    if at_end:
        default, help_ = f"`{at_end[1]}`", help_[: at_end.start()]
    elif action.default in (None, argparse.SUPPRESS, False) or action.default == []:
        default = ""
    else:
        default = f"`{action.default}`"
    names = (
        ", ".join(f"`{name}`" for name in action.option_strings)
        or f"`{action.metavar}`"
    )
    value = (
        "" if not action.option_strings or action.nargs == 0 else action.metavar or ""
    )
    if action.choices:
        help_ = f"{help_}: {', '.join(f'`{c}`' for c in action.choices)}"
    return (
        f"{names} {value}".strip(),
        default,
        _cell(help_) if not action.choices else help_,
    )


def _each(subs: Any) -> list[tuple[str, argparse.ArgumentParser]]:
    return list(subs.choices.items())


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = list(head)
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _belongs(home: str, name: str, other: str) -> bool:
    """Returns True if a name of the namespace `name` is explained on the page of
    `other`.
    """
    return (
        other != name and other.startswith(f"{name}.") and home.startswith(f"{other}.")
    )


def _first_sentence(home: str) -> str:
    value = _value(home)
    text = (inspect.getdoc(value) if callable(value) else _beside(home)) or ""
    first = " ".join(text.split("\n\n")[0].split())
    return _ROLE.sub(r"\1", re.split(r"(?<=[.:;]) ", first)[0].rstrip(":;"))


def _beside(home: str) -> str:
    """Returns the docstring under a constant."""
    module, _, n = home.rpartition(".")
    body = ast.parse(inspect.getsource(importlib.import_module(module))).body
    for statement, after in itertools.pairwise(body):
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(
            after, ast.Expr
        ):
            targets = (
                statement.targets
                if isinstance(statement, ast.Assign)
                else [statement.target]
            )
            if any(isinstance(t, ast.Name) and t.id == n for t in targets):
                return str(ast.literal_eval(after.value))
    return ""


def _cell(text: str | None) -> str:
    """Text that is safe in a cell of a Markdown table."""
    return re.sub(r"([|<*{])", r"\\\1", " ".join((text or "").split()))


def _installed(name: str) -> str:
    try:
        return version(name).partition("+")[0]
    except PackageNotFoundError:
        return "not here"
