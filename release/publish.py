"""The steps of a release, and their rehearsal."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from release import build, changelog, install, versions
from release.build import ReleaseError, run
from release.changelog import UNRELEASED, Changelog

NOTES = "NOTES.md"


class Publication:
    """One release of the tree's version.

    A rehearsal uploads nothing, takes the distributions that `make dist` built, and only reports
    what makes a commit no release: it runs on every commit.
    """

    def __init__(self, root: Path, dist: Path, is_rehearsal: bool) -> None:
        self._root = root
        self._dist = dist
        self._is_rehearsal = is_rehearsal
        self._version = versions.version(root)
        self._revision = versions.revision(root)
        self._changelog: Changelog = changelog.parse((root / "CHANGELOG.md").read_text())

    def run(self) -> None:
        """Run all steps.

        Raises:
            ReleaseError: A step failed; those after it did not run.
        """
        step("commit", self._check_commit)
        step("changelog", self._check_changelog)
        step("contract", self._check_contract)
        step("distributions", self._check_distributions)
        step("descriptions", self._check_descriptions)
        with tempfile.TemporaryDirectory(prefix="legato-release-") as folder:
            step("installation", lambda: self._check_installation(Path(folder)))
            step("notes", self._write_notes)
            if self._is_rehearsal:
                step("tags", lambda: self._rehearse_tags(Path(folder)))
                return
        step("upload", self._upload)
        step("tags", self._tag)

    def _doubt(self, why: str) -> None:
        """Stop a release; report in a rehearsal."""
        if not self._is_rehearsal:
            raise ReleaseError(why)
        print(f"  a release would stop here: {why}")

    def _check_commit(self) -> str:
        versions.check_module(self._root, self._version)
        if changed := run(["git", "status", "--porcelain"], self._root).splitlines():
            self._doubt(f"{len(changed)} files are not committed")
        if made := versions.existing(self._root, self._version):
            self._doubt(f"the tags {', '.join(made)} exist")
        return f"version {self._version}, contract revision {self._revision}"

    def _check_changelog(self) -> str:
        latest = self._changelog.latest
        if latest is None or latest.version != self._version:
            self._doubt(f"CHANGELOG.md has no [{self._version}]: run `make release-prepare`")
        if latest is not None and self._changelog.releases[0].body:
            self._doubt(f"CHANGELOG.md has entries under [{UNRELEASED}]")
        return f"{len(self._changelog.releases)} headings, {len(self._notes())} characters of notes"

    def _notes(self) -> str:
        """Return the version's entries; in a rehearsal, those of the next release."""
        latest = self._changelog.latest
        is_released = latest is not None and latest.version == self._version
        if self._is_rehearsal and (not is_released or self._changelog.releases[0].body):
            return self._changelog.notes(UNRELEASED)
        return self._changelog.notes(self._version)

    def _check_contract(self) -> str:
        compared = versions.check(self._root)
        if self._is_rehearsal:
            is_first = self._changelog.latest is None
            versions.check_revision(self._root, self._revision, is_first)
        else:
            versions.check_baseline(self._root, self._revision)
        return compared

    def _check_distributions(self) -> str:
        if not self._is_rehearsal:
            build.build(self._root, self._dist, self._version)
        build.check_sums(self._dist, self._version)
        install.check_contents(self._dist, self._version)
        return f"{len(self._files())} files in {self._dist.name}/"

    def _files(self) -> list[Path]:
        return [self._dist / name for name in build.file_names(self._version)]

    def _check_descriptions(self) -> str:
        run([sys.executable, "-m", "twine", "check", "--strict", *self._files()], self._root)
        return "twine finds nothing"

    def _check_installation(self, folder: Path) -> str:
        with ThreadPoolExecutor() as pool:
            clients = [
                pool.submit(
                    install.check_client,
                    self._dist,
                    self._version,
                    major,
                    folder / f"client{major}",
                )
                for major in install.PROTOBUF_MAJORS
            ]
            server = install.install_server(self._dist, self._version, folder / "server")
            install.check_server(server)
            sizes = {client.result() for client in clients}
        bill = self._dist / f"{build.SERVER.stem}-{self._version}.cdx.json"
        install.describe(server, bill, self._epoch())
        return f"the client takes {max(sizes) / 2**10:.0f} KiB; the server ran its demo"

    def _epoch(self) -> str:
        return build.source_date_epoch(self._root)

    def _write_notes(self) -> str:
        commit = run(["git", "rev-parse", "HEAD"], self._root).strip()
        minimum = versions.MINIMUM.read(self._root)
        text = (
            f"# Legato {self._version}\n\n{self._notes()}\n\n"
            f"### Build\n\nContract revision {self._revision}; clients from revision {minimum} on "
            f"are served. Built from commit {commit} by hatchling "
            f"{importlib.metadata.version('hatchling')} with SOURCE_DATE_EPOCH={self._epoch()}:\n\n"
            f"```\n{(self._dist / build.SUMS).read_text()}```\n"
        )
        (self._dist / NOTES).write_text(text)
        return f"{self._dist.name}/{NOTES}"

    def _rehearse_tags(self, folder: Path) -> str:
        clone = versions.rehearse(self._root, folder, self._version, self._notes())
        made = versions.existing(clone, self._version)
        return ", ".join(made) + " in a clone"

    def _upload(self) -> str:
        """Upload what is not there yet: a release that was cut off is run again."""
        upload = [sys.executable, "-m", "twine", "upload", "--non-interactive"]
        if "TWINE_REPOSITORY_URL" not in os.environ:  # twine cannot tell at another index
            upload.append("--skip-existing")
        run([*upload, *self._files()], self._root)
        return f"{len(self._files())} files"

    def _tag(self) -> str:
        made = versions.names(self._version)
        versions.create(self._root, self._version, "HEAD", self._notes())
        run(["git", "push", "--atomic", "origin", *made], self._root)
        return ", ".join(made)


def step(name: str, work: Callable[[], str]) -> None:
    """Do one step, and print what it found and how long it took."""
    start = time.monotonic()
    print(f"release: {name}", flush=True)
    found = work()
    print(f"  {found} ({time.monotonic() - start:.1f} s)", flush=True)


def prepare(root: Path, version: str, date: str) -> None:
    """Write a version everywhere, date the changelog's entries, and renew the contract's baseline.

    Raises:
        ReleaseError: The version is not above the last, or the contract's revision is wrong.
    """
    text = (root / "CHANGELOG.md").read_text()
    log = changelog.parse(text)
    latest, revision = log.latest, versions.revision(root)
    if latest is not None and versions.parse(version) <= versions.parse(latest.version):
        raise ReleaseError(f"{version} is not above {latest.version}, which is released")
    versions.check(root)
    versions.check_revision(root, revision, latest is None)
    log.cut(version, date)
    versions.write(root, version)
    (root / "CHANGELOG.md").write_text(log.text())
    versions.write_baseline(root, revision)
