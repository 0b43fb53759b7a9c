"""Turns errors of filesystems into one-line storage errors without secrets."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote as percent

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
from packstore.registry import missing_extra

_NAME = re.compile(r"key|secret|token|pass|cred|sas|auth|connection|headers|cookie|sig", re.I)
_HIDDEN = "***"
# Patterns of secrets in messages of clients that were not given as options: they came from the
# environment, a profile, or a signed URL.
_FORMS = re.compile(
    r"(?P<name>(?:AccountKey|SharedAccessSignature|X-Amz-(?:Signature|Credential|Security-Token)"
    r"|[?&;]sig|Authorization|aws_secret_access_key|aws_session_token)\s*[=:]\s*"
    r"|Bearer\s+|://)"
    r"(?P<value>(?<=://)[^/\s]+(?=@)|(?<!://)[^&;\s'\",)]+)",
    re.I,
)

_PAYER = "if its bucket lets the requester pay, add the storage option requester_pays=true"


def named_place(url: str) -> str:
    """Returns `url`; refuses one where a filesystem would open another place than intended."""
    if not url:
        remedy = "Write . for the current folder"
        raise StorageError(sentence("storage", "a place must have a name", "none", remedy))
    if any(login.cut for login in logins(url)):
        rule = "a login in a URL must not hold a slash, question mark or hash"
        remedy = "Write %2F, %3F or %23 for it, and %40 for an @ behind the host and its port"
        raise StorageError(sentence(display(url), rule, "one", remedy))
    return url


@contextlib.contextmanager
def as_storage_errors(verb: str, url: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Turns all errors of a filesystem in this context into a :class:`StorageError`.

    `verb` is ``open``, ``read``, ``write``, ``list`` or ``remove``.
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
    rule = "the package of its filesystem must be installed"
    return MissingExtraError(sentence(display(url), rule, str(error)))


def means_exists(error: BaseException) -> bool:
    """Returns True if a create-only put failed as the file exists; s3fs raises a bare OSError."""
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


class Secrets:
    """The secrets in the URL and the storage options of a location."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        texts = {*_of_url(url), *_of_options(options)}
        forms = {form for text in texts for form in (text, percent(text, safe=""))}
        self._texts = sorted(forms, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Returns `text` with every secret replaced."""
        for secret in self._texts:
            text = text.replace(secret, _HIDDEN)
        return _FORMS.sub(lambda m: m["name"] + _HIDDEN, text)

    def hide_in(self, error: BaseException) -> BaseException:
        """Returns the error; if it or a cause has secrets, a copy of its builtin kind without."""
        link: BaseException | None = error
        while link is not None:
            if self.hide(str(link)) != str(link):
                kinds = (k for k in type(error).__mro__ if k.__module__ == "builtins")
                kind = next((k for k in kinds if issubclass(k, OSError)), Exception)
                return kind(f"{type(error).__name__}: {self.hide(str(error))}")
            link = link.__cause__ or link.__context__
        return error


def _of_url(url: str) -> Iterator[str]:
    for scheme, login, rest, _ in logins(url):
        if login:
            yield login
            password = login.partition(":")[2]
            # Clients may split a login at other characters than its author, and show the parts.
            pieces = [p for p in re.split("[@:/?#]", password) if len(p) > 2]
            yield from filter(None, (password, *pieces))
        if scheme and (query := rest.partition("?")[2]):
            yield query
    if any(login.login and not login.rest for login in logins(url)):
        # The end of the login is unknown: hide all that may belong to it or to a query.
        yield from (p for p in re.split("[@&]", url.partition("?")[2]) if len(p) > 2)


def _of_options(options: Any, hide: bool = False) -> Iterator[str]:
    """Yields all texts in nested options under names that suggest a secret."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            yield from _of_options(value, hide or bool(_NAME.search(str(key))))
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _of_options(value, hide)
    elif hide and len(str(options)) > 3:
        yield str(options)
        for part in re.split(r"[;&]", str(options)):  # a connection string, a signature
            name, _, value = part.partition("=")
            if len(value) > 3 and _NAME.search(name):
                yield value
