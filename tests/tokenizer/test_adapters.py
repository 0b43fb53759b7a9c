"""A function of the user reads records: where it may come from, and what it may
return.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from children import run_python

import packstore
from packstore import Answers, Chat, Drop, Pair
from packstore.cli import main
from packstore.errors import ConfigError, DatasetExistsError, RecordError
from packstore.etl.reports import doctor, dry_run, estimate
from packstore.tokenizer.records.forms import load
from tests.tokenizer.conftest import TEMPLATE

CODE = '''
"""Reads records of a house."""
from packstore import Answers, Chat, Drop, Pair


def read_pair(record):
    """Two drafts, the shorter of which is better.

    Further lines are not announced.
    """
    if record["left"] == record["right"]:
        return Drop("tie", "equal drafts")
    drafts = sorted((record["left"], record["right"]), key=len)
    return Pair(record["task"], *drafts)


def read_chat(record):
    """A task and its answer, as turns."""
    return Chat(messages=[{"role": "user", "content": record["task"]},
                          {"role": "assistant", "content": record["left"]}])
'''
RECORDS = [
    {"task": f"T{i}", "left": "x" * (1 + i % 3), "right": "yy"} for i in range(6)
]
"""Two of them are ties of lengths, which are no ties of drafts."""


def read_pair(record: dict[str, Any]) -> Pair | Drop:
    """Two drafts, the shorter of which is better."""
    if record["left"] == record["right"]:
        return Drop("tie", "equal drafts")
    drafts = sorted((record["left"], record["right"]), key=len)
    return Pair(record["task"], *drafts)


def failing(record: dict[str, Any]) -> Chat:
    if record["task"] == "T3":
        raise ZeroDivisionError("no third")
    return Chat(prompt=record["task"], response=record["left"])


@pytest.fixture
def folder(tmp_path: Path, byte_level, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file of functions, records and a tokenizer."""
    (tmp_path / "house_forms.py").write_text(CODE, encoding="utf-8")
    lines = "".join(json.dumps(record) + "\n" for record in RECORDS)
    (tmp_path / "in.jsonl").write_text(lines, encoding="utf-8")
    byte_level().library.save(str(tmp_path / "t.json"))
    (tmp_path / "template.jinja").write_text(TEMPLATE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "house_forms", raising=False)
    return tmp_path


@pytest.fixture(name="pack_records")
def fixture_of_conftest(request: pytest.FixtureRequest) -> Any:
    """The fixture `pack`, by another name than the helper of this file."""
    return request.getfixturevalue("pack")


def pack(
    folder: Path, adapter: Any, out: str = "out", **settings: Any
) -> packstore.Dataset:
    settings = {"pack_size": 64, "num_workers": 0, **settings}
    return packstore.pack(
        "in.jsonl", str(folder / out), "t.json", adapter=adapter, **settings
    )


def ids_of(dataset: packstore.Dataset) -> list[Any]:
    return (
        packstore.scan(dataset, tokens=True)
        .collect()
        .sort("example_id")["input_ids"]
        .to_list()
    )


def imported() -> Callable[..., Any]:
    import house_forms

    return house_forms.read_pair


SPELLED: dict[str, Callable[[], Any]] = {
    "an import path": lambda: "house_forms:read_pair",
    "a file": lambda: "house_forms.py:read_pair",
    "a function of a module": imported,
    "a lambda": lambda: lambda record: read_pair(record),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("name", SPELLED)
def test_a_function_may_come_from_anywhere(name, num_workers, folder):
    expected = ids_of(
        packstore.pack(
            [{"prompt": r["task"], "chosen": c, "rejected": d}
             for r in RECORDS if r["left"] != r["right"]
             for c, d in [sorted((r["left"], r["right"]), key=len)]],
            "memory://adapters", "t.json", pack_size=64, num_workers=0,
        )
    )  # fmt: skip
    dataset = pack(folder, SPELLED[name](), num_workers=num_workers)
    assert ids_of(dataset) == expected
    counts = dataset.manifest.records
    assert (counts.read, counts.packed, counts.dropped) == (6, len(expected), {})


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_lambda_reads_chats_in_one_process_and_says_so(num_workers, folder, caplog):
    """The template is rendered by workers all the same."""
    caplog.set_level("INFO", "packstore")
    turns = [{"role": "user", "content": "T"}]
    dataset = pack(
        folder,
        lambda record: Chat(
            messages=[*turns, {"role": "assistant", "content": record["left"]}]
        ),
        chat_template=TEMPLATE,
        num_workers=num_workers,
        out=f"out-{num_workers}",
    )
    assert dataset.manifest.records.packed == 6
    assert any("this process" in text for text in caplog.messages)


@pytest.mark.parametrize("how", ["module", "file"])
def test_on_the_command_line(how, folder):
    adapter = {"module": "house_forms", "file": "house_forms.py"}[how] + ":read_pair"
    command = ["pack", "in.jsonl", "out", "--tokenizer", "t.json", "--adapter", adapter]
    env = {"PYTHONPATH": f"{folder}:{Path(packstore.__file__).parents[1]}"}
    done = run_python("-m", "packstore", *command, env=env)
    assert done.returncode == 0, done.stderr
    assert packstore.open("out").manifest.records.packed == 6
    assert adapter in done.stderr
    assert "the shorter of which is better" in done.stderr
    assert "Further lines" not in done.stderr


def test_what_is_announced(folder, caplog):
    caplog.set_level("INFO", "packstore")
    (folder / "in.jsonl").write_text(
        json.dumps({**RECORDS[0], "note": "n"}), encoding="utf-8"
    )
    pack(folder, "house_forms:read_pair")
    (text,) = [text for text in caplog.messages if text.startswith("reading records")]
    assert all(
        name in text for name in ("house_forms:read_pair", "task", "left", "right")
    )
    assert "note = " in text


COPIES: list[Callable[[Any], dict[str, Any]]] = [
    dict,
    lambda record: {**record},
    lambda record: record.copy(),
    lambda record: record | {},
    lambda record: {} | record,
    lambda record: json.loads(json.dumps(record)),
    lambda record: {name: record[name] for name in record},
]


@pytest.mark.parametrize("copy", COPIES)
def test_a_function_that_copies_a_record_looks_at_all_of_it(copy, folder, caplog):
    caplog.set_level("INFO", "packstore")

    def read_copy(record):
        fields = copy(record)
        return Pair(fields["task"], fields["left"], fields["right"])

    record = {"task": "T", "left": "l", "right": "r", "note": "n"}
    (folder / "in.jsonl").write_text(json.dumps(record), encoding="utf-8")
    pack(folder, read_copy)
    (text,) = [text for text in caplog.messages if text.startswith("reading records")]
    assert "note = " not in text


def test_a_module_that_was_loaded_from_its_file(folder, monkeypatch):
    """Its name in sys.modules is known in this process alone."""
    place = folder / "elsewhere" / "loaded_by_hand.py"
    place.parent.mkdir()
    place.write_text(CODE, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("loaded_by_hand", place)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loaded_by_hand", module)
    spec.loader.exec_module(module)
    expected = ids_of(pack(folder, "house_forms:read_pair"))
    dataset = pack(folder, module.read_pair, out="again")
    assert ids_of(dataset) == expected
    monkeypatch.delitem(sys.modules, "loaded_by_hand")
    name = dataset.manifest.provenance["reading"]["adapter"]
    (folder / "more.jsonl").write_text(
        json.dumps({**RECORDS[0], "task": "new"}), encoding="utf-8"
    )
    packstore.append(dataset, "more.jsonl", adapter=name)


TURNS = '[{"role": "user", "content": "p"}, {"role": "assistant", "content": "a"}]'
READINGS: list[tuple[Any, list[str]]] = [
    (Pair("p", "c", "r"), ["[u]p<e>[a]«c<e>»", "[u]p<e>[a]«r<e>»"]),
    (Answers("p", ["a", "b"], ["0.5", 1]), ["[u]p<e>[a]«a<e>»", "[u]p<e>[a]«b<e>»"]),
    (Chat(prompt="p", response="a", system="S"), ["[s]S<e>[u]p<e>[a]«a<e>»"]),
    (Chat(messages=TURNS), ["[u]p<e>[a]«a<e>»"]),
    (Chat(messages=json.loads(TURNS)), ["[u]p<e>[a]«a<e>»"]),
]


@pytest.mark.parametrize(("result", "expected"), READINGS)
def test_texts_are_turns_by_default_if_there_is_a_template(
    result, expected, byte_level, pack_records
):
    tokenizer = byte_level(template=TEMPLATE)
    assert (
        pack_records(tokenizer, {"x": 1}, adapter=lambda record: result).marked
        == expected
    )
    if not isinstance(result, Chat):
        as_text = pack_records(byte_level(), {"x": 1}, adapter=lambda record: result)
        assert as_text.marked[0] in ("p«c</s>»", "p«a</s>»")


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (Chat(input_ids=[80, 81], labels=[-100, 81]), [([80, 81], [False, True])]),
        (Chat(input_ids=[80, 81], mask=[0, 1]), [([80, 81], [False, True])]),
        (
            Pair([80], [81], [82]),
            [([80, 81], [False, True]), ([80, 82], [False, True])],
        ),
    ],
)
def test_a_function_may_return_token_ids(result, expected, pack_records):
    assert (
        pack_records(None, {"x": 1}, adapter=lambda record: result).sequences
        == expected
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_exception_names_the_function_and_the_record(num_workers, folder):
    for adapter in (failing, lambda record: failing(record)):
        with pytest.raises(RecordError, match=r"in\.jsonl, line 4") as caught:
            pack(folder, adapter, num_workers=num_workers)
        assert "no third" in str(caught.value)


@pytest.mark.parametrize(
    "result", [None, {"prompt": "p"}, "text", ("p", "c"), Drop("no_reason")]
)
def test_anything_else_that_is_returned_stops(result, folder):
    with pytest.raises(RecordError, match=r"in\.jsonl, line 1") as caught:
        pack(folder, lambda record: result)
    assert "Pair" in str(caught.value)


def test_records_that_are_left_out_are_counted_under_their_reason(folder):
    def read(record: dict[str, Any]) -> Pair | Drop:
        if len(record["left"]) == 2:
            return Drop("tie", "of equal length")
        return Pair(record["task"], record["left"], record["right"])

    rejects = folder / "rejects.jsonl"
    dataset = pack(folder, read, rejects=str(rejects))
    assert dataset.manifest.records.dropped == {"tie": 2}
    lines = [
        json.loads(line) for line in rejects.read_text(encoding="utf-8").splitlines()
    ]
    assert [line["detail"] for line in lines] == ["of equal length"] * 2


def test_a_record_of_another_kind_stops_here_too(folder):
    def read(record: dict[str, Any]) -> Pair | Chat:
        if record["task"] == "T2":
            return Chat(prompt="p", response="a")
        return Pair(record["task"], "c", "r")

    with pytest.raises(RecordError, match=r"line 3: .*line 1 "):
        pack(folder, read)


def test_an_adapter_has_judged_its_answers(byte_level):
    """Columns that judge, and siblings, do not stop; messages that nobody reads do."""

    def read(record: dict[str, Any]) -> Chat:
        return Chat(prompt=record["q"], response=record["answer_a"])

    def go(**more: Any) -> packstore.Dataset:
        records = [{"q": "Q", "answer_a": "x", "answer_b": "y", **more}]
        out = f"memory://{len(more)}-{sorted(more)}"
        return packstore.pack(
            records, out, byte_level().file, adapter=read, pack_size=64
        )

    assert go(score=0.5, label="bad", winner=2).manifest.kind == "sft"
    with pytest.raises(RecordError, match="history"):
        go(history=[["a", "b"]])


def test_a_mapped_column_replaces_what_the_adapter_returned(byte_level):
    records = [{"q": "Q", "a": "x", "b": "y", "n": 3, "m": 1}]
    dataset = packstore.pack(
        records, "memory://mapped", byte_level().file, pack_size=64, num_workers=0,
        adapter=lambda record: Pair(record["q"], record["a"], record["b"]),
        fields={"chosen_reward": "n", "rejected_reward": "m"},
    )  # fmt: skip
    assert packstore.scan(dataset).collect()["rewards"].to_list() == [[3, 1]]


def test_an_ignored_column_is_not_shown_to_the_function(folder):
    def read(record: dict[str, Any]) -> Chat:
        assert "right" not in record
        return Chat(prompt=record["task"], response=record["left"])

    assert pack(folder, read, ignore=["right"]).manifest.records.packed == 6


@pytest.mark.parametrize(
    "adapter",
    ["house_forms:absent", "house_forms", "nowhere:f", "none.py:f", ":f", "a:", 3],
)
def test_a_function_that_there_is_not(adapter, folder):
    with pytest.raises(ConfigError, match="adapter"):
        pack(folder, adapter)


# The manifest and what is added later


def test_the_manifest_has_the_name_and_the_hash_of_the_file(folder):
    dataset = pack(folder, "house_forms.py:read_pair")
    reading = dataset.manifest.provenance["reading"]
    digest = hashlib.sha256((folder / "house_forms.py").read_bytes()).hexdigest()
    assert reading == {"adapter": "house_forms.py:read_pair", "adapter_sha256": digest}
    again = pack(folder, "house_forms.py:read_pair")
    assert again.version == dataset.version
    with pytest.raises(DatasetExistsError, match="adapter"):
        pack(folder, "house_forms.py:read_chat", chat_template=TEMPLATE)


@pytest.mark.parametrize(
    "adapter", ["house_forms.py:read_pair", "house_forms:read_pair"]
)
def test_append_reads_by_the_same_function_and_checks_it(adapter, folder):
    pack(folder, adapter)
    more = folder / "more.jsonl"
    more.write_text(json.dumps({**RECORDS[0], "task": "U"}), encoding="utf-8")
    with pytest.raises(
        ConfigError, match="house_forms"
    ):  # a forged manifest may name any
        packstore.append("out", str(more))
    appended = packstore.append("out", str(more), adapter=adapter)
    assert appended.manifest.records.packed == 7

    def run(*arguments: str) -> str:
        """Run a process that has not loaded the file yet; return what it says if it
        fails.
        """
        path = f"{folder}:{Path(packstore.__file__).parents[1]}"
        flags = ("--adapter", adapter, "--tokenizer", "t.json")
        done = run_python(
            "-m", "packstore", *arguments, *flags, env={"PYTHONPATH": path}
        )
        return done.stderr if done.returncode else ""

    more.write_text(json.dumps({**RECORDS[0], "task": "V"}), encoding="utf-8")
    assert run("append", "out", str(more)) == ""
    changed = CODE.replace("key=len)", "key=len, reverse=True)")
    (folder / "house_forms.py").write_text(changed, encoding="utf-8")
    more.write_text(json.dumps({**RECORDS[0], "task": "W"}), encoding="utf-8")
    assert "house_forms" in run("append", "out", str(more))
    assert packstore.open("out").manifest.records.packed == 8


def test_append_reads_by_the_same_version_of_a_form(folder, monkeypatch):
    record = {"question": "Q", "chosen": "x", "rejected": "y"}
    settings = {"pack_size": 64, "num_workers": 0}
    packstore.pack([record], str(folder / "out"), "t.json", **settings)
    more = [{**record, "question": "R"}]
    assert packstore.append("out", more).manifest.records.packed == 2
    form = load()["question_pairs"]
    monkeypatch.setattr(form, "version", form.version + 1)
    with pytest.raises(ConfigError, match="question_pairs"):
        packstore.append("out", [{**record, "question": "S"}])


def test_append_by_a_function_without_a_name_needs_it_again(folder):
    function = lambda record: read_pair(record)  # noqa: E731
    pack(folder, function)
    more = folder / "more.jsonl"
    more.write_text(json.dumps({**RECORDS[0], "task": "U"}), encoding="utf-8")
    with pytest.raises(ConfigError, match="adapter"):
        packstore.append("out", str(more))
    assert (
        packstore.append("out", str(more), adapter=function).manifest.records.packed
        == 7
    )


# Reports


@pytest.mark.parametrize(
    "adapter", [read_pair, "house_forms:read_pair", lambda r: read_pair(r)]
)
def test_reports_read_by_it_as_pack_does(adapter, folder):
    found = doctor("in.jsonl", "t.json", adapter=adapter)
    assert (found.kind, found.records, found.tally.kept) == ("preference", 6, 6)
    projected = estimate("in.jsonl", "t.json", adapter=adapter)
    assert projected.tally.kept == 6
    report, findings = dry_run(
        "in.jsonl", str(folder / "new"), "t.json", adapter=adapter
    )
    assert report.tally.kept == 6
    assert all(finding.ok for finding in findings)


def test_reports_of_the_command_line(folder, capsys):
    for command in (
        ["estimate", "in.jsonl"],
        ["pack", "in.jsonl", "o", "--dry-run"],
    ):
        adapter = ["--adapter", "house_forms:read_pair"]
        assert main([*command, "--tokenizer", "t.json", *adapter]) in (0, 1)
        assert "preference" in capsys.readouterr().out
