"""The cases that a reader must answer that knows the core of the format alone."""

from __future__ import annotations

from case import Case

from packstore.format import RULES

NOT_FOR_READERS = {"labels-are-ids", "prefix-repeats", "reward-finite"}
"""Rules that a reader may leave to a checker."""

REFUSED = {
    "later-format_version",
    "later-features",
    "later-kind",
    "later-layout",
    "later-file_format",
    "manifest-carry-name",
    "manifest-carry-reserved",
    "manifest-path",
    "manifest-pack-size-0",
    "manifest-base",
    "manifest-shard-twice",
    "manifest-missing",
    "manifest-torn",
    "manifest-number",
    "manifest-utf-8",
    "manifest-nan",
    "shard-missing",
    "schema-missing",
    "schema-order",
    "schema-further",
    "schema-twice",
    "schema-counts",
    "schema-ids",
    "schema-unsigned",
    "schema-reward",
    "schema-nulls",
    "schema-parents",
    "schema-parents-missing",
    "schema-carried",
    "ids-negative",
    "ids-negative-base",
    "ids-overflow",
}
"""What the core tells a reader to refuse, besides packs that break a rule."""


def is_for_readers(case: Case) -> bool:
    """Return True if the core decides the case, without side data and Arrow files."""
    if case.sides or "arrow" in case.name:
        return False
    if case.expect is not None:
        return True
    if case.name in REFUSED:
        return True
    # A case that breaks further rules besides is decided by any of them.
    return bool(set(case.refuse) & (RULES.keys() - NOT_FOR_READERS))
