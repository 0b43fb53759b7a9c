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

Each class says when it is raised. A message is one line and says where, what must hold,
what was found, and what to do: :func:`sentence` joins those four parts. Callers add
context as notes (the row group being read, the number of attempts);
:func:`message_with_notes` returns both.
"""

from __future__ import annotations

import html
import re
from typing import NamedTuple

CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]"
)


def sentence(where: str, rule: str, found: str = "", remedy: str = "") -> str:
    """Returns one line of the form ``where: rule; found X. Remedy.``

    `found` and `remedy` may be empty. Line breaks and control characters in the parts,
    which may quote user data, are replaced, and very long parts are truncated: the
    message is one line.
    """
    text = f"{_one_line(where)}: {_one_line(rule)}"
    if found:
        text += f"; found {_one_line(found)}"
    text = text.rstrip(".") + "."
    # Settings of a remedy are typed as they stand: it is cut only where it would fill a
    # screen.
    return f"{text} {_one_line(remedy, 3000).rstrip('.')}." if remedy else text


def refuse_pointer(start: bytes, where: str, kind: type[PackstoreError]) -> None:
    """Raises `kind` if a file begins as what Git LFS leaves in place of one it did not
    download.
    """
    if start.startswith(b"version https://git-lfs"):
        found = "the pointer that Git LFS left in its place"
        raise kind(
            sentence(where, "must be the file itself", found, "Run git lfs pull")
        )


def add_place(error: BaseException, place: str) -> None:
    """Adds a note, once, of the part of the file that was being read."""
    note = f"While reading {place}."
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)


def message_with_notes(error: BaseException) -> str:
    """Returns the message of an error and its notes, on one line."""
    return " ".join([str(error), *getattr(error, "__notes__", ())])


def quote(value: object, limit: int = 60) -> str:
    """Returns `value` as a short, quoted, printable excerpt for an error message."""
    text = (
        ascii(value)
        if isinstance(value, str) and not value.isprintable()
        else repr(value)
    )
    return text if len(text) <= limit else text[: limit - 1] + "…"


def visible(text: str) -> str:
    """Escapes control characters of `text`, except tab and newline, as ``\\x1b``,
    ``\\u202e``.

    A terminal would execute them: clear the screen, set the clipboard, hide text, or
    show the rest of the line in another order. YAML reads these escapes in quotes.
    """
    return CONTROL.sub(lambda match: ascii(match[0])[1:-1], text)


def visible_line(text: str) -> str:
    """Escapes control characters and newlines: no part of `text` looks like another
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


def spelled(path: str) -> str:
    """Returns `path` as valid Unicode.

    If the locale is not UTF-8, Python decodes undecodable bytes of a file name to lone
    surrogates, which neither manifests nor UTF-8 streams can hold.
    """
    try:
        return path.encode(errors="surrogateescape").decode(errors="replace")
    except UnicodeEncodeError:  # other surrogates, which do not come from a file name
        return path.encode(errors="replace").decode()


class Login(NamedTuple):
    """One part of a chained URL, split at the login before its host."""

    scheme: str  # with ``://``, or what was mistyped for it; empty: the part is no URL
    login: str  # user and password, up to the last ``@`` that may end them
    rest: str  # host and path; empty: the end of the login is ambiguous
    more: str = (
        ""  # query, fragment or session id after the path, with the character before it
    )
    # True: the login has a ``/``, ``?`` or ``#``, where clients end it too early
    cut: bool = False
    mistyped: bool = False  # True: the part resembles a URL, and is a local path


def logins(url: str) -> list[Login]:
    """Splits a URL, which may be a chain joined by ``::``, into its parts.

    A password may contain ``@`` and, by mistake, ``/``, so that its end is unknown:
    everything up to the last ``@`` counts as login, even after a possible port. An
    ``@`` in a path after a host without login does not.
    """
    return [_login(part) for part in re.split(r"::(?=[A-Za-z][A-Za-z0-9+.-]*:/)", url)]


def display(url: str) -> str:
    """Returns the URL without login, query string, fragment and session id, to be
    shown.
    """
    return "::".join(
        part.scheme + (part.rest or "***") for part in logins(spelled(url))
    )


def is_mistyped(url: str) -> bool:
    """Returns True if a part of `url` resembles a URL, and is a local path."""
    return any(part.mistyped for part in logins(url))


_MISTYPED = re.compile(
    r"[A-Za-z][A-Za-z0-9+.-]+:/(?!/)"  # http:/host
    r"|(?:https?|ftp|s3a?|gc?s|az|abfss?)(?:/{2,}|:/{3,})"  # http//host, http:///host
    r"|/{2,}(?=.*@)",  # //user:password@host
    re.DOTALL,
)
_OF_KEYS = [
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
]
"""Schemes of stores in whose names ``#`` and ``;`` are characters like others."""
# A host without password or port; of IPv6 with a port, which resembles a password.
_HOST = re.compile(r"[^:]*|(?:[^:@]*@)?\[[0-9A-Fa-f:.%]*\](?::[0-9]*)?")


def _login(part: str) -> Login:
    scheme, colon, rest = part.partition("://")
    scheme += colon
    if mistyped := _MISTYPED.match(part):
        scheme, rest = mistyped[0], part[mistyped.end() :]
    elif not colon:
        return Login("", "", part)
    host = re.split("[/?#]", rest, maxsplit=1)[0]
    cut, login, name = False, "", rest
    if _HOST.fullmatch(host):
        login, _, name = host.rpartition("@")
        name += rest[len(host) :]
    elif "@" in rest:
        login, _, name = rest.rpartition("@")
        cut = "@" not in host
        # After a question mark, the last @ may belong to the query, and a secret may
        # follow it.
        name = "" if "?" in login else name
    ends = "[?]" if scheme.partition(":")[0].lower() in _OF_KEYS else "[?#;]"
    shown = re.split(ends, name, maxsplit=1)[0]
    return Login(scheme, login, shown, name[len(shown) :], cut, bool(mistyped))


def _one_line(text: str, limit: int = 600) -> str:
    flat = "".join(c if c.isprintable() else " " for c in spelled(text))
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


class PackstoreError(Exception):
    """Base class of every error that packstore raises on purpose."""


class ConfigError(PackstoreError, ValueError):
    """A setting is invalid, or contradicts another."""


class UnknownNameError(ConfigError, LookupError):
    """A name that the registry does not hold."""


class MissingExtraError(PackstoreError, ImportError):
    """An optional dependency is not installed."""


class InputError(PackstoreError, ValueError):
    """An input file cannot be read as what it claims to be."""


class RecordError(InputError):
    """One record breaks a rule whose policy is ``"error"``."""


class DropRateError(PackstoreError, ValueError):
    """More records were dropped than the job allows."""


class TokenizerError(PackstoreError, ValueError):
    """A tokenizer or a chat template does not load, or misbehaves."""


class WrongEngineError(TokenizerError):
    """A faster way to tokenize returns other ids than the reference.

    Attributes:
        tokenizer: sha256 of the tokenizer file.
    """

    tokenizer: str = ""


class StorageError(PackstoreError, OSError):
    """A store refuses to read, write or list.

    Attributes:
        transient: True: a retry helps; False: it never does; None: it seldom does.
        written: True if the file is there, whole, but might not survive a power cut.
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
    """A committed version names files that are not there, or have another size."""

    transient: bool | None = False


class FormatError(PackstoreError, ValueError):
    """Stored bytes do not follow the format."""


class IntegrityError(FormatError):
    """A hash, checksum or count differs from the recorded one."""


class UnsupportedFormatError(FormatError):
    """The dataset needs a newer reader."""


class CompatibilityError(PackstoreError, ValueError):
    """Two valid things do not belong together."""


class DivergedError(PackstoreError, ArithmeticError):
    """The loss or gradient of a training is not finite."""


class WorkerError(PackstoreError, RuntimeError):
    """A process that reads for this one has died."""


class BackendError(PackstoreError, RuntimeError):
    """An attention backend does not support its inputs."""
