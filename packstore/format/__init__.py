"""The definition of a dataset, without I/O; see ``README.md``."""

from packstore.format.arrays import (
    IGNORE_INDEX,
    SOURCE_SHIFT,
    Examples,
    Int32,
    Int64,
    Packs,
    PackSizes,
    Rows,
    Tally,
    to_offsets,
)
from packstore.format.rules import RULES, check_packs
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
    "Examples",
    "Int32",
    "Int64",
    "PackSizes",
    "Packs",
    "Rows",
    "Tally",
    "check_packs",
    "from_arrow",
    "pack_schema",
    "to_arrow",
    "to_offsets",
]
