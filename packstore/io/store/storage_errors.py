"""Turns errors of filesystems into one-line storage errors with cause and remedy.

Each client has its own exceptions, some wrapped twice. They have in common an error
code of the store, an HTTP status, an errno or the name of a class; these are looked up
along the chain of causes, without importing any client. Sources of the codes: the S3
API's list of error responses, Azure's Blob service error codes, and the statuses in the
documentation of Google's JSON API.
"""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from packstore.errors import (
    MissingExtraError,
    PackstoreError,
    StorageError,
    display,
    sentence,
)
from packstore.io.store.local import UnsyncedError
from packstore.registry import missing_extra
from packstore.secrets import Secrets, chain_of

EXTRAS = {
    "s3": "s3",
    "s3a": "s3",
    "gs": "gcs",
    "gcs": "gcs",
    "az": "azure",
    "abfs": "azure",
    "abfss": "azure",
    "http": "http",
    "https": "http",
}
"""URL scheme -> the extra of packstore that installs its client."""

BUCKETS = tuple(scheme for scheme, extra in EXTRAS.items() if extra != "http")
"""URL schemes of object stores with buckets (containers)."""

CLIENTS = {
    "httpx",
    "httpx2",
    "huggingface_hub",
    "mlflow",
    "requests",
    "safetensors",
    "trackio",
    "wandb",
}
"""Packages that write to disks, hubs and trackers, with errors of no common class."""


@contextlib.contextmanager
def as_storage_errors(
    verb: str, place: str | Callable[[], str], options: Mapping[str, Any]
) -> Iterator[None]:
    """Turn all errors of a filesystem in this context into a StorageError.

    Args:
        verb: ``open``, ``read``, ``write``, ``list`` or ``remove``.
        place: the URL, or a function that returns it.
        options: storage options; the message has none of their secrets.
    """
    try:
        yield
    except PackstoreError:
        raise
    except Exception as error:
        url = place if isinstance(place, str) else place()
        secrets = Secrets(url, options)
        storage_error = _storage_error(
            error, verb, url, secrets, has_options=bool(options)
        )
        raise storage_error from secrets.hide_in(error)


def _storage_error(
    error: Exception, verb: str, url: str, secrets: Secrets, has_options: bool
) -> StorageError:
    cause = _cause_of(error)
    if cause is None:
        cause = _unlisted_cause(error, secrets, has_options)
    else:
        cause = _specify_cause(cause, verb, scheme=url.partition("://")[0])

    reason = cause.reason
    code = _code_of(error)
    if code and cause.remedy:
        reason += f" ({code})"
    is_written = isinstance(error, UnsyncedError)
    if is_written:
        rule = "it is written, but its folder cannot be synced"
    else:
        rule = f"cannot {verb}"
    storage_error = StorageError(sentence(display(url), rule, reason, cause.remedy))
    storage_error.written = is_written
    storage_error.transient = False if is_written else cause.transient
    return storage_error


def is_of_client(error: BaseException) -> bool:
    """Return True for an error of a disk, hub or tracker, no bug of packstore."""
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, OSError) or package in CLIENTS


def missing_filesystem(url: str, error: ImportError) -> MissingExtraError:
    """Return the error for a missing filesystem package, with its install command."""
    scheme = url.partition("://")[0].rsplit("::", 1)[-1]
    if scheme in EXTRAS:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        return missing_extra(f"{scheme}:// storage", EXTRAS[scheme], cause)
    text = sentence(
        where=display(url),
        rule="the package of its filesystem must be installed",
        found=str(error),
        remedy="Run: pip install huggingface-hub" if scheme == "hf" else "",
    )
    return MissingExtraError(text)


def means_exists(error: BaseException) -> bool:
    """Return True if a create-only put failed because the file exists."""
    # s3fs raises a bare OSError.
    is_exists_error = isinstance(error, FileExistsError)
    return is_exists_error or _code_of(error) in ("PreconditionFailed", "412")


def is_transient(error: BaseException) -> bool:
    """Return True if a retry helps: throttling, server errors, lost connections."""
    cause = _cause_of(error)
    return cause is not None and cause.transient is True


# Causes


class Cause(NamedTuple):
    """The cause of an error, which completes "found …", and its remedy.

    Attributes:
        transient: True: a retry within a minute or two helps; False: it never does;
            None: perhaps.
    """

    reason: str
    remedy: str = ""
    transient: bool | None = None


_LATER = "Check the network, or run again later"
_OTHER_PLACE = "Free some space or name another place"

THROTTLED = Cause(
    "that it throttles", "Run again later, or raise retry_seconds", transient=True
)
STORE_FAILED = Cause("an error inside the store", "Run again later", transient=True)
NO_ANSWER = Cause("no answer in time", _LATER, transient=True)
CUT_ANSWER = Cause("an answer that ended too early", _LATER, transient=True)
DAMAGED_ON_THE_WAY = Cause("bytes that were damaged on the way", _LATER, transient=True)
HUB_OFFLINE = Cause(
    "that the Hugging Face hub is switched off (HF_HUB_OFFLINE)",
    "Unset it; or `hf download` the files where there is a network, and name the local "
    "ones",
    transient=False,
)
UNREACHABLE = Cause(
    "no connection", "Check network, endpoint and proxy settings", transient=True
)
DENIED = Cause("permission denied", "Check that these credentials may do this here")
BAD_CREDENTIALS = Cause(
    "credentials that the store does not accept",
    "Check the key, the secret and the endpoint",
)
EXPIRED_CREDENTIALS = Cause(
    "credentials that have expired", "Log in again, or renew the token"
)
NO_CREDENTIALS = Cause(
    "no credentials",
    "Set them in the environment or a profile; for public data, anon=true",
)
REQUESTER_PAYS = Cause(
    "a bucket that lets the requester pay", "Add the storage option requester_pays=true"
)
NO_BUCKET = Cause("no such bucket", "Check its name, or make it first", transient=False)
BAD_BUCKET_NAME = Cause("a bucket name that cannot be", "Check it", transient=False)
OTHER_REGION = Cause("that the bucket is in another region", "Set AWS_DEFAULT_REGION")
WRONG_CLOCK = Cause("that this machine's clock is wrong", "Set the clock (NTP)")
NO_CONDITIONAL_PUTS = Cause("a store without conditional puts", "Name another one")
ARCHIVED = Cause("an object in an archive", "Restore it to a class that can be read")
STORE_FULL = Cause("no space left in the store", _OTHER_PLACE)
UNTRUSTED_CERTIFICATE = Cause(
    "a certificate that is not trusted",
    "Check the endpoint, or name the certificates to trust",
)
TLS_FAILED = Cause("a failure of TLS", "Check the endpoint: http or https?")
DISK_FULL = Cause("no space left on the device", _OTHER_PLACE)
FILE_TOO_LARGE = Cause("File too large", "Raise the limit on file sizes (ulimit -f)")
QUOTA_EXCEEDED = Cause("disk quota exceeded", _OTHER_PLACE)
DEVICE_FAILED = Cause("an error of the device", "Check it, e.g. with dmesg")
READ_ONLY = Cause("a read-only filesystem", "Name another place")
NO_FILE = Cause("no such file or folder", "Check the path", transient=False)
DENIED_LOCALLY = Cause("permission denied", "Check the rights, or the credentials")
NO_FOLDER = Cause(
    "a file where a folder must be", "Name another folder", transient=False
)
IS_A_FOLDER = Cause("a folder where a file must be", "Name a file", transient=False)

# Codes of stores, statuses, classes of clients, errnos and builtin classes.
_CAUSES = {
    # Throttling
    "SlowDown": THROTTLED,
    "Throttling": THROTTLED,
    "ThrottlingException": THROTTLED,
    "RequestLimitExceeded": THROTTLED,
    "TooManyRequests": THROTTLED,
    "TooManyRequestsException": THROTTLED,
    "ServerBusy": THROTTLED,
    "BandwidthLimitExceeded": THROTTLED,
    "429": THROTTLED,
    "503": THROTTLED,
    # Servers
    "InternalError": STORE_FAILED,
    "ServiceUnavailable": STORE_FAILED,
    "OperationAborted": STORE_FAILED,
    "ConditionalRequestConflict": STORE_FAILED,
    "500": STORE_FAILED,
    "502": STORE_FAILED,
    # Answers
    "RequestTimeout": NO_ANSWER,
    "OperationTimedOut": NO_ANSWER,
    "ReadTimeoutError": NO_ANSWER,
    "ConnectTimeoutError": NO_ANSWER,
    "ServerTimeoutError": NO_ANSWER,
    "FSTimeoutError": NO_ANSWER,
    "ReadTimeout": NO_ANSWER,
    "Timeout": NO_ANSWER,
    "ServiceResponseTimeoutError": NO_ANSWER,
    "408": NO_ANSWER,
    "504": NO_ANSWER,
    "ETIMEDOUT": NO_ANSWER,
    "TimeoutError": NO_ANSWER,
    "IncompleteBody": CUT_ANSWER,
    "ClientPayloadError": CUT_ANSWER,
    "IncompleteRead": CUT_ANSWER,
    "IncompleteReadError": CUT_ANSWER,
    "ResponseStreamingError": CUT_ANSWER,
    "ChunkedEncodingError": CUT_ANSWER,
    "ContentLengthError": CUT_ANSWER,
    "ResponseParserError": CUT_ANSWER,
    "ContentDecodingError": CUT_ANSWER,
    "ChecksumError": CUT_ANSWER,
    "BadDigest": DAMAGED_ON_THE_WAY,
    "FlexibleChecksumError": DAMAGED_ON_THE_WAY,
    "XAmzContentChecksumMismatch": DAMAGED_ON_THE_WAY,
    "XAmzContentSHA256Mismatch": DAMAGED_ON_THE_WAY,
    # Connections
    "OfflineModeIsEnabled": HUB_OFFLINE,
    "EndpointConnectionError": UNREACHABLE,
    "ConnectionClosedError": UNREACHABLE,
    "ClientConnectionError": UNREACHABLE,
    "ServerDisconnectedError": UNREACHABLE,
    "ClientConnectorError": UNREACHABLE,
    "HTTPClientError": UNREACHABLE,
    "ServiceRequestError": UNREACHABLE,
    "ServiceResponseError": UNREACHABLE,
    "ProxyError": UNREACHABLE,
    "RemoteDisconnected": UNREACHABLE,
    "ECONNREFUSED": UNREACHABLE,
    "ECONNRESET": UNREACHABLE,
    "ECONNABORTED": UNREACHABLE,
    "EPIPE": UNREACHABLE,
    "EHOSTUNREACH": UNREACHABLE,
    "ENETUNREACH": UNREACHABLE,
    "ENETDOWN": UNREACHABLE,
    "ConnectionError": UNREACHABLE,
    "ClientConnectorCertificateError": UNTRUSTED_CERTIFICATE,
    "SSLError": TLS_FAILED,
    "ClientConnectorSSLError": TLS_FAILED,
    # Credentials and rights
    "AccessDenied": DENIED,
    "AllAccessDisabled": DENIED,
    "AuthorizationFailure": DENIED,
    "AuthorizationPermissionMismatch": DENIED,
    "InsufficientAccountPermissions": DENIED,
    "InvalidPayer": DENIED,
    "403": DENIED,
    "InvalidAccessKeyId": BAD_CREDENTIALS,
    "SignatureDoesNotMatch": BAD_CREDENTIALS,
    "InvalidToken": BAD_CREDENTIALS,
    "InvalidSecurity": BAD_CREDENTIALS,
    "AuthenticationFailed": BAD_CREDENTIALS,
    "InvalidAuthenticationInfo": BAD_CREDENTIALS,
    "ClientAuthenticationError": BAD_CREDENTIALS,
    "401": BAD_CREDENTIALS,
    "ExpiredToken": EXPIRED_CREDENTIALS,
    "ExpiredTokenException": EXPIRED_CREDENTIALS,
    "TokenRefreshRequired": EXPIRED_CREDENTIALS,
    "RequestExpired": EXPIRED_CREDENTIALS,
    "RefreshError": EXPIRED_CREDENTIALS,
    "NoCredentialsError": NO_CREDENTIALS,
    "PartialCredentialsError": NO_CREDENTIALS,
    "CredentialUnavailableError": NO_CREDENTIALS,
    "DefaultCredentialsError": NO_CREDENTIALS,
    "RequestTimeTooSkewed": WRONG_CLOCK,
    # Buckets and objects
    "NoSuchBucket": NO_BUCKET,
    "ContainerNotFound": NO_BUCKET,
    "ContainerBeingDeleted": NO_BUCKET,
    "PermanentRedirect": OTHER_REGION,
    "TemporaryRedirect": OTHER_REGION,
    "AuthorizationHeaderMalformed": OTHER_REGION,
    "IllegalLocationConstraintException": OTHER_REGION,
    "301": OTHER_REGION,
    "NotImplemented": NO_CONDITIONAL_PUTS,
    "501": NO_CONDITIONAL_PUTS,
    "BlobArchived": ARCHIVED,
    "InvalidObjectState": ARCHIVED,
    "QuotaExceeded": STORE_FULL,
    "StorageFull": STORE_FULL,
    "XMinioStorageFull": STORE_FULL,
    "507": STORE_FULL,
    # Local disks
    "ENOSPC": DISK_FULL,
    "EFBIG": FILE_TOO_LARGE,
    "EDQUOT": QUOTA_EXCEEDED,
    "EIO": DEVICE_FAILED,
    "EROFS": READ_ONLY,
    "FileNotFoundError": NO_FILE,
    "PermissionError": DENIED_LOCALLY,
    "NotADirectoryError": NO_FOLDER,
    "IsADirectoryError": IS_A_FOLDER,
}

_CAUSES_BY_TEXT = {
    "requester pays": REQUESTER_PAYS,
    "Forbidden: ": DENIED,  # gcsfs gives nothing else
    "Invalid bucket name": BAD_BUCKET_NAME,
}


def _cause_of(error: BaseException) -> Cause | None:
    """Return the cause of a client's error; None if it is not in the tables.

    A text in `_CAUSES_BY_TEXT` decides first, then the most specific name in the chain
    of causes: a code of the store, a class of the client, an HTTP status, an errno, a
    builtin class.
    """
    chain = list(chain_of(error))
    for link in chain:
        if isinstance(link, socket.gaierror):
            transient = True if link.errno == socket.EAI_AGAIN else None
            return UNREACHABLE._replace(reason="no such host", transient=transient)
        for text, cause in _CAUSES_BY_TEXT.items():
            if text in str(link):
                return cause
    for names_of in (_codes, _client_classes, _statuses, _errnos, _builtin_classes):
        for link in chain:
            for name in names_of(link):
                if name in _CAUSES:
                    return _CAUSES[name]
    return None


def _specify_cause(cause: Cause, verb: str, scheme: str) -> Cause:
    """Return a more specific cause, if the verb and the store imply one."""
    if cause is NO_FILE and verb == "write" and scheme in BUCKETS:
        return NO_BUCKET  # a put needs nothing else to exist
    if cause is DENIED and EXTRAS.get(scheme) in ("s3", "gcs"):
        payer = "if its bucket lets the requester pay, add requester_pays=true"
        return cause._replace(remedy=f"{cause.remedy}; {payer}")
    return cause


def _unlisted_cause(error: Exception, secrets: Secrets, has_options: bool) -> Cause:
    """Return the cause of an error that is in no table: its own text."""
    text = error.strerror if isinstance(error, OSError) else None
    text = secrets.hide(text or str(error)) or "no further text"
    # Clients raise TypeError for options that they do not have.
    may_be_options = isinstance(error, TypeError) and has_options
    remedy = "Check the storage options" if may_be_options else ""
    return Cause(f"{type(error).__name__}: {text}", remedy)


# Names to look an error up by


def _code_of(error: BaseException) -> str | None:
    """Return the store's error code (``NoSuchBucket``) from the chain of causes."""
    for link in chain_of(error):
        for code in _codes(link):
            return code
    return None


def _codes(error: BaseException) -> list[str]:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        code = response.get("Error", {}).get("Code")
    else:
        code = getattr(error, "error_code", None)  # azure: a text or an enum
        code = getattr(code, "value", code)
    return [str(code)] if code else []


def _client_classes(error: BaseException) -> list[str]:
    kinds = type(error).__mro__
    return [kind.__name__ for kind in kinds if kind.__module__ != "builtins"]


def _statuses(error: BaseException) -> list[str]:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        metadata = response.get("ResponseMetadata", {})
        return [str(metadata.get("HTTPStatusCode", ""))]
    names = ("status_code", "status", "code")  # azure and requests; aiohttp; gcsfs
    for holder in (error, response):
        for name in names:
            value = str(getattr(holder, name, ""))
            if value.isdecimal():
                return [value]
    return []


def _errnos(error: BaseException) -> list[str]:
    number = error.errno if isinstance(error, OSError) else None
    return [errno.errorcode.get(number or 0, "")]


def _builtin_classes(error: BaseException) -> list[str]:
    kinds = type(error).__mro__
    return [kind.__name__ for kind in kinds if kind.__module__ == "builtins"]
