"""A data collator that lays packs, or records of token ids, end to end as one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from packstore.config import PackConfig
from packstore.errors import ConfigError
from packstore.format.arrays import Packs
from packstore.format.schema import require_kind
from packstore.torch.batch.batch import PackedBatch, collate
from packstore.torch.data.in_memory import in_one_pack


class PackCollator:
    """Lays packs, or records of token ids, end to end as one batch.

    Args:
        kind: ``preference``, ``sft`` or ``scored``.
        config: for records, `layout`, `fields` and `carry`; their shapes are those of
            :func:`~packstore.torch.pack_in_memory`. Limits on number and length do not apply.
        max_length: most tokens of a prompt with one side, of records of pairs: ends are cut off,
            as by TRL's ``truncation_mode="keep_start"``; default: none.

    Raises:
        UnknownNameError: `kind` is none of those.
    """

    def __init__(
        self,
        kind: str = "preference",
        config: PackConfig | None = None,
        *,
        max_length: int | None = None,
    ) -> None:
        require_kind(kind)
        self.kind, self.config, self.max_length = kind, config or PackConfig(), max_length

    def __call__(self, items: Sequence[Packs | Mapping[str, Any]]) -> PackedBatch:
        """Collates these items into one batch."""
        if not items:
            raise ConfigError("a batch must hold at least one item; found none.")
        packs: Sequence[Any] = items
        if not all(isinstance(item, Packs) for item in items):
            packs = [in_one_pack([*map(self._read, items)], self.kind, self.config)]
        return collate(packs, self.kind)

    def _read(self, record: Any) -> Any:
        """Returns a record; where it has ids of a pair, as TRL makes them, without its texts."""
        if not isinstance(record, Mapping) or "chosen_ids" not in record:
            return record
        record = {name: value for name, value in record.items() if f"{name}_ids" not in record}
        if self.max_length is None:
            return record
        kept = max(0, self.max_length - len(record["prompt_ids"]))
        sides = {name: record[name][:kept] for name in ("chosen_ids", "rejected_ids")}
        return {**record, **sides}
