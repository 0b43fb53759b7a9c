"""Shapes of records and names of their fields, as data (``shapes.yaml``)."""

from __future__ import annotations

import functools
import itertools
import re
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


HARMLESS = "harmless"
"""The group of names of fields that say nothing of an answer's worth."""

_JOINT = re.compile(r"[-\s]+|(?<=[a-z0-9])(?=[A-Z])")
"""Where words of a name are joined."""


class Known:
    """The names of fields, from the table.

    Attributes:
        entries: name of a shape -> its entry.
        field_names: our own names of fields; the setting ``fields`` maps them to other names.
        spellings: our name -> accepted names, in order of precedence, unless `fields` maps it.
        id_spellings: the same of fields that hold ids: a record may have its texts as well.
        accepted: all of these names.
        not_text: fields whose values are never text: their CSV cells are parsed as JSON.
        turns: fields that may be JSON text of messages.
        lists: fields with one value for each response.
        beside: names of fields that are read beside those of any named shape.
        remedies: group of further fields, which change a record's meaning -> what to do if nothing
            reads one.
        feedback: the groups that judge, weigh or add an answer: such an answer is no SFT.
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
        texts, turns = {"text", "HH text", "turns", "variables"}, {"messages", "turns"}
        lists = {"texts", "dialogues", "lists of ids", "numbers", "lists of labels"}
        self.not_text = tuple(name for name, of in forms.items() if of.isdisjoint(texts))
        self.turns = {name for name, of in forms.items() if of & turns}
        self.lists = {name for name, of in forms.items() if of & lists}
        self.spellings = {n: tuple(names["spellings"].get(n, [n])) for n in forms}
        self.id_spellings = {
            name: tuple(s + end for end in ("_ids", "_input_ids", "") for s in self.spellings[name])
            for name in ("prompt", "chosen", "rejected", "response")
        }
        spelled = (*self.spellings.values(), *self.id_spellings.values())
        self.accepted = frozenset(itertools.chain.from_iterable(spelled))
        self.beside = {name for field in names["beside"] for name in self.spellings[field]}
        further = names["further"]
        self.remedies = {group: entry["remedy"] for group, entry in further.items()}
        self.feedback = frozenset(names["feedback"])
        self.labels, self.good, self.bad = names["labels"], names["good"], names["bad"]
        self._groups = dict.fromkeys(names["harmless"], HARMLESS)
        self._groups |= {n: group for group, entry in further.items() for n in entry["names"]}
        self._patterns = [(group, re.compile(text)) for group, text in names["patterns"]]

    def is_number(self, name: str) -> bool:
        """Returns True for the name of a field that must be a number, if it is there."""
        return self.group(name) in ("judges", "weighs", "margin")

    def group(self, name: str) -> str:
        """Returns the group of a further field, :data:`HARMLESS`, or nothing."""
        *_, last = name.removesuffix("[]").rpartition(".")
        plain = _JOINT.sub("_", last).lower()
        found = self._groups.get(plain)
        if found is None:
            found = next((group for group, of in self._patterns if of.fullmatch(plain)), "")
            if len(self._groups) < 10_000:
                self._groups[plain] = found
        return found


known = functools.cache(Known)
"""Returns the names, read once."""
