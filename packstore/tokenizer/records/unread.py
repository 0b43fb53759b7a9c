"""Stub; replaced by the branch door-unread."""

from typing import Any

from packstore.format.arrays import MAX_FIELDS, Tally
from packstore.tokenizer.dialogue.messages import is_empty


class UnreadRules:
    def __init__(self, config: Any, kind: str, *, carried: Any, has_adapter: bool) -> None:
        pass

    def check(self, record: Any, read: Any, parsed: Any) -> None:
        pass


def count_unread(tally: Tally, records: list[dict[str, Any]]) -> None:
    names = set[str]().union(*records)
    for name in sorted(names)[:MAX_FIELDS]:
        count = sum(not is_empty(record.get(name)) for record in records) - tally.used[name]
        if count > 0:
            tally.unused[name] += count


def first_values(record: Any, unread: Any) -> dict[str, str]:
    return {name: str(record[name])[:200] for name in unread}


def sibling_remedy(record: Any) -> str:
    return ""
