"""CHANGELOG.md in the form of Keep a Changelog 1.1.0."""

from __future__ import annotations

import datetime
import itertools
import re
from dataclasses import dataclass, field

from release.errors import ReleaseError
from release.versions import parse as parse_version

UNRELEASED = "Unreleased"
SECTIONS = ("Added", "Changed", "Deprecated", "Removed", "Fixed", "Security")
REPOSITORY = "https://github.com/legato-vlm/legato"
_HEADING = re.compile(r"## \[(?P<version>[^\]]+)\](?: - (?P<date>\S+))?")
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

    @property
    def sections(self) -> list[str]:
        return [line.removeprefix("### ") for line in self.lines if line.startswith("### ")]


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


def parse(text: str) -> Changelog:
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
    faults += _faults(found)
    if faults:
        raise ReleaseError("CHANGELOG.md: " + "; ".join(faults))
    return found


def _faults(changelog: Changelog) -> list[str]:
    faults = []
    if not changelog.preamble.startswith("# Changelog\n"):
        faults.append("the first line is not `# Changelog`")
    if not changelog.releases or changelog.releases[0].version != UNRELEASED:
        faults.append(f"the first release is not [{UNRELEASED}]")
    for release in changelog.releases:
        found = [*_faults_of_heading(release), *_faults_of_body(release)]
        faults += [f"[{release.version}]: {fault}" for fault in found]
        if release.version not in changelog.links:
            faults.append(f"[{release.version}] has no link at the end")
    dated = [release for release in changelog.releases if release.version != UNRELEASED]
    for newer, older in itertools.pairwise(dated):
        if _numbers(newer.version) <= _numbers(older.version):
            faults.append(f"[{newer.version}] is above [{older.version}]")
        if (newer.date or "") < (older.date or ""):
            faults.append(f"[{newer.version}] is older than [{older.version}]")
    return faults


def _faults_of_heading(release: Release) -> list[str]:
    if release.version == UNRELEASED:
        return ["has a date"] if release.date else []
    faults = []
    if not _numbers(release.version):
        faults.append("not a version X.Y.Z")
    if not _is_date(release.date):
        faults.append("no date YYYY-MM-DD")
    if not release.body:
        faults.append("no entries")
    return faults


def _faults_of_body(release: Release) -> list[str]:
    faults = []
    for section in release.sections:
        if section not in SECTIONS:
            faults.append(f"section {section!r} is none of {', '.join(SECTIONS)}")
        if release.sections.count(section) > 1:
            faults.append(f"section {section} occurs twice")
    if release.body and not release.body.startswith("### "):
        faults.append("entries before the first section")
    lines = [line for line in release.lines if line.strip()]
    for above, below in itertools.pairwise([*lines, "### "]):
        if above.startswith("### ") and below.startswith("### "):
            faults.append(f"section {above.removeprefix('### ')} is empty")
    return faults


def _numbers(version: str) -> tuple[int, ...]:
    try:
        return parse_version(version)
    except ReleaseError:
        return ()


def _is_date(text: str | None) -> bool:
    try:
        return datetime.date.fromisoformat(text or "").isoformat() == text
    except ValueError:
        return False
