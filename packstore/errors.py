"""The exceptions that packstore raises on purpose.

::

    PackstoreError
    ├── ConfigError (ValueError)
    │   └── UnknownNameError (LookupError)
    ├── MissingExtraError (ImportError)
    ├── InputError (ValueError)
    │   └── RecordError
    ├── DropRateError (ValueError)
    ├── TokenizerError (ValueError)
    │   └── WrongEngineError
    ├── StorageError (OSError)
    │   ├── DatasetBusyError (BlockingIOError)
    │   ├── DatasetExistsError (FileExistsError)
    │   ├── DatasetNotFoundError (FileNotFoundError)
    │   └── MissingFilesError (FileNotFoundError)
    ├── FormatError (ValueError)
    │   ├── IntegrityError
    │   └── UnsupportedFormatError
    ├── CompatibilityError (ValueError)
    ├── DivergedError (ArithmeticError)
    ├── WorkerError (RuntimeError)
    └── BackendError (RuntimeError)

The docstring of a class describes when it is raised. A message is one line of four
parts: the place, the rule, the value that breaks it, and a remedy; :func:`sentence`
joins them. Callers add context as notes (the row group being read, the number of
attempts); :func:`message_with_notes` returns both.
"""

from __future__ import annotations

import html
import re
from typing import NamedTuple

CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def sentence(where: str, rule: str, found: str = "", remedy: str = "") -> str:
    """Return one line of the form ``where: rule; found X. Remedy.``

    Line breaks and control characters in the parts, which may quote user data, are
    replaced, and very long parts are truncated: the message is one line.

    Args:
        where: file, record, setting or argument.
        rule: the rule that is broken, such as ``must be a folder``.
        found: the value that breaks it, or "".
        remedy: a way out, as an instruction, or "".
    """
    text = f"{_one_line(where)}: {_one_line(rule)}"
    if found:
        text += f"; found {_one_line(found)}"
    text = text.rstrip(".") + "."
    if remedy:
        # Settings of a remedy are to be copied, so that it is hardly ever truncated.
        text += f" {_one_line(remedy, limit=3000).rstrip('.')}."
    return text


def refuse_pointer(start: bytes, where: str, kind: type[PackstoreError]) -> None:
    """Raise `kind` for the pointer that Git LFS leaves in place of a file.

    Args:
        start: the first bytes of the file.
    """
    if start.startswith(b"version https://git-lfs"):
        raise kind(
            sentence(
                where,
                rule="must be the file itself",
                found="the pointer that Git LFS left in its place",
                remedy="Run git lfs pull",
            )
        )


def add_place(error: BaseException, place: str) -> None:
    """Add a note, once, of the part of the file that was being read."""
    note = f"While reading {place}."
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def message_with_notes(error: BaseException) -> str:
    """Return the message of an error and its notes, on one line."""
    return " ".join([str(error), *getattr(error, "__notes__", ())])


def quote(value: object, limit: int = 60) -> str:
    """Return `value` as a short, quoted, printable excerpt for an error message."""
    if isinstance(value, str) and not value.isprintable():
        text = ascii(value)
    else:
        text = repr(value)
    return _truncate(text, limit)


def visible(text: str) -> str:
    """Escape control characters of `text`, except tab and newline, as ``\\x1b``,
    ``\\u202e``.

    A terminal would execute them: clear the screen, set the clipboard, hide text, or
    show the end of the line in another order. YAML reads these escapes in quotes.
    """
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def visible_line(text: str) -> str:
    """Escape control characters and newlines: no part of `text` looks like another
    line.
    """
    return visible(text).replace("\n", "\\n")


def markdown_text(value: object) -> str:
    """Return one line of Markdown that shows `value` as it is: no HTML, link, picture
    or column.
    """
    line = re.sub(r"\s+", " ", visible(str(value))).strip()
    # CommonMark takes an escaped punctuation character literally; :// would make a bare
    # link.
    return re.sub(r"[\\`*\[\]|!]|:(?=//)", r"\\\g<0>", html.escape(line, quote=False))


def to_unicode(path: str) -> str:
    """Return `path` as valid Unicode.

    If the locale is not UTF-8, Python decodes undecodable bytes of a file name to lone
    surrogates, which neither manifests nor UTF-8 streams can hold.
    """
    try:
        return path.encode(errors="surrogateescape").decode(errors="replace")
    except UnicodeEncodeError:  # other surrogates, which do not come from a file name
        return path.encode(errors="replace").decode()


class Login(NamedTuple):
    """One part of a chained URL, split at the login before its host.

    Attributes:
        scheme: with ``://``, or with the characters mistyped for it; "": the part is no
            URL.
        login: user and password, up to the last ``@`` that may end them.
        location: host and path; "": the end of the login is ambiguous.
        suffix: query, fragment or session id after the path, with the character before
            it.
        has_early_end: the login holds a ``/``, ``?`` or ``#``, where clients end it too
            early.
        is_mistyped: the part resembles a URL, but is a local path.
    """

    scheme: str
    login: str
    location: str
    suffix: str = ""
    has_early_end: bool = False
    is_mistyped: bool = False


def logins(url: str) -> list[Login]:
    """Split a URL, which may be a chain joined by ``::``, into its parts.

    A password may contain ``@`` and, by mistake, ``/``, so that its end is unknown:
    everything up to the last ``@`` counts as login, even after a possible port. An
    ``@`` in a path after a host without login does not.
    """
    parts = re.split(r"::(?=[A-Za-z][A-Za-z0-9+.-]*:/)", url)
    return [_split_login(part) for part in parts]


def display(url: str) -> str:
    """Return the URL to be shown: without login, query string, fragment and session
    id.
    """
    parts = logins(to_unicode(url))
    return "::".join(part.scheme + (part.location or "***") for part in parts)


def is_mistyped(url: str) -> bool:
    """Return True if a part of `url` resembles a URL, but is a local path."""
    return any(part.is_mistyped for part in logins(url))


_MISTYPED_SCHEME = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)"  # http:/host
    r"|(?:https?|ftp|s3a?|gc?s|az|abfss?)(?:/{2,}|:/{3,})"  # http//host, http:///host
    r"|/{2,}(?=.*@)",  # //user:password@host
    re.DOTALL,
)

_STORE_SCHEMES = {
    "s3",
    "s3a",
    "gs",
    "gcs",
    "az",
    "abfs",
    "abfss",
    "file",
    "local",
    "memory",
    "hf",
}
"""Schemes of stores whose keys may hold ``#`` and ``;``."""

_HOST = re.compile(r"[^:]*|(?:[^:@]*@)?\[[0-9A-Fa-f:.%]*\](?::[0-9]*)?")
"""A host without password or port; of IPv6 also with a port, which resembles a
password.
"""


def _split_login(part: str) -> Login:
    mistyped = _MISTYPED_SCHEME.match(part)
    if mistyped is not None:
        scheme = mistyped[0]
    elif "://" in part:
        scheme = part[: part.index("://") + 3]
    else:
        return Login(scheme="", login="", location=part)
    address = part[len(scheme) :]

    login = ""
    has_early_end = False
    host = re.split("[/?#]", address, maxsplit=1)[0]
    if _HOST.fullmatch(host):
        login, _, host_only = host.rpartition("@")
        address = host_only + address[len(host) :]
    elif "@" in address:
        login, _, address = address.rpartition("@")
        has_early_end = "@" not in host
        if "?" in login:
            # The last @ may belong to the query, and a secret may follow it.
            address = ""

    is_store = scheme.partition(":")[0].lower() in _STORE_SCHEMES
    location = re.split("[?]" if is_store else "[?#;]", address, maxsplit=1)[0]
    return Login(
        scheme=scheme,
        login=login,
        location=location,
        suffix=address[len(location) :],
        has_early_end=has_early_end,
        is_mistyped=mistyped is not None,
    )


def _one_line(text: str, limit: int = 600) -> str:
    line = "".join(c if c.isprintable() else " " for c in to_unicode(text))
    return _truncate(line, limit)


def _truncate(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


class PackstoreError(Exception):
    """Base class of every error that packstore raises on purpose."""


class ConfigError(PackstoreError, ValueError):
    """A setting is invalid, or contradicts another."""


class UnknownNameError(ConfigError, LookupError):
    """A name that the registry does not hold."""


class MissingExtraError(PackstoreError, ImportError):
    """An optional dependency is not installed."""


class InputError(PackstoreError, ValueError):
    """An input file cannot be read, or breaks the rules of its format."""


class RecordError(InputError):
    """A record breaks a rule, and the job is set to stop then (``on``: ``error``)."""


class DropRateError(PackstoreError, ValueError):
    """More records were dropped than the job allows."""


class TokenizerError(PackstoreError, ValueError):
    """A tokenizer or a chat template does not load, or misbehaves."""


class WrongEngineError(TokenizerError):
    """A faster engine returns other token ids than the reference.

    Attributes:
        tokenizer: sha256 of the tokenizer file.
    """

    tokenizer: str = ""


class StorageError(PackstoreError, OSError):
    """A store refuses to read, write or list.

    Attributes:
        transient: True: a retry helps; False: it never does; None: it seldom does.
        written: True if the file is complete, but might not survive a power cut.
    """

    transient: bool | None = None
    written: bool = False

    @property
    def is_missing(self) -> bool:
        """True if a file does not exist."""
        return isinstance(self.__cause__, FileNotFoundError)


class DatasetBusyError(StorageError, BlockingIOError):
    """A job of this machine is writing to a place declared to have no writer."""


class DatasetExistsError(StorageError, FileExistsError):
    """The place already holds a committed dataset."""


class DatasetNotFoundError(StorageError, FileNotFoundError):
    """The place holds no committed dataset."""


class MissingFilesError(StorageError, FileNotFoundError):
    """A committed version names files that are absent, or have another size."""

    transient: bool | None = False


class FormatError(PackstoreError, ValueError):
    """Stored bytes do not follow the format."""


class IntegrityError(FormatError):
    """A hash, checksum or count differs from the recorded one."""


class UnsupportedFormatError(FormatError):
    """The dataset needs a newer reader, or one with a higher limit."""


class CompatibilityError(PackstoreError, ValueError):
    """Two valid inputs do not fit each other."""


class DivergedError(PackstoreError, ArithmeticError):
    """The loss or gradient of a training is not finite."""


class WorkerError(PackstoreError, RuntimeError):
    """A process that reads for this one has died."""


class BackendError(PackstoreError, RuntimeError):
    """An attention backend does not support its inputs."""
