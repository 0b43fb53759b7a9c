"""What filesystems raise, as one-line storage errors without secrets."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Iterator, Mapping
from typing import Any

from packstore.errors import MissingExtraError, PackstoreError, StorageError, sentence
from packstore.registry import missing_extra

_EXTRAS = {
    **dict.fromkeys(("s3", "s3a"), "s3"),
    **dict.fromkeys(("gs", "gcs"), "gcs"),
    **dict.fromkeys(("az", "abfs", "abfss", "adl"), "azure"),
    **dict.fromkeys(("http", "https"), "http"),
}
_SECRET = re.compile(r"key|secret|token|pass|cred|sas|auth|connection|headers|cookie", re.I)
_CAUSES: tuple[tuple[type[Exception] | int, str, str], ...] = (
    (FileNotFoundError, "no such file or folder", "Check the path"),
    (PermissionError, "permission denied", "Check the rights of the folder, or the credentials"),
    (NotADirectoryError, "a file where a folder must be", "Name another folder"),
    (IsADirectoryError, "a folder where a file must be", "Name a file"),
    (errno.ENOSPC, "no space left on the device", "Free some space or name another place"),
    (errno.EDQUOT, "disk quota exceeded", "Free some space or name another place"),
    (errno.EROFS, "a read-only filesystem", "Name another place"),
)


@contextlib.contextmanager
def guarded(verb: str, url: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Turns whatever a filesystem raises inside into a :class:`StorageError`.

    Args:
        verb: what is being done: ``open``, ``read``, ``write``, ``list`` or ``remove``.
        url: to what.
        options: the storage options, whose secrets must not be told.
    """
    try:
        yield
    except PackstoreError:
        raise
    except Exception as error:
        raise _storage_error(error, verb, url, options) from error


def only_regular(path: str) -> str:
    """`path`, unless a device or pipe is there, which may give bytes without end, or wait for them.

    A link is followed: caches of downloads are made of them, and hashes tell what may be read.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise OSError(errno.EINVAL, "a device or pipe where a file must be")
    return path


def missing_filesystem(url: str, error: ImportError) -> MissingExtraError:
    """The error for a URL whose filesystem package is not installed, with the install line."""
    scheme = url.partition("://")[0].rsplit("::", 1)[-1]
    if scheme in _EXTRAS:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        return missing_extra(f"{scheme}:// storage", _EXTRAS[scheme], cause)
    return MissingExtraError(
        sentence(display(url), "the package of its filesystem must be installed", str(error))
    )


def means_exists(error: BaseException) -> bool:
    """Whether a create-only put was refused because something is there.

    s3fs raises a bare OSError(EINVAL) when the 412 answer of the server names no condition; the
    code is then in the client's error behind it.
    """
    if isinstance(error, FileExistsError):
        return True
    answer = getattr(error.__cause__, "response", None)
    code = answer.get("Error", {}).get("Code") if isinstance(answer, dict) else None
    return code in ("PreconditionFailed", "ConditionalRequestConflict", "412")


def display(url: str) -> str:
    """The URL without user, password and query string: for messages and manifests."""
    if "://" not in url:
        return url
    return re.sub(r"(?<=://)[^/@]*@", "", url.partition("?")[0])


def _storage_error(
    error: Exception, verb: str, url: str, options: Mapping[str, Any]
) -> StorageError:
    code = error.errno if isinstance(error, OSError) else None
    for cause, what, remedy in _CAUSES:
        if code == cause if isinstance(cause, int) else isinstance(error, cause):
            return StorageError(sentence(display(url), f"cannot {verb}", what, remedy))
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    for secret in _secrets(options) | _url_secrets(url):
        text = text.replace(secret, "***")
    found = f"{type(error).__name__}: {text or 'no further text'}"
    return StorageError(sentence(display(url), f"cannot {verb}", found))


def _url_secrets(url: str) -> set[str]:
    login = re.search(r"://([^/@]+)@", url)
    query = url.partition("?")[2] if "://" in url else ""
    return {part for part in (login.group(1) if login else "", query) if part}


def _secrets(options: Any, hide: bool = False) -> set[str]:
    """All texts in nested options that stand under a name that looks like a secret."""
    if isinstance(options, Mapping):
        parts = (_secrets(v, hide or bool(_SECRET.search(str(k)))) for k, v in options.items())
        return set().union(*parts)
    if isinstance(options, list | tuple):
        return set().union(*(_secrets(v, hide) for v in options))
    return {str(options)} if hide and len(str(options)) > 3 else set()
