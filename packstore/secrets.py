"""Hides logins, keys and tokens of URLs, options and environments in texts that are
shown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote as percent

from packstore.errors import logins

_NAME = re.compile(
    r"key|secret|token|pass|cred|sas|auth|connection|headers|cookie|sig", re.I
)
# Patterns of secrets in messages of clients that were not given as options: they came
# from the environment, a profile, or a signed URL.
_FORMS = re.compile(
    r"(?P<name>(?:AccountKey|SharedAccessSignature|X-Amz-(?:Signature|Credential|Security-Token)"
    r"|[?&;](?:sig|token|access_token|password)|Authorization|aws_secret_access_key|aws_session_token)\s*[=:]\s*(?:(?:Bearer|Basic)\s+)?"
    r"|Bearer\s+|://|(?=\bhf_[A-Za-z0-9]{16}))"
    r"(?P<value>(?<=://)[^/\s]+(?=@)|(?<!://)[^&;\s'\",)]+)",
    re.I,
)
_LOGIN = re.compile(r"[^\s'\"<>]*(?::|//)[^\s'\"<>]*(?=@|%40)", re.I)
"""User and password, with the scheme before them: a password may hold a slash or an @.
"""


class Secrets:
    """The secrets in the URL and the storage options of a location."""

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        texts = {*_of_url(url), *_of_options(options)}
        forms = {form for text in texts for form in (text, percent(text, safe=""))}
        self._texts = sorted(forms, key=len, reverse=True)

    def hide(self, text: str) -> str:
        """Returns `text` with every secret replaced."""
        for secret in self._texts:
            text = text.replace(secret, "***")
        return _FORMS.sub(r"\g<name>***", text)

    def hide_in(self, error: BaseException) -> BaseException:
        """Returns the error; if it or a cause has secrets, a copy of its builtin kind
        without.
        """
        return _without(self.hide, error)


def client_text(said: object) -> str:
    """Return the text of a client of the hub or of a tracker, or a name given to it,
    for showing.

    Clients repeat names, which may be URLs by mistake, the endpoint with its login, and
    headers.
    """
    return _LOGIN.sub("***", _FORMS.sub(r"\g<name>***", str(said)))


def client_cause(error: BaseException) -> BaseException:
    """Return the error of such a client, or a copy without its secrets."""
    return _without(client_text, error)


def _without(hide: Callable[[str], str], error: BaseException) -> BaseException:
    """Return the error; if it or a cause has secrets, a copy of its builtin kind
    without.
    """
    if all(hide(str(link)) == str(link) for link in chain_of(error)):
        return error
    kinds = (k for k in type(error).__mro__ if k.__module__ == "builtins")
    kind = next((k for k in kinds if issubclass(k, OSError)), Exception)
    return kind(f"{type(error).__name__}: {hide(str(error))}")


def _of_url(url: str) -> Iterator[str]:
    for _, login, _, more, *_ in logins(url):
        if login:
            yield login
            password = login.partition(":")[2]
            # Clients may split a login at other characters than its author, and show
            # the parts.
            pieces = [p for p in re.split("[@:/?#]", password) if len(p) > 2]
            yield from filter(None, (password, *pieces))
        if len(more) > 1:
            yield more[1:]
    if any(login.login and not login.rest for login in logins(url)):
        # The end of the login is unknown: hide all that may belong to it or to a query.
        yield from (p for p in re.split("[@&]", url.partition("?")[2]) if len(p) > 2)


def without_secrets(options: Any) -> Any:
    """Returns nested options without those whose names suggest a secret."""
    if not isinstance(options, Mapping):
        return options
    kept = {str(k): v for k, v in options.items() if not _NAME.search(str(k))}
    return {name: without_secrets(value) for name, value in kept.items()}


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


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """Yields the error and its causes, the one raised last first."""
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        yield link
        link = link.__cause__ or (
            None if link.__suppress_context__ else link.__context__
        )
