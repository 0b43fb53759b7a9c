"""Files that are not what they say: nothing of them is run, each is refused with its place."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from packstore.cli import main
from packstore.errors import FormatError, InputError
from packstore.exchange import import_
from packstore.exchange.nemo_packs import KEYS
from packstore.exchange.object_array import read_rows

pytestmark = pytest.mark.usefixtures("no_collector")

GOOD: dict[str, Any] = {
    "input_ids": [5, 6, 7, 5, 6, 300, 70_000],
    "labels": [-100, 6, 7, -100, -100, 300, 70_000],
    "reward": [1.0, 0.0],
    "lengths": [3, 4],
    "seq_boundaries": [0, 3, 7],
}
START = b"\x80\x03cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85C\x01b\x87R(K\x01"
DTYPE = (
    b"cnumpy\ndtype\nX\x02\x00\x00\x00O8\x89\x88\x87R(K\x03X\x01\x00\x00\x00|NNNJ\xff\xff\xff\xffJ"
)
DTYPE += b"\xff\xff\xff\xffK?tb\x89"


class Calls:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = function, arguments

    def __reduce__(self) -> Any:
        return self.call


def header(rows: object = 1, dtype: str = "|O") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': ({rows},), }}\n".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text


def body(*rows: Any) -> bytes:
    array = np.empty(len(rows), object)
    array[:] = rows
    return pickle.dumps(array, 3)


def change(**values: Any) -> bytes:
    return header() + body({**GOOD, **values})


def row_bytes(row: Any) -> bytes:
    return pickle.dumps(row, 3)[2:-1]


MARK = "packstore-was-here"
DEEP: list[Any] = []
for _ in range(200):
    DEEP = [DEEP]
LAUGHS: list[Any] = []
for _ in range(99):
    LAUGHS = [LAUGHS] * 9

PICKLES: dict[str, tuple[bytes, str]] = {
    # Calls.
    "os.system": (header() + pickle.dumps(Calls(os.system, f"touch {MARK}"), 3), "the name 'posix"),
    "os.system in a row": (change(labels=Calls(os.system, f"touch {MARK}")), "the name 'posix"),
    "os.system among ids": (change(labels=[Calls(os.system, f"touch {MARK}")]), "the name 'posix"),
    "eval": (
        header() + pickle.dumps(Calls(eval, f"open('{MARK}', 'w')"), 3),
        "the name 'builtins.eva",
    ),
    "eval, protocol 5": (header() + pickle.dumps(Calls(eval, "1"), 5), "the name 'builtins.eval'"),
    "getattr": (header() + b"\x80\x03cbuiltins\ngetattr\n.", "the name 'builtins.getattr'"),
    "numpy.load": (header() + b"\x80\x03cnumpy\nload\nX\x01\x00\x00\x00x\x85R.", "'numpy.load'"),
    "numpy.fromfile": (
        header() + b"\x80\x03cnumpy\nfromfile\nX\x01\x00\x00\x00x\x85R.",
        "fromfile",
    ),
    "a dotted name": (
        header() + b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.",
        "'numpy.ndarray.tofile'",
    ),
    "numpy by another way": (
        header() + b"\x80\x03cnumpy.core.multiarray\nnumpy.load\n.",
        "the name",
    ),
    "ndarray called": (
        header() + b"\x80\x03cnumpy\nndarray\nJ\x00\xca\x9a;\x85R.",
        "a call of something else",
    ),
    "an array of another shape": (
        header() + b"\x80\x03cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n"
        b"\x8a\x05\x00\x00\x00\x00\x7f\x85C\x01b\x87R.",
        "a call of something else",
    ),
    "a data type of another kind": (
        header() + b"\x80\x03cnumpy\ndtype\nX\x02\x00\x00\x00V9\x89\x88\x87R.",
        "a call of something else",
    ),
    "a new object": (header() + b"\x80\x03cnumpy\nndarray\n)\x81.", "the instruction b'\\x81'"),
    "an instance": (header() + b"\x80\x03(cnumpy\nndarray\no.", "the instruction b'o'"),
    "old instance": (header() + b"(ios\nsystem\n.", "the instruction b'i'"),
    "extension": (header() + b"\x80\x03\x82\x01.", "the instruction b'\\x82'"),
    "persistent id": (header() + b"\x80\x03Pmine\n.", "the instruction b'P'"),
    "buffers out of band": (header() + b"\x80\x05\x97.", "the instruction b'\\x97'"),
    "text numbers": (header() + b"I1\n.", "the instruction b'I'"),
    "a state of a name": (header() + b"\x80\x03cnumpy\nndarray\n}b.", "AttributeError"),
    "a class for a name": (
        header() + b"\x80\x03cnumpy\nndarray\nN}\x8c\x09__class__cnumpy\ndtype\ns\x86b.",
        "TypeError",
    ),
    "another call for a name": (
        header() + b"\x80\x03cnumpy\ndtype\nN}\x8c\x08__call__cnumpy\nndarray\ns\x86b.",
        "AttributeError",
    ),
    "a state of nothing": (header() + b"\x80\x03}}b.", "AttributeError"),
    "another array's state": (
        header() + START + b"K\x01\x85cnumpy\ndtype\n\x89]tb.",
        "an array of something else",
    ),
    "a call by keywords": (header() + b"\x80\x04cnumpy\nndarray\n)}\x92.", "instruction b'\\x92'"),
    "a set": (header() + b"\x80\x04\x8f.", "the instruction b'\\x8f'"),
    # Memory.
    "a huge shape": (header(10**15) + body(GOOD), "must hold the 1000000000000000 rows"),
    "a huge memo": (
        header() + b"\x80\x03]r\xff\xff\xff\x7f.",
        "a memo that is larger than the file",
    ),
    "a huge text": (header() + b"\x80\x03X\xff\xff\xff\x7fabc.", "a long text"),
    "huge bytes": (header() + b"\x80\x03B\xff\xff\xff\x7fabc.", "the instruction b'B'"),
    "a huge number": (header() + b"\x80\x03\x8b\xff\xff\xff\x7fabc.", "the instruction b'\\x8b'"),
    "a long name": (header() + b"\x80\x03c" + b"a" * 9999 + b"\n\n.", "a long text or number"),
    "a list in itself": (header() + b"\x80\x03]q\x00(h\x00h\x00e.", "something else at its end"),
    "laughs": (
        change(labels=LAUGHS),
        "row 0, labels: must be whole numbers of 64 bits; found a li",
    ),
    "a row again and again": (header(99) + body(*[GOOD] * 99), "row 1: .*one that is used twice"),
    "a list in every row": (header(2) + body(GOOD, {**GOOD}), "row 1: .*one that is used twice"),
    "a list in a row twice": (
        change(lengths=GOOD["reward"], reward=GOOD["reward"]),
        "row 0: .*one that is used twice",
    ),
    "lists in no row": (change(labels=[[] for _ in range(9999)]), "more lists than such a file"),
    "equal hashes": (
        header() + b"\x80\x03}(" + b"\x8a\x0b\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x1fNu.",
        "a long text or number",
    ),
    "a doubled value": (header() + b"\x80\x03]2.", "the instruction b'2'"),
    "a pile of marks": (header() + b"\x80\x03" + b"(" * 70_000, "an end in the middle"),
    "deep tuples": (
        header() + b"\x80\x03)" + b"\x85" * 300_000 + b".",
        "more tuples than such a file has",
    ),
    "a deep key": (
        header() + b"\x80\x03})" + b"\x85" * 300_000 + b"Ns.",
        "more tuples than such a file has",
    ),
    "deep tuples, as a shape": (
        header() + START + b")" + b"\x85" * 300_000 + DTYPE + b"]tb.",
        "more tuples than such a file has",
    ),
    "numbers in a tuple": (
        header() + START[:-2] + b"](K\x01K\x02t" + DTYPE + b"\x89]tb.",
        "ValueError",
    ),
    "deep lists": (change(input_ids=DEEP), "more lists than such a file has"),
    # Half of a file, and more than one.
    "empty": (b"", "must begin with the header"),
    "no header": (b"PK\x03\x04" + bytes(100), "must begin with the header"),
    "half a header": (header()[:30], "must begin with the header"),
    "a version to come": (b"\x93NUMPY\x09\x00" + header()[8:], "must begin with the header"),
    "a program as header": (header("__import__('os').system('x')"), "must begin with the header"),
    "an endless header": (header("(" * 5000), "must begin with the header"),
    "numbers": (header(3, "<i8") + bytes(24), "must be a flat array of objects"),
    "a table": (header("1, 1") + body(GOOD), "must be a flat array of objects"),
    "a shape below 0": (header(-1) + body(), "must be a flat array of objects"),
    "no pickle": (header(), "an end in the middle"),
    "cut off": (change()[:-20], "an end in the middle"),
    "cut off in a number": (header() + START + b"\x85]}(X\x06\x00\x00\x00labels](K", "an end in"),
    "bytes behind": (change() + b"x", "bytes behind its end"),
    "no rows": (header(0) + body(), "must hold at least one pack"),
    "a row too few": (header(2) + body(GOOD), "must hold the 2 rows of its header; found 1"),
    "a row too many": (
        header(1) + body(GOOD, {k: [*v] for k, v in GOOD.items()}),
        "must hold the 1 rows of its header; found 2",
    ),
    "rows elsewhere": (
        header() + START + b"K\x01\x85" + DTYPE + b"](" + row_bytes(GOOD) + b"]" + b"e" + b"tb.",
        "the array must be of the 2 rows",
    ),
    "the array in a list": (header() + b"\x80\x03](" + body(GOOD)[2:-1] + b"e.", "something else"),
    "only a dict": (header() + pickle.dumps(GOOD, 3), "something else at its end"),
    # Rows.
    "a row that is no dict": (header() + body([1, 2]), "row 0: must be a dict .*; found a list"),
    "rows of texts": (header() + body("abc"), "row 0: must be a dict .*; found 'abc'"),
    "a key too few": (
        header() + body({k: v for k, v in GOOD.items() if k != "reward"}),
        "row 0: must be a dict with the keys",
    ),
    "a key too many": (
        header() + body({"more": [1], **GOOD}),
        "row 0: must be a dict with the keys",
    ),
    "a key twice": (
        header()
        + START
        + b"K\x01\x85"
        + DTYPE
        + b"](}(X\x06\x00\x00\x00labels]X\x06\x00\x00\x00labels]uetb.",
        "must be a dict with the keys input_ids, labels, lengths, reward, seq_boundaries; found",
    ),
    "a key of numbers": (header() + body({1: [2]}), "row 0: must be a dict with the keys"),
    "an array for a list": (change(input_ids=np.arange(3)), "a call of something else"),
    "a text for a list": (change(labels="abc"), "row 0, labels: must be a list; found 'abc'"),
    "none for a list": (change(labels=None), "row 0, labels: must be a list"),
    "a row in a row": (
        change(labels={k: [*v] for k, v in GOOD.items()}),
        "must be a list; found a dict",
    ),
    "a tuple for a list": (change(labels=(1, 2)), "row 0, labels: must be a list"),
    "truth for numbers": (change(labels=[True] * 7), "row 0, labels: must be whole numbers"),
    "reals for ids": (change(input_ids=[1.0] * 7), "row 0, input_ids: must be whole numbers"),
    "texts for ids": (change(input_ids=["a"] * 7), "row 0, input_ids: must be whole numbers"),
    "texts for rewards": (change(reward=["a", "b"]), "row 0, reward: must be numbers"),
    "ids below 0": (change(input_ids=[-1, *GOOD["input_ids"][1:]]), "row 0, input_ids, element 0"),
    "ids over int32": (change(input_ids=[2**31] * 7), "must be 0 to 2147483647; found 2147483648"),
    "ids over int64": (change(input_ids=[2**63] * 7), "must be whole numbers of 64 bits"),
    "ids of many bits": (change(input_ids=[1 << 900] * 7), "a long text or number"),
    "labels below -100": (change(labels=[-101] * 7), "row 0, labels, element 0: must be -100 to"),
    "rewards over float32": (change(reward=[1e300, 0.0]), "reward-finite"),
    "rewards without end": (change(reward=[float("nan"), 0.0]), "reward-finite"),
    "a huge reward": (change(reward=[1 << 900, 0.0]), "a long text or number"),
    "labels of another length": (change(labels=[-100, 6]), "row 0, labels: there must be 7, for 7"),
    "rewards of another length": (change(reward=[1.0]), "row 0, reward: there must be 2"),
    "ragged boundaries": (change(seq_boundaries=[0, 7]), "row 0, seq_boundaries: there must be 3"),
    "boundaries in disorder": (change(seq_boundaries=[0, 8, 7]), r"row 0: .* [segments-nonempty]"),
    "boundaries that fall": (change(seq_boundaries=[3, 0, 7]), r"[boundaries-span]"),
    "an empty segment": (change(seq_boundaries=[0, 0, 7], lengths=[0, 7]), "[segments-nonempty]"),
    "an odd side": (change(lengths=[7], reward=[1.0], seq_boundaries=[0, 7]), "at least one pair"),
    "no pair": (change(**{k: [] for k in GOOD}), "at least one pair; found 0 lengths"),
    "lengths of others": (change(lengths=[3, 5]), "[lengths-concat]"),
    "labels of others": (change(labels=[-100, 9, 7, -100, -100, 300, 70_000]), "[labels-are-ids]"),
    "a first label": (change(labels=[*GOOD["input_ids"]]), "[first-unsupervised]"),
    "no label": (change(labels=[-100] * 7), "[supervised-nonempty]"),
}


def test_the_good_one(tmp_path: Path) -> None:
    (tmp_path / "x.npy").write_bytes(change())
    dataset = import_("nemo", tmp_path / "x.npy", tmp_path / "packs")
    assert next(dataset.iter_packs()).input_ids.tolist() == GOOD["input_ids"]


@pytest.mark.parametrize("name", PICKLES)
def test_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, said = PICKLES[name]
    monkeypatch.chdir(tmp_path)
    Path("bad.npy").write_bytes(data)
    with pytest.raises((InputError, FormatError)) as caught:
        import_("nemo", "bad.npy", "packs")
    text = str(caught.value)
    assert text.startswith("bad.npy"), text
    assert len(text) < 800
    for part in said.split(".*"):
        assert part in text, text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bad.npy"]


def test_the_place_is_that_of_the_bad_row(tmp_path: Path) -> None:
    long = {
        **GOOD,
        "input_ids": [5] * 15_000,
        "labels": [-100, *[5] * 6_999, -100, *[5] * 7_999],
    }
    long |= {"lengths": [7_000, 8_000], "seq_boundaries": [0, 7_000, 15_000]}
    rows = [{k: [*v] for k, v in long.items()} for _ in range(30)]
    rows[17]["labels"][1] = 9
    (tmp_path / "x.npy").write_bytes(header(30) + body(*rows))
    with pytest.raises(FormatError, match=r"x.npy, row 17: .*labels-are-ids"):
        import_("nemo", tmp_path / "x.npy", tmp_path / "packs")
    rows[17]["labels"][1:2] = []
    (tmp_path / "x.npy").write_bytes(header(30) + body(*rows))
    with pytest.raises(InputError, match=r"x.npy, row 17, labels: there must be 15000"):
        import_("nemo", tmp_path / "x.npy", tmp_path / "packs")
    assert [p.name for p in tmp_path.iterdir()] == ["x.npy"]


HUNGRY = {
    "numbers": header(30) + body(*[{k: [*range(999, 9999)] for k in GOOD} for _ in range(30)]),
    "reals": header(30) + body(*[{k: [*np.arange(9e3)] for k in GOOD} for _ in range(30)]),
    "lists": header() + b"\x80\x03" + b"]K\x01a" * 99_999 + b"N.",
    "dicts": header() + b"\x80\x03" + b"}K\x01Ns" * 99_999 + b"N.",
    "nothing": header() + b"\x80\x03](" + b"N" * 999_999 + b"e.",
    "marks": header() + b"\x80\x03" + b"(" * 999_999 + b"t.",
    "a memo": header() + b"\x80\x04]" + b"\x94" * 999_999 + b".",
    "texts": header() + b"\x80\x04](" + b"\x8c\x02ab" * 99_999 + b"e.",
}


@pytest.mark.parametrize("name", HUNGRY)
def test_memory_is_in_proportion_to_the_file(name: str) -> None:
    data = HUNGRY[name]
    survives(GOOD_FILE)  # compiles the scan
    tracemalloc.start()
    survives(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 40 * len(data)


def test_as_a_user_meets_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.npy"
    path.write_bytes(PICKLES["os.system"][0])
    assert main(["import", "nemo", str(path), str(tmp_path / "out")]) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert err.startswith(f"packstore: error: {path}: must be what numpy.save writes ")
    assert "Import only files that NeMo-Aligner wrote." in err
    assert main(["import", "nemo", str(tmp_path / "none.npy"), str(tmp_path / "out")]) == 1
    assert "no such file" in capsys.readouterr().err


GOOD_FILE = change()
WHOLE = header(3) + body(*[{k: [*v] for k, v in GOOD.items()} for _ in range(3)])


def survives(data: bytes) -> None:
    """Read to the end, or refused in our own words."""
    with contextlib.suppress(InputError):
        for row in read_rows(io.BytesIO(data), "file", KEYS):
            assert set(row) == KEYS


@settings(max_examples=600, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4)
)
def test_flipped_bytes(flips: list[tuple[int, int]]) -> None:
    data = bytearray(WHOLE)
    for at, value in flips:
        data[at] = value
    survives(bytes(data))


CODES = b"\x80\x95(]})N\x88\x89\x8aG\x8cXCc\x93\x94qrhj\x85\x86\x87tRbaesuKMJ."
PIECES = [bytes([c]) for c in CODES] + [
    *(START, DTYPE, b"\x85", b"K\x01", b"M\x01\x02", b"h\x00", b"q\x00", b"]q\x00", b"tb."),
    *(row_bytes(GOOD), row_bytes(GOOD["labels"]), b"X\x06\x00\x00\x00labels", b"\x8c\x01b"),
    *(b"cnumpy\nndarray\n", b"cnumpy\ndtype\n", b"cnumpy.core.multiarray\n_reconstruct\n"),
]


@settings(max_examples=1500, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=30))
def test_any_program(pieces: list[bytes]) -> None:
    survives(header() + b"".join(pieces) + b".")


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes(data: bytes) -> None:
    survives(header() + data)
    survives(data)
