"""The refusal of a record, for one of the reasons in
:data:`packstore.config.REASONS`.

A *way out* is advice with settings: they are spelled for the user's *door*: as flags
in the shell (``--ignore NAME``), as arguments in Python.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from packstore.config import REASONS, TokenizeConfig
from packstore.config.remedies import Door, spell
from packstore.errors import RecordError, quote, sentence

CORRECT = "Correct it"

ADAPTER: Mapping[str, Any] = {"adapter": "FILE.py:FUNCTION"}

WAYS_OUT: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bad_role": ("Read turns with other keys by an adapter ({})", ADAPTER),
}
"""Reason -> the usual way out of it, also named where such records are left out."""


class Refused(Exception):
    """One record cannot become an example, for a reason of
    :data:`packstore.config.REASONS`.

    Args:
        reason: a name of `REASONS`.
        detail: the broken rule, and the value.
        remedy: the way out; each ``{}`` stands for one of `settings`. If empty, the
            entry of `WAYS_OUT`.
        settings: of the remedy, which are spelled as the job's user types them.
    """

    def __init__(
        self,
        reason: str,
        detail: str,
        remedy: str = CORRECT,
        *settings: Mapping[str, Any],
    ) -> None:
        super().__init__(reason, detail, remedy)
        self.reason = reason
        self.detail = detail
        self.remedy = remedy
        self.settings = settings
        if not remedy:
            self.remedy = CORRECT
            if reason in WAYS_OUT:
                self.remedy, way_out = WAYS_OUT[reason]
                self.settings = (way_out,)

    def spell_remedy(self, door: Door, config: TokenizeConfig) -> str:
        """Return the remedy in the syntax of a door.

        Args:
            door: shell or Python.
            config: of the job. In Python, a mapping replaces its `fields`, so that the
                remedy repeats them; flags add to them.
        """
        if not self.settings:
            return self.remedy
        texts = []
        for settings in self.settings:
            if "fields" in settings and door == "python":
                settings = {
                    **settings,
                    "fields": {**config.fields, **settings["fields"]},
                }
            texts.append(spell(door, settings))
        return self.remedy.format(*texts)

    def summary(self, door: Door, config: TokenizeConfig) -> str:
        """Return the detail, with the way out for a reason that has a usual one."""
        if self.reason not in WAYS_OUT or self.remedy == CORRECT:
            return self.detail
        return f"{self.detail}. {self.spell_remedy(door, config)}"

    def as_error(self, where: str, door: Door, config: TokenizeConfig) -> RecordError:
        """Return the error of the record at `where`, with ways out in the syntax of a
        door.
        """
        setting = spell(door, {"on": {self.reason: "drop"}})
        remedy = self.spell_remedy(door, config)
        remedy = f"{remedy}, or count and leave out such records ({setting})"
        return RecordError(
            sentence(where, REASONS[self.reason].rule, self.detail, remedy)
        )


class Stop(Refused):
    """One record shows that the whole input is read wrongly: the job stops, whatever
    `on` is.
    """

    def __init__(
        self, rule: str, detail: str, remedy: str = "", *settings: Mapping[str, Any]
    ) -> None:
        super().__init__("wrong_type", detail, remedy, *settings)
        self.remedy = remedy  # without advice, `Refused` advises "Correct it"
        self.rule = rule

    def as_error(self, where: str, door: Door, config: TokenizeConfig) -> RecordError:
        """Return the error of the record at `where`, with a way out in the syntax of a
        door.
        """
        return RecordError(
            sentence(where, self.rule, self.detail, self.spell_remedy(door, config))
        )


def wrong_type(
    rule: str, value: object, remedy: str = CORRECT, *settings: Mapping[str, Any]
) -> Refused:
    """Return the refusal of a value that breaks a rule of its type."""
    return Refused("wrong_type", f"{rule}, found {quote(value)}", remedy, *settings)
