"""The refusal of a record, for one of the reasons in :data:`packstore.config.REASONS`."""

from __future__ import annotations

from packstore.config import REASONS
from packstore.errors import RecordError, quote, sentence

CORRECT = "Correct it"

WAYS_OUT = {
    "bad_role": "Read turns with other keys by an adapter (--adapter FILE.py:FUNCTION)",
}
"""Reason -> the usual way out of it, also named where such records are left out."""


class Refused(Exception):
    """One record cannot become an example, for a reason of :data:`packstore.config.REASONS`."""

    def __init__(self, reason: str, detail: str, remedy: str = CORRECT) -> None:
        super().__init__(reason, detail, remedy)
        self.reason = reason
        self.detail = detail
        self.remedy = remedy or WAYS_OUT.get(reason, CORRECT)

    @property
    def summary(self) -> str:
        """The detail, with the way out for a reason that has a usual one."""
        if self.reason not in WAYS_OUT or self.remedy == CORRECT:
            return self.detail
        return f"{self.detail}. {self.remedy}"

    def as_error(self, where: str) -> RecordError:
        """Return the error of the record at `where`."""
        reason = self.reason
        setting = f'set on={{"{reason}": "drop"}} (--on {reason}=drop)'
        remedy = f"{self.remedy}, or {setting} to count and leave out such records"
        return RecordError(sentence(where, REASONS[reason].rule, self.detail, remedy))


class Stop(Refused):
    """One record shows that the whole input is read wrongly: the job stops, whatever `on` says."""

    def __init__(self, rule: str, detail: str, remedy: str = "") -> None:
        super().__init__("wrong_type", detail, remedy)
        self.remedy = remedy  # none at all, where there is none
        self.rule = rule

    def as_error(self, where: str) -> RecordError:
        """Return the error of the record at `where`."""
        return RecordError(sentence(where, self.rule, self.detail, self.remedy))


def wrong_type(rule: str, value: object, remedy: str = CORRECT) -> Refused:
    """Return the refusal of a value that breaks a rule of its type."""
    return Refused("wrong_type", f"{rule}, found {quote(value)}", remedy)
