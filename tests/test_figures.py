"""The figures of the pages about what packing saves are those of the results files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def result(name: str) -> Any:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    return json.loads(path.read_text(encoding="utf-8"))


MEASURED = result("why_pack")["results"]
WAYS = {
    "padded, 16 pairs a batch, random order": "padded_random_16",
    "padded, 4 pairs": "padded_random_4",
    "padded, 1 pair": "padded_random_1",
    "padded, 16 pairs of similar length (`group_by_length`)": "length_grouped_16",
    "padding-free": "padding_free",
}
CONTENDERS = ("trl", "trl_packed", "concat", "shared_prefix")
SHORT = ("padded_random_16", "length_grouped_16", "padding_free")
ROUTES = (
    "log_softmax, supervised rows",
    "TRL ChunkedLogProbFunction",
    "torch linear_cross_entropy",
    "packstore",
)
LOADERS = ("packstore", "packstore-arrow", "litdata", "hf-streaming", "mds")
PROGRAMS = (
    "datasets+trl",
    "nemo-steps",
    "plain-script",
    "packstore",
    "packstore-reference",
)


def span(value: Callable[[Any], float], digits: int = 2) -> str:
    """The least and the largest of a figure over the files."""
    found = [value(r) for r in MEASURED]
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


def rows(page: str) -> dict[str, list[str]]:
    """First cell of each table row of a page -> the other cells."""
    lines = re.findall(r"^\| (.+) \|$", (ROOT / page).read_text(encoding="utf-8"), re.M)
    return {first: cells for first, *cells in (line.split(" | ") for line in lines)}


def test_the_page_on_records_says_what_numbers_of_tokens_cost() -> None:
    left_out, kept = result("rollouts")["packed"]
    page = (ROOT / "docs/records.md").read_text(encoding="utf-8")
    ratio = kept["seconds"] / left_out["seconds"]
    assert f"takes {kept['bytes_per_token']:.1f} bytes" in page
    assert f"takes {ratio:.1f} times the processor time" in page


def test_the_readme_rounds_what_was_measured() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    padded = span(lambda r: r["over_packs"]["padded_random_16"], 1)
    assert (
        f"Padded batches of 16 random pairs process {padded} times the tokens" in readme
    )
    assert (
        f"gives a pair {weights('first_fit_shuffle')} times its fair weight" in readme
    )


def test_the_benchmarks_page_gives_every_baseline() -> None:
    over = [[span(lambda r, w=w: r["over_packs"][w])] for w in SHORT]
    whole = span(lambda r: r["tokens"]["concat_packs"] / r["tokens"]["packs"])
    assert table_under("Tokens of an epoch") == [*over, [whole]]
    strategies = "first_fit_shuffle", "first_fit_decreasing"
    assert table_under("Weight of a pair in the gradient") == [
        [weights(s)] for s in strategies
    ]
    routes = {
        r["route"]: r for r in result("logprobs")["rows"] if r["dtype"] == "float32"
    }
    assert table_under("Log-probs and their gradients") == [
        [f"{routes[r]['extra_mib']:.0f} MiB", f"{routes[r]['seconds']:.2f} s"]
        for r in ROUTES
    ]
    text, chats = (seconds(f"qwen3 {form} 50000") for form in ("text", "chat"))
    assert table_under("From text to a dataset") == [
        [f"{took[name]:.0f} s" if name in took else "–" for took in (text, chats)]
        for name in PROGRAMS
    ]
    runs = result("real_model")["results"]
    assert table_under("Training") == [
        [f"{runs[n]['seconds_per_pair']:.1f} s", f"{runs[n]['peak_gb']:.1f} GB"]
        for n in CONTENDERS
    ]
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert f"TRL {result('real_model')['versions']['trl']}, `real_model.py`" in page
    curves = zip(runs["trl"]["losses"], runs["trl_packed"]["losses"], strict=True)
    assert max(abs(unpacked - on_packs) for unpacked, on_packs in curves) < 1e-5


def test_the_benchmarks_page_gives_every_loader() -> None:
    """All figures but the flipped bits, which older results have under another name."""
    loaders = result("loading")["rows"]
    expected = []
    for name in LOADERS:
        loader = loaders[name]
        resume = f"{1e3 * loader['resume_seconds'][-1]:,.0f}"
        if not loader["resume_exact"][-1]:
            resume += ", not exact"
        expected.append(
            [
                f"{round(loader['samples_per_second'], -2):,.0f}",
                f"{loader['cpu_us']:.0f}",
                f"{1e3 * loader['first_seconds']:,.0f}",
                resume,
                f"{loader['bytes'] / 1e6:.0f}",
            ]
        )
    assert [cells[:-1] for cells in table_under("Reading")] == expected


def test_the_page_of_packing_gives_what_sharing_saves_and_repeats() -> None:
    rows = {
        (
            row["file"].partition(".")[0].partition("_scored")[0],
            row["share_prefixes"],
        ): row
        for row in result("sharing")["rows"]
    }
    for cells in table_under("Sharing prefixes", "docs/packing.md", first=True):
        file = cells[0].partition(",")[0].replace("oasst", "oasst_k2_6")
        assert cells[1:] == [
            f"{100 * rows[file, share][figure]:.1f}"
            for figure in ("stored", "repeated")
            for share in ("example", "pack")
        ]


def table_under(
    heading: str, page: str = "docs/benchmarks.md", first: bool = False
) -> list[list[str]]:
    """The cells of the table in a section of a page, without the first column unless
    that is wanted.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    section = text.partition(f"\n## {heading}\n")[2].split("\n## ")[0]
    lines = re.findall(r"^\| (.+) \|$", section, re.M)
    return [line.split(" | ")[0 if first else 1 :] for line in lines[1:]]


def seconds(case: str) -> dict[str, float]:
    """Seconds of each contender of ``etl.py``; of the two ways to run TRL, the quicker
    one.
    """
    took = {
        name: row["seconds"]
        for name, row in result("etl")["cases"][case]["rows"].items()
    }
    if ways := [s for name, s in took.items() if name.startswith("datasets")]:
        took["datasets+trl"] = min(ways)
    return took


def test_concepts_give_every_set() -> None:
    told = rows("docs/concepts.md")
    for name, way in WAYS.items():
        expected = [
            f"{r['over_packs'][way]:.2f}, {r['over_concat_packs'][way]:.2f}"
            for r in MEASURED
        ]
        assert told[name] == expected, name

    (chat,) = (r for r in MEASURED if r["file"] == "chat_en.jsonl")
    kept = {name: ratio - 1 for name, ratio in chat["kept_over_concat"].items()}
    page = (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    assert f"`concat` drops {kept['pairs'] * chat['pairs']:.0f} pairs" in page
    assert (
        f"the default keeps {kept['tokens']:.0%} more tokens".replace("%", " %") in page
    )


@pytest.mark.parametrize("page", ["docs/index.md", "docs/concepts.md"])
def test_the_weights_under_a_mean_per_pack(page: str) -> None:
    assert weights("first_fit_shuffle") in (ROOT / page).read_text(encoding="utf-8")


def weights(strategy: str) -> str:
    """The least and the largest weight of a pair, over the files."""
    found = [r["pack_mean_weight"][strategy] for r in MEASURED]
    return f"{min(w[0] for w in found):.1f} to {max(w[-1] for w in found):.1f}"


def test_the_pages_give_what_a_gpu_measured() -> None:
    session = result("gpu_session")["results"]
    page = rows("docs/benchmarks.md")
    model = "llama-1.2b/hh/8192"
    for name, way in (
        ("packs", "shared_prefix/triton"),
        ("padding-free, the same head", "padding_free/triton"),
        ("padding-free, TRL's head", "padding_free/trl"),
        ("padded, pairs of similar length, TRL's head", "padded_grouped/trl"),
    ):
        found = [session.get(f"{model}/{way}{end}") for end in ("/compiled", "")]
        assert page[name] == [
            f"{f['pairs_per_second']:.0f}" if f else "–" for f in found
        ], name
    ratios = session[f"{model}/ratio to padding-free/compiled"]
    texts = [
        " ".join((ROOT / p).read_text(encoding="utf-8").split())
        for p in ("docs/benchmarks.md", "README.md")
    ]
    for way in ("padding_free/triton", "padded_grouped/trl"):
        assert all(f" {ratios[f'over {way}']:.2f} times" in text for text in texts)
    right = sum(case["verdict"] == "right" for case in session.values())
    assert f"- {right} cases" in texts[0]
    assert not any(case["verdict"] in ("WRONG", "FAILED") for case in session.values())


def test_the_pages_give_the_sizes_of_steps() -> None:
    by_settings = {
        (row["pack_size"], row["requested"]): row
        for row in result("step_sizes")["rows"]
        if row["ranks"] == 1
    }

    def mean(row: dict[str, Any]) -> str:
        return f"{row['mean']:.1f}{' (warns)' if row['warns'] else ''}"

    loaders = (ROOT / "docs/loaders.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| (\d,\d+) \| \S+ \| (\d+) \| .*$", loaders, re.M)
    assert len(lines) == 8
    for size, requested in lines:
        row = by_settings[int(size.replace(",", "")), int(requested)]
        cells = [size, f"{row['pairs_per_pack']:.1f}", requested, mean(row)]
        cells += [
            f"{row['fewest']} to {row['most']}",
            f"{row['mean_below_request']:.1f}",
        ]
        assert f"| {' | '.join(cells)} |" in loaders
    from_trl = rows("docs/from-trl.md")
    for size in (1024, 8192):
        expected = [by_settings[size, requested] for requested in (8, 16)]
        cells = [f"{row['steps']} steps of {mean(row)}" for row in expected]
        assert from_trl[f"packs of {size:,}"] == cells
    unpacked = [by_settings[8192, requested] for requested in (8, 16)]
    assert from_trl["TRL, unpacked"] == [
        f"{row['unpacked_steps']} steps of {row['pairs'] / row['unpacked_steps']:.1f}"
        for row in unpacked
    ]


AGENT_RECORDS = {
    "generated rollouts, one row a turn": "turns",
    "the same, whole trajectories": "trajectories",
    "rollouts of 6 turns, one row a turn": "short_turns",
    "chats with tools, one row a turn": "tool_turns",
    "pairs with tools": "tool_pairs",
    "pairs, a prompt in several records": "pandalm",
    "pairs of dialogues": "hh_harmless",
}


def test_the_pages_give_what_prefix_trees_save() -> None:
    measured = result("agents")
    sets = measured["sets"]
    page = rows("docs/agents.md")
    for name, key in AGENT_RECORDS.items():
        tokens = [sets[key]["of_concat"][way] for way in ("example", "pack")]
        cells = [f"{value:.2f}" for value in tokens]
        step = sets[key]["step"]
        cells.append(f"{step['times_faster']['pack']:.2f}" if step else "–")
        assert page[name] == cells, name

    text = (ROOT / "docs/agents.md").read_text(encoding="utf-8")
    turns = sets["turns"]
    half_size = str(turns["pack_size"] // 2)
    share = turns["other_pack_sizes"][half_size] / turns["tokens"]["concat"]
    assert f"packs have {turns['pack_size']:,} tokens" in text
    assert f"{turns['of_concat']['pack']:.2f} becomes {share:.2f}" in " ".join(
        text.split()
    )
    fewer = turns["tokens"]["concat"] / turns["tokens"]["pack"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"[{fewer:.1f} times fewer tokens](docs/agents.md" in readme

    stored = [sets[key]["tokens"]["pack"] / 1e6 for key in ("trajectories", "turns")]
    claim = "They take {:.2f} million tokens, and the rows of their turns {:.2f}."
    assert claim.format(*stored) in " ".join(text.split())

    planning = measured["planning"]
    assert f"rows of turns take {planning['turns, arrays']['median_ms']:.0f} ms" in text

    loaders = (ROOT / "docs/loaders.md").read_text(encoding="utf-8")
    millions = [turns["tokens"][way] / 1e6 for way in ("concat", "pack")]
    assert f"{turns['sequences']} rows of turns" in loaders
    assert f"{millions[0]:.1f} million tokens in `concat`" in loaders
    assert f"and {millions[1]:.2f} million in batches" in loaders
    times = [planning[f"answers, {form}"]["median_ms"] for form in ("arrays", "lists")]
    assert f"take {times[0]:.0f} to {times[1]:.0f} ms of a core" in loaders


def test_the_page_of_reference_log_probs_rounds_the_time_of_values_of_tokens() -> None:
    page = rows("docs/ref-logps.md")
    names = {
        "`ref_token_logps`": "and of each token",
        "`ref_top_k`, 16 ids, float16": "and top 16, float16",
        "`ref_top_k`, 16 ids, uint8": "and top 16, uint8",
        "`ref_top_k`, 64 ids, float16": "and top 64, float16",
    }
    measured = {
        row["columns"]: row["seconds_of_plain"]
        for row in result("ref_logps")["columns"]
    }
    for name, columns in names.items():
        assert page[name] == [f"{measured[columns]:.2f}"]


def test_the_page_on_attention_has_the_launches_that_were_counted() -> None:
    page = rows("docs/attention.md")
    launches = {
        (record["model"], record["layout"], record["attention"]): record["launches"]
        for record in result("launches")["records"]
    }
    for model, layout, _ in launches:
        counts = [
            str(launches[model, layout, backend])
            for backend in ("auto_varlen", "auto_ranges")
        ]
        assert page[f"{model}, `{layout}`"] == counts
    saved = {
        (record["model"], round(record["saved bytes a token"] / 1000))
        for record in result("launches")["records"]
    }
    assert saved == {("Qwen3-0.6B", 47), ("Llama-3.2-1B", 76)}
