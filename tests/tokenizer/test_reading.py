"""How a record is read: in which order, announced with what is left, and alike in any
order.
"""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from children import run_python

import packstore
from packstore.cli import main
from packstore.errors import ConfigError, RecordError, UnknownNameError
from tests.tokenizer.conftest import TEMPLATE

Q = {"role": "user", "content": "Q"}
X = {"role": "assistant", "content": "x"}
PAIR = {"prompt": "Q", "chosen": "x", "rejected": "y"}
TEXT = {"prompt": "Q", "response": "x"}
CHAT = {"messages": [Q, X]}
SCORED = {"prompt": "Q", "responses": ["x", "y"], "scores": [2, 1]}
HELPSTEER3 = {
    "context": [Q],
    "response1": "x",
    "response2": "y",
    "overall_preference": 1,
}
ALPACA = {"instruction": "Q", "input": "R", "output": "x"}
AMBIGUOUS = {**ALPACA, "problem": "P", "solution": "z"}
OF_KIND = {"preference": PAIR, "sft": TEXT, "scored": SCORED}

AS_CHATS = ["[u]Q<e>[a]«x<e>»", "[u]Q<e>[a]«y<e>»"]


@pytest.fixture(scope="module")
def tokenizer(byte_level):
    return byte_level(template=TEMPLATE)


@pytest.fixture
def files(tmp_path, byte_level):
    """A folder with a tokenizer, for the command line and for jobs that are
    repeated.
    """
    byte_level().library.save(str(tmp_path / "t.json"))

    def write(name: str, *records: Any) -> str:
        path = tmp_path / name
        path.write_text(
            "".join(json.dumps(r) + "\n" for r in records), encoding="utf-8"
        )
        return str(path)

    return write


def reading(packed) -> dict[str, Any]:
    """Return how the manifest says that records are read."""
    return packed.dataset.manifest.provenance["reading"]


# The order


def test_a_form_goes_before_own_names(pack, tokenizer):
    """HelpSteer2 has a prompt and a response; its helpfulness says what they
    are worth.
    """
    record = {**TEXT, "helpfulness": 3, "correctness": 1}
    packed = pack(tokenizer, record)
    assert packed.dataset.manifest.kind == "scored"
    assert reading(packed)["form"] == "helpsteer2"


def test_own_names_go_before_nothing_else(pack, tokenizer):
    packed = pack(tokenizer, {**PAIR, "topic": "x"})
    assert "form" not in reading(packed)
    assert reading(packed)["fields"] == {name: name for name in PAIR}


def test_fields_of_the_user_go_before_forms(pack, tokenizer):
    packed = pack(
        tokenizer,
        {**ALPACA, "asked": "W"},
        fields={"prompt": "asked", "response": "output"},
    )
    assert packed.marked == ["W«x</s>»"]


def test_a_null_column_counts_as_absent(pack, tokenizer):
    """Also for a form, and in NaN of tables."""
    for nothing in (None, float("nan")):
        packed = pack(
            tokenizer, {**TEXT, "helpfulness": nothing}, {**TEXT, "label": nothing}
        )
        assert packed.dataset.manifest.kind == "sft"


def test_of_two_forms_the_one_that_requires_the_other_s_fields_wins(pack, tokenizer):
    """Alpaca's fields are among those of pairs of alpaca's."""
    record = {"instruction": "Q", "output": "x", "chosen": "x", "rejected": "y"}
    assert reading(pack(tokenizer, record))["form"] == "alpaca_pairs"


def test_two_forms_that_fit_stop_and_are_both_named(pack, tokenizer):
    with pytest.raises(RecordError) as caught:
        pack(tokenizer, AMBIGUOUS)
    assert "alpaca" in str(caught.value)
    assert "problem_solution" in str(caught.value)
    assert pack(tokenizer, AMBIGUOUS, form="alpaca").marked == ["[u]Q\nR<e>[a]«x<e>»"]
    assert pack(tokenizer, AMBIGUOUS, form="problem_solution").marked == [
        "[u]P<e>[a]«z<e>»"
    ]


def test_two_structures_of_one_form_are_told_apart_by_their_columns(pack, tokenizer):
    both = {"problem": "P", "solution": "x", "question": "Q", "answer": "z"}
    with pytest.raises(RecordError, match="problem_solution") as caught:
        pack(tokenizer, both)
    for columns, question in ((["problem"], "Q"), (["answer", "question"], "P")):
        assert f"ignore={json.dumps(columns)}" in str(caught.value)
        assert (
            pack(tokenizer, both, ignore=columns)
            .marked[0]
            .startswith(f"[u]{question}<e>")
        )


def test_a_form_that_is_named_is_insisted_on(pack, tokenizer):
    assert (
        reading(pack(tokenizer, HELPSTEER3, form="helpsteer3"))["form"] == "helpsteer3"
    )
    with pytest.raises(RecordError, match="item 2") as caught:
        pack(tokenizer, HELPSTEER3, PAIR, form="helpsteer3")
    assert "context" in str(caught.value)
    assert "helpsteer3" in str(caught.value)


def test_a_form_that_there_is_not(pack, tokenizer):
    with pytest.raises(ConfigError, match="helpsteer3"):
        pack(tokenizer, PAIR, form="helpster3")


def test_form_none_reads_own_names_alone(pack, tokenizer):
    record = {"prompt": "Q", "completion": "x", "instruction": "R", "output": "z"}
    assert reading(pack(tokenizer, record))["form"] == "alpaca"
    assert pack(tokenizer, record, form="none").marked == ["Q«x</s>»"]
    with pytest.raises(RecordError, match="context"):
        pack(tokenizer, HELPSTEER3, form="none")


def test_the_form_is_decided_for_each_record(pack, tokenizer, caplog):
    """Ties are left out, and the totals are said once."""
    caplog.set_level("INFO", "packstore")
    ties = [{**HELPSTEER3, "overall_preference": n} for n in (-1, 0, 2)]
    packed = pack(tokenizer, {**PAIR, "prompt": [Q]}, *ties)
    assert (packed.dataset.manifest.records.packed, packed.dropped) == (3, {"tie": 1})
    totals = "\n".join(text for text in caplog.messages if text.startswith("records"))
    assert totals.count("helpsteer3") == 1
    assert totals.count("1 ties") == 1


def test_what_a_record_is_does_not_depend_on_others(pack, tokenizer):
    """Nor on their number, nor on their order: `unique_id` has another value in
    each.
    """
    records = [
        {
            "messages": [Q, {**X, "content": f"x{i}"}],
            "unique_id": f"u{i}",
            "channel": "ab"[i % 2],
        }
        for i in range(12)
    ]
    for number in (1, 2, 3, 8, 12):
        assert len(pack(tokenizer, *records[:number]).sequences) == number
    shuffled = random.Random(0).sample(records, len(records))
    assert sorted(pack(tokenizer, *shuffled).marked) == sorted(
        pack(tokenizer, *records).marked
    )


# Kinds


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("distance", [1, 3000])
def test_a_record_of_another_kind_stops_and_both_places_are_named(
    num_workers, distance, files, tmp_path
):
    """In the first block, and in a later one."""
    filler = {**PAIR, "prompt": "Q" * 700}
    source = files("in.jsonl", *[filler] * distance, TEXT)
    with pytest.raises(RecordError) as caught:
        packstore.pack(
            source,
            f"{tmp_path}/out",
            f"{tmp_path}/t.json",
            pack_size=1024,
            num_workers=num_workers,
        )
    assert f"in.jsonl, line {distance + 1}:" in str(caught.value)
    assert "in.jsonl, line 1 " in str(caught.value)
    assert "preference" in str(caught.value)
    assert "sft" in str(caught.value)


def test_a_folder_of_two_kinds_names_a_file_of_each(files, tmp_path):
    """So that they can be packed apart."""
    (tmp_path / "raw").mkdir()
    files("raw/a.jsonl", PAIR, PAIR)
    files("raw/b.jsonl", TEXT)
    with pytest.raises(RecordError) as caught:
        packstore.pack(f"{tmp_path}/raw", f"{tmp_path}/out", f"{tmp_path}/t.json")
    assert "a.jsonl, line 1" in str(caught.value)
    assert "b.jsonl, line 1" in str(caught.value)


def test_the_kind_may_be_said(pack, tokenizer):
    record = {**TEXT, "score": 0.5}
    assert pack(tokenizer, record).dataset.manifest.kind == "scored"
    with pytest.raises(RecordError, match="scor"):
        pack(tokenizer, record, kind="sft")
    assert (
        pack(tokenizer, record, kind="sft", ignore=["score"]).dataset.manifest.kind
        == "sft"
    )
    with pytest.raises(RecordError):
        pack(tokenizer, PAIR, kind="sft")
    with pytest.raises(RecordError):
        pack(tokenizer, HELPSTEER3, kind="sft")


# What stops first


BAD: dict[str, Any] = {
    "another kind": TEXT,
    "a column that weighs": {**PAIR, "weight": 0.5},
    "a field that is missing": {"prompt": "Q", "chosen": "x"},
    "two forms": AMBIGUOUS,
    "too long": {**PAIR, "chosen": "x" * 5000},
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("first", BAD)
def test_the_first_record_that_stops_a_job_is_named(
    first, num_workers, files, tmp_path
):
    """Whatever stops it: the reading, or the ids that come of it."""
    others = [record for name, record in BAD.items() if name != first]
    settings = {
        "pack_size": 4096,
        "on": {"overlong": "error"},
        "num_workers": num_workers,
    }
    for good in (2, 2500):
        filler = [{**PAIR, "prompt": "Q" * 700}] * good
        source = files("in.jsonl", *filler, BAD[first], *others, *filler)
        with pytest.raises(RecordError, match=rf"line {good + 1}: "):
            packstore.pack(source, f"{tmp_path}/out", f"{tmp_path}/t.json", **settings)


# What pack says before it works


def announcement(caplog) -> str:
    (text,) = [text for text in caplog.messages if text.startswith("reading records")]
    return text


def test_own_names_are_announced(pack, tokenizer, caplog):
    caplog.set_level("INFO", "packstore")
    long = "a long note " * 100
    pack(tokenizer, {"q": "Q", "chosen": "x", "rejected": "y", "note": long, "n": 3},
         fields={"prompt": "q"})  # fmt: skip
    text = announcement(caplog)
    assert "prompt <- q" in text
    (note,) = [line for line in text.splitlines() if "note" in line]
    assert long[:150] in note
    assert len(note) < 250
    assert any("n = 3" in line for line in text.splitlines())


def test_a_form_is_announced_with_its_docstring_and_fields(pack, tokenizer, caplog):
    caplog.set_level("INFO", "packstore")
    pack(tokenizer, {**HELPSTEER3, "domain": "code", "task": "t9"})
    text = announcement(caplog)
    assert "helpsteer3" in text
    assert "Two answers and a preference from -3" in text
    assert all(name in text for name in HELPSTEER3)
    assert "task = " in text


def test_the_announcement_comes_before_the_work(pack, tokenizer, caplog):
    """And is not repeated for later blocks."""
    caplog.set_level("INFO", "packstore")
    pack(tokenizer, *[PAIR] * 50)
    texts = caplog.messages
    first = [text.startswith("reading records") for text in texts].index(True)
    packed = [text.startswith("packed") for text in texts].index(True)
    assert first < packed
    announcement(caplog)


def test_columns_that_appear_later_are_named_at_the_end(pack, tokenizer, caplog):
    caplog.set_level("INFO", "packstore")
    pack(tokenizer, {**PAIR, "topic": "n"}, {**PAIR, "remark": "secret words"})
    assert "remark" not in announcement(caplog)
    later = "\n".join(caplog.messages).partition(announcement(caplog))[2]
    assert "remark" in later
    assert "secret words" not in later
    assert "topic" not in later


@pytest.mark.parametrize("flags", [[], ["--dry-run"]])
def test_the_command_line_says_it_on_stderr(flags, files, tmp_path):
    source = files("in.jsonl", {**PAIR, "note": "n"})
    command = ["pack", source, f"{tmp_path}/out", "--tokenizer", f"{tmp_path}/t.json"]
    done = run_python("-m", "packstore", *command, *flags)
    assert "note = " in done.stderr
    assert "note = " not in done.stdout


def test_the_manifest_says_how_records_are_read_without_their_text(pack, tokenizer):
    record = {
        "q": "secret",
        "chosen": "hidden",
        "rejected": "covert",
        "note": "private",
    }
    packed = pack(tokenizer, record, fields={"prompt": "q"})
    said = reading(packed)
    assert said["fields"]["prompt"] == "q"
    text = json.dumps(packed.dataset.manifest.provenance)
    assert not [value for value in record.values() if value in text]
    form = reading(pack(tokenizer, HELPSTEER3))
    assert form["form"] == "helpsteer3"
    assert isinstance(form["form_version"], int)
    assert set(form["fields"]) >= set(HELPSTEER3)


def test_scores_of_a_classifier_beside_chats_say_how_to_leave_them(
    pack, tokenizer, caplog
):
    """FineTome: it becomes scored, and a line says what ignores the score."""
    caplog.set_level("INFO", "packstore")
    record = {"conversations": [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "x"}],
              "source": "s", "score": 5.2}  # fmt: skip
    assert pack(tokenizer, record).dataset.manifest.kind == "scored"
    assert 'ignore=["score"]' in announcement(caplog)
    assert pack(tokenizer, record, ignore=["score"]).dataset.manifest.kind == "sft"


# Columns to ignore


@pytest.mark.parametrize(
    ("record", "ignore"),
    [
        ({**TEXT, "label": "finance"}, ["label"]),
        ({**TEXT, "rating": [1, {"a": None}]}, ["rating"]),
        ({**TEXT, "a.b": {"score": 1}}, ["a.b"]),  # a whole name goes before a path
        ({**TEXT, "": 1, "_x": 2, "score ": 3}, ["", "_x", "score "]),
        ({**TEXT, "metadata": {"score": 1, "by": {"grade": 2}}}, ["metadata"]),
        ({**TEXT, "metadata": {"score": 1, "by": {"grade": 2}}},
         ["metadata.score", "metadata.by.grade"]),
        ({**TEXT, "metadata": '{"score": 1, "id": 3}'}, ["metadata.score"]),
        ({**TEXT, "notes": [{"score": 1}, {"score": 2}]}, ["notes[].score"]),
        ({**TEXT, "meta": {"by": '{"verdict": "bad"}'}}, ["meta.by.verdict"]),
        ({**TEXT, "helpfulness": 3}, ["helpfulness"]),  # no form, then
        ({**TEXT, "messages": [Q, {**X, "content": "z"}]}, ["messages"]),
        ({**TEXT, "absent": None}, ["absent", "nowhere", "no.where"]),
    ],
)  # fmt: skip
def test_an_ignored_column_is_as_if_absent(record, ignore, pack, byte_level):
    packed = pack(byte_level(), record, ignore=ignore)
    assert packed.marked == ["Q«x</s>»"]
    assert packed.dataset.manifest.kind == "sft"
    assert not packed.dataset.manifest.records.fields_not_used.keys() & set(ignore)


def test_other_members_are_not_ignored(pack, byte_level):
    record = {**TEXT, "metadata": {"score": 1, "rating": 2}}
    with pytest.raises(RecordError, match="rating"):
        pack(byte_level(), record, ignore=["metadata.score"])


def test_a_column_that_is_ignored_is_not_read(pack, byte_level):
    with pytest.raises(RecordError):
        pack(byte_level(), PAIR, ignore=["chosen"])


def test_append_ignores_and_reads_as_the_dataset_was_read(files, tmp_path):
    """Without saying it again, in Python and on the command line; also its form."""
    first = {
        "question": "Q",
        "answer": "x",
        "problem": "P",
        "solution": "z",
        "score": 1,
    }
    tokenizer, out = f"{tmp_path}/t.json", f"{tmp_path}/out"
    settings = {"ignore": ["score"], "form": "question_answer", "pack_size": 64}
    dataset = packstore.pack(files("a.jsonl", first), out, tokenizer, **settings)
    assert dataset.manifest.provenance["settings"]["ignore"] == ["score"]
    more = files("b.jsonl", {**first, "question": "R", "score": 0})
    assert packstore.append(out, more).manifest.records.packed == 2
    again = files("c.jsonl", {**first, "question": "S", "score": 3})
    assert main(["append", out, again]) == 0
    newest = packstore.open(out)
    assert newest.manifest.records.packed == 3
    assert newest.manifest.kind == "sft"
    with pytest.raises(RecordError):
        packstore.append(out, files("d.jsonl", {**first, "rating": 3}))


# Roles of messages


def test_names_of_roles_are_mapped(pack, tokenizer, files, tmp_path):
    turns = [{"role": "NARRATOR", "content": "S"}, {"role": "USER", "content": "Q"},
             {"role": "IT", "content": "x"}]  # fmt: skip
    roles = {"NARRATOR": "system", "USER": "user", "IT": "assistant"}
    packed = pack(tokenizer, {"messages": turns}, roles=roles)
    assert packed.marked == ["[s]S<e>[u]Q<e>[a]«x<e>»"]
    with pytest.raises(RecordError, match="IT") as caught:
        pack(
            tokenizer,
            {"messages": turns[1:]},
            on={"bad_role": "error"},
            roles={"USER": "user"},
        )
    assert 'roles={"IT": "assistant"}' in str(caught.value)
    source = files("in.jsonl", {"messages": turns})
    command = ["pack", source, f"{tmp_path}/out", "--tokenizer", f"{tmp_path}/t.json"]
    flags = [part for item in roles.items() for part in ("--role", "=".join(item))]
    assert main([*command, "--chat-template", "plain", *flags]) == 0


@pytest.mark.parametrize("keys", [("speaker", "text"), ("who", "words")])
def test_turns_with_other_keys_need_an_adapter(pack, tokenizer, keys, caplog):
    """The way out is named where the job stops, and where such records are left out."""
    turns = [
        dict(zip(keys, turn, strict=True))
        for turn in (("user", "Q"), ("assistant", "x"))
    ]
    with pytest.raises(RecordError, match="role") as caught:
        pack(tokenizer, {"messages": turns}, on={"bad_role": "error"})
    assert "adapter=" in str(caught.value)
    caplog.clear()
    pack(tokenizer, {"messages": turns})
    assert "adapter=" in caplog.text


def test_a_role_of_packstore_may_mean_another(pack, tokenizer):
    turns = [{"role": "developer", "content": "S"}, Q, X]
    packed = pack(tokenizer, {"messages": turns}, roles={"developer": "system"})
    assert packed.marked == ["[s]S<e>[u]Q<e>[a]«x<e>»"]


def test_a_meaning_that_there_is_not(pack, tokenizer):
    with pytest.raises((ConfigError, UnknownNameError), match="narrator"):
        pack(tokenizer, CHAT, roles={"IT": "narrator"})


# Ways out


WAYS_OUT: list[tuple[Any, dict[str, Any], str, str]] = [
    ({"prompt": "Q", "chosen": "x"}, {}, "--field rejected=NAME", '"rejected": "NAME"'),
    ({"prompt": "Q", "chosen": "x"}, {}, "--on missing_field=drop", 'on={"missing_field": "drop"}'),
    ({**PAIR, "chosen_reward": 1}, {}, "--ignore chosen_reward", 'ignore=["chosen_reward"]'),
    ({**PAIR, "chosen_reward": 1}, {}, "--field rejected_reward=NAME", '"rejected_reward": "NAME"'),
    ({**PAIR, "system": "S"}, {}, "--as-chat", "as_chat=True"),
    ({**PAIR, "system": "S"}, {}, "--ignore system", 'ignore=["system"]'),
    ({"chosen": "x", "rejected": "y"}, {}, "--field prompt=NAME", '"prompt": "NAME"'),
    ({"title": "x"}, {}, "--field messages=NAME", '"messages": "NAME"'),
    ({"title": "x"}, {}, "--adapter FILE.py:FUNCTION", 'adapter="FILE.py:FUNCTION"'),
    (AMBIGUOUS, {}, "--form alpaca", 'form="alpaca"'),
    ({"q": "Q", "chosen": "x", "rejected": "y", "margin": 3, "chosen_reward": 2,
      "rejected_reward": 1}, {"fields": {"prompt": "q"}}, "--ignore margin", 'ignore=["margin"]'),
    ({"q": "Q", "chosen": "x", "rejected": "y", "chosen_reward": 2}, {"fields": {"prompt": "q"}},
     "--field rejected_reward=NAME", 'fields={"prompt": "q", "rejected_reward": '
                                     '"NAME"}'),
]  # fmt: skip
"""A record, settings, and what its refusal must show in the shell and in Python."""


@pytest.mark.parametrize(
    ("record", "settings", "flag", "argument", "num_workers"),
    [*((*way, 0) for way in WAYS_OUT), (*WAYS_OUT[0], 2)],
)
def test_ways_out_are_in_the_syntax_of_the_door(
    record, settings, flag, argument, num_workers, files, tmp_path, capsys
):
    """Also where a worker refuses the record. A mapping in Python replaces the one
    before.
    """
    filler = [{**PAIR, "q": "Q", "prompt": "Q" * 700}] * (2500 if num_workers else 0)
    source, out = files("in.jsonl", *filler, record), f"{tmp_path}/out"
    with pytest.raises(RecordError) as caught:
        packstore.pack(
            source, out, f"{tmp_path}/t.json", num_workers=num_workers, **settings
        )
    assert argument in str(caught.value)
    assert "--" not in str(caught.value)
    flags = [f"--num-workers={num_workers}", "--tokenizer", f"{tmp_path}/t.json"]
    flags += [
        part
        for item in settings.get("fields", {}).items()
        for part in ("--field", "=".join(item))
    ]
    assert main(["pack", source, out, *flags]) == 1
    said = capsys.readouterr().err
    assert flag in said
    assert argument not in said
