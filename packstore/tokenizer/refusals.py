"""The refusal of a record, for one of the reasons in :data:`packstore.config.REASONS`."""

from __future__ import annotations

from packstore.config import REASONS
from packstore.errors import RecordError, quote, sentence


class Refused(Exception):
    """One record cannot become an example, for a reason of :data:`packstore.config.REASONS`."""

    def __init__(self, reason: str, detail: str, remedy: str = "Correct it") -> None:
        super().__init__(reason, detail, remedy)
        self.reason = reason
        self.detail = detail
        self.remedy = remedy

    def as_error(self, where: str) -> RecordError:
        """Returns the error of the record at `where`."""
        reason = self.reason
        setting = f'set on={{"{reason}": "drop"}} (--on {reason}=drop)'
        remedy = f"{self.remedy}, or {setting} to count and leave out such records"
        return RecordError(sentence(where, REASONS[reason].rule, self.detail, remedy))


def wrong_type(rule: str, found: object, remedy: str = "Correct it") -> Refused:
    """Returns the refusal of a value that breaks a rule of its type."""
    return Refused("wrong_type", f"{rule}, found {quote(found)}", remedy)
