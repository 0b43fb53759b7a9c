"""Uploading a file to S3 in parts, of which a few are in memory and on their way at a time.

Each part is asked again by itself, so that one failure in a large shard costs one part; and the
upload is known by its id, so that one which fails is given up by name and leaves nothing behind
that the owner would pay for. What a killed process leaves, `unfinished` lists.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, Protocol, TypeVar

from packstore.errors import StorageError
from packstore.io.clients import PART_BYTES, PARTS_AT_ONCE
from packstore.io.error_causes import code_of

T = TypeVar("T")
MAX_PARTS = 10_000
RESTARTS = 3


class Ask(Protocol):
    """Makes a request, and makes it again if that may help; raises :class:`StorageError`."""

    def __call__(self, call: Callable[[], T], /) -> T:
        """What `call` returns."""


class Upload(NamedTuple):
    """An upload that was begun and neither finished nor given up."""

    path: str
    id: str
    began: datetime.datetime


def upload(fs: Any, local_path: str, path: str, ask: Ask) -> None:
    """Puts the file at `path`, whole or not at all.

    Args:
        fs: an s3fs filesystem.
        local_path: the file.
        path: bucket and key.
        ask: makes one request.

    Raises:
        StorageError: the store refuses, or fails for too long.
    """
    bucket, key, _ = fs.split_path(path)
    size = os.path.getsize(local_path)
    target = {"Bucket": bucket, "Key": key}
    if size <= PART_BYTES:
        with open(local_path, "rb") as file:
            data = file.read()
        ask(lambda: fs.call_s3("put_object", Body=data, **target))
        return
    for restart in range(1, RESTARTS + 1):
        try:
            _in_parts(fs, local_path, size, target, ask)
            return
        except StorageError as error:
            # Somebody gave it up; or it is finished, and only the answer was lost.
            if code_of(error) != "NoSuchUpload":
                raise
            if _size(fs, path, ask) == size:
                return
            if restart == RESTARTS:
                raise


def _in_parts(fs: Any, local_path: str, size: int, target: dict[str, str], ask: Ask) -> None:
    step = max(PART_BYTES, -(-size // MAX_PARTS))
    begun = 0

    def begin() -> Any:
        nonlocal begun
        begun += 1
        return fs.call_s3("create_multipart_upload", **target)

    whole = target
    target = {**target, "UploadId": ask(begin)["UploadId"]}

    def send(number: int) -> dict[str, Any]:
        data = os.pread(file.fileno(), step, (number - 1) * step)
        part = {"PartNumber": number, "Body": data, **target}
        answer = ask(lambda: fs.call_s3("upload_part", **part))
        return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        with open(local_path, "rb") as file, ThreadPoolExecutor(PARTS_AT_ONCE) as threads:
            jobs = [threads.submit(send, n + 1) for n in range(-(-size // step))]
            try:
                parts = [job.result() for job in jobs]
            except BaseException:
                threads.shutdown(cancel_futures=True)
                raise
        end = {"MultipartUpload": {"Parts": parts}, **target}
        ask(lambda: fs.call_s3("complete_multipart_upload", **end))
    except BaseException:
        with contextlib.suppress(StorageError):
            ask(lambda: fs.call_s3("abort_multipart_upload", **target))
        raise
    finally:
        if begun > 1:  # an earlier one may have begun although its answer was lost
            _give_up_others(fs, whole, target["UploadId"], ask)


def _give_up_others(fs: Any, target: dict[str, str], ours: str, ask: Ask) -> None:
    path = f"{target['Bucket']}/{target['Key']}"
    with contextlib.suppress(StorageError):
        for other in unfinished(fs, path, ask):
            if other.path == path and other.id != ours:
                give_up(fs, path, other.id, ask)


def unfinished(fs: Any, path: str, ask: Ask) -> list[Upload]:
    """The uploads below `path` (bucket and prefix) that were neither finished nor given up."""
    bucket, prefix, _ = fs.split_path(path)
    query = {"Bucket": bucket, "Prefix": prefix}
    found: list[Upload] = []
    while True:
        page = ask(lambda query=query: fs.call_s3("list_multipart_uploads", **query))  # type: ignore[misc]
        found += [
            Upload(f"{bucket}/{u['Key']}", u["UploadId"], u["Initiated"])
            for u in page.get("Uploads", ())
        ]
        if not page.get("IsTruncated"):
            return found
        query |= {
            "KeyMarker": page["NextKeyMarker"],
            "UploadIdMarker": page["NextUploadIdMarker"],
        }


def give_up(fs: Any, path: str, upload_id: str, ask: Ask) -> None:
    """Removes the parts of an upload to `path` (bucket and key)."""
    bucket, key, _ = fs.split_path(path)
    target = {"Bucket": bucket, "Key": key, "UploadId": upload_id}
    ask(lambda: fs.call_s3("abort_multipart_upload", **target))


def _size(fs: Any, path: str, ask: Ask) -> int | None:
    fs.invalidate_cache()
    try:
        return int(ask(lambda: fs.info(path))["size"] or 0)
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise
