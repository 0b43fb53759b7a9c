"""NeMo-Aligner's packed DPO file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packstore.exchange.import_options import Importer, ImportOptions
from packstore.io.store.location import Location

if TYPE_CHECKING:
    from packstore.etl.pipeline import Progress
    from packstore.io.dataset.dataset import Dataset


def _run(source: Location, place: Location, options: ImportOptions, progress: Progress) -> Dataset:
    from packstore.exchange.nemo_packs import import_packs

    return import_packs(source, place, options, progress)


IMPORTER = Importer(
    help="NeMo-Aligner's packed DPO file (an .npy of pickled dicts, which is never run)",
    examples="  packstore import nemo packed_8192_seed0.npy prefs-8k\n"
    "  packstore import nemo packed_8192_seed0.npy s3://bucket/prefs-8k --pack-size 8192 "
    "--tokenizer tokenizer.json\n",
    options=ImportOptions,
    run=_run,
)
