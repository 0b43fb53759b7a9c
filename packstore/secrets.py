"""Hide logins, keys and tokens of URLs, options and environments in shown texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote as percent_encode

from packstore.errors import logins

_SECRET_NAME = re.compile(
    r"key|secret|token|pass|cred|sas|auth|connection|headers|cookie|sig", re.I
)
"""Part of the name of an option that may hold a secret."""

_SECRET_FORM = re.compile(
    r"(?P<name>(?:AccountKey|SharedAccessSignature|X-Amz-(?:Signature|Credential|Security-Token)"
    r"|[?&;](?:sig|token|access_token|password)|Authorization|aws_secret_access_key|aws_session_token)\s*[=:]\s*(?:(?:Bearer|Basic)\s+)?"
    r"|Bearer\s+|://|(?=\bhf_[A-Za-z0-9]{16}))"
    r"(?P<value>(?<=://)[^/\s]+(?=@)|(?<!://)[^&;\s'\",)]+)",
    re.I,
)
"""Secrets that are recognized by the words before them, such as ``Authorization:``.

Clients show them in messages. They are not among the storage options, but come from the
environment, a profile, or a signed URL.
"""

_LOGIN = re.compile(r"[^\s'\"<>]*(?::|//)[^\s'\"<>]*(?=@|%40)", re.I)
"""User and password, with the scheme before them: a password may hold a slash or an @.
"""


class Secrets:
    """The secrets in the URL and the storage options of a location."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        secrets = {*_secrets_of_url(url), *_secrets_of_options(options)}
        spellings = secrets | {percent_encode(secret, safe="") for secret in secrets}
        # One secret may be a part of another: the longer one must be replaced first.
        self._longest_first = sorted(spellings, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Return `text` with every secret replaced."""
        for secret in self._longest_first:
            text = text.replace(secret, "***")
        return _SECRET_FORM.sub(r"\g<name>***", text)

    def hide_in(self, error: BaseException) -> BaseException:
        """Return an error that shows no secrets; see :func:`_hide_in_error`."""
        return _hide_in_error(error, self.hide)


def client_text(text: object) -> str:
    """Return a text of a client of the hub or of a tracker, without secrets.

    Clients repeat names, which may be URLs by mistake, the endpoint with its login, and
    headers.
    """
    return _LOGIN.sub("***", _SECRET_FORM.sub(r"\g<name>***", str(text)))


def client_cause(error: BaseException) -> BaseException:
    """Return an error of a client, or a copy of it that shows no secrets."""
    return _hide_in_error(error, client_text)


def _hide_in_error(error: BaseException, hide: Callable[[str], str]) -> BaseException:
    """Return the error itself if neither it nor a cause of it shows secrets.

    Else return an error without causes, of the nearest builtin subclass of OSError, or
    Exception, with the class and the message of the original.
    """
    if all(hide(str(link)) == str(link) for link in chain_of(error)):
        return error
    kind = _builtin_os_error(error) or Exception
    return kind(f"{type(error).__name__}: {hide(str(error))}")


def _builtin_os_error(error: BaseException) -> type[OSError] | None:
    """Return the most specific builtin class of an OSError."""
    for kind in type(error).__mro__:
        if kind.__module__ == "builtins" and issubclass(kind, OSError):
            return kind
    return None


def _secrets_of_url(url: str) -> Iterator[str]:
    parts = logins(url)
    for part in parts:
        if part.login:
            yield part.login
            yield from _secrets_of_password(part.login.partition(":")[2])
        query = part.suffix[1:]
        if query:
            yield query
    if any(part.login and not part.location for part in parts):
        # The end of the login is unknown: hide all that may belong to it or to a query.
        for piece in re.split("[@&]", url.partition("?")[2]):
            if len(piece) > 2:
                yield piece


def _secrets_of_password(password: str) -> Iterator[str]:
    if password:
        yield password
    # Clients may split a login at other characters than its author, and show the parts.
    for piece in re.split("[@:/?#]", password):
        if len(piece) > 2:
            yield piece


def without_secrets(options: Any) -> Any:
    """Return nested options without the ones that may be secrets, by their names."""
    if not isinstance(options, Mapping):
        return options
    return {
        str(name): without_secrets(value)
        for name, value in options.items()
        if not _SECRET_NAME.search(str(name))
    }


def _secrets_of_options(options: Any, is_secret: bool = False) -> Iterator[str]:
    """Yield all texts in nested options that may be secrets, by their names."""
    if isinstance(options, Mapping):
        for name, value in options.items():
            has_secret_name = _SECRET_NAME.search(str(name)) is not None
            yield from _secrets_of_options(value, is_secret or has_secret_name)
    elif isinstance(options, list | tuple):
        for value in options:
            yield from _secrets_of_options(value, is_secret)
    elif is_secret and len(str(options)) > 3:
        yield str(options)
        # A connection string or a signature has several parts.
        for part in re.split(r"[;&]", str(options)):
            name, _, value = part.partition("=")
            if len(value) > 3 and _SECRET_NAME.search(name):
                yield value


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its cause, the cause of that, and so on."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        if link.__cause__ is not None:
            link = link.__cause__
        elif link.__suppress_context__:
            link = None
        else:
            link = link.__context__
