"""Generates pages of the site at build time: the API, the commands, the dependencies.

The text of the API is that of the docstrings, by mkdocstrings; settings are tables made from the
fields of their dataclasses, and commands from their parsers. No page is stored in a file, so none
can differ from the code.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import inspect
import itertools
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator
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
SHAPES_PAGE = "reference/shapes.md"
_DEPENDENCIES = re.compile(r"<!-- dependencies -->.*<!-- /dependencies -->", re.S)
_ROLE = re.compile(r":(?:class|meth|func|attr|data|mod):(<code>|`)(?:~[\w.]+\.(?=\w+(?:<|`)))?")
"""A role of reStructuredText in a docstring, up to the name that it shows."""


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the namespaces and of the commands."""
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
    made: dict[str, Callable[[], Iterable[str]]] = {COMMANDS_PAGE: commands, SHAPES_PAGE: shapes}
    for name, place in NAMESPACES.items():
        made[place] = lambda name=name: namespace(name)
    return made


def namespace(name: str) -> Iterator[str]:
    """Yields a page of a namespace: all names with a sentence each, then each in full."""
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
    own = [n for n, value in vars(module).items() if getattr(value, "__module__", "") == name]
    public = [n for n in getattr(module, "__all__", own) if not n.startswith("_")]
    return {n: imported.get(n, f"{name}.{n}") for n in sorted(public, key=str.lower)}


def commands() -> Iterator[str]:
    """Yields the page of the command line: each command with all its arguments and defaults."""
    from packstore.cli import parser

    top = parser()
    (subs,) = (a for a in top._actions if isinstance(a, argparse._SubParsersAction))
    yield "# Commands\n"
    yield f"{top.description}\n"
    yield "`packstore COMMAND --help` shows the same in a terminal. A flag is a setting of the "
    yield "[Python call](packstore.md) with `_` for `-`. Exit codes: 0 success, 1 a named error or "
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


def shapes() -> Iterator[str]:
    """Yields the page of shapes: the named ones with their sets, packstore's own, and names."""
    from packstore.config.record_shapes import known

    entries = {n: entry for n, entry in known().entries.items() if "becomes" not in entry}
    yield "---\nhide: [toc]  # its table is wide\n---\n# Shapes\n"
    yield "The forms of records that packstore reads ([Records](../records.md)).\n"
    yield "## Named shapes\n"
    yield "Records of these sets and trainers are read without a flag: `packstore pack "
    yield "hf://datasets/SET/FILES OUT --tokenizer …`. *Tried*: a real file was packed. *Seen*: "
    yield "the form was read at its source, or in code that reads the set. *Memory*: neither, so "
    yield "look at the first line of the log. In the last column, learned text is in «».\n"
    rows = []
    for name, entry in entries.items():
        sets = "<br>".join(f"`{s}`" for s in entry.get("sets", ()))
        shown = (text.replace("\n", "↵").replace("|", "\\|") for text in entry.get("shows", ()))
        becomes = "<br>".join(f"`{text}`" for text in shown) or _cell(entry.get("refuse"))
        fields = ", ".join(f"`{path}`" for path in entry["fields"])
        tried = next((mark for mark in ("tried", "seen") if entry.get(mark)), "memory")
        kind = entry.get("kind", "refused")
        rows.append((f"[{name}]({entry['source']})", fields, sets, kind, tried, becomes))
    yield from _table(("shape", "fields", "sets", "kind", "", "becomes"), rows)
    yield from own_shapes()


def own_shapes() -> Iterator[str]:
    """Yields the tables of packstore's own shapes, of the forms of values, and of further names."""
    from packstore.config.record_shapes import known
    from packstore.tokenizer.records.forms import FORMS
    from packstore.tokenizer.records.shapes import table

    yield "\n## packstore's own shapes\n"
    yield "A record without a named shape gets the first of these that it fits whole.\n"
    rows = []
    for shape in table().own:
        fields = ", ".join(f"`{name}` {form}" for name, form in shape.entry["fields"].items())
        takes = ", ".join(f"`{name}`" for name in shape.entry.get("takes", ()))
        rows.append((shape.name, shape.kind, fields, takes, shape.entry["becomes"]))
    yield from _table(("shape", "kind", "fields", "optional", "becomes"), rows)
    yield "\n## Forms of values\n"
    yield from _table(("form", "value"), ((name, form.described) for name, form in FORMS.items()))
    yield "\n## Other names of fields\n"
    yield "Names that end in `_ids` or `_input_ids` are read for token ids, too, and further names "
    yield "of rewards where they hold numbers.\n"
    names = {
        name: ", ".join(f"`{spelling}`" for spelling in spellings if spelling != name)
        for name, spellings in known().spellings.items()
    }
    rows = [(f"`{name}`", others) for name, others in names.items() if others]
    yield from _table(("field", "also read under the names"), rows)


def dependencies() -> Iterator[str]:
    """Yields the table of dependencies: bounds of pyproject.toml, and installed versions."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    rows = []
    for extra, names in groups.items():
        for wanted in names if extra != "dev" else ():
            name, bounds = re.match(r"([\w.-]+(?:\[[\w,-]+\])?)(.*)", wanted).groups()  # type: ignore[union-attr]
            oldest, below = (re.search(rf"{sign}([\w.]+)", bounds) for sign in (">=", "<"))
            if oldest:
                told = (oldest[1], below[1] if below else "", _installed(name.partition("[")[0]))
                rows.append((name, extra and f"`{extra}`", *told))
    yield from _table(("package", "extra", "oldest", "below", "newest tried"), rows)


def _entry(n: str, home: str) -> Iterator[str]:
    """Yields one name in full: its docstring, and the table of settings or tree of errors."""
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
        drawn = (inspect.getdoc(importlib.import_module("packstore.errors")) or "").split("\n\n")
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
    names = ", ".join(f"`{name}`" for name in action.option_strings) or f"`{action.metavar}`"
    value = "" if not action.option_strings or action.nargs == 0 else action.metavar or ""
    if action.choices:
        help_ = f"{help_}: {', '.join(f'`{c}`' for c in action.choices)}"
    return f"{names} {value}".strip(), default, _cell(help_) if not action.choices else help_


def _each(subs: Any) -> list[tuple[str, argparse.ArgumentParser]]:
    return list(subs.choices.items())


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = list(head)
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _belongs(home: str, name: str, other: str) -> bool:
    """Returns True if a name of the namespace `name` is explained on the page of `other`."""
    return other != name and other.startswith(f"{name}.") and home.startswith(f"{other}.")


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
        if isinstance(statement, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
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
