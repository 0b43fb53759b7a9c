"""Pages with packs: texts of records stay text, and what is drawn is what is stored."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
from base64 import b64encode
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_turns import agent_turns
from small_jobs import trained_tokenizer
from tokenizers import Tokenizer, decoders, models

import packstore
from packstore import Dataset
from packstore.cli import main
from packstore.format.arrays import TopK
from packstore.io.side import SideWriter
from packstore.pages.charts import histogram

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Elements(HTMLParser):
    """The tags of a page with their attributes, and the text of each script and
    style.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.texts: dict[str, str] = {}
        self.policy = ""
        self.inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        given = dict(attrs)
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        self.inside = given.get("id") or tag

    def handle_data(self, data: str) -> None:
        if self.inside in ("data", "script", "style"):
            self.texts[self.inside] = self.texts.get(self.inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self.inside = ""


def written(dataset: Dataset, folder: Path, *flags: str) -> str:
    page = folder / "page.html"
    assert main(["show", dataset.url, "--count", "9", "--html", str(page), *flags]) == 0
    return page.read_text(encoding="utf-8")


def data_of(page: str) -> Any:
    return json.loads(Elements(page).texts["data"])


def test_no_element_comes_from_a_record(
    hostile: Dataset, harmless: Dataset, tmp_path: Path
) -> None:
    page = written(hostile, tmp_path)
    found = Elements(page)
    assert found.tags == Elements(written(harmless, tmp_path)).tags
    assert (
        re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2066]", page) == []
    )
    embedded = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert re.search(r"[<>&]|[^\x00-\x7f]", embedded[1]) is None
    data = json.loads(embedded[1])
    assert data["embedded"][0]["columns"][0]["note"].startswith("</script><script>")
    whole = "".join(filter(None, data["embedded"][0]["texts"]))
    assert (
        r"<script>\u2028\u2029\x1b]0;owned\x07\u202egnp.exe\u2066\u200b&lt;b&gt;"
        in whole
    )
    assert "語🙂é" in whole


def test_the_policy_permits_the_script_and_style_of_the_page_only(
    hostile: Dataset, tmp_path: Path
) -> None:
    page = written(hostile, tmp_path)
    found = Elements(page)
    for name in ("script", "style"):
        digest = b64encode(hashlib.sha256(found.texts[name].encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in found.policy
    assert found.policy.startswith("default-src 'none'; ")
    assert "unsafe" not in found.policy
    assert "connect-src" not in found.policy
    assert not re.search(
        r"""(src|href|style|on\w+)=["']""", page.partition("<body>")[2]
    )
    dangerous = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\("
    assert not re.search(dangerous, found.texts["script"])


def test_titles_and_tables_of_pages_are_text(hostile: Dataset, tmp_path: Path) -> None:
    place, file = tmp_path / "<b>\u202e", tmp_path / "stats.html"
    shutil.copytree(hostile.url, place)
    assert main(["stats", str(place), "--by", "note", "--html", str(file)]) == 0
    page = file.read_text(encoding="utf-8")
    assert {"b", "img", "script"} & {tag for tag, _ in Elements(page).tags} == set()
    assert r"&lt;b&gt;\u202e" in page
    assert "&lt;/script&gt;&lt;script&gt;" in page


@pytest.mark.parametrize(("low", "high"), [(-300.0, -100.0), (100.0, 300.0)])
def test_an_axis_begins_and_ends_beside_its_values(low: float, high: float) -> None:
    numbers = np.linspace(low, high, 101)
    drawing = histogram("rewards", numbers, x_title="reward", y_title="sequences")
    labels = {float(text) for text in re.findall(r"middle\">(-?[0-9]+)<", drawing)}
    assert (min(labels), max(labels)) == (low, high)


def labels_and_bars(numbers: Any) -> tuple[list[str], list[str]]:
    """Return the labels and the bars of a histogram: values and their number."""
    drawing = histogram("rewards", numbers, x_title="reward", y_title="sequences")
    labels = re.findall(r"middle\">([0-9][^<]*)<", drawing)
    return labels, re.findall(r"<title>(.*?)</title>", drawing)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_whole_numbers_of_a_short_range_have_a_bar_each(dtype: Any) -> None:
    numbers = np.repeat([1, 2, 9], [300, 200, 1]).astype(dtype)
    labels, bars = labels_and_bars(numbers)
    assert [bar for bar in bars if not bar.endswith(": 0")] == [
        "1: 300",
        "2: 200",
        "9: 1",
    ]
    assert not any(label.endswith("+") for label in labels)


@pytest.mark.parametrize("scale", [1, 0.7])
def test_a_last_bar_of_outliers_is_labelled(scale: float) -> None:
    """Others of the axis keep their distance from its label."""
    numbers = scale * np.repeat([1, 2, 6, 900], [300, 200, 100, 1])
    labels, bars = labels_and_bars(numbers)
    start, end = bars[-1].partition(":")[0].split(" to ")
    assert float(start) <= scale * 6
    assert float(end) == scale * 900
    assert [label for label in labels if label.endswith("+")] == [f"{start}+"]
    assert f"{start}" not in labels


@pytest.mark.parametrize("made", ["hostile", "harmless"])
def test_a_pack_is_drawn_as_it_is_stored(
    made: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    dataset: Dataset = request.getfixturevalue(made)
    embedded = data_of(written(dataset, tmp_path, "--ids", "--count", "99"))["embedded"]
    rows = [group.row(i) for group in dataset.iter_packs() for i in range(len(group))]
    assert len(rows) > 2
    for pack, drawn in zip(rows, embedded, strict=True):
        signed = np.array(drawn["ids"])
        assert np.array_equal(np.where(signed < 0, ~signed, signed), pack.input_ids)
        assert np.array_equal(signed >= 0, pack.supervised)
        assert drawn["texts"] == [f"{i} " for i in pack.input_ids]
        assert [s["start"] for s in drawn["sequences"]] == pack.seq_boundaries[
            :-1
        ].tolist()
        assert [s["length"] for s in drawn["sequences"]] == pack.lengths.tolist()
        shared = [s["shared"] for s in drawn["sequences"]]
        assert shared == pack.segment_offsets.tolist()
        assert (max(shared) > 0) == (dataset.manifest.layout == "shared_prefix")
        for number, sequence in enumerate(drawn["sequences"]):
            parent = number - pack.parent_distances[number]
            assert sequence["parent"] == (parent if sequence["shared"] else None)
        assert [s["side"] for s in drawn["sequences"][:2]] == ["chosen", "rejected"]
        first = divmod(int(drawn["sequences"][0]["id"]), 1 << 40)
        assert (
            f"{'ab'[first[0]]}.jsonl, line {first[1] + 1}"
            in drawn["sequences"][0]["place"]
        )


@pytest.mark.parametrize(
    ("answer", "number", "pack_size", "text"),
    [
        (
            [5],
            301,
            8,
            "holds packs 0 to 299 of the 301 requested: at most 300 packs, and 20 MB",
        ),
        ([31_000_000] * 800_000, 2, 1 << 20, "holds packs 0 to 0 of the 2 requested"),
    ],
    ids=["packs", "bytes"],
)
def test_a_page_is_bounded_and_says_so(
    tmp_path: Path, answer: list[int], number: int, pack_size: int, text: str
) -> None:
    record = {"prompt": [1, 2], "chosen": answer, "rejected": [4]}
    dataset = packstore.pack([record] * number, tmp_path / "made", pack_size=pack_size)
    assert len(dataset) == number
    assert (
        text in data_of(written(dataset, tmp_path, "--ids", "--count", "400"))["note"]
    )
    assert (
        "holds"
        not in data_of(written(dataset, tmp_path, "--ids", "--count", "1"))["note"]
    )


def bytes_as_tokens() -> Tokenizer:
    return trained_tokenizer(["a word and another word"] * 9)


def metaspace() -> Tokenizer:
    made = Tokenizer(models.WordLevel({"▁one": 0, "▁two": 1, "?": 2}, "?"))
    made.decoder = decoders.Metaspace()
    return made


@pytest.mark.parametrize(
    ("made", "text", "size", "texts"),
    [
        # Tokens of one character share its text; of half a character, none has one.
        (bytes_as_tokens, "語🙂!", 8, ["語", None, None, "🙂", None, None, None, "!"]),
        (bytes_as_tokens, "語", 2, ["\ufffd", "\ufffd"]),
        (bytes_as_tokens, "語", 3, ["語", None, None]),
        # The space before a word is kept if the decoder drops that of the first.
        (metaspace, None, 2, [" one", " two"]),
    ],
)
def test_texts_of_tokens(
    made: Callable[[], Tokenizer],
    text: str,
    size: int,
    texts: list[str | None],
    tmp_path: Path,
) -> None:
    tokenizer = made()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ids = [0, 1] if text is None else tokenizer.encode(text).ids[:size]
    record = {"prompt": [0, *ids], "chosen": ids, "rejected": [1, 1]}
    dataset = packstore.pack(
        [record], tmp_path / "made", str(tmp_path / "tokenizer.json")
    )
    (pack,) = data_of(written(dataset, tmp_path))["embedded"]
    assert (
        pack["texts"][1 : 1 + 2 * size] == 2 * texts
    )  # no character is of prompt and response


def drawn_by_a_browser(folder: Path) -> str:
    """Return the elements of ``page.html`` in `folder` once its script has run."""
    assert CHROMIUM is not None
    flags = (
        "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        "--disable-sync "
    )
    flags += "--disable-background-networking --disable-component-update "
    flags += (
        f"--user-data-dir={folder / 'profile'} --virtual-time-budget=4000 --dump-dom"
    )
    page = (folder / "page.html").as_uri()
    done = subprocess.run(
        [CHROMIUM, *flags.split(), page],
        env={**os.environ, "TMPDIR": "/tmp"},  # a long path is too long for its socket
        capture_output=True,
        encoding="utf-8",
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_says_what_sequences_share(tmp_path: Path) -> None:
    """And its picture of attention has the keys in every ancestor."""
    turns = agent_turns(num_tasks=2)
    dataset = packstore.pack(
        turns, tmp_path / "trees", share_prefixes="pack", pack_size=1000
    )
    written(dataset, tmp_path, "--ids", "--count", "1")
    page = drawn_by_a_browser(tmp_path)
    pack = dataset.read_packs(0).row(0)
    sentences = re.findall(r'<p class="soft shares">(.*?)</p>', page)
    for sentence, shared, parent in zip(
        sentences, pack.segment_offsets, pack.parents, strict=True
    ):
        text = re.sub("<.*?>", "", sentence)
        says = f"shares its first {shared} tokens with sequence {parent}"
        assert (says in text) == (shared > 0)

    boxes = re.findall(r'<rect x="(\d+)" y="(\d+)" width="(\d+)" height', page)
    found = sorted(tuple(map(int, box)) for box in boxes)
    starts = pack.seq_boundaries.tolist()
    parents = pack.parents.tolist()
    offsets = pack.segment_offsets.tolist()
    expected = []
    for i, end in enumerate(offsets):
        ancestor = parents[i]
        while end:
            expected.append((starts[ancestor], starts[i], end - offsets[ancestor]))
            end = offsets[ancestor]
            ancestor = parents[ancestor]
    assert found == sorted(expected)
    assert len(expected) > len(offsets)


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_makes_no_element_of_a_record(
    hostile: Dataset, tmp_path: Path
) -> None:
    written(hostile, tmp_path)
    page = drawn_by_a_browser(tmp_path)
    tags = [tag for tag, _ in Elements(page).tags]
    assert "img" not in tags
    assert tags.count("script") == 2
    assert f"<title>{hostile.url}</title>" in page
    assert tags.count("article") == len(hostile.read_packs(0).row(0).lengths)
    drawn = re.search(r'<div class="tokens".*?</div>', page, re.DOTALL)
    pack = data_of(page)["embedded"][0]
    own = pack["sequences"][0]
    on = [i for i in range(own["start"], own["stop"]) if pack["ids"][i] >= 0]
    text = "".join(pack["texts"][i] or "" for i in on)
    assert "</script><img src=x" in text
    spans = re.findall(
        r'<span class="(.*?)" data-t="\d+">(.*?)</span>', drawn[0], re.DOTALL
    )
    supervised = "".join(unescape(part) for role, part in spans if role == "chosen on")
    assert supervised.replace("↵\n", "\n") == text
    assert {role for role, _ in spans} == {"prompt shared", "chosen on"}


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_colours_tokens_by_their_values(
    harmless: Dataset, tmp_path: Path
) -> None:
    side = tmp_path / "side"
    with SideWriter(str(side), harmless, {"teacher": "token<top1,float16>"}) as writer:
        for packs in harmless.iter_packs():
            ids = packs.signed_ids[packs.supervised][:, None]
            ids[1::2] += 1  # every second token is not the teacher's first
            logps = np.linspace(-8, 0, len(ids))[:, None]
            values = {"teacher": TopK(ids, logps)}
            writer.write(packs.example_ids, values, num_targets=packs.num_targets)

    written(harmless, tmp_path, "--ids", "--count", "1", "--side", str(side))
    page = drawn_by_a_browser(tmp_path)
    tokens = "".join(re.findall(r'<div class="tokens".*?</div>', page, re.DOTALL))
    levels = re.findall(
        r'class="\w+ on valued" data-t="\d+" style="--v: (.*?);', tokens
    )
    num_targets = int(harmless.read_packs(0).row(0).num_targets.sum())
    assert len(levels) == (num_targets + 1) // 2
    assert tokens.count(" on absent") == num_targets // 2
    assert levels == sorted(levels)
    assert (float(levels[0]), float(levels[-1])) == (0, 1)
    assert "not among the top 1" in page
