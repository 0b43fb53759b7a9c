"""A nightly job as a DAG of Airflow 3: append, verify, clean; an alert if one fails.

Each step may be run again after a failure. A run appends the records of the day before
(in UTC). Settings come from the environment:

    NIGHTLY_DATASET          folder or URL of the dataset
    NIGHTLY_SOURCE           pattern of the files of a day; {night} is its date
    NIGHTLY_STORAGE_OPTIONS  storage options as JSON
    NIGHTLY_ALERT_URL        gets a POST request with the text of each failure

Without Airflow, ``python airflow_dag.py 2026-11-30`` appends the records of that day in
this process.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from datetime import datetime, timedelta
from typing import Any

import packstore

DATASET = os.environ["NIGHTLY_DATASET"]
URLS = [DATASET]
"""Datasets to verify and clean; with a validation split, those of both splits:
``[f"{DATASET}/train", f"{DATASET}/validation"]``.
"""

SOURCE = os.environ["NIGHTLY_SOURCE"]
STORAGE_OPTIONS = json.loads(os.environ.get("NIGHTLY_STORAGE_OPTIONS", "{}"))
ALERT_URL = os.environ["NIGHTLY_ALERT_URL"]


def append(night: str) -> int:
    """Append the records of a night, if there are any; return the version."""
    dataset = packstore.append(
        DATASET,
        SOURCE.format(night=night),
        allow_empty=True,
        storage_options=STORAGE_OPTIONS,
    )
    return dataset.version


def verify() -> None:
    """Raise if a byte or a count of the dataset is wrong."""
    for url in URLS:
        report = packstore.open(url, STORAGE_OPTIONS).verify()
        if not report.ok:
            raise RuntimeError(f"{url}: {'; '.join(report.problems)}")


def clean() -> None:
    """Remove old versions, and files that killed jobs left."""
    for url in URLS:
        packstore.clean(
            url, delete=True, keep_versions=7, storage_options=STORAGE_OPTIONS
        )


def alert(text: str) -> None:
    """Send the text of a failure."""
    request = urllib.request.Request(ALERT_URL, data=text.encode(), method="POST")
    with urllib.request.urlopen(request, timeout=30):
        pass


def alert_about_task(context: Any) -> None:
    """Send the error of a task that Airflow does not try again."""
    alert(f"nightly job of {DATASET}: {context['exception']}")


def run_night(night: str) -> None:
    """Run all steps, and send the error of one that fails."""
    try:
        version = append(night)
        verify()
        clean()
    except Exception as error:
        alert(f"nightly job of {DATASET}: {error}")
        raise
    print(f"{DATASET}: version {version}")


try:
    from airflow.sdk import CronTriggerTimetable, dag, task
except ImportError:
    if __name__ == "__main__":
        run_night(sys.argv[1])
else:

    @dag(
        # Not as a string: the setting create_cron_data_intervals decides which day it is
        # that `ds` then names.
        schedule=CronTriggerTimetable("30 2 * * *", timezone="UTC"),
        start_date=datetime(2026, 1, 1),
        catchup=False,
        max_active_runs=1,
        default_args={
            "retries": 2,
            "retry_delay": timedelta(minutes=10),
            "on_failure_callback": alert_about_task,
        },
    )
    def nightly() -> None:
        """Append, verify, clean."""
        day_before = "{{ macros.ds_add(ds, -1) }}"
        task(append)(night=day_before) >> task(verify)() >> task(clean)()

    nightly_dag = nightly()
