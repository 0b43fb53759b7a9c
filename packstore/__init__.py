"""packstore: preference data, packed once and checked, trained from anywhere.

    >>> import packstore
    >>> ds = packstore.pack(
    ...     "prefs.jsonl", "prefs-8k", tokenizer="tokenizer.json", pack_size=8192
    ... )
    >>> ds.manifest.fill_rate, len(ds)
    >>> packstore.open("prefs-8k").verify()

``append``, ``clean``, ``concat``, ``estimate``, ``export``, ``pack`` and ``publish`` do
what the commands of these names do. ``doctor`` lints records, ``check`` tries a place,
``open`` and ``scan`` read, and ``plan`` plans from lengths. ``packstore.pack`` is a
call and the sub-package of the packing algorithms at once. Importing packstore is
cheap: numba, pyarrow and torch are loaded by the first call that needs them.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import TYPE_CHECKING, Any

import packstore.pack as _pack_package
from packstore.registry import missing_extra
from packstore.version import VERSION as __version__

__all__ = [
    "Answers",
    "Chat",
    "Dataset",
    "Drop",
    "PackConfig",
    "PackstoreError",
    "Pair",
    "Plan",
    "__version__",
    "append",
    "check",
    "clean",
    "concat",
    "doctor",
    "estimate",
    "export",
    "open",
    "pack",
    "plan",
    "publish",
    "scan",
]

if TYPE_CHECKING:
    from packstore.config import PackConfig
    from packstore.errors import PackstoreError
    from packstore.etl.append import append
    from packstore.etl.concat import concat
    from packstore.etl.pipeline import pack
    from packstore.etl.reports.place import check
    from packstore.etl.reports.records import doctor, estimate
    from packstore.exchange import export
    from packstore.io.dataset.dataset import Dataset, open
    from packstore.io.scan import scan
    from packstore.io.versions.clean import clean
    from packstore.io.versions.publish import publish
    from packstore.pack.plan import Plan, plan
    from packstore.tokenizer.records.reading import Answers, Chat, Drop, Pair
else:

    class _CallablePackage(ModuleType):
        """The sub-package ``packstore.pack``, which is also the function of this name.

        It is made callable here, so that the sub-package imports no higher layer.
        """

        def __call__(self, *args: Any, **settings: Any) -> Dataset:
            return _load_pack()(*args, **settings)

        @property
        def __doc__(self) -> str:
            function = _load_pack()
            signature = inspect.signature(function)
            parameters = [
                parameter.replace(annotation=parameter.empty)
                for parameter in signature.parameters.values()
            ]
            signature = inspect.Signature(parameters)
            return f"packstore.pack{signature}\n\n{inspect.getdoc(function)}"

        @property
        def __signature__(self) -> inspect.Signature:
            return inspect.signature(_load_pack())

    def _load_pack() -> Any:
        return _load("pack", "packstore.etl.pipeline")

    _pack_package.__class__ = _CallablePackage

_LAZY = {
    "Answers": "packstore.tokenizer.records.reading",
    "Chat": "packstore.tokenizer.records.reading",
    "Drop": "packstore.tokenizer.records.reading",
    "Pair": "packstore.tokenizer.records.reading",
    "Dataset": "packstore.io.dataset.dataset",
    "PackConfig": "packstore.config",
    "PackstoreError": "packstore.errors",
    "Plan": "packstore.pack.plan",
    "append": "packstore.etl.append",
    "check": "packstore.etl.reports.place",
    "clean": "packstore.io.versions.clean",
    "concat": "packstore.etl.concat",
    "doctor": "packstore.etl.reports.records",
    "estimate": "packstore.etl.reports.records",
    "export": "packstore.exchange",
    "open": "packstore.io.dataset.dataset",
    "plan": "packstore.pack.plan",
    "publish": "packstore.io.versions.publish",
    "scan": "packstore.io.scan",
}
"""Public name -> its module, which is imported at the first use."""


def _load(name: str, module: str) -> Any:
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        raise missing_extra(f"packstore.{name}", "", error) from error


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return _load(name, _LAZY[name])
    raise AttributeError(f"module 'packstore' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
