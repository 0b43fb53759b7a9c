"""Reports on records or a destination before a job; they write no dataset.

See ``README.md``.
"""

from packstore.etl.reports.records import doctor, dry_run, estimate

__all__ = [
    "doctor",
    "dry_run",
    "estimate",
]
