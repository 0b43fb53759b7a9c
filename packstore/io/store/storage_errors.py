"""Turns errors of filesystems into one-line storage errors with cause and remedy,
without secrets.

Each client has its own exceptions, some wrapped twice. What they share is an error code
of the store, an HTTP status, an errno or the name of a class; these are looked up along
the chain of causes, without importing any client. Sources of the codes: the S3 API's
list of error responses, Azure's Blob service error codes, and the statuses in the
documentation of Google's JSON API.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from packstore.errors import (
    MissingExtraError,
    PackstoreError,
    StorageError,
    display,
    is_mistyped,
    logins,
    sentence,
)
from packstore.io.store.local import UnsyncedError
from packstore.registry import missing_extra
from packstore.secrets import Secrets, chain_of

_SCHEMES = {
    "s3": "s3 s3a",
    "gcs": "gs gcs",
    "azure": "az abfs abfss",
    "http": "http https",
}
EXTRAS = {
    scheme: extra for extra, schemes in _SCHEMES.items() for scheme in schemes.split()
}
"""URL scheme -> the extra of packstore that installs its client."""

BUCKETS = tuple(scheme for scheme, extra in EXTRAS.items() if extra != "http")
"""URL schemes of object stores with buckets (containers)."""


def check_url(url: str) -> str:
    """Returns `url`; refuses one where a filesystem would open another place than
    intended.
    """
    if not url:
        remedy = "Write . for the current folder"
        raise StorageError(
            sentence("storage", "a place must have a name", "none", remedy)
        )
    if is_mistyped(url):
        rule, found = (
            "a URL must begin with a scheme and two slashes",
            "something like it",
        )
        remedy = "Write scheme://…; for a local path, ./ or one / at its beginning"
        raise StorageError(sentence(display(url), rule, found, remedy))
    if any(login.cut for login in logins(url)):
        rule = "a login in a URL must not hold a slash, question mark or hash"
        remedy = (
            "Write %2F, %3F or %23 for it, and %40 for an @ behind the host and "
            "its port"
        )
        raise StorageError(sentence(display(url), rule, "one", remedy))
    return url


@contextlib.contextmanager
def as_storage_errors(
    verb: str, place: str | Callable[[], str], options: Mapping[str, Any]
) -> Iterator[None]:
    """Turns all errors of a filesystem in this context into a :class:`StorageError`.

    `verb` is ``open``, ``read``, ``write``, ``list`` or ``remove``; `place` a URL.
    """
    try:
        yield
    except PackstoreError:
        raise
    except Exception as error:
        url = place if isinstance(place, str) else place()
        secrets, cause, code = Secrets(url, options), _cause_of(error), _code_of(error)
        scheme = url.partition("://")[0]
        if cause is None:
            text = (error.strerror if isinstance(error, OSError) else None) or str(
                error
            )
            text = secrets.hide(text) or "no further text"
            remedy = (
                "Check the storage options"
                if isinstance(error, TypeError) and options
                else ""
            )
            cause = Cause(f"{type(error).__name__}: {text}", remedy)
        elif (
            cause.reason == "no such file or folder"
            and verb == "write"
            and scheme in BUCKETS
        ):
            cause = NO_BUCKET  # a put needs nothing else to exist
        elif cause is DENIED and EXTRAS.get(scheme) in ("s3", "gcs"):
            payer = "if its bucket lets the requester pay, add requester_pays=true"
            cause = cause._replace(remedy=f"{cause.remedy}; {payer}")
        found = f"{cause.reason} ({code})" if code and cause.remedy else cause.reason
        written = isinstance(error, UnsyncedError)
        rule = (
            "it is written, but its folder cannot be synced"
            if written
            else f"cannot {verb}"
        )
        named = StorageError(sentence(display(url), rule, found, cause.remedy))
        named.written, named.transient = written, False if written else cause.transient
        raise named from secrets.hide_in(error)


CLIENTS = {
    *("httpx", "httpx2", "requests", "huggingface_hub", "safetensors"),
    *("wandb", "mlflow", "trackio"),
}
"""Packages that write to disks, hubs and trackers, with errors of no common class."""


def is_of_client(error: BaseException) -> bool:
    """Returns True for an error of a disk, a hub or a tracker, which is no defect of
    packstore.
    """
    return (
        isinstance(error, OSError)
        or type(error).__module__.partition(".")[0] in CLIENTS
    )


def missing_filesystem(url: str, error: ImportError) -> MissingExtraError:
    """Returns the error for a missing filesystem package, with the command that
    installs it.
    """
    scheme = url.partition("://")[0].rsplit("::", 1)[-1]
    if scheme in EXTRAS:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        return missing_extra(f"{scheme}:// storage", EXTRAS[scheme], cause)
    rule = "the package of its filesystem must be installed"
    remedy = "Run: pip install huggingface-hub" if scheme == "hf" else ""
    return MissingExtraError(sentence(display(url), rule, str(error), remedy))


def means_exists(error: BaseException) -> bool:
    """Returns True if a create-only put failed as the file exists; s3fs raises a bare
    OSError.
    """
    exists = isinstance(error, FileExistsError)
    return exists or _code_of(error) in ("PreconditionFailed", "412")


class Cause(NamedTuple):
    """The cause of an error, which completes "found …", and its remedy.

    `transient`: True: a retry within a minute or two helps; False: never; None:
        perhaps.
    """

    reason: str
    remedy: str = ""
    transient: bool | None = None


_LATER = "Check the network, or run again later"
_OTHER_PLACE = "Free some space or name another place"
_UNREACHABLE = Cause(
    "no connection", "Check network, endpoint and proxy settings", True
)
DENIED = Cause("permission denied", "Check that these credentials may do this here")
NO_BUCKET = Cause("no such bucket", "Check its name, or make it first", False)

# Cause -> its names in errors: codes of stores, statuses, classes of clients, errnos,
# builtin classes.
_NAMED: dict[Cause, str] = {
    Cause(
        "that it throttles", "Run again later, or raise retry_seconds", True
    ): "SlowDown "
    "Throttling ThrottlingException RequestLimitExceeded TooManyRequests ServerBusy "
    "TooManyRequestsException BandwidthLimitExceeded 429 503",
    Cause(
        "an error inside the store", "Run again later", True
    ): "InternalError ServiceUnavailable "
    "OperationAborted ConditionalRequestConflict 500 502",
    Cause(
        "no answer in time", _LATER, True
    ): "RequestTimeout OperationTimedOut ReadTimeoutError "
    "ConnectTimeoutError ServerTimeoutError FSTimeoutError ReadTimeout Timeout "
    "ServiceResponseTimeoutError 408 504 ETIMEDOUT TimeoutError",
    Cause(
        "an answer that ended too early", _LATER, True
    ): "IncompleteBody ClientPayloadError "
    "IncompleteRead IncompleteReadError ResponseStreamingError ChunkedEncodingError "
    "ContentLengthError ResponseParserError ContentDecodingError ChecksumError",
    Cause(
        "bytes that were damaged on the way", _LATER, True
    ): "BadDigest FlexibleChecksumError "
    "XAmzContentChecksumMismatch XAmzContentSHA256Mismatch",
    Cause(
        "that the Hugging Face hub is switched off (HF_HUB_OFFLINE)",
        "Unset it; or `hf download` the files where there is a network, and name the "
        "local ones",
        False,
    ): "OfflineModeIsEnabled",
    _UNREACHABLE: "EndpointConnectionError ConnectionClosedError ClientConnectionError "
    "ServerDisconnectedError ClientConnectorError HTTPClientError ServiceRequestError "
    "ServiceResponseError ProxyError RemoteDisconnected ECONNREFUSED ECONNRESET "
    "ECONNABORTED "
    "EPIPE EHOSTUNREACH ENETUNREACH ENETDOWN ConnectionError",
    DENIED: "AccessDenied AllAccessDisabled AuthorizationFailure InvalidPayer 403 "
    "AuthorizationPermissionMismatch InsufficientAccountPermissions",
    Cause(
        "credentials that the store does not accept",
        "Check the key, the secret and the endpoint",
    ): "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken InvalidSecurity "
    "AuthenticationFailed InvalidAuthenticationInfo ClientAuthenticationError 401",
    Cause(
        "credentials that have expired", "Log in again, or renew the token"
    ): "ExpiredToken "
    "ExpiredTokenException TokenRefreshRequired RequestExpired RefreshError",
    Cause(
        "no credentials",
        "Set them in the environment or a profile; for public data, anon=true",
    ): "NoCredentialsError PartialCredentialsError CredentialUnavailableError "
    "DefaultCredentialsError",
    NO_BUCKET: "NoSuchBucket ContainerNotFound ContainerBeingDeleted",
    Cause(
        "that this machine's clock is wrong", "Set the clock (NTP)"
    ): "RequestTimeTooSkewed",
    Cause(
        "that the bucket is in another region", "Set AWS_DEFAULT_REGION"
    ): "PermanentRedirect "
    "TemporaryRedirect AuthorizationHeaderMalformed IllegalLocationConstraintException "
    "301",
    Cause("a store without conditional puts", "Name another one"): "NotImplemented 501",
    Cause(
        "an object in an archive", "Restore it to a class that can be read"
    ): "BlobArchived InvalidObjectState",
    Cause("no space left in the store", _OTHER_PLACE): "QuotaExceeded StorageFull 507 "
    "XMinioStorageFull",
    Cause(
        "a certificate that is not trusted",
        "Check the endpoint, or name the certificates to trust",
    ): "ClientConnectorCertificateError",
    Cause("a failure of TLS", "Check the endpoint: http or https?"): "SSLError "
    "ClientConnectorSSLError",
    Cause("no space left on the device", _OTHER_PLACE): "ENOSPC",
    Cause("File too large", "Raise the limit on file sizes (ulimit -f)"): "EFBIG",
    Cause("disk quota exceeded", _OTHER_PLACE): "EDQUOT",
    Cause("an error of the device", "Check it, e.g. with dmesg"): "EIO",
    Cause("a read-only filesystem", "Name another place"): "EROFS",
    Cause("no such file or folder", "Check the path", False): "FileNotFoundError",
    Cause(
        "permission denied", "Check the rights, or the credentials"
    ): "PermissionError",
    Cause(
        "a file where a folder must be", "Name another folder", False
    ): "NotADirectoryError",
    Cause("a folder where a file must be", "Name a file", False): "IsADirectoryError",
}
_CAUSES = {name: cause for cause, names in _NAMED.items() for name in names.split()}

_PAYS = Cause(
    "a bucket that lets the requester pay", "Add the storage option requester_pays=true"
)
_TEXTS = {
    "requester pays": _PAYS,
    "Forbidden: ": DENIED,  # gcsfs gives nothing else
    "Invalid bucket name": Cause("a bucket name that cannot be", "Check it", False),
}


def _cause_of(error: BaseException) -> Cause | None:
    """Returns the cause of a client's error; None if it is not in the table.

    Of the whole chain of causes the most specific name counts: a text, a code, a class,
    …
    """
    chain = list(chain_of(error))
    for link in chain:
        if isinstance(link, socket.gaierror):
            transient = True if link.errno == socket.EAI_AGAIN else None
            return _UNREACHABLE._replace(reason="no such host", transient=transient)
        for part, cause in _TEXTS.items():
            if part in str(link):
                return cause
    for kind in zip(*map(_names, chain), strict=True):
        for name in itertools.chain(*kind):
            if name in _CAUSES:
                return _CAUSES[name]
    return None


def is_passing(error: BaseException) -> bool:
    """Returns True if a retry helps: throttling, server errors, lost connections."""
    cause = _cause_of(error)
    return cause is not None and cause.transient is True


def _code_of(error: BaseException) -> str | None:
    """Returns the store's error code (``NoSuchBucket``); None if there is none."""
    return next((code for link in chain_of(error) if (code := _code(link))), None)


def _names(error: BaseException) -> tuple[list[str], ...]:
    """Returns the names to look an error up by, the most specific first."""
    number = error.errno if isinstance(error, OSError) else None
    classes, builtin = list[str](), list[str]()
    for kind in type(error).__mro__:
        (builtin if kind.__module__ == "builtins" else classes).append(kind.__name__)
    numbers = [errno.errorcode.get(number or 0, "")]
    return [_code(error) or ""], classes, [_status(error)], numbers, builtin


def _code(error: BaseException) -> str | None:
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):  # botocore
        return str(answer.get("Error", {}).get("Code") or "") or None
    code = getattr(error, "error_code", None)  # azure
    return str(getattr(code, "value", code)) if code else None


def _status(error: BaseException) -> str:
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):  # botocore
        return str(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
    names = ("status_code", "status", "code")  # azure and requests, aiohttp, gcsfs
    values = (
        str(getattr(holder, name, "")) for holder in (error, answer) for name in names
    )
    return next(filter(str.isdecimal, values), "")
