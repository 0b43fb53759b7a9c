"""The versions of a dataset; see ``README.md``."""

from packstore.io.manifest.commit import DATA, FOLDER, MAX_MANIFEST_BYTES, manifest_path
from packstore.io.manifest.manifest import (
    FILE_FORMATS,
    GROUP_FOOTER_BYTES,
    MAX_FOOTER_BYTES,
    Manifest,
    Records,
    build_manifest,
)
from packstore.io.manifest.side_manifest import SIDE, SIDE_TYPES, SIDE_VERSION

__all__ = [
    "DATA",
    "FILE_FORMATS",
    "FOLDER",
    "GROUP_FOOTER_BYTES",
    "MAX_FOOTER_BYTES",
    "MAX_MANIFEST_BYTES",
    "SIDE",
    "SIDE_TYPES",
    "SIDE_VERSION",
    "Manifest",
    "Records",
    "build_manifest",
    "manifest_path",
]
