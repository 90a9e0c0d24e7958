"""The steps of a release, and their rehearsal; CHANGELOG.md by Keep a Changelog 1.1.0."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from release import build, install, versions
from release.build import ReleaseError, run

UNRELEASED = "Unreleased"
REPOSITORY = "https://github.com/legato-vlm/legato"
_HEADING = re.compile(
    r"## \[(?P<version>Unreleased(?=\]$)|\d+\.\d+\.\d+(?=\] - ))\](?: - (?P<date>\d{4}-\d\d-\d\d))?"
)
_LINK = re.compile(r"\[(?P<version>[^\]]+)\]: (?P<url>\S+)")


@dataclass
class Release:
    """One `##` heading and what is under it."""

    version: str  # or UNRELEASED
    date: str | None
    lines: list[str] = field(default_factory=list)

    @property
    def body(self) -> str:
        return "\n".join(self.lines).strip()


@dataclass
class Changelog:
    """The file, parsed."""

    preamble: str
    releases: list[Release]
    links: dict[str, str]  # a release's version to its address

    @property
    def latest(self) -> Release | None:
        """The newest release; None before the first."""
        return self.releases[1] if len(self.releases) > 1 else None

    def notes(self, version: str) -> str:
        """Return the entries of a version.

        Raises:
            ReleaseError: There is no such heading, or nothing under it.
        """
        for release in self.releases:
            if release.version == version and release.body:
                return release.body
        raise ReleaseError(f"CHANGELOG.md has no entries under [{version}]")

    def cut(self, version: str, date: str) -> None:
        """Turn what is unreleased into the entries of a version.

        Raises:
            ReleaseError: Nothing is unreleased.
        """
        self.notes(UNRELEASED)
        previous = self.latest
        cut = Release(version, date, self.releases[0].lines)
        self.releases = [Release(UNRELEASED, None), cut, *self.releases[1:]]
        compared = f"compare/v{previous.version}...v{version}" if previous else f"tree/v{version}"
        self.links[version] = f"{REPOSITORY}/{compared}"
        self.links[UNRELEASED] = f"{REPOSITORY}/compare/v{version}...main"

    def text(self) -> str:
        parts = [self.preamble.strip()]
        for release in self.releases:
            dated = f" - {release.date}" if release.date else ""
            parts += [f"## [{release.version}]{dated}", *([release.body] if release.body else [])]
        known = [release.version for release in self.releases if release.version in self.links]
        parts.append("\n".join(f"[{version}]: {self.links[version]}" for version in known))
        return "\n\n".join(parts) + "\n"


def parse_changelog(text: str) -> Changelog:
    """Read a changelog.

    Raises:
        ReleaseError: It does not have the form; the message names every fault.
    """
    preamble: list[str] = []
    found = Changelog("", [], {})
    faults: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("## "):
            if match := _HEADING.fullmatch(line):
                found.releases.append(Release(match["version"], match["date"]))
            else:
                faults.append(f"line {number} is neither [{UNRELEASED}] nor [X.Y.Z] - YYYY-MM-DD")
        elif match := _LINK.fullmatch(line):
            found.links[match["version"]] = match["url"]
        else:
            (found.releases[-1].lines if found.releases else preamble).append(line)
    found.preamble = "\n".join(preamble)
    if not found.releases or found.releases[0].version != UNRELEASED:
        faults.append(f"the first release is not [{UNRELEASED}]")
    unlinked = [each.version for each in found.releases if each.version not in found.links]
    faults += [f"[{version}] has no link at the end" for version in unlinked]
    if faults:
        raise ReleaseError("CHANGELOG.md: " + "; ".join(faults))
    return found


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
        self._changelog: Changelog = parse_changelog((root / "CHANGELOG.md").read_text())

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
    log = parse_changelog(text)
    latest, revision = log.latest, versions.revision(root)
    if latest is not None and versions.parse(version) <= versions.parse(latest.version):
        raise ReleaseError(f"{version} is not above {latest.version}, which is released")
    versions.check(root)
    versions.check_revision(root, revision, latest is None)
    log.cut(version, date)
    versions.write(root, version)
    (root / "CHANGELOG.md").write_text(log.text())
    versions.write_baseline(root, revision)
