"""Reports before a job, which write no dataset; see ``README.md``."""

from packstore.etl.reports.records import doctor, dry_run, estimate

__all__ = [
    "doctor",
    "dry_run",
    "estimate",
]
