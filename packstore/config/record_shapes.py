"""What is known of records, as data (``shapes.yaml``): the shapes, and the names of fields."""

from __future__ import annotations

import functools
from importlib.resources import files
from typing import Any

from packstore.errors import ConfigError, sentence


def read_yaml(text: str, path: str) -> list[Any]:
    """Returns the documents of a text, as far as they are objects.

    Raises:
        ConfigError: it is something else.
    """
    import yaml

    rule = "it must be YAML: name of a shape -> its fields, kind, reads"
    try:
        found = [*yaml.load_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))]
    except yaml.YAMLError as error:
        raise ConfigError(sentence(f"setting shape, {path}", rule, str(error))) from None
    if not found or not all(isinstance(part, dict) for part in found):
        raise ConfigError(sentence(f"setting shape, {path}", rule, "no object"))
    return found


class Known:
    """The names of fields, from the table.

    Attributes:
        entries: name of a shape -> its entry.
        field_names: our own names of fields; the setting ``fields`` maps them to other names.
        spellings: our name -> accepted names, in order of precedence, unless `fields` maps it.
        id_spellings: the same of fields that hold ids: a record may have its texts as well.
        not_text: fields whose values are never text: their CSV cells are parsed as JSON.
        groups: group of further fields -> their names.
        feedback: names of fields that judge, weigh or add an answer: such an answer is no SFT.
        unread: name of a field that changes a record's meaning -> what to do if nothing reads it.
        harmless: names of fields that say nothing of an answer's worth.
        good, bad: what a label says of an answer.
    """

    def __init__(self) -> None:
        text = files("packstore.config").joinpath("shapes.yaml").read_text("utf-8")
        names, self.entries = read_yaml(text, "")
        forms: dict[str, set[str]] = {}
        for entry in self.entries.values():
            for name, form in {**entry["fields"], **entry.get("takes", {})}.items():
                if "becomes" in entry:
                    forms.setdefault(name, set()).add(form)
        self.field_names = tuple(forms)
        self.not_text = tuple(
            n for n, of in forms.items() if of.isdisjoint(("text", "HH text", "turns", "variables"))
        )
        self.spellings = {n: tuple(names["spellings"].get(n, [n])) for n in forms}
        self.id_spellings = {
            name: tuple(s + end for end in ("_ids", "_input_ids", "") for s in self.spellings[name])
            for name in ("prompt", "chosen", "rejected", "response")
        }
        further = names["further"]
        self.groups = {group: frozenset(entry["names"]) for group, entry in further.items()}
        self.feedback = frozenset[str]().union(*(self.groups[group] for group in names["feedback"]))
        self.unread = {name: e["remedy"] for e in further.values() for name in e["names"]}
        self.harmless = frozenset(names["harmless"])
        self.labels, self.good, self.bad = names["labels"], names["good"], names["bad"]


known = functools.cache(Known)
"""Returns the names, read once."""


def __getattr__(name: str) -> Any:
    """Returns a constant: an attribute of :class:`Known` in capital letters."""
    return getattr(known(), name.lower())


def plain_name(name: str) -> str:
    """Returns a name as the tables of names have it: small letters, with underscores."""
    return name.lower().replace("-", "_").replace(" ", "_")
