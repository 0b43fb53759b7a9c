"""What a log says of the progress of a long job: a line a minute, and no more than is known."""

from __future__ import annotations

import argparse
import logging

import pytest

from packstore.cli import _messages


def test_a_log_has_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    monkeypatch.setattr(_messages.time, "monotonic", lambda: now)
    caplog.set_level(logging.INFO, "packstore")
    args = argparse.Namespace(log_format="text", quiet=False)
    with _messages.progress_of("pack", args) as report:
        for stage, totals in {"compare": [900, 1100, 1000], "read": [1000]}.items():
            begun = now
            while now < begun + 200:
                done = round((now - begun) * 5)
                report(stage, done, totals[done % len(totals)], "records")
                now += 1
            report(stage, 1000, 1000, "records")
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 2 * (1 + 3 + 1)
    first, minute, *_ = lines
    assert first == "pack: compare (pass 1 of 2) 25 of about 1,100 records, 5/s"
    assert minute.startswith("pack: compare (pass 1 of 2) 325 of about 1,100 records, 5/s, 0:02:")
    assert lines[4] == "pack: compare (pass 1 of 2) 1,000 records, 5/s"
    assert lines[6] == "pack: read (pass 2 of 2) 325 of 1,000 records, 5/s, 0:02:15 left"
