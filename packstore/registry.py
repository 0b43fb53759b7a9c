"""Maps names that users type to code, imported on first use.

A plug-in is one small file plus one line in the registry of its folder. Listing the choices
(``--help``) imports nothing.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

from packstore.errors import MissingExtraError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """A fixed mapping from a name to ``"module:attribute"``, loaded on first use.

    Args:
        noun: noun for the names in error messages (``"strategy"``).
        entries: name -> ``"module:attribute"``.
        extras: name -> the extra of packstore that installs the required third-party package.
    """

    def __init__(
        self, noun: str, entries: Mapping[str, str], extras: Mapping[str, str] | None = None
    ) -> None:
        self.noun = noun
        self._entries = dict(entries)
        self._extras = dict(extras or {})

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def names(self) -> tuple[str, ...]:
        """Returns all names, in the order of registration."""
        return tuple(self._entries)

    def check(self, name: str) -> str:
        """Returns `name` if it is known."""
        if name in self._entries:
            return name
        near = difflib.get_close_matches(str(name), self._entries, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownNameError(
            f"unknown {self.noun} {name!r}; choose one of: {', '.join(self._entries)}.{hint}"
        )

    def load(self, name: str) -> T:
        """Loads the object registered as `name`."""
        module, _, attribute = self._entries[self.check(name)].partition(":")
        try:
            loaded: Any = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            if name not in self._extras:
                raise
            raise missing_extra(f"{self.noun} {name!r}", self._extras[name], error) from error
        return loaded  # type: ignore[no-any-return]


def missing_extra(noun: str, extra: str, error: ImportError) -> MissingExtraError:
    """Returns the error for a missing optional dependency, with the command that installs it."""
    package = (error.name or str(error)).partition(".")[0]
    return MissingExtraError(
        f"{noun} needs the package {package!r}, which is not installed. "
        f"Run: pip install 'packstore[{extra}]'"
    )
