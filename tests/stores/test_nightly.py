"""The nightly jobs of ``examples/nightly``, on a server of S3, with alerts by HTTP."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import date, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from places import Files
from small_jobs import write_jsonl, write_tokenizer
from stores import Store

import packstore

NIGHTLY = Path(__file__).parents[2] / "examples" / "nightly"


def records(first: int, count: int) -> list[dict[str, str]]:
    return [
        {
            "prompt": f"Question {'? ' * number}",
            "chosen": f"Answer {number}.",
            "rejected": "No.",
        }
        for number in range(first, first + count)
    ]


def lines(values: list[Any]) -> bytes:
    return "".join(f"{json.dumps(value)}\n" for value in values).encode()


class AlertServer(HTTPServer):
    """Keeps the bodies of requests, as a service that sends alerts would."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), AlertHandler)
        self.texts: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/"


class AlertHandler(BaseHTTPRequestHandler):
    server: AlertServer

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.texts.append(body.decode())
        self.send_response(204)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def alerts() -> Iterator[AlertServer]:
    with AlertServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


class Night:
    """A place with a dataset and a folder of records for each night.

    Args:
        store: a place on the server.
        folder: a local folder.
        splits: the dataset has a validation split.
    """

    def __init__(
        self, store: Store, folder: Path, alerts: AlertServer, splits: bool = False
    ) -> None:
        self.dataset = f"{store.url}/prefs"
        self.raw = f"{store.url}/raw"
        self.options = store.options
        self._files = Files(self.raw, **store.options)
        self._alerts = alerts
        write_tokenizer(folder / "t.json")
        packstore.pack(
            write_jsonl(folder / "first.jsonl", records(0, 40)),
            self.dataset,
            str(folder / "t.json"),
            pack_size=256,
            validation_fraction=0.3 if splits else 0.0,
            storage_options=self.options,
        )
        self.urls = [self.dataset]
        if splits:
            self.urls = [f"{self.dataset}/{name}" for name in ("train", "validation")]

    def put(self, night: str, data: bytes) -> None:
        self._files.write(f"{night}/a.jsonl", data)

    def versions(self) -> list[int]:
        return [packstore.open(url, self.options).version for url in self.urls]

    def num_records(self) -> int:
        datasets = [packstore.open(url, self.options) for url in self.urls]
        assert all(dataset.verify().ok for dataset in datasets)
        return sum(dataset.manifest.records.packed for dataset in datasets)

    @property
    def environment(self) -> dict[str, str]:
        flags = []
        for name, value in self.options.items():
            text = value
            if not isinstance(value, str):
                text = json.dumps(value, separators=(",", ":"))
            flags += ["--storage-option", f"{name}={text}"]
        path = [str(Path(sys.executable).parent), os.environ["PATH"]]
        curl = "curl --silent --show-error --fail --data-binary @- "
        return {
            **os.environ,
            "PATH": os.pathsep.join(path),
            "PACKSTORE_OPTIONS": " ".join([*flags, "--quiet"]),
            "ALERT": curl + self._alerts.url,
            "NIGHTLY_DATASET": self.dataset,
            "NIGHTLY_SOURCE": self.raw + "/{night}/*.jsonl",
            "NIGHTLY_STORAGE_OPTIONS": json.dumps(self.options),
            "NIGHTLY_ALERT_URL": self._alerts.url,
        }

    def command(self, door: str, night: str) -> list[str]:
        if door == "airflow":
            return [sys.executable, str(NIGHTLY / "airflow_dag.py"), night]
        pattern = f"{self.raw}/{night}/*.jsonl"
        return ["bash", str(NIGHTLY / "nightly.sh"), self.dataset, pattern]

    def start(self, door: str, night: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(door, night),
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
        )

    def run(self, door: str, night: str) -> int:
        process = self.start(door, night)
        _, log = process.communicate(timeout=300)
        print(log)
        return process.returncode


@pytest.mark.slow
@pytest.mark.parametrize(("door", "splits"), [("cron", True), ("airflow", False)])
def test_nights(
    door: str, splits: bool, s3: Store, tmp_path: Path, alerts: AlertServer
) -> None:
    job = Night(s3, tmp_path, alerts, splits)
    first_versions = job.versions()

    job.put("01", lines(records(40, 10)))
    assert job.run(door, "01") == 0
    assert job.num_records() == 50
    assert job.versions() == [version + 1 for version in first_versions]

    assert job.run(door, "02") == 0  # nothing new
    assert job.run(door, "01") == 0  # again
    assert (job.num_records(), alerts.texts) == (50, [])

    job.put("03", lines(records(50, 10)) + b'{"prompt": "Why')
    assert job.run(door, "03") != 0
    assert job.num_records() == 50
    (text,) = alerts.texts
    assert "03/a.jsonl, line 11" in text

    job.put("03", lines(records(50, 10)))
    assert job.run(door, "03") == 0
    assert job.num_records() == 60
    assert len(alerts.texts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("splits", [False, True])
def test_a_killed_night_is_run_again(
    splits: bool, s3: Store, tmp_path: Path, alerts: AlertServer
) -> None:
    job = Night(s3, tmp_path, alerts, splits)
    before = job.versions()
    job.put("01", lines(records(40, 10)))
    process = job.start("cron", "01")
    until = time.monotonic() + 120
    while job.versions() == before and time.monotonic() < until:
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert job.run("cron", "01") == 0
    assert job.num_records() == 50
    assert job.versions() == [version + 1 for version in before]


@pytest.mark.slow
def test_a_damaged_dataset_alerts(
    s3: Store, tmp_path: Path, alerts: AlertServer
) -> None:
    job = Night(s3, tmp_path, alerts)
    files = Files(job.dataset, **job.options)
    (shard,) = [name for name in files.names() if name.endswith(".parquet")]
    data = files.read(shard)
    files.write(shard, data[:100] + b"\0" + data[101:])
    assert job.run("cron", "01") == 1
    assert shard in alerts.texts[0]


def crontab() -> tuple[dict[str, str], list[str]]:
    """The variables and the commands of ``crontab``, as cron reads them."""
    variables = {}
    commands = []
    for line in (NIGHTLY / "crontab").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        assignment = re.fullmatch(r"(\w+)=(.*)", line)
        if assignment:
            variables[assignment[1]] = assignment[2]
        else:
            command = line.split(maxsplit=5)[5]
            assert not re.search(r"(?<!\\)%", command)
            commands.append(command.replace("\\%", "%"))
    return variables, commands


@pytest.mark.slow
def test_commands_of_the_crontab(
    s3: Store, tmp_path: Path, alerts: AlertServer
) -> None:
    job = Night(s3, tmp_path, alerts)
    variables, (nightly, fold) = crontab()
    environment = {
        **job.environment,
        "DATASET": job.dataset,
        "SOURCE": job.raw,
    }
    assert {"DATASET", "SOURCE", "ALERT", "PACKSTORE_OPTIONS"} < variables.keys()
    assert (
        shlex.split(variables["ALERT"])[:-1] == shlex.split(environment["ALERT"])[:-1]
    )

    yesterday = date.today() - timedelta(days=1)
    job.put(str(yesterday), lines(records(40, 10)))
    script = nightly.replace("/opt/packstore/nightly.sh", str(NIGHTLY / "nightly.sh"))
    for command in (script, fold):
        subprocess.run(["bash", "-c", command], env=environment, check=True)
    assert job.num_records() == 50
    folded = packstore.open(job.dataset, job.options)
    assert (folded.version, len(folded.manifest.shards)) == (3, 1)
