"""Import formats: one small file each, one line in :data:`IMPORTERS`."""

from __future__ import annotations

from packstore.exchange.import_options import Importer
from packstore.registry import Registry

IMPORTERS: Registry[Importer] = Registry(
    "import format",
    {
        "nemo": "packstore.exchange.importers.nemo:IMPORTER",
    },
)
