"""Uploads a file to S3 in parts, a few at a time.

Without its own retries (see `clients`), s3fs would start again at the first part when one fails,
and report a failure when the response to its last request is lost. Here each request is retried,
and a failed upload is aborted; `unfinished` lists those of killed processes.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

from packstore.errors import StorageError
from packstore.io.store.clients import PART_BYTES, PARTS_AT_ONCE
from packstore.io.store.error_causes import code_of

Request: TypeAlias = Callable[[Callable[[], Any]], Any]
"""Makes a request, with retries; raises :class:`StorageError`."""

MAX_PARTS = 10_000


def upload(fs: Any, local_path: str, path: str, request: Request) -> None:
    """Uploads the file to `path` (bucket and key), atomically.

    Raises:
        StorageError: the store refuses, or fails for too long.
    """
    bucket, key, _ = fs.split_path(path)
    target: dict[str, Any] = {"Bucket": bucket, "Key": key}
    size = os.path.getsize(local_path)
    if size <= PART_BYTES:
        with open(local_path, "rb") as file:
            target["Body"] = file.read()
        request(lambda: fs.call_s3("put_object", **target))
        return
    step = max(PART_BYTES, -(-size // MAX_PARTS))
    # If the response is lost, an upload without parts stays, which costs nothing; see `unfinished`.
    begun = request(lambda: fs.call_s3("create_multipart_upload", **target))
    target["UploadId"] = begun["UploadId"]

    def send(number: int) -> dict[str, Any]:
        body = os.pread(file.fileno(), step, (number - 1) * step)
        part = {"PartNumber": number, "Body": body, **target}
        answer = request(lambda: fs.call_s3("upload_part", **part))
        return {"PartNumber": number, "ETag": answer["ETag"]}

    try:
        with open(local_path, "rb") as file, ThreadPoolExecutor(PARTS_AT_ONCE) as threads:
            parts = list(threads.map(send, range(1, -(-size // step) + 1)))
        end = {"MultipartUpload": {"Parts": parts}, **target}
        request(lambda: fs.call_s3("complete_multipart_upload", **end))
    except BaseException as error:
        if code_of(error) == "NoSuchUpload" and _has(fs, path, size, request):
            return  # the upload is complete, only the response was lost
        with contextlib.suppress(StorageError):
            abort(fs, path, target["UploadId"], request)
        raise


def unfinished(fs: Any, path: str, request: Request) -> list[tuple[str, datetime.datetime, str]]:
    """Lists target, begin and id of the uploads below `path` neither completed nor aborted."""
    bucket, prefix, _ = fs.split_path(path)
    query = {"Bucket": bucket, "Prefix": prefix}
    found: list[tuple[str, datetime.datetime, str]] = []
    while True:
        page = request(lambda query=query: fs.call_s3("list_multipart_uploads", **query))  # type: ignore[misc]
        uploads = page.get("Uploads", ())
        found += [(f"{bucket}/{u['Key']}", u["Initiated"], u["UploadId"]) for u in uploads]
        if not page.get("IsTruncated"):
            return found
        query |= {f"{name}Marker": page[f"Next{name}Marker"] for name in ("Key", "UploadId")}


def abort(fs: Any, path: str, upload_id: str, request: Request) -> None:
    """Aborts an upload to `path`, and removes its parts."""
    bucket, key, _ = fs.split_path(path)
    target = {"Bucket": bucket, "Key": key, "UploadId": upload_id}
    request(lambda: fs.call_s3("abort_multipart_upload", **target))


def _has(fs: Any, path: str, size: int, request: Request) -> bool:
    fs.invalidate_cache()
    with contextlib.suppress(StorageError):
        return int(request(lambda: fs.info(path))["size"] or 0) == size
    return False
