"""``benchmarks/gpu_session.py`` on CPU, with the packages that its GPU machine lacks
blocked.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import range_kernels
import torch
from children import run_python

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
LACKING = ("numba", "llvmlite", "polars", "isal", "torchdata", "duckdb", "jsonschema")

BLOCKED = f"""
from importlib.machinery import PathFinder
find = PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] in {LACKING} else find(name, path, target)
PathFinder.find_spec = staticmethod(find_spec)
"""


def run(
    tmp_path: Path, *arguments: str, out: Path | None = None
) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(BLOCKED, encoding="utf-8")
    environment = {
        "PYTHONPATH": os.pathsep.join([str(tmp_path), str(BENCHMARKS.parent)]),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
        "OUT": str(out or ""),
    }
    return run_python(BENCHMARKS / "gpu_session.py", *arguments, env=environment)


@pytest.mark.slow
def test_whole_plan_in_two_calls(tmp_path: Path) -> None:
    """The second goes on where the first was cut; a training run is killed and
    resumed.
    """
    from gpu import prepare, sizes

    data = tmp_path / "data"
    prepare.write_data(data, sizes.DRY)  # packing needs numba, reading does not
    done = run(tmp_path)
    message = (
        "gpu_session.py needs a CUDA GPU; --cpu-dry-run tries the script without one."
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", message + "\n")
    arguments = ("--cpu-dry-run", "--data", str(data), "--out", str(tmp_path))
    done = run(tmp_path, *arguments, "--only", "head/", "--end", str(time.time() + 1e3))
    assert done.returncode == 0, done.stdout + done.stderr
    before = json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))
    (tmp_path / "out").mkdir()
    done = run(
        tmp_path, *arguments, "--end", str(time.time() + 1e3), out=tmp_path / "out"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = (tmp_path / "results.json").read_text(encoding="utf-8")
    assert (tmp_path / "out" / "results.json").read_text(encoding="utf-8") == results
    cases: dict[str, Any] = json.loads(results)
    assert cases.items() >= before.items()
    absent = {name for name, case in cases.items() if case["verdict"] == "absent"}
    needs = ("/trl", "flash_attn", "ranges", "train/graphs")
    assert all(any(need in name for need in needs) for name in absent)
    assert cases["killed and resumed"]["right"]
    ways = ("trl", "bfloat16", "own precision", "ref-logps", "lora")
    assert {f"train/{way}" for way in ways} <= cases.keys()
    assert {n for n in cases if "ratio" in n} >= {
        "qwen3-0.6b/hh/256/ratios",
        "llama-1.2b/hh/256/ratios/compiled",
    }
    assert cases["llama-8b/hh/256/shared_prefix/triton/compiled"]["rounds"] == 1


def fail(error: BaseException) -> None:
    raise error


def test_verdicts(tmp_path: Path) -> None:
    """A case that raises or kills its process is recorded, and the next one runs."""
    from gpu.session import Part, Session, supervise
    from gpu.sizes import DRY

    works = {
        "right": lambda: {"right": True},
        "WRONG": lambda: {"right": False},
        "measured": lambda: {"ms": 1.0},
        "does not fit": lambda: fail(torch.OutOfMemoryError("of 78 GiB")),
        "absent": lambda: fail(ModuleNotFoundError("trl")),
        "FAILED": lambda: fail(RuntimeError("an illegal access")),
        "unfinished": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "skipped": lambda: None,
    }

    def cases(session: Session) -> None:
        for name, work in works.items():
            session.case(name, work, seconds=1e6 if name == "skipped" else 0)
        session.case("not asked for", lambda: fail(AssertionError()))

    def session(stop: float) -> Session:
        return Session(tmp_path, DRY, "|".join(works), stop)

    unprepared = Part("broken", 60, (lambda _: fail(ValueError("no model")),))
    parts = [Part("cases", 60, (cases,)), unprepared]
    supervise(parts, session, time.time() + 60)
    verdicts = {name: case["verdict"] for name, case in session(0).cases.items()}
    assert verdicts == {name: name for name in works} | {"broken, work 0": "FAILED"}
    assert not session(0).table()
    session(0).forget(["skipped", "absent"])
    works["skipped"] = works["absent"] = works["right"]
    supervise(parts, session, time.time() + 60)
    again = {name: case["verdict"] for name, case in session(0).cases.items()}
    assert again == verdicts | {"absent": "right"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # the compiler's
def test_compiled_layers_that_are_not_compiled_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a model of which nothing was asked is not made."""
    from gpu import fast
    from gpu.rounds import OURS, Group
    from gpu.session import Session
    from gpu.sizes import DRY
    from torch._dynamo.utils import counters

    from packstore.torch.models import compiled

    group = Group("llama-1.2b", "hh", 256, (OURS, "shared_prefix/eager"), 0)
    session = Session(tmp_path, DRY, "", 4e9)
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(compiled, "MAX_GRAPHS", 1)
    with torch._dynamo.config.patch(recompile_limit=1):  # the limit of an older torch
        fast.measure_group(session, group)
    reasons = [
        case["why"] for case in session.cases.values() if case["verdict"] == "FAILED"
    ]
    assert reasons
    assert all(
        re.search(r"RuntimeError: \d+ of \d+ frames", reason) for reason in reasons
    )
    monkeypatch.delattr(fast, "Trial")
    fast.measure_group(Session(tmp_path, DRY, "qwen3", 4e9), group)


def test_a_round_has_all_pairs_and_one_time(tmp_path: Path) -> None:
    from gpu import fast
    from gpu.rounds import OURS, Group
    from gpu.session import Session
    from gpu.sizes import DRY

    session = Session(tmp_path, DRY, "", 4e9)
    group = Group("llama-1.2b", "hh", 256, (OURS,), 0, is_compiled=False)
    trial = fast.Trial(session, group)
    trial.round(OURS)
    micro_batches = trial.micro_batches(OURS)
    assert len(micro_batches) == DRY.micro_batches
    (seconds,) = trial.seconds[OURS]
    assert trial.rate(OURS) == len(trial.rows) / seconds
    assert sum(x.num_pairs for x in micro_batches) == len(trial.rows)


@pytest.fixture
def ranges_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Backend `ranges` runs on a CPU, by plain kernels."""
    from gpu import session

    monkeypatch.setattr(session, "NEED_GPU", ())
    with range_kernels.backend_on_cpu(monkeypatch):
        yield


@pytest.mark.usefixtures("ranges_on_cpu")
def test_cases_of_backend_ranges(tmp_path: Path) -> None:
    """They are absent from a dry run, as the kernels need a GPU."""
    from gpu import parts, right_kernels
    from gpu.session import Session
    from gpu.sizes import DRY, PROFILES

    session = Session(tmp_path, DRY, "ranges", 4e9)
    right_kernels.attention(session, ("ranges",), DRY.heads)
    right_kernels.deterministic(session, ("ranges",))
    parts.attention_by_profile(session)
    parts.attention_by_length(session)
    verdicts = Counter(case["verdict"] for case in session.cases.values())
    num_layouts = len(right_kernels.layouts(DRY)) - 1  # without the ragged one
    num_timed = len(DRY.timed_models) * (len(PROFILES) + 1)
    assert verdicts == {"right": 2 * num_layouts + 1, "measured": num_timed}


def test_a_graph_that_repeats_its_first_batch_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpu import fast
    from gpu.rounds import GRAPHS, Group
    from gpu.session import Session
    from gpu.sizes import DRY

    from packstore.torch.training import graphs

    group = Group("llama-1.2b", "hh", 256, (GRAPHS,), 0, is_compiled=False)
    assert "loss" in fast.Trial(Session(tmp_path, DRY, "", 4e9), group).warm(GRAPHS)
    monkeypatch.setattr(graphs._Inputs, "copy", copy_once(graphs._Inputs.copy))
    trial = fast.Trial(Session(tmp_path, DRY, "", 4e9), group)
    with pytest.raises(RuntimeError, match="a replay has loss"):
        trial.warm(GRAPHS)


def copy_once(copy: Any) -> Any:
    """Return a version of ``_Inputs.copy`` that ignores batches after the first."""
    inputs: list[Any] = []

    def copy_first(self: Any, fields: Any) -> None:
        if not inputs:
            copy(self, fields)
        inputs.append(self)

    return copy_first


@pytest.mark.parametrize("is_replayed", [True, False])
def test_a_replay_that_computes_nothing_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_replayed: bool
) -> None:
    from gpu import graphs, right_models
    from gpu.session import Session
    from gpu.sizes import DRY

    if not is_replayed:
        monkeypatch.setattr(graphs.RepeatedCalls, "replay", lambda _: None)
    session = Session(tmp_path, DRY, "", 4e9)
    right_models.cuda_graph(session)
    verdicts = {case["verdict"] for case in session.cases.values()}
    assert verdicts == {"right" if is_replayed else "WRONG"}


PROFILE = "profile/qwen3-0.6b/shared_prefix/triton/compiled"


def test_kernels_of_a_stored_profile_have_their_kinds() -> None:
    from gpu.counted import stored_results
    from gpu.parts import sum_by_kind

    table = stored_results()[PROFILE]["table"]
    milliseconds = sum_by_kind((name, ms) for name, ms, _ in table)
    assert milliseconds == pytest.approx(
        {
            "attention": 14.06,
            "products": 34.31,
            "head sums": 3.14,
            "gathered keys": 6.54,
            "copies": 2.26,
            "elementwise": 4.20,
        },
        abs=0.01,
    )


def test_counted_milliseconds_are_those_of_a_stored_run() -> None:
    """Steps in which the device did not wait for the host."""
    from gpu.counted import STORED_WAYS, StoredCase

    for arguments in STORED_WAYS:
        if arguments[0] == "llama-1.2b":
            case = StoredCase(*arguments)
            counted = sum(case.milliseconds().values())
            assert counted == pytest.approx(case.measured_milliseconds(), rel=0.05)


def test_counted_kernels_are_those_of_a_stored_profile() -> None:
    from gpu.counted import PROFILED, StoredCase, stored_results
    from gpu.predictions import LAUNCH_SECONDS

    profile = stored_results()[PROFILE]
    case = StoredCase(*PROFILED)
    parts = case.works[0].parts(case.ceilings)
    assert 1e3 * sum(parts.values()) == pytest.approx(profile["ms"], rel=0.05)
    assert 1e3 * parts["attention"] == pytest.approx(14.06, rel=0.05)
    assert 1e3 * parts["head sums"] == pytest.approx(3.14, rel=0.05)
    launch_seconds = profile["wall_ms"] / 1e3 / profile["kernels"]
    assert pytest.approx(launch_seconds, rel=0.01) == LAUNCH_SECONDS


def test_counted_launches_are_those_of_compiled_layers() -> None:
    from gpu.predictions import ATTENTION_KERNELS, LAYERS, MODELS

    path = BENCHMARKS / "results" / "launches.json"
    for record in json.loads(path.read_text(encoding="utf-8"))["records"]:
        layer = LAYERS[MODELS[record["model"]]["hidden_size"]]
        backend = "ranges" if "ranges" in record["attention"] else "torch_varlen"
        kernels = ATTENTION_KERNELS[backend][record["layout"] == "concat"]
        assert layer.compiled_kernels + kernels == record["launches"]


def test_flash_attention_counts_whole_tiles() -> None:
    """Published rates on an H100, TFLOP/s of a causal forward pass, heads of 128."""
    from gpu.parts import uniform
    from gpu.predictions import CEILINGS, FLASH, tile_scores, tiles_of_queries

    forward, _ = FLASH[128]
    for length, tflops in ((512, 191), (2048, 298), (8192, 333)):
        queries = uniform(length, 16384).queries.astype(float)
        tiles = tiles_of_queries(forward, queries, queries)
        share = (queries**2 / 2).sum() / tile_scores(forward, *tiles)
        assert share * CEILINGS["product_tflops"] == pytest.approx(tflops, rel=0.2)


def test_stored_expectations_are_those_that_are_counted() -> None:
    from gpu.counted import expected_cases, rounded

    path = BENCHMARKS / "results" / "gpu_predictions.json"
    stored = json.loads(path.read_text(encoding="utf-8"))["expected"]
    counted = rounded(expected_cases())
    assert stored.keys() == counted.keys()
    for name, figures in counted.items():
        assert figures == pytest.approx(stored[name], rel=1e-3), name


def test_calls_of_the_plan_have_the_seconds_that_their_parts_need(
    tmp_path: Path,
) -> None:
    from gpu.plan import CALLS, ENDING, first_call, second_call
    from gpu.sizes import GPU

    for seconds, parts_of_call in zip(CALLS, (first_call, second_call), strict=True):
        parts = parts_of_call(GPU, tmp_path, tmp_path)
        assert sum(part.seconds for part in parts) == seconds - ENDING


def test_the_page_gives_what_is_expected() -> None:
    page = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    path = BENCHMARKS / "results" / "gpu_predictions.json"
    expected = json.loads(path.read_text(encoding="utf-8"))["expected"]
    for way in ("", "/ranges", "/graphs", "/ranges/graphs"):
        cells = []
        for model in ("qwen3-0.6b", "llama-1.2b", "llama-8b"):
            case = f"{model}/hh/8192/shared_prefix/triton{way}/compiled"
            rate = expected.get(case, {}).get("pairs_per_second")
            cells.append("–" if rate is None else f"{rate:.0f}")
        assert f" | {' | '.join(cells)} |\n" in page, way


def test_the_page_gives_what_an_h200_measured() -> None:
    from gpu.counted import stored_results

    root = BENCHMARKS.parent
    page = (root / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    readme = (root / "README.md").read_text(encoding="utf-8")
    results = stored_results()

    def rate(way: str) -> float:
        return float(results[f"llama-1.2b/hh/8192/{way}"]["pairs_per_second"])

    packs = rate("shared_prefix/triton/compiled")
    padding_free = rate("padding_free/triton/compiled")
    padded = rate("padded_grouped/trl/compiled")
    assert f"| packs | {packs:.0f} | {rate('shared_prefix/triton'):.0f} |" in page
    flat = f"{padding_free:.0f} | {rate('padding_free/triton'):.0f}"
    assert f"| padding-free, the same head | {flat} |" in page
    trl_head = rate("padding_free/trl/compiled")
    assert f"| padding-free, TRL's head | {trl_head:.0f} | – |" in page
    assert f"TRL's head | {padded:.0f} | – |" in page
    for text in (page, " ".join(readme.split())):
        assert f"{packs / padding_free:.2f} times as" in text
        assert f"{packs / padded:.2f} times as fast as padded" in text
    trainer = results["train/trl"]["pairs_per_second"]
    assert f"TRL's trainer did {trainer:.1f} pairs a second" in page
    heads = [
        f"{results[f'head/128256x2048/{name}']['ms']:.1f}"
        for name in (
            "triton",
            "trl",
            "logits",
            "liger cross entropy, sum",
            "cut cross entropy",
        )
    ]
    sentence = (
        "takes {} ms; TRL's {}, kept logits {}, Liger's {}, Cut Cross Entropy {}."
    )
    assert sentence.format(*heads) in page


def test_the_page_takes_the_run_on_an_h200_apart() -> None:
    from gpu.counted import (
        PROFILED,
        STORED_WAYS,
        StoredCase,
        at_the_limit,
        stored_results,
    )

    page = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    big, *_, small = (StoredCase(*arguments) for arguments in STORED_WAYS)
    big_parts = big.milliseconds()
    products = big_parts["products"] + big_parts["products of the head"]
    measured = big.measured_milliseconds()
    assert f"{sum(big_parts.values()):.0f} ms of {measured:.0f} for packs" in page
    assert f"counted as {products:.0f} of the {measured:.0f} ms" in page

    seconds = [work.limit(big.ceilings) for work in big.works]
    limit = at_the_limit(big.works, big.round.num_pairs)
    figures = stored_results()[big.name]
    assert f"would take {1e3 * sum(seconds) / len(seconds):.0f} ms" in page
    assert (
        f"does {limit['pairs_per_second']:.0f} pairs a second, an MFU of "
        f"{limit['mfu']:.2f}, where {figures['pairs_per_second']:.0f} and "
        f"{figures['mfu']:.2f} were measured"
    ) in page
    operations = sum(3.5 * work.attention for work in big.works)
    share = operations / sum(work.flash for work in big.works)
    assert f"as {big_parts['attention']:.0f} ms, {100 * share:.0f} % of the" in page

    profile = stored_results()[PROFILE]
    assert (
        f"{profile['ms']:.0f} ms of kernels in a step of {profile['wall_ms']:.0f}"
        in page
    )
    case = StoredCase(*PROFILED)
    rate = 3.5 * case.works[0].attention / 14.06e-3 / 1e12
    share = rate / case.ceilings["product_tflops"]
    assert f"14 of attention ({100 * share:.0f} % of" in page

    small_parts = small.milliseconds()
    counted = sum(small_parts.values())
    measured = small.measured_milliseconds()
    attention = small_parts["attention"] + small_parts["head sums"]
    rate = stored_results()[small.name]["pairs_per_second"]
    assert (
        f"did {rate:.0f} pairs a second, {measured:.0f} ms a micro-batch, of which "
        f"{counted:.0f} ms of kernels are counted, {attention:.0f} of them"
    ) in page
    assert f"other {round(measured) - round(counted)} were not profiled" in page
    limit = at_the_limit(small.works, small.round.num_pairs)
    assert f"95 % of the limit, {limit['pairs_per_second']:.0f} pairs" in page


def test_rollouts_are_trees_with_the_log_probs_of_whole_sequences() -> None:
    from gpu.sizes import DRY, TINY, batch_of, lengths, make_model

    from packstore.torch import packed_logps, use_packed_attention

    rows = lengths("agents", 3, 12)
    tree, whole = (batch_of(rows, name, 100) for name in ("shared_prefix", "concat"))
    assert tree.num_tokens < whole.num_tokens / 2
    model = make_model("Llama", TINY, DRY, torch.float64)
    use_packed_attention(model, "reference")
    expected = packed_logps(model, whole)
    torch.testing.assert_close(packed_logps(model, tree), expected)


def test_the_page_gives_what_is_counted() -> None:
    from gpu.counted import ratios
    from gpu.sizes import PROFILES, TURNS

    page = (BENCHMARKS.parent / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    compiled, eager = ratios(True), ratios(False)
    for profile, medians in PROFILES.items():
        if profile in TURNS:
            continue
        over = [
            f"{x['triton']:.2f} ({eager[names]['triton']:.2f})"
            for names, x in compiled.items()
            if names[1] == profile
        ]
        row = re.escape(" | ".join(over))
        assert re.search("{}, {}, {}".format(*medians) + r"[^|]*\| " + row, page), (
            profile
        )
    readme = (BENCHMARKS.parent / "README.md").read_text(encoding="utf-8")
    over = [x["triton"] for (_, name), x in compiled.items() if name == "ultrafeedback"]
    claim = f"{min(over):.2f} to {max(over):.2f} times as fast as padding-free"
    assert claim in " ".join(readme.split())
    over = [x["trainer"] for x in compiled.values()]
    assert f"counted {min(over):.1f} to {max(over):.1f} times" in page
