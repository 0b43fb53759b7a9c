"""Values derived from a dataset, by example id; see ``README.md``."""

from packstore.io.side.side import SHARD_ROWS, SideReport, SideWriter, open_side
from packstore.io.side.tokens import TOKEN_RULES

__all__ = [
    "SHARD_ROWS",
    "TOKEN_RULES",
    "SideReport",
    "SideWriter",
    "open_side",
]
