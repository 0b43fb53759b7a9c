"""Prepares a release: version, changelog, commit, tag, and an upload that is rehearsed.

    make release VERSION=0.2.0

1. The section *Unreleased* of CHANGELOG.md becomes the one of this version, of today.
2. ``packstore/version.py`` and ``CITATION.cff`` get the version, and the date.
3. The sdist and the wheel are built into ``dist/``, compared with what git tracks, and
   installed in a clean environment, where ``tests/support/smoke.py`` runs.
4. twine checks them, uploads them to a package index that runs on this machine for it,
   and pip installs packstore from there.
5. The three files are committed, and the commit is tagged. Nothing is pushed.

If a step fails, the files are as before, and there is no commit and no tag.

    make publish

uploads ``dist/`` to PyPI: `release.yml` runs it for a tag that was pushed.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from try_release import PROJECT, attempt, build, environment, run  # noqa: E402

CHANGELOG = ROOT / "CHANGELOG.md"
VERSION_FILE = ROOT / "packstore" / "version.py"
CITATION = ROOT / "CITATION.cff"
DIST = ROOT / "dist"

UNRELEASED = "## [Unreleased]\n"
READY_S = 60


class NotReleasable(Exception):
    """The reason why this version cannot be released."""


def main() -> None:
    """Run `release`, or `publish`; a refusal is one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("version", nargs="?", default="", help="such as 0.2.0")
    parser.add_argument(
        "--publish", action="store_true", help="upload the tagged commit to PyPI"
    )
    args = parser.parse_args()
    try:
        if args.publish:
            publish()
        else:
            release(args.version)
    except NotReleasable as reason:
        sys.exit(f"release: {reason}")


def release(version: str) -> None:
    """Change the files, build and rehearse, commit and tag."""
    check_version(version)
    changelog = changelog_of_release(CHANGELOG.read_text(encoding="utf-8"), version)
    with restoring(CHANGELOG, VERSION_FILE, CITATION):
        CHANGELOG.write_text(changelog, encoding="utf-8")
        set_version(version)
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            wheel = build(work, sys.executable)
            print(attempt(work, sys.executable, wheel), flush=True)
            rehearse_upload(work, version)
            shutil.rmtree(DIST, ignore_errors=True)
            shutil.copytree(work / "dist", DIST)
        run("git", "add", CHANGELOG, VERSION_FILE, CITATION)
        run("git", "commit", "--quiet", "--message", f"Release {version}")
    run("git", "tag", "--annotate", tag_of(version), "--message", f"Release {version}")
    print(f"release: committed and tagged {tag_of(version)}; the files are in dist/")
    print(f"release: to publish it, run: git push origin HEAD {tag_of(version)}")


def publish() -> None:
    """Build the tagged commit and upload it to PyPI, or as twine's settings say."""
    version = current_version()
    if tag_of(version) not in run("git", "tag", "--points-at", "HEAD").split():
        raise NotReleasable(f"this commit has no tag {tag_of(version)}")
    refuse_changes()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        build(work, sys.executable)
        python = environment(work / "upload", sys.executable, ["twine>=6.1"])
        files = sorted((work / "dist").iterdir())
        run(python, "-m", "twine", "check", "--strict", *files)
        print(run(python, "-m", "twine", "upload", "--non-interactive", *files))


# Checks


def check_version(version: str) -> None:
    """Raise NotReleasable unless `version` is a new one, and the tree is clean."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise NotReleasable(
            f"VERSION must be three numbers; found {version!r}. "
            "Run: make release VERSION=0.2.0"
        )
    if run("git", "tag", "--list", tag_of(version)).strip():
        raise NotReleasable(f"the tag {tag_of(version)} exists already")
    tags = run("git", "tag", "--list", "v*").split()
    newest = max(tags, key=numbers_of, default="v0.0.0")
    if numbers_of(version) < numbers_of(newest):
        raise NotReleasable(f"{version} is older than the tag {newest}")
    refuse_changes()


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version or a tag, which sort as versions do."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def refuse_changes() -> None:
    """Raise NotReleasable if git would not build what lies here."""
    changes = run("git", "status", "--porcelain").strip()
    if changes:
        raise NotReleasable(f"the tree has changes that are not committed:\n{changes}")


def changelog_of_release(text: str, version: str) -> str:
    """Return the changelog with the unreleased changes under a heading of `version`."""
    before, heading, after = text.partition(UNRELEASED)
    if not heading:
        raise NotReleasable("CHANGELOG.md has no section ## [Unreleased]")
    changes = re.split(r"^## ", after, maxsplit=1, flags=re.MULTILINE)[0]
    if not re.search(r"^- ", changes, re.MULTILINE):
        raise NotReleasable("the section ## [Unreleased] of CHANGELOG.md lists nothing")
    if f"\n## [{version}]" in after:
        raise NotReleasable(f"CHANGELOG.md has a section {version} already")
    today = datetime.datetime.now(datetime.UTC).date()
    return f"{before}{UNRELEASED}\n## [{version}] - {today}\n{after}"


# Files


def tag_of(version: str) -> str:
    """Return the name of the tag of a version."""
    return f"v{version}"


def current_version() -> str:
    """Return the version of the package in this tree."""
    text = VERSION_FILE.read_text(encoding="utf-8")
    return re.search(r'^VERSION = "(.+)"$', text, re.MULTILINE)[1]  # type: ignore[index]


def set_version(version: str) -> None:
    """Write the version into the package, and with date and address the citation."""
    text = VERSION_FILE.read_text(encoding="utf-8")
    text = text.replace(f'"{current_version()}"', f'"{version}"')
    VERSION_FILE.write_text(text, encoding="utf-8")

    lines = CITATION.read_text(encoding="utf-8").splitlines()
    written = re.compile("version:|date-released:|repository-code:")
    lines = [line for line in lines if not written.match(line)]
    today = datetime.datetime.now(datetime.UTC).date()
    lines += [f"version: {version}", f"date-released: {today}"]
    if address := PROJECT.get("urls", {}).get("Source"):
        lines.append(f"repository-code: {address}")
    CITATION.write_text("\n".join(lines) + "\n", encoding="utf-8")


@contextlib.contextmanager
def restoring(*files: Path) -> Iterator[None]:
    """Write back the files if the block fails, also by Ctrl-C."""
    contents = {file: file.read_bytes() for file in files}
    try:
        yield
    except BaseException:
        for file, content in contents.items():
            file.write_bytes(content)
        run("git", "reset", "--quiet")
        raise


# Upload


def rehearse_upload(work: Path, version: str) -> None:
    """Upload `dist` to an index on this machine, and install packstore from it."""
    tools = ["twine>=6.1", "pypiserver>=2.3"]
    python = environment(work / "upload", sys.executable, tools)
    files = sorted((work / "dist").iterdir())
    os.environ["NO_PROXY"] = ",".join(["127.0.0.1", os.environ.get("NO_PROXY", "")])
    print(run(python, "-m", "twine", "check", "--strict", *files).strip())

    with serving_index(python, work / "index") as url:
        upload = ("-m", "twine", "upload", "--non-interactive", "--repository-url", url)
        login = ("--username", "rehearsal", "--password", "rehearsal")
        run(python, *upload, *login, *files)

        # In the environment of the attempt, which has the dependencies.
        installed = work / "with-core" / "bin" / "python"
        install = ("-m", "pip", "install", "--quiet", "--no-cache-dir", "--no-deps")
        options = ("--force-reinstall", "--index-url", f"{url}simple/")
        run(installed, *install, *options, f"packstore=={version}")
    printed = run(installed, "-m", "packstore", "--version", folder=work).strip()
    if printed != f"packstore {version}":
        raise NotReleasable(f"`packstore --version` prints {printed!r}")
    print(f"uploaded to an index on this machine, and installed from it: {printed}")


@contextlib.contextmanager
def serving_index(python: Path, folder: Path) -> Iterator[str]:
    """Run a package index on a free port; yield its address."""
    folder.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    command = [python, "-m", "pypiserver", "run", "--port", str(port)]
    command += ["--interface", "127.0.0.1", "--disable-fallback"]
    command += ["--authenticate", ".", "--passwords", ".", folder]
    log = folder.with_suffix(".log")
    with open(log, "wb") as output:
        server = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        until = time.monotonic() + READY_S
        while not answers(url):
            if server.poll() is not None or time.monotonic() > until:
                text = log.read_text(encoding="utf-8", errors="replace")
                raise NotReleasable(f"the index on this machine did not start:\n{text}")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def answers(url: str) -> bool:
    """Return True if a server answers at `url`, without a proxy."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        opener.open(url, timeout=5).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
