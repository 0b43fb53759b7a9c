"""Why a store refuses: what its client raised, read as a cause with a remedy.

Every client has errors of its own, some of them wrapped twice. What they have in common is a code
of the store, an HTTP status, or the name of the exception; these are looked for along the chain of
causes, so that no client need be imported. Codes: the S3 API's list of error responses, Azure's
Blob service error codes, and the statuses that Google's JSON API documents.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from typing import NamedTuple


class Cause(NamedTuple):
    """What is wrong, and what to do about it; `passing` if it may be gone in a moment."""

    what: str
    do: str = ""
    passing: bool = False


_THROTTLED = Cause(
    "that it throttles",
    "Run again later, make fewer requests at a time, or be more patient (storage options "
    "retry_attempts, retry_seconds)",
    True,
)
_FAILING = Cause("an error inside the store", "Run again later, or ask who operates it", True)
_UNREACHABLE = Cause(
    "no connection", "Check the network, the endpoint and the proxy settings", True
)
_TIMEOUT = Cause("no answer in time", "Check the network, or run again later", True)
_CUT = Cause("an answer that ended too early", "Check the network, or run again later", True)
_DAMAGED = Cause(
    "bytes that were damaged on the way", "Check the network, or run again later", True
)
DENIED = Cause("permission denied", "Check that these credentials may do this here")
_UNKNOWN_KEYS = Cause(
    "credentials that the store does not accept", "Check the key, the secret and the endpoint"
)
_EXPIRED = Cause("credentials that have expired", "Log in again, or renew the token")
_NO_KEYS = Cause(
    "no credentials",
    "Set them in the environment or a profile, or add the storage option anon=true for public data",
)
NO_BUCKET = Cause("no such bucket", "Check its name, or make it first")
_CLOCK = Cause("that this machine's clock is wrong", "Set the clock (NTP)")
_REGION = Cause(
    "that the bucket is in another region",
    "Set AWS_DEFAULT_REGION to the region of the bucket, or check the endpoint",
)
_PAYS = Cause("a bucket that lets the requester pay", "Add the storage option requester_pays=true")
_NO_CONDITION = Cause(
    "a store that does not know this kind of request",
    "packstore needs conditional puts to commit: name another store, or a newer release of it",
)
_FROZEN = Cause("an object in an archive", "Restore it to a class that can be read")
_FULL = Cause("no space left in the store", "Free some space or name another place")


def _all(names: str, cause: Cause) -> dict[str, Cause]:
    return dict.fromkeys(names.split(), cause)


_CODES: dict[str, Cause] = {
    **_all(
        "SlowDown Throttling ThrottlingException RequestLimitExceeded TooManyRequests "
        "TooManyRequestsException BandwidthLimitExceeded ServerBusy",
        _THROTTLED,
    ),
    **_all(
        "InternalError ServiceUnavailable OperationAborted ConditionalRequestConflict",
        _FAILING,
    ),
    **_all("RequestTimeout OperationTimedOut", _TIMEOUT),
    "IncompleteBody": _CUT,
    **_all("BadDigest XAmzContentChecksumMismatch XAmzContentSHA256Mismatch", _DAMAGED),
    **_all(
        "AccessDenied AllAccessDisabled AuthorizationFailure AuthorizationPermissionMismatch "
        "InsufficientAccountPermissions InvalidPayer",
        DENIED,
    ),
    **_all(
        "InvalidAccessKeyId SignatureDoesNotMatch InvalidToken InvalidSecurity "
        "AuthenticationFailed InvalidAuthenticationInfo",
        _UNKNOWN_KEYS,
    ),
    **_all("ExpiredToken ExpiredTokenException TokenRefreshRequired RequestExpired", _EXPIRED),
    **_all("NoSuchBucket ContainerNotFound ContainerBeingDeleted", NO_BUCKET),
    "RequestTimeTooSkewed": _CLOCK,
    **_all(
        "PermanentRedirect TemporaryRedirect AuthorizationHeaderMalformed "
        "IllegalLocationConstraintException 301",
        _REGION,
    ),
    **_all("NotImplemented 501", _NO_CONDITION),
    **_all("InvalidObjectState BlobArchived", _FROZEN),
    **_all("QuotaExceeded StorageFull XMinioStorageFull", _FULL),
}
_STATUS: dict[int, Cause] = {
    401: _UNKNOWN_KEYS,
    403: DENIED,
    408: _TIMEOUT,
    429: _THROTTLED,
    500: _FAILING,
    502: _FAILING,
    503: _THROTTLED,
    504: _TIMEOUT,
    507: _FULL,
}
_ERRNOS: dict[int, Cause] = {
    **dict.fromkeys(
        (
            errno.ECONNREFUSED,
            errno.ECONNRESET,
            errno.ECONNABORTED,
            errno.EPIPE,
            errno.EHOSTUNREACH,
            errno.ENETUNREACH,
            errno.ENETDOWN,
        ),
        _UNREACHABLE,
    ),
    errno.ETIMEDOUT: _TIMEOUT,
    errno.ENOSPC: Cause("no space left on the device", "Free some space or name another place"),
    errno.EFBIG: Cause("File too large", "Raise the limit on file sizes (ulimit -f)"),
    errno.EDQUOT: Cause("disk quota exceeded", "Free some space or name another place"),
    errno.EROFS: Cause("a read-only filesystem", "Name another place"),
}
# Exceptions of clients, by name; the most telling first.
_NAMES: dict[str, Cause] = {
    "ClientConnectorCertificateError": Cause(
        "a certificate that is not trusted", "Check the endpoint, or name the certificates to trust"
    ),
    "SSLError": Cause("a failure of TLS", "Check the endpoint: http or https?"),
    "ClientConnectorSSLError": Cause("a failure of TLS", "Check the endpoint: http or https?"),
    "NoCredentialsError": _NO_KEYS,
    "PartialCredentialsError": _NO_KEYS,
    "CredentialUnavailableError": _NO_KEYS,
    "DefaultCredentialsError": _NO_KEYS,
    "ClientAuthenticationError": _UNKNOWN_KEYS,
    "RefreshError": _EXPIRED,
    "FlexibleChecksumError": _DAMAGED,
    **_all(
        "ClientPayloadError IncompleteRead IncompleteReadError ResponseStreamingError "
        "ChunkedEncodingError ContentLengthError ResponseParserError ContentDecodingError "
        "ChecksumError",
        _CUT,
    ),
    **_all(
        "ReadTimeoutError ConnectTimeoutError ServerTimeoutError FSTimeoutError ReadTimeout "
        "Timeout ServiceResponseTimeoutError",
        _TIMEOUT,
    ),
    **_all(
        "EndpointConnectionError ConnectionClosedError ClientConnectionError "
        "ServerDisconnectedError ClientConnectorError HTTPClientError ServiceRequestError "
        "ServiceResponseError ProxyError RemoteDisconnected",
        _UNREACHABLE,
    ),
}
_TYPES: tuple[tuple[type[BaseException], Cause], ...] = (
    (FileNotFoundError, Cause("no such file or folder", "Check the path")),
    (
        PermissionError,
        Cause("permission denied", "Check the rights of the folder, or the credentials"),
    ),
    (NotADirectoryError, Cause("a file where a folder must be", "Name another folder")),
    (IsADirectoryError, Cause("a folder where a file must be", "Name a file")),
    (ConnectionError, _UNREACHABLE),
    (TimeoutError, _TIMEOUT),
)
_TEXTS: tuple[tuple[str, Cause], ...] = (
    ("requester pays", _PAYS),
    ("Forbidden: ", DENIED),  # gcsfs, which tells nothing else
    ("Invalid bucket name", Cause("a bucket name that cannot be", "Check it")),
)


def cause_of(error: BaseException) -> Cause | None:
    """Why the store refused; None if nothing is known of such an error."""
    chain = list(_chain(error))
    for find in (_by_host, _by_text, _by_code, _by_name, _by_status, _by_errno, _by_type):
        for link in chain:
            if cause := find(link):
                return cause
    return None


def is_passing(error: BaseException) -> bool:
    """Whether it may help to ask again: throttling, an error of the server, a lost connection."""
    cause = cause_of(error)
    return cause is not None and cause.passing


def code_of(error: BaseException) -> str | None:
    """The store's own code for what it answered, if it gave one (``NoSuchBucket``)."""
    return next((code for link in _chain(error) if (code := _code(link))), None)


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error and what caused it: first is what was raised last."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _code(error: BaseException) -> str | None:
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):  # botocore
        return str(answer.get("Error", {}).get("Code") or "") or None
    code = getattr(error, "error_code", None)  # azure
    return str(getattr(code, "value", code)) if code else None


def _status(error: BaseException) -> int | None:
    answer = getattr(error, "response", None)
    if isinstance(answer, dict):  # botocore
        status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return status if isinstance(status, int) else None
    for holder in (error, answer):
        for name in ("status_code", "status", "code"):  # azure and requests, aiohttp, gcsfs
            status = getattr(holder, name, None)
            if isinstance(status, int) or (isinstance(status, str) and status.isdecimal()):
                return int(status)
    return None


def _by_text(error: BaseException) -> Cause | None:
    text = str(error)
    return next((cause for part, cause in _TEXTS if part in text), None)


def _by_code(error: BaseException) -> Cause | None:
    return _CODES.get(_code(error) or "")


def _by_status(error: BaseException) -> Cause | None:
    return _STATUS.get(_status(error) or 0)


def _by_name(error: BaseException) -> Cause | None:
    names = [c.__name__ for c in type(error).__mro__ if c.__module__ != "builtins"]
    return next((_NAMES[name] for name in names if name in _NAMES), None)


def _by_host(error: BaseException) -> Cause | None:
    if not isinstance(error, socket.gaierror):
        return None
    return _UNREACHABLE._replace(what="no such host", passing=error.errno == socket.EAI_AGAIN)


def _by_errno(error: BaseException) -> Cause | None:
    code = error.errno if isinstance(error, OSError) else None
    return _ERRNOS.get(code or 0)


def _by_type(error: BaseException) -> Cause | None:
    return next((cause for kind, cause in _TYPES if isinstance(error, kind)), None)
