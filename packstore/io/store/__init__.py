"""A local folder or any URL that fsspec knows; see ``README.md``."""

from packstore.io.store.location import Location
from packstore.io.store.retry import retrying
from packstore.io.store.staging import Staging

__all__ = [
    "Location",
    "Staging",
    "retrying",
]
