"""Uploads a file to S3 in parts, a few at a time.

Each part is retried separately, so that a failure in a large shard costs one part. A failed upload
is aborted, so that it leaves no parts to pay for; `unfinished` lists those of killed processes.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

from packstore.errors import StorageError
from packstore.io.store.clients import PART_BYTES, PARTS_AT_ONCE
from packstore.io.store.error_causes import code_of

Ask: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Makes a request, with retries; raises :class:`StorageError`."""

MAX_PARTS = 10_000


class Upload(NamedTuple):
    """An upload that was started, and neither completed nor aborted."""

    path: str
    id: str
    began: datetime.datetime


def upload(fs: Any, local_path: str, path: str, ask: Ask) -> None:
    """Uploads the file to `path`, atomically.

    Args:
        fs: an s3fs filesystem.
        local_path: the file.
        path: bucket and key.
        ask: makes one request.

    Raises:
        StorageError: the store refuses, or fails for too long.
    """
    bucket, key, _ = fs.split_path(path)
    target: dict[str, Any] = {"Bucket": bucket, "Key": key}
    size = os.path.getsize(local_path)
    if size <= PART_BYTES:
        with open(local_path, "rb") as file:
            target["Body"] = file.read()
        ask(lambda: fs.call_s3("put_object", **target))
        return
    step = max(PART_BYTES, -(-size // MAX_PARTS))
    # If the response is lost, an upload without parts stays, which costs nothing; see `unfinished`.
    target["UploadId"] = ask(lambda: fs.call_s3("create_multipart_upload", **target))["UploadId"]

    def send(number: int) -> dict[str, Any]:
        body = os.pread(file.fileno(), step, (number - 1) * step)
        part = {"PartNumber": number, "Body": body, **target}
        answer = ask(lambda: fs.call_s3("upload_part", **part))
        return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        with open(local_path, "rb") as file, ThreadPoolExecutor(PARTS_AT_ONCE) as threads:
            parts = list(threads.map(send, range(1, -(-size // step) + 1)))
        end = {"MultipartUpload": {"Parts": parts}, **target}
        ask(lambda: fs.call_s3("complete_multipart_upload", **end))
    except BaseException as error:
        if code_of(error) == "NoSuchUpload" and _has(fs, path, size, ask):
            return  # the upload is complete, only the response was lost
        with contextlib.suppress(StorageError):
            ask(lambda: fs.call_s3("abort_multipart_upload", **target))
        raise


def unfinished(fs: Any, path: str, ask: Ask) -> list[Upload]:
    """Lists the uploads below `path` (bucket and prefix) neither completed nor aborted."""
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
        query |= {f"{name}Marker": page[f"Next{name}Marker"] for name in ("Key", "UploadId")}


def give_up(fs: Any, path: str, upload_id: str, ask: Ask) -> None:
    """Removes the parts of an upload to `path` (bucket and key)."""
    bucket, key, _ = fs.split_path(path)
    target = {"Bucket": bucket, "Key": key, "UploadId": upload_id}
    ask(lambda: fs.call_s3("abort_multipart_upload", **target))


def _has(fs: Any, path: str, size: int, ask: Ask) -> bool:
    fs.invalidate_cache()
    with contextlib.suppress(StorageError):
        return int(ask(lambda: fs.info(path))["size"] or 0) == size
    return False
