"""The definition of a dataset, without I/O; see ``README.md``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packstore.format.arrays import (
    IGNORE_INDEX,
    SOURCE_SHIFT,
    BrokenLine,
    Examples,
    Int32,
    Int64,
    Packs,
    PackSizes,
    to_offsets,
)
from packstore.format.rules import RULES, check_packs
from packstore.format.seeds import keys, mixed, permutation

if TYPE_CHECKING:
    from packstore.format.schema import (
        FEATURES,
        FORMAT_VERSION,
        KINDS,
        LAYOUTS,
        from_arrow,
        pack_schema,
        to_arrow,
    )

__all__ = [
    "FEATURES",
    "FORMAT_VERSION",
    "IGNORE_INDEX",
    "KINDS",
    "LAYOUTS",
    "RULES",
    "SOURCE_SHIFT",
    "BrokenLine",
    "Examples",
    "Int32",
    "Int64",
    "PackSizes",
    "Packs",
    "check_packs",
    "from_arrow",
    "keys",
    "mixed",
    "pack_schema",
    "permutation",
    "to_arrow",
    "to_offsets",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'packstore.format' has no attribute {name!r}")
    # Imported on first use: the schema loads Arrow, which packing does not need.
    from packstore.format import schema

    return getattr(schema, name)
