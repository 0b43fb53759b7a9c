"""Nothing that is written, logged, raised or shown tells a key, token, signature or
password.
"""

from __future__ import annotations

import logging
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import fsspec
import pytest
from places import Files, at_each
from stores import Store
from tokenizers import Tokenizer
from train_runs import save_gpt2

import packstore
from packstore import clean
from packstore.cli import main
from packstore.config import ReadConfig
from packstore.config.training import TrainConfig
from packstore.errors import display
from packstore.secrets import client_text
from packstore.torch import SideWriter, open_side

QUICK = {"retry_attempts": 2, "retry_backoff": 0.01}
TOKEN = "ya29.t0ken-of-a-test"
SETTINGS: dict[str, Any] = {
    "pack_size": 1024,
    "row_group_tokens": 1024,
    "shard_tokens": 1,
}


def keyed(store: Store) -> tuple[dict[str, Any], list[str]]:
    """Storage options with keys, and what in them nobody may see."""
    options = {**store.options, **QUICK}
    if store.kind == "azure":
        [key] = re.findall("AccountKey=([^;]+)", options["connection_string"])
        return options, [key, options["connection_string"]]
    if store.kind == "gcs":
        from google.oauth2.credentials import Credentials

        return {**options, "token": Credentials(TOKEN)}, [TOKEN]
    return options, [options["key"], options["secret"]]


class Told:
    """Everything that anybody could have seen."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def add(self, *values: object) -> None:
        """Adds the values as `str` and as `repr`."""
        self.texts += [f(value) for value in values for f in (str, repr)]

    def files(self, files: Files) -> None:
        """The bytes of all files at a place, and their names."""
        for path, data in files.all().items():
            self.texts += [path, data.decode("latin-1")]

    def error(self, action: Callable[[], Any]) -> None:
        """Adds the error that `action` raises, with its traceback."""
        with pytest.raises(packstore.errors.PackstoreError) as caught:
            action()
        self.add(caught.value)
        self.texts += traceback.format_exception(caught.value)

    def check(self, secrets: list[str]) -> None:
        """None of it tells a secret, in any form."""
        whole = "\n".join(self.texts)
        for secret in secrets:
            for form in {secret, quote(secret), quote(secret, safe="")}:
                assert form not in whole, whole[max(whole.index(form) - 300, 0) :][:600]


@pytest.mark.parametrize(
    "kind", ["s3", "gcs", pytest.param("azure", marks=pytest.mark.slow)]
)
def test_nothing_tells_a_secret(
    kind: str,
    request: pytest.FixtureRequest,
    pairs: Path,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store: Store = request.getfixturevalue(kind)
    options, secrets = keyed(store)
    files, told = Files(store.url, **store.options), Told()
    caplog.set_level(logging.DEBUG, "packstore")

    def pack(**more: Any) -> packstore.Dataset:
        return packstore.pack(
            str(pairs),
            store.url,
            tokenizer,
            storage_options=options,
            **SETTINGS,
            **more,
        )

    def stop(path: str) -> None:
        if "-p00001-" in path:  # with marker and note there
            told.files(files)
            raise KeyboardInterrupt

    with at_each("put_file", stop), pytest.raises(KeyboardInterrupt):
        pack(partitions=2)
    assert any("writers/" in text for text in told.texts)
    assert any("-00000.json" in text for text in told.texts)
    data = pack(partitions=2)
    columns = {"x": "int64"}
    with SideWriter(
        f"{store.url}-side", data, columns, storage_options=options
    ) as side:
        for packs in data.iter_packs():
            side.write(packs.example_ids, {"x": packs.example_ids})
    told.files(files)
    told.add(data, data.manifest, data.verify(), data.location, ReadConfig(), side)
    told.add(
        open_side(f"{store.url}-side", options),
        clean(store.url, storage_options=options),
    )
    told.add(*packstore.check(store.url, storage_options=options))
    told.error(pack)
    told.error(lambda: packstore.open(f"{store.url}-none", storage_options=options))
    nowhere = Store(store.kind, "never-made", "ds", store.endpoint).url
    told.error(
        lambda: packstore.pack(str(pairs), nowhere, tokenizer, storage_options=options)
    )
    if kind == "s3":  # the other clients ask for a minute by themselves
        down = store.through("http://127.0.0.1:9")  # nobody listens there
        told.error(lambda: packstore.open(store.url, {**options, **keyed(down)[0]}))
        assert "Retrying" in caplog.text
    files.remove(data.manifest.shards[0].path)
    told.error(lambda: list(data.iter_packs()))
    told.texts.append(caplog.text)
    told.check(secrets)


def test_signed_addresses(
    s3: Store,
    pairs: Path,
    tokenizer: Tokenizer,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """A signature in the address of an input, a wrong one, and a password."""
    pytest.importorskip("aiohttp")
    caplog.set_level(logging.DEBUG, "packstore")
    Files(s3.url, **s3.options).write("in.jsonl", pairs.read_bytes())
    parameters = {"Bucket": s3.bucket, "Key": f"{s3.path}/in.jsonl"}
    signed = s3.client().generate_presigned_url("get_object", Params=parameters)
    query = urlsplit(signed).query
    [signature] = re.findall("Signature=([^&]+)", query)
    secrets = [query, signature]
    told = Told()
    made = packstore.pack(signed, tmp_path / "ds", tokenizer, **SETTINGS)
    told.files(Files(str(tmp_path / "ds")))
    told.add(made.manifest)
    wrong = signed.replace(signature, "w0ng-s1gnature")
    secrets += ["w0ng-s1gnature", "pa55-w0rd"]
    host = urlsplit(signed).netloc
    with_login = signed.replace(host, f"someone:pa55-w0rd@{host}").replace(query, "")
    settings: dict[str, Any] = {**SETTINGS, "storage_options": QUICK}
    for source in (wrong, with_login):
        told.error(
            lambda url=source: packstore.pack(
                url, tmp_path / "x", tokenizer, **settings
            )
        )  # type: ignore[misc]
    told.texts.append(caplog.text)
    told.check(secrets)


ADDRESSES = [  # URL, what of it is shown; nobody may see what is in capitals
    ("http://user:p@ssWRD@host/r.jsonl", "http://host/r.jsonl"),
    ("http://us@er:passWRD@host/r.jsonl", "http://host/r.jsonl"),
    ("s3://key:abc/SECRET@bucket/r.jsonl", "s3://bucket/r.jsonl"),
    ("s3://key:abc/sec/r@ETS@bucket/r.jsonl", "s3://bucket/r.jsonl"),
    ("ftp://user:abc?SECRET@host/r.jsonl", "ftp://***"),
    ("ftp://user:a#SECRET@host/r.jsonl", "ftp://host/r.jsonl"),
    (
        "simplecache::ftp://user:p@ss/WRD@host/r.jsonl",
        "simplecache::ftp://host/r.jsonl",
    ),
    ("zip://a.jsonl::ftp://u:abc/WRD@host/a.zip", "zip://a.jsonl::ftp://host/a.zip"),
    ("https://user:pw@host/x?sig=a@SECRET", "https://***"),
    ("http://user:123/WRD/456@host:8080/r.jsonl", "http://host:8080/r.jsonl"),
    ("http://user:123?WRD@host/r.jsonl", "http://***"),
    ("http://host/a@b/c", "http://host/a@b/c"),
    ("http://host:8080/a%40b/c", "http://host:8080/a%40b/c"),
    ("http://[::1]/a@b", "http://[::1]/a@b"),
    ("http://[::1]:8080/a", "http://[::1]:8080/a"),
    ("s3://bucket/a:b@c", "s3://bucket/a:b@c"),
    ("abfs://container@account.net/x@y", "abfs://account.net/x@y"),
    ("https://host/a?token=x@y", "https://host/a"),
    ("folder/a:b@c", "folder/a:b@c"),
    ("http://[::1]:8080/a@b", "http://[::1]:8080/a@b"),
    ("http://host/a#SECRET", "http://host/a"),
    ("http://host/a;jsessionid=SECRET?b=c", "http://host/a"),
    ("s3://bucket/a;b#c?versionId=SECRET", "s3://bucket/a;b#c"),
    ("http:/user:pWRD@host/a", "http:/host/a"),
    ("http:///user:pWRD@host/a", "http:///host/a"),
    ("https//user:pWRD@host/a", "https//host/a"),
    ("//user:pWRD@host/a", "//host/a"),
    ("simplecache::s3:/user:pWRD@bucket/a", "simplecache::s3:/bucket/a"),
]


@pytest.mark.parametrize(("url", "shown"), ADDRESSES)
def test_a_login_with_odd_characters_is_hidden(
    url: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the error of a client has all of it."""

    def refuse(url: str, **_: Any) -> None:
        raise ValueError(f"403 for {url} by aiohttp, at {quote(url)}")

    assert display(url) == shown
    monkeypatch.setattr("fsspec.core.url_to_fs", refuse)
    with pytest.raises(packstore.errors.StorageError) as caught:
        packstore.open(url)
    text = "".join(traceback.format_exception(caught.value))
    assert not any(secret in text for secret in re.findall("[A-Z]{3,}", url))


def test_a_user_without_password_is_hidden() -> None:
    with pytest.raises(packstore.errors.DatasetNotFoundError) as caught:
        packstore.open("memory://SECRET@bucket/ds")
    assert "memory://bucket/ds" in str(caught.value)
    assert "SECRET" not in str(caught.value)


def test_a_login_with_a_slash_is_refused() -> None:
    for url in (
        "s3://AKIA:abc/SECRET@b/r.jsonl",
        "http://user:abc?SECRET@host/r.jsonl",
    ):
        with pytest.raises(packstore.errors.StorageError, match="%2F") as caught:
            packstore.pack(url, "never", "never")
        assert "SECRET" not in str(caught.value)


def test_what_only_resembles_a_url_is_no_local_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("http:/u:W0RD@h/a", "//u:W0RD@h/a", "s3:/bucket/a", "s3//bucket/a"):
        with pytest.raises(packstore.errors.StorageError, match="scheme://") as caught:
            packstore.pack([{}], url, "never")
        assert "W0RD" not in str(caught.value)
    for url in ("s3://bucket/run", "http:/u:W0RD@h/run"):
        with pytest.raises(packstore.errors.ConfigError, match="output_dir") as caught:
            TrainConfig(model="m", train_dataset="d", output_dir=url)
        assert "W0RD" not in str(caught.value)
        with pytest.raises(packstore.errors.ConfigError, match="cache_dir"):
            ReadConfig(cache_dir=url)
    assert not [*tmp_path.iterdir()]


def test_a_tokenizer_by_address_tells_no_password() -> None:
    for login in ("user:p@ss/W0RD", "user:abc?x#W0RD", "user:W0RD", "user:1/W0RD"):
        for scheme in ("http://", "http:/"):
            with pytest.raises(packstore.errors.TokenizerError) as caught:
                packstore.pack([{}], "never", f"{scheme}{login}@host/tokenizer.json")
            assert "W0RD" not in str(caught.value)


LOGINS = ("https://u:W0RD@127.0.0.1:9", "https:/u:W0RD@h", "//u:W0RD@h", "u:W0RD@h")
LOGINS += ("https://u:a/W0RD@h", "https://u:a@W0RD@h", "https://h:80/?token=W0RD")


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("login", LOGINS)
def test_a_name_on_a_hub_tells_no_password(
    login: str,
    debug: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: Any,
) -> None:
    """A URL in place of a name: what the hub's client says of it repeats it."""
    name = f"{login}/d"
    dataset = packstore.pack(
        [{"prompt": [1], "chosen": [2], "rejected": [3]}], tmp_path / "ds"
    )
    save_gpt2(tmp_path / "model")
    train = (
        f"train --train-dataset {dataset.url} --output-dir {tmp_path}/run "
        "--use-cpu true"
    )
    for command in (
        f"{train} --model {name}",
        f"{train} --model {name} --loss bradley_terry",
        f"{train} --model {tmp_path}/model --push-to-hub true --hub-model-id {name}",
        f"ref-logps {dataset.url} {tmp_path}/side --model {name}",
        f"evaluate {dataset.url} --loss simpo --model {name}",
        f"publish {dataset.url} {name}",
        f"show {dataset.url} --tokenizer {name}",
        *(
            [f"{train} --model m --resume-from-checkpoint {name}"]
            if "//" in name
            else []
        ),
    ):
        assert main([*command.split(), *(["--debug"] if debug else [])])
        told = "".join(capsys.readouterr()) + caplog.text
        assert "internal error" not in told
        assert "W0RD" not in told, command


def test_what_a_client_says_is_shown_without_secrets() -> None:
    """Its endpoint with a login, tokens, and headers; and nothing else is changed."""
    token = "hf_" + 17 * "Ab"
    for said in (
        f"401 for https://u:{token}@host/api/models/x",
        f"Invalid user token {token}.",
        f"headers: {{'authorization': 'Bearer {token}'}}",
        f"Authorization: Bearer {token}",
        f"404 for https://host/x?token={token}&a=b",
        f"404 for https://user%3A{token}%40host/x",
    ):
        assert token not in client_text(said)
    for said in (
        "404 Not Found for https://host/api/models/me/x",
        "Write to me@host.org: no.",
    ):
        assert client_text(said) == said


def test_no_command_shows_a_login(
    tmp_path: Path,
    pairs: Path,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Neither on the terminal nor in a page. (A store in memory, whose URLs may have a
    login.)
    """
    monkeypatch.chdir(tmp_path)
    tokenizer.save("t.json")
    source, out = "memory://u:W0RD@in/a.jsonl", "memory://u:W0RD@out/ds"
    fsspec.filesystem("memory").pipe("/u:W0RD@in/a.jsonl", pairs.read_bytes())
    for command in (
        f"pack {source} {out} --tokenizer t.json --pack-size 1024",
        f"pack {source} {out} --tokenizer t.json --pack-size 512",
        f"append {out} {source} --tokenizer t.json",
        f"pack {source} {out}-3 --tokenizer t.json --dry-run",
        f"estimate {source} --tokenizer t.json",
        f"concat {out} {out} {out}-2",
        *(
            f"{name} {out}"
            for name in ("inspect", "inspect --as-config", "inspect --json")
        ),
        *(
            f"{name} {out}"
            for name in ("stats --html stats.html", "show", "verify", "clean")
        ),
        f"show {out} --html show.html",
        f"export nemo {out} {out}.npy",
    ):
        main(command.split())
    told = capsys.readouterr()
    pages = [page.read_text(encoding="utf-8") for page in tmp_path.glob("*.html")]
    assert len(pages) == 2
    texts = (
        told.out,
        told.err,
        caplog.text,
        *pages,
        *map(str, Files(out).all().items()),
    )
    assert not [text for text in texts if "W0RD" in text]


def test_records_of_a_run_have_no_storage_options() -> None:
    """They go to checkpoints, trackers and the README.md of the model, which people
    publish.
    """
    config = TrainConfig(
        model="m",
        output_dir="o",
        train_dataset="http://u:W0RD@h/d?sig=W0RD",
        storage_options={"secret": "W0RD"},
    )
    assert config.recorded()["train_dataset"] == "http://h/d"
    assert "W0RD" not in str(config.recorded())
