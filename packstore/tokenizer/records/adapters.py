"""Adapters: a user's own function from a record to a reading, in this process or in
workers.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from packstore.errors import ConfigError, quote, sentence
from packstore.tokenizer.records.forms import first_paragraph
from packstore.tokenizer.records.reading import Answers, Chat, Drop, Pair

Function = Callable[[dict[str, Any]], Pair | Answers | Chat | Drop]


class Adapter:
    """A user's function, by its name in a module or file, so that workers can load it.

    Attributes:
        name: ``module:function`` or ``file.py:function``; for a function that cannot be
            imported, such as a lambda or one of a notebook, its own name.
        is_importable: whether other processes can load it by its name.
        sha256: of the module's file, or of the function's source if it cannot be
            imported; empty if there is neither.
    """

    def __init__(
        self, function: Function, name: str, is_importable: bool, sha256: str
    ) -> None:
        self._function = function
        self.name = name
        self.is_importable = is_importable
        self.sha256 = sha256

    @property
    def summary(self) -> str:
        """The first paragraph of the function's docstring, on one line."""
        return first_paragraph(self._function)

    def apply(self, record: Mapping[str, Any]) -> AdaptedRecord:
        """Return a record with the function's result, or the text of its error."""
        tracked = _TrackedRecord(record)
        adapted = AdaptedRecord(record)
        try:
            adapted.result = self._function(tracked)
        except Exception as error:  # a user's function may raise anything
            adapted.error = f"{type(error).__name__}: {error}"
        adapted.columns = tracked.columns
        return adapted

    def provenance(self) -> dict[str, Any]:
        """Return the entries of the manifest: the name and `sha256`."""
        return {"adapter": self.name, "adapter_sha256": self.sha256}

    def __reduce__(self) -> tuple[Any, ...]:
        if self.is_importable:
            return load_adapter, (self.name,)
        # This process applies the function itself, and sends the others records with
        # its results. Their adapter has a name and a hash, and no function.
        return Adapter, (_raise_elsewhere, self.name, False, self.sha256)


class AdaptedRecord(dict[str, Any]):
    """A record, with the result of an adapter.

    Attributes:
        result: of the function; None if it raised an error.
        columns: names of the columns that the function looked at.
        error: the text of the function's error, or empty.
        token_values: the fields that the setting `token_values` names, which the
            function did not see.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        super().__init__(record)
        self.token_values: dict[str, Any] = {}
        self.result: Any = None
        self.columns: set[str] = set()
        self.error = ""


def _raise_elsewhere(record: dict[str, Any]) -> Pair:
    """Stand for a function that only the process of the user has."""
    raise RuntimeError("the adapter belongs to another process")


class _TrackedRecord(dict[str, Any]):
    """A record that remembers the columns that a function looks at.

    A copy counts as a look at every column.
    """

    def __init__(self, record: Mapping[str, Any]) -> None:
        super().__init__(record)
        self.columns: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.columns.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.columns.add(name)
        return super().get(name, default)

    def setdefault(self, name: str, default: Any = None) -> Any:
        self.columns.add(name)
        return super().setdefault(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.columns.add(name)
        return super().pop(name, *default)

    def popitem(self) -> tuple[str, Any]:
        name, value = super().popitem()
        self.columns.add(name)
        return name, value

    def __iter__(self) -> Iterator[str]:
        # Overridden, so that `dict(record)` and `{**record}` call __getitem__ for each
        # column: Python copies a dict that iterates as usual without a call.
        return super().__iter__()

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __or__(self, other: Any) -> Any:
        return dict(self) | other

    def __ror__(self, other: Any) -> Any:
        return other | dict(self)

    def items(self) -> Any:
        self.columns.update(self)
        return super().items()

    def values(self) -> Any:
        self.columns.update(self)
        return super().values()


@functools.lru_cache(maxsize=8)  # to unpickle an adapter is to load it
def load_adapter(name: str) -> Adapter:
    """Return the adapter of ``module:function`` or ``file.py:function``.

    Raises:
        ConfigError: there is no such module, file or function.
    """
    where = f"setting adapter, {name}"
    rule = "it must be module:function or file.py:function"
    place, colon, function_name = name.rpartition(":")
    if not (colon and place and function_name):
        raise ConfigError(sentence(where, rule, quote(name)))
    try:
        if place.endswith(".py"):
            module = _load_file(Path(place))
        else:
            module = importlib.import_module(place)
    except Exception as error:  # a module may raise anything
        raise ConfigError(
            sentence(where, rule, f"{type(error).__name__}: {error}")
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        functions = ", ".join(
            member
            for member, value in vars(module).items()
            if inspect.isfunction(value)
        )
        raise ConfigError(
            sentence(where, rule, f"no function {function_name!r} ({functions})")
        )
    return Adapter(function, name, is_importable=True, sha256=_file_sha256(module))


def adapter_of(function: Function) -> Adapter:
    """Return the adapter of a function, by its module or file if it has one.

    Raises:
        ConfigError: it is not callable.
    """
    if not callable(function):
        raise ConfigError(
            sentence(
                "setting adapter", "it must be a function, or its name", quote(function)
            )
        )
    name = getattr(function, "__qualname__", type(function).__name__)
    module = sys.modules.get(getattr(function, "__module__", "") or "")
    if module is not None and getattr(module, name, None) is function:
        place = _place_of(module)
        if place is not None:
            full_name = f"{place}:{name}"
            sha256 = _file_sha256(module)
            return Adapter(function, full_name, is_importable=True, sha256=sha256)
    return Adapter(function, name, is_importable=False, sha256=_source_sha256(function))


def _place_of(module: ModuleType) -> str | None:
    """Return the name or file by which other processes load a module; None if they
    cannot.
    """
    if module.__name__ == "__main__":
        return None  # to import a script or a notebook would run it again
    if _is_importable(module):
        return module.__name__
    file: str | None = getattr(module, "__file__", None)
    return file if file and file.endswith(".py") else None


def _is_importable(module: ModuleType) -> bool:
    """Return True if another process would find this module's file by its name."""
    package, _, _ = module.__name__.rpartition(".")
    path = getattr(sys.modules.get(package), "__path__", None)
    if package and path is None:
        return False
    # importlib.util.find_spec looks into sys.modules first, where a module that was
    # loaded from a file by hand is, too.
    for finder in sys.meta_path:
        spec = finder.find_spec(module.__name__, path)
        if spec is not None:
            return spec.origin == getattr(module, "__file__", None)
    return False


def _load_file(path: Path) -> ModuleType:
    """Import a file as a module with a name of its own, once in a process."""
    resolved = path.resolve()
    path_hash = hashlib.sha256(str(resolved).encode()).hexdigest()
    name = f"packstore_adapter_{path_hash[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    if not resolved.is_file():
        raise FileNotFoundError(f"no file {path}")
    spec = importlib.util.spec_from_file_location(name, resolved)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _file_sha256(module: ModuleType) -> str:
    """Return the sha256 of a module's file; empty without one."""
    file = getattr(module, "__file__", None)
    if not file or not Path(file).is_file():
        return ""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _source_sha256(function: Function) -> str:
    """Return the sha256 of a function's source; empty if Python does not have it."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()
