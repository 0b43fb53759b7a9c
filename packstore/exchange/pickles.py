"""A machine for the few instructions of a pickle that an array of dicts of numbers needs.

``numpy.save`` writes such an array as a pickle, and a pickle is a program: ``numpy.load`` with
``allow_pickle`` runs whatever the file asks for. This machine runs nothing. It knows three names,
which are tokens and never called (numpy's array, its data type, and what puts an array together);
it makes numbers, texts, lists and dicts; everything else it refuses. What it makes is as large as
the file at most: no instruction copies a list, and the memo gives back texts and names only. Rows
are given as soon as they are complete, so one is in memory.

What the instructions mean is in Python's ``pickletools``, which also showed what numpy 1 and 2
write (protocols 3 and 4; ``numpy.core`` and ``numpy._core``).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NoReturn

import numpy as np

from packstore.errors import InputError, quote, sentence
from packstore.exchange.values import MARK, ROW, Array, DType, List, Name, kind_of
from packstore.exchange.window import INT1, INT2, INT4, Window

MAX_TEXT = 256
"""Bytes of a text or a name at most: the file holds the names of a few lists, no prose."""

MAX_WAITING = 1 << 16
"""Values at most that wait to be put somewhere; numpy puts them after a thousand."""

_ARRAY, _DTYPE = "numpy.ndarray", "numpy.dtype"
_RECONSTRUCT = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct")


class Machine:
    """Runs the instructions of one file.

    Args:
        stream: stands behind the header of the file.
        path: what error texts call it.
        keys: the keys of every row.
    """

    def __init__(self, stream: BinaryIO, path: str, keys: frozenset[str]) -> None:
        self._bytes, self._path, self._keys = Window(stream), path, keys
        self._stack: list[Any] = []
        self._memo: dict[int, str | bytes | Name] = {}
        self._memoized = self._given = 0
        self._ready: dict[str, List] | None = None

    def run(self) -> Iterator[dict[str, List]]:
        """Gives each row as soon as it is complete.

        Raises:
            InputError: the file asks for anything else than an array of such rows.
        """
        try:
            while (code := self._bytes.peek()) != ord("."):
                self._step(code)
                if self._ready is not None:
                    row, self._ready = self._ready, None
                    self._given += 1
                    yield row
            self._stop()
        except EOFError:
            self.refuse("an end in the middle")

    def _step(self, code: int) -> None:
        if code in (INT1, INT2, INT4):
            self._whole_numbers(code)
        elif code in _ACTIONS:
            self._bytes.take(1)
            _ACTIONS[code](self)
        else:
            self.refuse(f"the instruction {bytes([code])!r}")
        if len(self._stack) > MAX_WAITING:
            self.refuse("values that are put nowhere")

    def _stop(self) -> None:
        self._bytes.take(1)
        top = self._stack[0] if len(self._stack) == 1 else None
        if not isinstance(top, Array) or top.rows is None:
            self.refuse("something else at its end")
        if top.shape != (self._given,) or top.rows.rows != self._given or top.rows.parts:
            must = f"the array must be of the {self._given} rows that are in the file"
            raise InputError(sentence(self._path, must, "another shape, or rows elsewhere"))
        if not self._bytes.at_end():
            self.refuse("bytes behind its end")

    def refuse(self, found: str) -> NoReturn:
        """Raises :class:`InputError` for what stands here."""
        where = f"{self._path}, row {self._given}, byte {self._bytes.position} behind the header"
        must = "must be what numpy.save writes of dicts of lists of numbers, and nothing else"
        raise InputError(sentence(where, must, found, "Import only files that NeMo-Aligner wrote"))

    def pop(self) -> Any:
        """The topmost value."""
        if not self._stack or self._stack[-1] is MARK:
            self.refuse("an instruction without its values")
        return self._stack.pop()

    def pop_to_mark(self) -> list[Any]:
        """The values above the topmost mark, which goes too."""
        marks = (i for i in range(len(self._stack) - 1, -1, -1) if self._stack[i] is MARK)
        if (mark := next(marks, None)) is None:
            self.refuse("an instruction without its mark")
        values = self._stack[mark + 1 :]
        del self._stack[mark:]
        return values

    def push(self, value: Any) -> None:
        """Puts a value on top."""
        self._stack.append(value)

    def push_tuple(self, values: list[Any]) -> None:
        """Puts values together."""
        if any(isinstance(value, np.ndarray) for value in values):
            self.refuse("a tuple in place of a list")
        self.push(tuple(values))

    def _whole_numbers(self, code: int) -> None:
        """One whole number; in a list that is being filled, all that follow one another."""
        stack = self._stack
        filling = len(stack) > 1 and stack[-1] is MARK and isinstance(stack[-2], List)
        if filling or (stack and isinstance(stack[-1], np.ndarray)):
            self.push(self._bytes.run())
        else:
            size = {INT1: 1, INT2: 2, INT4: 4}[code]
            self._bytes.take(1)
            self.push(int.from_bytes(self._bytes.take(size), "little", signed=size == 4))

    def small(self, size: int) -> bytes:
        """The next bytes, which are a text."""
        if size > MAX_TEXT:
            self.refuse("a long text")
        return self._bytes.take(size)

    def unsigned(self, size: int) -> int:
        """The next bytes as a number."""
        return int.from_bytes(self._bytes.take(size), "little")

    def line(self) -> str:
        """The next bytes up to the end of a line."""
        text = b""
        while (byte := self._bytes.take(1)) != b"\n":
            text += byte
            if len(text) > MAX_TEXT:
                self.refuse("a long name")
        return text.decode("ascii", "replace")

    def name(self, module: str, name: str) -> None:
        """A name, if it is one of the three."""
        if (whole := f"{module}.{name}") not in (*_RECONSTRUCT, _ARRAY, _DTYPE):
            self.refuse(f"the name {quote(whole, 120)}")
        self.push(Name(whole))

    def name_on_stack(self) -> None:
        """A name that stands on the stack."""
        name, module = self.pop(), self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            self.refuse("a name that is no text")
        self.name(module, name)

    def put(self, number: int) -> None:
        """Remembers the topmost value, if it may stand in several places."""
        value = self.pop()
        self.push(value)
        self._memo.pop(number, None)
        self._memoized += 1
        if isinstance(value, str | bytes | Name):
            self._memo[number] = value

    def put_next(self) -> None:
        """Remembers the topmost value under the next number."""
        self.put(self._memoized)

    def get(self, number: int) -> None:
        """The value that is remembered under a number."""
        if number not in self._memo:
            self.refuse("a list or another value that is used twice")
        self.push(self._memo[number])

    def reduce(self) -> None:
        """What a call would give: nothing is called."""
        arguments, called = self.pop(), self.pop()
        if not isinstance(called, Name) or not isinstance(arguments, tuple):
            self.refuse("a call of something else")
        name = called.name
        if name in _RECONSTRUCT and arguments == (Name(_ARRAY), (0,), b"b"):
            self.push(Array())
        elif name == _DTYPE and arguments in (("O8", False, True), ("O", False, True)):
            self.push(DType())
        else:
            self.refuse("a call of something else")

    def build(self) -> None:
        """The state of the data type, which says nothing, or of the array, which is its rows."""
        state, made = self.pop(), self.pop()
        if isinstance(made, Array) and isinstance(state, tuple) and len(state) == 5:
            _, made.shape, dtype, _, rows = state
            if not isinstance(dtype, DType) or not isinstance(rows, List):
                self.refuse("an array of something else")
            made.rows = rows
        elif not isinstance(made, DType) or not isinstance(state, tuple):
            self.refuse("a state of something else")
        self.push(made)

    def append(self, values: list[Any]) -> None:
        """Puts values into the list below them."""
        into = self._stack[-1] if self._stack else None
        if not isinstance(into, List):
            self.refuse("values for no list")
        others = [value for value in values if value is not ROW]
        into.rows += len(values) - len(others)
        into.parts += others

    def set(self, values: list[Any]) -> None:
        """Puts keys and values into the dict below them; with all keys it is a row."""
        into = self._stack[-1] if self._stack else None
        if not isinstance(into, dict) or len(values) % 2:
            self.refuse("values for no dict")
        where = f"{self._path}, row {self._given}"
        for key, value in zip(values[::2], values[1::2], strict=True):
            if not isinstance(key, str) or key not in self._keys or key in into:
                must = f"must have the keys {', '.join(sorted(self._keys))}, each once"
                raise InputError(sentence(where, must, kind_of(key)))
            if not isinstance(value, List):
                raise InputError(sentence(f"{where}, {key}", "must be a list", kind_of(value)))
            into[key] = value
        if len(into) == len(self._keys):
            self._stack[-1], self._ready = ROW, into


_ACTIONS: dict[int, Callable[[Machine], object]] = {
    0x80: lambda m: m.small(1),  # the protocol
    0x95: lambda m: m.small(8),  # bytes of a frame
    ord("("): lambda m: m.push(MARK),
    ord("]"): lambda m: m.push(List()),
    ord("}"): lambda m: m.push({}),
    ord(")"): lambda m: m.push(()),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    0x8A: lambda m: m.push(int.from_bytes(m.small(m.unsigned(1)), "little", signed=True)),
    ord("G"): lambda m: m.push(struct.unpack(">d", m.small(8))[0]),
    0x8C: lambda m: m.push(m.small(m.unsigned(1)).decode("utf-8", "replace")),
    ord("X"): lambda m: m.push(m.small(m.unsigned(4)).decode("utf-8", "replace")),
    ord("C"): lambda m: m.push(m.small(m.unsigned(1))),
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: Machine.name_on_stack,
    0x94: Machine.put_next,
    ord("q"): lambda m: m.put(m.unsigned(1)),
    ord("r"): lambda m: m.put(m.unsigned(4)),
    ord("h"): lambda m: m.get(m.unsigned(1)),
    ord("j"): lambda m: m.get(m.unsigned(4)),
    0x85: lambda m: m.push_tuple([m.pop()]),
    0x86: lambda m: m.push_tuple([m.pop(), m.pop()][::-1]),
    0x87: lambda m: m.push_tuple([m.pop(), m.pop(), m.pop()][::-1]),
    ord("t"): lambda m: m.push_tuple(m.pop_to_mark()),
    ord("R"): Machine.reduce,
    ord("b"): Machine.build,
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.pop_to_mark()),
    ord("s"): lambda m: m.set([m.pop(), m.pop()][::-1]),
    ord("u"): lambda m: m.set(m.pop_to_mark()),
}
"""Instruction -> what it does."""
