"""CHANGELOG.md in the form of Keep a Changelog 1.1.0."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from release.build import ReleaseError

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
    if not found.releases or found.releases[0].version != UNRELEASED:
        faults.append(f"the first release is not [{UNRELEASED}]")
    unlinked = [each.version for each in found.releases if each.version not in found.links]
    faults += [f"[{version}] has no link at the end" for version in unlinked]
    if faults:
        raise ReleaseError("CHANGELOG.md: " + "; ".join(faults))
    return found
