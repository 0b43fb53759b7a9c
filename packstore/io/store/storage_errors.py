"""Turns errors of filesystems into one-line storage errors without secrets."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from packstore.errors import (
    MissingExtraError,
    PackstoreError,
    StorageError,
    display,
    logins,
    sentence,
)
from packstore.io.store.clients import BUCKETS, EXTRAS
from packstore.io.store.error_causes import DENIED, NO_BUCKET, Cause, cause_of, code_of
from packstore.io.store.redact import Secrets
from packstore.registry import missing_extra

_PAYER = "if its bucket lets the requester pay, add the storage option requester_pays=true"


def named_place(url: str) -> str:
    """Returns `url`; raises where a filesystem would open another place than intended.

    Raises:
        StorageError: it is empty (the current folder), or its login contains ``/``, ``?`` or
            ``#``, so that part of the password would be read as the host.
    """
    if not url:
        must, do = "a place must have a name", "Write . for the current folder"
        raise StorageError(sentence("storage", must, "none", do))
    if any(login.cut for login in logins(url)):
        must = "a login in a URL must not hold a slash, question mark or hash"
        do = "Write %2F, %3F or %23 for it, and %40 for an @ behind the host and its port"
        raise StorageError(sentence(display(url), must, "one", do))
    return url


@contextlib.contextmanager
def as_storage_errors(verb: str, url: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Turns all errors of a filesystem in this context into a :class:`StorageError`.

    `verb` is ``open``, ``read``, ``write``, ``list`` or ``remove``; secrets in `url` and `options`
    are removed from the text.
    """
    try:
        yield
    except PackstoreError:
        raise
    except Exception as error:
        raise _storage_error(error, verb, url, options) from Secrets(url, options).hide_in(error)


def missing_filesystem(url: str, error: ImportError) -> MissingExtraError:
    """Returns the error for a missing filesystem package, with the command that installs it."""
    scheme = url.partition("://")[0].rsplit("::", 1)[-1]
    if scheme in EXTRAS:
        cause = error.__cause__ if isinstance(error.__cause__, ImportError) else error
        return missing_extra(f"{scheme}:// storage", EXTRAS[scheme], cause)
    must = "the package of its filesystem must be installed"
    return MissingExtraError(sentence(display(url), must, str(error)))


def means_exists(error: BaseException) -> bool:
    """Returns True if a create-only put failed because the file exists.

    s3fs raises a bare OSError(EINVAL) when the server's 412 response names no condition; the code
    is then in its cause, the client's error.
    """
    exists = isinstance(error, FileExistsError)
    return exists or code_of(error) in ("PreconditionFailed", "412")


def _storage_error(
    error: Exception, verb: str, url: str, options: Mapping[str, Any]
) -> StorageError:
    cause, code = cause_of(error), code_of(error)
    scheme = url.partition("://")[0]
    if cause is None:
        text = (error.strerror if isinstance(error, OSError) else None) or str(error)
        text = Secrets(url, options).hide(text)
        cause = Cause(f"{type(error).__name__}: {text or 'no further text'}")
    elif cause.what == "no such file or folder" and verb == "write" and scheme in BUCKETS:
        cause = NO_BUCKET  # a put needs nothing else to exist
    elif cause is DENIED and EXTRAS.get(scheme) in ("s3", "gcs"):
        cause = cause._replace(do=f"{cause.do}; {_PAYER}")
    what = f"{cause.what} ({code})" if code and cause.do else cause.what
    named = StorageError(sentence(display(url), f"cannot {verb}", what, cause.do))
    named.passing = cause.passing
    return named
