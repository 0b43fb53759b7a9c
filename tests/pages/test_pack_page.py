"""Pages with packs: texts of records stay text, and what is drawn is what is stored."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from base64 import b64encode
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from packstore import Dataset
from packstore.cli import main
from packstore.pages import frame, packs
from packstore.pages.packs import PackReader

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Elements(HTMLParser):
    """The tags of a page with their attributes, and the text of each script and style."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.texts: dict[str, str] = {}
        self.policy = ""
        self._inside = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        given = dict(attrs)
        if given.get("http-equiv") == "Content-Security-Policy":
            self.policy = given["content"] or ""
        self._inside = given.get("id") or tag

    def handle_data(self, data: str) -> None:
        if self._inside in ("data", "script", "style"):
            self.texts[self._inside] = self.texts.get(self._inside, "") + data

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""


def written(dataset: Dataset, folder: Path) -> str:
    page = folder / "page.html"
    assert main(["show", dataset.url, "--count", "9", "--html", str(page)]) == 0
    return page.read_text(encoding="utf-8")


def test_no_element_comes_from_a_record(
    hostile: Dataset, harmless: Dataset, tmp_path: Path
) -> None:
    page = written(hostile, tmp_path)
    found = Elements(page)
    assert found.tags == Elements(written(harmless, tmp_path)).tags
    assert re.findall("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b\u2028-\u202e\u2066]", page) == []
    embedded = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert embedded is not None
    assert re.search(r"[<>&]|[^\x00-\x7f]", embedded[1]) is None
    data = json.loads(embedded[1])
    assert data["embedded"][0]["columns"][0]["note"].startswith("</script><script>")
    whole = "".join(filter(None, data["embedded"][0]["texts"]))
    assert r"<script>\u2028\u2029\x1b]0;owned\x07\u202egnp.exe\u2066\u200b&lt;b&gt;" in whole
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
    assert not re.search(r"""(src|href|style|on\w+)=["']""", page.partition("<body>")[2])
    script = frame.asset("packs.js")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", script)


def test_titles_of_pages_are_text() -> None:
    page = frame.page("<b>\u202e\x1b", "<i>", [frame.table(["<u>"], [["<s>"]])])
    assert {"b", "i", "u", "s"} & {tag for tag, _ in Elements(page).tags} == set()
    assert r"&lt;b&gt;\u202e\x1b" in page


@pytest.mark.parametrize("made", ["hostile", "harmless"])
def test_a_pack_is_drawn_as_it_is_stored(made: str, request: pytest.FixtureRequest) -> None:
    dataset: Dataset = request.getfixturevalue(made)
    reader = PackReader(dataset, lambda ids: "".join(f"{i}," for i in ids))
    number = 0
    for group in dataset.iter_packs():
        for row in range(len(group)):
            pack, drawn = group.row(row), reader.pack(number)
            signed = np.array(drawn["ids"])
            assert np.array_equal(np.where(signed < 0, ~signed, signed), pack.input_ids)
            assert np.array_equal(signed >= 0, pack.supervised)
            assert "".join(drawn["texts"]) == "".join(f"{i}," for i in pack.input_ids)
            assert [s["start"] for s in drawn["sequences"]] == pack.seq_boundaries[:-1].tolist()
            assert [s["length"] for s in drawn["sequences"]] == pack.lengths.tolist()
            assert [s["side"] for s in drawn["sequences"][:2]] == ["chosen", "rejected"]
            first = divmod(int(drawn["sequences"][0]["id"]), 1 << 40)
            assert f"{'ab'[first[0]]}.jsonl, line {first[1] + 1}" in drawn["sequences"][0]["place"]
            number += 1
    assert number == len(dataset) > 2


def test_a_page_is_bounded_and_says_so(
    harmless: Dataset, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reader = PackReader(harmless, None)
    one = len(frame.embedded(reader.pack(0)))
    monkeypatch.setattr(packs, "MOST_BYTES", one + 1)
    page, left = packs.pack_page(reader, range(2))
    assert left.startswith("The page holds packs 0 to 0 of the 2 asked for: at most 300 packs")
    assert left in page
    monkeypatch.setattr(packs, "MOST_PACKS", 1)
    monkeypatch.setattr(packs, "MOST_BYTES", 1 << 30)
    assert packs.pack_page(reader, range(2))[1] == left.replace("300", "1").replace(
        " 0 MB", " 1073 MB"
    )
    assert packs.pack_page(reader, range(1))[1] == ""


def test_tokens_of_one_character_share_its_text(hostile: Dataset) -> None:
    tokenizer = Tokenizer.from_file(str(Path(hostile.url).parent / "tokenizer.json"))
    ids = tokenizer.encode("word 語🙂!").ids
    found = PackReader(hostile, tokenizer.decode).texts(ids)
    assert "".join(filter(None, found)) == "word 語🙂!"
    assert found.count(None) == 3 - 1 + 4 - 1
    half = PackReader(hostile, tokenizer.decode).texts(tokenizer.encode("語").ids[:2])
    assert half == ["\ufffd", "\ufffd"]


def test_the_space_before_a_word_is_kept_if_the_decoder_drops_the_first(
    hostile: Dataset,
) -> None:
    model = models.WordLevel({"▁one": 0, "▁two": 1, "?": 2}, "?")
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.Metaspace()
    assert tokenizer.decode([0]) == "one"
    assert PackReader(hostile, tokenizer.decode).texts([0, 1]) == [" one", " two"]


@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium: apt-get install chromium")
def test_a_browser_makes_no_element_of_a_record(hostile: Dataset, tmp_path: Path) -> None:
    written(hostile, tmp_path)
    assert CHROMIUM is not None
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync "
    flags += "--disable-background-networking --disable-component-update "
    flags += f"--user-data-dir={tmp_path / 'profile'} --virtual-time-budget=4000 --dump-dom"
    page = (tmp_path / "page.html").as_uri()
    done = subprocess.run(
        [CHROMIUM, *flags.split(), page], capture_output=True, encoding="utf-8", timeout=120
    )
    assert done.returncode == 0, done.stderr
    tags = [tag for tag, _ in Elements(done.stdout).tags]
    assert "img" not in tags
    assert tags.count("script") == 2
    assert f"<title>{hostile.url}</title>" in done.stdout
    assert tags.count("article") == len(hostile.read_packs(0).row(0).lengths)
    drawn = re.search(r'<div class="tokens".*?</div>', done.stdout, re.DOTALL)
    assert drawn is not None
    (pack,) = json.loads(Elements(done.stdout).texts["data"])["embedded"][:1]
    own = pack["sequences"][0]
    on = [i for i in range(own["start"], own["stop"]) if pack["ids"][i] >= 0]
    text = "".join(pack["texts"][i] or "" for i in on)
    assert "</script><img src=x" in text
    spans = re.findall(r'<span class="(.*?)" data-t="\d+">(.*?)</span>', drawn[0], re.DOTALL)
    supervised = "".join(unescape(part) for role, part in spans if role == "chosen on")
    assert supervised.replace("↵\n", "\n") == text
    assert {role for role, _ in spans} == {"prompt", "chosen on"}
