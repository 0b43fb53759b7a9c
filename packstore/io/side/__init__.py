"""Values derived from a dataset, by example id; see ``README.md``."""

from packstore.io.side.side import SHARD_ROWS, SideReport, SideWriter, open_side

__all__ = [
    "SHARD_ROWS",
    "SideReport",
    "SideWriter",
    "open_side",
]
