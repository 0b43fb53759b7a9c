"""``packstore ref-logps`` and ``packstore evaluate``, from a saved model to printed
figures.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars
import pytest
from children import run_python
from small_jobs import write_jsonl

import packstore
from packstore.cli import main
from packstore.torch import SideWriter, open_side

torch = pytest.importorskip("torch", reason="these commands run a model")
transformers = pytest.importorskip("transformers", reason="these commands load a model")


pytestmark = [  # PEFT's, with transformers 5.23
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning"),
]


def save_model(folder: Path, seed: int) -> str:
    size = {
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
    }
    heads = {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.3,
    }
    ids = {"bos_token_id": None, "eos_token_id": None}
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(**size, **heads, **ids)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """Two models, and datasets of pairs and of single sequences."""
    folder = tmp_path_factory.mktemp("made")
    rows: list[dict[str, Any]] = [
        {
            "prompt": [1, i % 9],
            "chosen": [3, 4, i % 40],
            "rejected": [i],
            "source": "ab"[i % 2],
        }
        for i in range(20)
    ]
    lines = folder / "rows.jsonl"
    write_jsonl(lines, rows)
    pairs = packstore.pack(
        str(lines), str(folder / "p"), pack_size=40, carry=("source:string",)
    )
    return SimpleNamespace(
        policy=save_model(folder / "policy", 0),
        reference=save_model(folder / "reference", 1),
        pairs=pairs.url,
    )


def figures(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    capsys.readouterr()
    assert main(["evaluate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_from_end_to_end(
    made: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    side = str(tmp_path / "side")
    ref_logps = ["ref-logps", made.pairs, side, "--model", made.reference, "--json"]
    assert main(ref_logps) == 0
    result = json.loads(capsys.readouterr().out)
    assert "model_sha256" in result
    numbers = ["evaluate", made.pairs, "--model", "./no", "--ref-logps", side]
    assert main([*numbers, "--by", "ref_logps"]) == 1
    assert "file, source" in capsys.readouterr().err
    assert (result["url"], result["version"]) == (side, 1)
    assert result["dataset"] == {"url": made.pairs, "version": 1}
    assert len(open_side(side)) == 20
    policy = ["--model", made.policy, "--loss-parameter", "beta=0.2"]
    by = ["--by", "source"]
    online = figures(
        capsys, made.pairs, *policy, "--reference-model", made.reference, *by
    )
    stored = figures(capsys, made.pairs, *policy, "--ref-logps", side, *by)
    assert list(online["by"]) == ["a", "b"]
    assert (online["url"], online["version"]) == (made.pairs, 1)
    assert stored == online  # float32 both, one pack a batch
    assert online["metrics"]["examples"] == 20
    twice = figures(capsys, made.pairs, *policy[:-1], "beta=0.4", "--ref-logps", side)[
        "metrics"
    ]
    margins = [each["rewards/margins"] for each in (online["metrics"], twice)]
    assert margins[1] == pytest.approx(2 * margins[0])
    assert margins[0] != 0
    same = figures(capsys, made.pairs, "--model", made.reference, "--ref-logps", side)
    assert same["metrics"]["rewards/margins"] == 0
    assert main(["evaluate", made.pairs, *policy, "--ref-logps", side]) == 0
    out = capsys.readouterr().out
    assert "rewards/accuracies" in out
    table = tmp_path / "rows.parquet"
    stored = figures(
        capsys, made.pairs, *policy, "--ref-logps", side, "--examples", str(table), *by
    )
    assert stored == online
    rows = polars.read_parquet(table)
    assert rows["example_id"].to_list() == list(range(20))
    assert rows["source"].to_list() == ["a", "b"] * 10
    joined = packstore.scan(made.pairs).collect().join(rows, on="example_id")
    assert len(joined) == 20
    unwritable = ["--examples", str(tmp_path / ("long" * 80))]
    assert (
        main(["evaluate", made.pairs, *policy, "--ref-logps", side, *unwritable]) == 1
    )
    assert "longlong" in capsys.readouterr().err
    sft = figures(capsys, made.pairs, "--model", made.policy, "--loss", "sft")
    assert sft["metrics"]["perplexity"] > 1


def test_metrics_of_groups(
    made: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a carried column, of a joined one, and of the input files."""
    command = [made.pairs, "--model", made.policy, "--loss", "simpo"]
    result = figures(capsys, *command, "--by", "source")
    assert (result["url"], result["version"]) == (made.pairs, 1)
    whole, groups = result["metrics"], result["by"]
    assert [groups[name]["examples"] for name in "ab"] == [10, 10]
    for name in ("loss", "rewards/margins"):
        assert groups["a"][name] != groups["b"][name]
        mean = (groups["a"][name] + groups["b"][name]) / 2
        assert whole[name] == pytest.approx(mean)
    of_file = figures(capsys, *command, "--by", "file")
    assert of_file["by"]["rows.jsonl"] == pytest.approx(whole)
    assert figures(capsys, *command)["by"] == {}

    side = str(tmp_path / "levels")
    dataset = packstore.open(made.pairs)
    with SideWriter(side, dataset, {"level": "int64"}) as writer:
        writer.write(range(20), {"level": [i % 2 for i in range(20)]})
    of_level = figures(capsys, *command, "--side", side, "--by", "level")["by"]
    assert of_level == {"0": groups["a"], "1": groups["b"]}

    assert main(["evaluate", *command, "--by", "source"]) == 0
    table = capsys.readouterr().out
    assert "By source" in table
    assert f"{groups['b']['loss']:.6g}" in table


def test_a_table_of_many_groups_names_how_many_there_are(
    made: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        {"prompt": [1], "chosen": [3], "rejected": [i, 5], "row": max(i, 7)}
        for i in range(40)
    ]
    data = packstore.pack(
        rows, str(tmp_path / "many"), pack_size=40, carry=("row:int64",)
    )
    command = [data.url, "--model", made.policy, "--loss", "sft", "--by", "row"]
    groups = figures(capsys, *command)["by"]
    assert list(groups) == ["7", *sorted(str(i) for i in range(8, 40))]
    assert groups["7"]["examples"] == 8
    assert main(["evaluate", *command]) == 0
    table = capsys.readouterr().out
    assert "33 groups" in table
    assert "│ 7 " in table
    assert "│ 9 " not in table


def test_a_group_with_nothing_to_compare_has_null(
    made: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """JSON has no NaN, which is the mean over no pairs."""
    rows = [
        {"prompt": [1], "responses": [[3], [i], [i, 5]], "scores": [i % 2, 0, 0]}
        | {"source": "ab"[i % 2]}
        for i in range(6, 20)
    ]
    data = packstore.pack(
        rows, str(tmp_path / "tied"), pack_size=40, carry=("source:string",)
    )
    command = [data.url, "--model", made.policy, "--loss", "simpo", "--by", "source"]
    groups = figures(capsys, *command)["by"]
    assert groups["a"]["examples"] == groups["b"]["examples"] == 7
    assert groups["a"]["loss"] is None
    assert groups["b"]["loss"] > 0
    assert main(["evaluate", *command]) == 0
    assert "│ a " in capsys.readouterr().out


def test_log_probs_of_what_was_appended(
    made: SimpleNamespace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the old version stay valid, beside those of the new part."""
    rows = [
        {"prompt": [2, i], "chosen": [3], "rejected": [i, 4], "source": "c"}
        for i in range(9)
    ]
    more = packstore.pack(
        rows, str(tmp_path / "m"), pack_size=40, carry=("source:string",)
    )
    grown = packstore.append(packstore.concat([made.pairs], str(tmp_path / "ds")), rows)
    sides = [str(tmp_path / name) for name in ("ref-pairs", "ref-more")]
    for dataset, side in zip((made.pairs, more.url), sides, strict=True):
        assert main(["ref-logps", dataset, side, "--model", made.reference]) == 0
    policy = [grown.url, "--model", made.policy]
    online = figures(capsys, *policy, "--reference-model", made.reference)
    stored = figures(capsys, *policy, "--ref-logps", sides[1], "--ref-logps", sides[0])
    assert stored == online
    assert online["metrics"]["examples"] == 29
    assert main(["evaluate", *policy, "--ref-logps", sides[0]]) == 1
    assert "source 1" in capsys.readouterr().err


def test_a_run_and_its_rerun(
    made: SimpleNamespace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    out = str(tmp_path / "run")
    job = [
        "train",
        "--model",
        made.policy,
        "--train-dataset",
        made.pairs,
        "--eval-dataset",
    ]
    job += [made.pairs]
    job += ["--max-steps", "4", "--logging-steps", "1", "--examples-per-step", "6"]
    job += ["--output-dir"]
    assert main([*job, out]) == 0
    capsys.readouterr()
    assert main([*job, out]) == 0  # a rerun
    assert f"already finished: {out}" in capsys.readouterr().out
    assert f"{out} is finished" in caplog.text
    assert "resumed" not in caplog.text
    assert main([*job, out, "--max-steps", "6"]) == 0
    assert f"trained {out}" in capsys.readouterr().out
    assert "resumed from step 4 of 6" in caplog.text
    card = Path(out, "README.md").read_text(encoding="utf-8")
    records = json.loads(Path(out, "trainer_state.json").read_text("utf-8"))
    examples = sum(r.get("examples", 0) for r in records["log_history"])
    assert examples > 30
    assert f"| examples | {examples:.0f} |" in card


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["--loss-parameter", "beta=0.3"], id="reference"),
        pytest.param(
            ["--loss", "simpo", "--loss-parameter", "gamma=0.7"],
            id="no reference",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--ref-logps", "{side}", "--eval-ref-logps", "{side}"],
            id="stored reference",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_run_ends_with_the_command_that_evaluates_it(
    made: SimpleNamespace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
) -> None:
    side = str(tmp_path / "side")
    if "{side}" in flags:
        assert main(["ref-logps", made.pairs, side, "--model", made.policy]) == 0
    out = str(tmp_path / "a run")
    job = ["train", "--model", made.policy, "--train-dataset", made.pairs]
    job += ["--eval-dataset", made.pairs, "--output-dir", out, "--max-steps", "2"]
    job += ["--learning-rate", "1e-2", "--warmup-steps", "0"]
    job += [flag.format(side=side) for flag in flags]
    capsys.readouterr()
    assert main(job) == 0
    last_line = capsys.readouterr().out.splitlines()[-1]
    program, command, *words = shlex.split(last_line.partition(": ")[2])
    assert (program, command) == ("packstore", "evaluate")
    metrics = figures(capsys, *words)["metrics"]
    state = json.loads(Path(out, "trainer_state.json").read_text(encoding="utf-8"))
    evaluation = [r for r in state["log_history"] if "eval_loss" in r][-1]
    for name in ("loss", "rewards/margins"):
        assert metrics[name] == pytest.approx(evaluation[f"eval_{name}"], rel=1e-5)
    assert metrics["rewards/margins"] != 0


@pytest.mark.slow
def test_weights_are_told_in_a_sentence(made: SimpleNamespace, tmp_path: Path) -> None:
    """Not by transformers' table, of which a log would make one line."""
    config = json.loads(Path(made.policy, "config.json").read_text(encoding="utf-8"))
    shutil.copytree(made.policy, tmp_path / "model")
    fewer = json.dumps({**config, "num_hidden_layers": 1})
    (tmp_path / "model" / "config.json").write_text(fewer, encoding="utf-8")
    command = ["evaluate", made.pairs, "--model", tmp_path / "model", "--loss", "simpo"]
    done = run_python("-m", "packstore", *command, "--use-cpu")
    assert done.returncode == 0, done.stderr
    assert "9 of the weights" in done.stderr
    assert "LOAD REPORT" not in done.stderr


@pytest.mark.slow
def test_two_ranks(made: SimpleNamespace, tmp_path: Path) -> None:
    """As torchrun starts them; the first alone prints."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    side = str(tmp_path / "side")
    command = [sys.executable, "-m", "packstore", "ref-logps", made.pairs, side]
    env = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
    }
    ranks = [
        subprocess.Popen(
            [*command, "--model", made.reference],
            env={
                **env,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    assert "side dataset" in said[0][0]
    assert said[1][0] == ""
    assert len(open_side(side)) == 20


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("ref-logps", "{pairs}", "{out}", "--model", "./nowhere"), "no such folder"),
        (
            ("ref-logps", "./nowhere", "{out}", "--model", "{policy}"),
            "must be a dataset",
        ),
        (
            ("evaluate", "{pairs}", "--model", "{policy}"),
            "--reference-model, or --ref-logps",
        ),
        (
            ("evaluate", "{pairs}", "--model", "{policy}", "--loss", "dpoo"),
            "unknown loss",
        ),
        (
            ("evaluate", "{pairs}", "--model", "./no", "--by", "sauce"),
            "source",
        ),
        (
            ("evaluate", "{pairs}", "--model", "{policy}", "--ref-logps", "./no"),
            "a side dataset",
        ),
        (
            (
                "train",
                "--model",
                "./no",
                "--train-dataset",
                "{pairs}",
                "--output-dir",
                "{out}",
            ),
            "model ./no: ",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_wrong_input_is_one_line(
    made: SimpleNamespace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    text: str,
) -> None:
    places = {**vars(made), "out": str(tmp_path / "out")}
    assert main([argument.format(**places) for argument in arguments]) == 1
    error = capsys.readouterr().err
    lines = [
        line for line in error.splitlines() if line.startswith("packstore: error:")
    ]
    assert len(lines) == 1
    assert text in lines[0]
    assert "internal" not in error
