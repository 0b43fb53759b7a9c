"""Causes and remedies of errors raised by the clients of object stores.

Each client has its own exceptions, some wrapped twice. What they share is an error code of the
store, an HTTP status, an errno or the name of a class; these are looked up along the chain of
causes, without importing any client. Sources of the codes: the S3 API's list of error responses,
Azure's Blob service error codes, and the statuses in the documentation of Google's JSON API.
"""

from __future__ import annotations

import errno
import itertools
import socket
from collections.abc import Iterator
from typing import NamedTuple


class Cause(NamedTuple):
    """The cause of an error, which completes "found …", and its remedy.

    `passing`: True: a retry within a minute or two helps; False: never; None: perhaps.
    """

    what: str
    do: str = ""
    passing: bool | None = None


_LATER = "Check the network, or run again later"
_OTHER_PLACE = "Free some space or name another place"
_UNREACHABLE = Cause(
    "no connection", "Check the network, the endpoint and the proxy settings", True
)
DENIED = Cause("permission denied", "Check that these credentials may do this here")
NO_BUCKET = Cause("no such bucket", "Check its name, or make it first", False)

# Cause -> its names in errors: codes of stores, statuses, classes of clients, errnos, builtin
# classes.
_NAMED: dict[Cause, str] = {
    Cause(
        "that it throttles",
        "Run again later, make fewer requests at a time, or be more patient (storage option "
        "retry_seconds)",
        True,
    ): "SlowDown Throttling ThrottlingException RequestLimitExceeded TooManyRequests "
    "TooManyRequestsException BandwidthLimitExceeded ServerBusy 429 503",
    Cause(
        "an error inside the store", "Run again later, or ask who operates it", True
    ): "InternalError ServiceUnavailable OperationAborted ConditionalRequestConflict 500 502",
    Cause("no answer in time", _LATER, True): "RequestTimeout OperationTimedOut ReadTimeoutError "
    "ConnectTimeoutError ServerTimeoutError FSTimeoutError ReadTimeout Timeout "
    "ServiceResponseTimeoutError 408 504 ETIMEDOUT TimeoutError",
    Cause("an answer that ended too early", _LATER, True): "IncompleteBody ClientPayloadError "
    "IncompleteRead IncompleteReadError ResponseStreamingError ChunkedEncodingError "
    "ContentLengthError ResponseParserError ContentDecodingError ChecksumError",
    Cause("bytes that were damaged on the way", _LATER, True): "BadDigest FlexibleChecksumError "
    "XAmzContentChecksumMismatch XAmzContentSHA256Mismatch",
    _UNREACHABLE: "EndpointConnectionError ConnectionClosedError ClientConnectionError "
    "ServerDisconnectedError ClientConnectorError HTTPClientError ServiceRequestError "
    "ServiceResponseError ProxyError RemoteDisconnected ECONNREFUSED ECONNRESET ECONNABORTED "
    "EPIPE EHOSTUNREACH ENETUNREACH ENETDOWN ConnectionError",
    DENIED: "AccessDenied AllAccessDisabled AuthorizationFailure InvalidPayer 403 "
    "AuthorizationPermissionMismatch InsufficientAccountPermissions",
    Cause(
        "credentials that the store does not accept", "Check the key, the secret and the endpoint"
    ): "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken InvalidSecurity "
    "AuthenticationFailed InvalidAuthenticationInfo ClientAuthenticationError 401",
    Cause("credentials that have expired", "Log in again, or renew the token"): "ExpiredToken "
    "ExpiredTokenException TokenRefreshRequired RequestExpired RefreshError",
    Cause(
        "no credentials",
        "Set them in the environment or a profile, or add the storage option anon=true for public "
        "data",
    ): "NoCredentialsError PartialCredentialsError CredentialUnavailableError "
    "DefaultCredentialsError",
    NO_BUCKET: "NoSuchBucket ContainerNotFound ContainerBeingDeleted",
    Cause("that this machine's clock is wrong", "Set the clock (NTP)"): "RequestTimeTooSkewed",
    Cause(
        "that the bucket is in another region",
        "Set AWS_DEFAULT_REGION to the region of the bucket, or check the endpoint",
    ): "PermanentRedirect TemporaryRedirect AuthorizationHeaderMalformed "
    "IllegalLocationConstraintException 301",
    Cause(
        "a store that does not know this kind of request",
        "packstore needs conditional puts to commit: name another store, or a newer release of it",
    ): "NotImplemented 501",
    Cause("an object in an archive", "Restore it to a class that can be read"): "BlobArchived "
    "InvalidObjectState",
    Cause("no space left in the store", _OTHER_PLACE): "QuotaExceeded StorageFull 507 "
    "XMinioStorageFull",
    Cause(
        "a certificate that is not trusted", "Check the endpoint, or name the certificates to trust"
    ): "ClientConnectorCertificateError",
    Cause("a failure of TLS", "Check the endpoint: http or https?"): "SSLError "
    "ClientConnectorSSLError",
    Cause("no space left on the device", _OTHER_PLACE): "ENOSPC",
    Cause("File too large", "Raise the limit on file sizes (ulimit -f)"): "EFBIG",
    Cause("disk quota exceeded", _OTHER_PLACE): "EDQUOT",
    Cause("a read-only filesystem", "Name another place"): "EROFS",
    Cause("no such file or folder", "Check the path", False): "FileNotFoundError",
    Cause(
        "permission denied", "Check the rights of the folder, or the credentials"
    ): "PermissionError",
    Cause("a file where a folder must be", "Name another folder", False): "NotADirectoryError",
    Cause("a folder where a file must be", "Name a file", False): "IsADirectoryError",
}
_CAUSES = {name: cause for cause, names in _NAMED.items() for name in names.split()}

_TEXTS: tuple[tuple[str, Cause], ...] = (
    (
        "requester pays",
        Cause("a bucket that lets the requester pay", "Add the storage option requester_pays=true"),
    ),
    ("Forbidden: ", DENIED),  # gcsfs gives nothing else
    ("Invalid bucket name", Cause("a bucket name that cannot be", "Check it", False)),
)


def cause_of(error: BaseException) -> Cause | None:
    """Returns the cause of a client's error; None if it is not in the table.

    Of the whole chain of causes the most specific name counts: a text, a code, a class, …
    """
    chain = list(_chain(error))
    for link in chain:
        if isinstance(link, socket.gaierror):
            passing = True if link.errno == socket.EAI_AGAIN else None
            return _UNREACHABLE._replace(what="no such host", passing=passing)
        for part, cause in _TEXTS:
            if part in str(link):
                return cause
    for kind in zip(*map(_names, chain), strict=True):
        for name in itertools.chain(*kind):
            if name in _CAUSES:
                return _CAUSES[name]
    return None


def is_passing(error: BaseException) -> bool:
    """Returns True if a retry helps: throttling, server errors, lost connections."""
    cause = cause_of(error)
    return cause is not None and cause.passing is True


def code_of(error: BaseException) -> str | None:
    """Returns the store's error code (``NoSuchBucket``); None if there is none."""
    return next((code for link in _chain(error) if (code := _code(link))), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and its causes, the one raised last first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


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
    values = (str(getattr(holder, name, "")) for holder in (error, answer) for name in names)
    return next(filter(str.isdecimal, values), "")
