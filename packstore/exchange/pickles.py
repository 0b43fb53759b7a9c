"""Unpickles an array of dicts of lists of numbers, as ``numpy.save`` writes it, and nothing else.

A pickle is a program: ``numpy.load`` with ``allow_pickle`` runs it. Here Python's ``Unpickler``
runs it, but resolves only four names, to stand-ins instead of numpy's objects: they accept the
arguments that ``numpy.save`` writes, and make only a holder of the rows. Before that, :func:`_scan`
refuses every instruction that such a file does not need, and memory or stack use out of proportion
to the file's size.

The instructions are documented in Python's ``pickletools``, which also showed the output of numpy 1
and 2 (protocols 3 and 4; ``numpy.core`` and ``numpy._core``).
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from packstore.errors import InputError, PackstoreError, quote, sentence
from packstore.pack.kernels import jit

_TEXT = 256
"""Most bytes of a text or a name: the file holds the names of a few lists only."""
_TUPLES = 16
"""Most tuples, of which numpy writes seven: hashing nested tuples uses stack for each level."""
_LISTS = 8
"""Least bytes of the file per list or dict, each of which takes up to 250 bytes of memory."""
_LONG = 9
"""Most bytes of an integer, 64 bits and the sign: larger ones can have equal hashes."""

_NO, _LINES = -1, -9
_SIZES = np.full(256, _NO, np.int64)
"""Instruction -> bytes of its argument. Negative: `_NO`: not allowed; `_LINES`: two lines; else
minus (n + 1): a length of n bytes, and as many bytes as it says."""
for _codes, _size in (
    (b"(]})N\x88\x89\x93\x94\x85\x86\x87tRbaesu.", 0),
    (b"\x80Kqh", 1),
    (b"M", 2),
    (b"Jrj", 4),
    (b"\x95G", 8),
    (b"\x8a\x8cC", -2),
    (b"X", -5),
    (b"c", _LINES),
):
    _SIZES[list(_codes)] = _size

_FAULTS = (
    "an end in the middle",
    "the instruction {}",
    "a long text or number",
    "more tuples than such a file has",
    "more lists than such a file has",
    "bytes behind its end",
    "a memo that is larger than the file",
)
_END, _CODE, _LENGTH, _DEEP, _MANY, _BEHIND, _MEMO = range(len(_FAULTS))


def load(data: bytes, path: str) -> list[Any]:
    """Returns the objects of the pickled array in `data`, which are of built-in types.

    They take at most about 40 times the memory of `data`, for a real file about 10 times. A list
    may occur several times.

    Args:
        data: the file after its header.
        path: name of the file in error texts.

    Raises:
        InputError: the file is not such an array.
    """
    fault, at = _scan(np.frombuffer(data, np.uint8), _SIZES)
    if fault >= 0:
        found = _FAULTS[fault].format(quote(data[at : at + 1]))
        raise _refusal(f"{path}, byte {at} behind the header", found)
    try:
        array = _Unpickler(io.BufferedReader(io.BytesIO(data), 1 << 20)).load()
    except PackstoreError as error:
        raise _refusal(path, str(error)) from None
    except Exception as error:  # inconsistent instructions raise many kinds of errors
        raise _refusal(path, quote(f"{type(error).__name__}: {error}", 120)) from error
    if not isinstance(array, _Array) or array.rows is None:
        raise _refusal(path, "something else at its end")
    if array.shape != (len(array.rows),):
        must = f"the array must be of the {len(array.rows)} rows that are in the file"
        raise InputError(sentence(path, must, "another shape"))
    return array.rows


class _Array:
    """Holds the rows of the array, once its state is set."""

    __slots__ = ("rows", "shape")

    def __init__(self) -> None:
        self.rows: list[Any] | None = None
        self.shape: object = None

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, _, rows = state
        if not isinstance(dtype, _DType) or type(rows) is not list:
            raise InputError("an array of something else")
        self.shape, self.rows = shape, rows


class _DType:
    """The data type of objects, whose state is ignored."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        pass


class _Name:
    """A stand-in for a name of numpy; an instance without attributes, so that it is immutable."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        raise InputError("a call of something else")


class _MakeArray(_Name):
    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        return _Array() if arguments == (_NDARRAY, (0,), b"b") else super().__call__()


class _MakeDType(_Name):
    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        ok = arguments in (("O8", False, True), ("O", False, True))
        return _DType() if ok else super().__call__()


_NDARRAY, _MAKE_ARRAY = _Name(), _MakeArray()
_NAMES: dict[str, _Name] = {
    "numpy.ndarray": _NDARRAY,
    "numpy.dtype": _MakeDType(),
    "numpy.core.multiarray._reconstruct": _MAKE_ARRAY,
    "numpy._core.multiarray._reconstruct": _MAKE_ARRAY,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> _Name:
        """Returns the stand-in of one of the four names; nothing is imported."""
        if (whole := f"{module}.{name}") not in _NAMES:
            raise InputError(f"the name {quote(whole, 120)}")
        return _NAMES[whole]


def _refusal(where: str, found: str) -> InputError:
    must = "must be what numpy.save writes of dicts of lists of numbers, and nothing else"
    return InputError(sentence(where, must, found, "Import only files that NeMo-Aligner wrote"))


@jit
def _scan(data: npt.NDArray[np.uint8], sizes: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Returns the first fault of the instructions, an index of `_FAULTS` or -1, and its offset."""
    at = start = tuples = lists = count = 0
    end = len(data)
    while at < end:
        start, code = at, data[at]
        size, at, count = sizes[code], at + 1, count + 1
        if size == _NO:
            return _CODE, start
        if size == _LINES:
            lines = 2
            while lines and at < end:
                if at - start > _TEXT:
                    return _LENGTH, start
                lines -= data[at] == 0x0A
                at += 1
            size = lines  # positive if the file ended
        elif size < 0:
            prefix, size = -1 - size, 0
            if at + prefix > end:
                return _END, start
            for place in range(prefix):
                size += np.int64(data[at + place]) << (8 * place)
            at += prefix
            if size > (_LONG if code == 0x8A else _TEXT):
                return _LENGTH, start
        at += size
        if at > end:
            return _END, start
        if (
            code == 0x72
            and (  # LONG_BINPUT
                (np.int64(data[at - 1]) << 24 | np.int64(data[at - 2]) << 16)
                | (np.int64(data[at - 3]) << 8 | np.int64(data[at - 4]))
            )
            > count
        ):
            return _MEMO, start
        tuples += 0x85 <= code <= 0x87 or code == 0x74
        lists += code == 0x5D or code == 0x7D
        if tuples > _TUPLES:
            return _DEEP, start
        if lists * _LISTS > end + 64:
            return _MANY, start
        if code == 0x2E:
            return (-1, at) if at == end else (_BEHIND, at)
    return _END, start
