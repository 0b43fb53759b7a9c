"""Export formats: one small file each, one line in :data:`EXPORTERS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from packstore.config import Settings, setting
from packstore.errors import CompatibilityError, sentence
from packstore.io.store.location import Location
from packstore.registry import Registry

if TYPE_CHECKING:
    from packstore.etl.pipeline import Progress
    from packstore.io.dataset.dataset import Dataset


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Settings):
    """Options of every export."""

    overwrite: bool = setting(False, "replace existing files")


@dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export.

    Attributes:
        files: URLs of the files written, without secrets.
        facts: facts about them, by name.
    """

    files: list[str]
    facts: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Exporter:
    """An export format.

    Attributes:
        help: one line for ``packstore export --help``.
        out: output argument of the command line, ``FILE`` or ``FOLDER``, and its help.
        examples: command lines.
        options: class of its options, :class:`ExportOptions` or a subclass.
        run: ``(dataset, place, options, progress)`` -> the result.
    """

    help: str
    out: tuple[str, str]
    examples: str
    options: type[ExportOptions]
    run: Callable[[Dataset, Location, Any, Progress], Exported]


def need_kind(dataset: Dataset, kinds: tuple[str, ...], format: str) -> None:
    """Raises :class:`CompatibilityError` unless the dataset is of one of `kinds`."""
    if (kind := dataset.manifest.kind) not in kinds:
        must = f"{format} holds datasets of kind {' or '.join(kinds)} only"
        raise CompatibilityError(sentence(dataset.url, must, f"kind {kind}"))


EXPORTERS: Registry[Exporter] = Registry(
    "export format",
    {
        "nemo": "packstore.exchange.exporters.nemo:EXPORTER",
        "megatron": "packstore.exchange.exporters.megatron:EXPORTER",
    },
)
