"""CHANGELOG.md has the form of Keep a Changelog, and a release cuts it."""

from __future__ import annotations

import pytest

from release import changelog
from release.distributions import ROOT
from release.process import ReleaseError

TEXT = """\
# Changelog

All notable changes.

## [Unreleased]

### Added

- A thing.

## [0.2.0] - 2026-11-01

### Fixed

- Another.

## [0.1.0] - 2026-10-01

### Added

- The first.

[Unreleased]: https://example.org/unreleased
[0.2.0]: https://example.org/0.2.0
[0.1.0]: https://example.org/0.1.0
"""


def test_the_changelog_has_the_form():
    """This repository's own, with something to release or a release."""
    parsed = changelog.parse((ROOT / "CHANGELOG.md").read_text())
    assert parsed.releases[0].body or parsed.latest


def test_what_was_parsed_is_written_as_it_was():
    """Cutting a release changes no other line."""
    assert changelog.parse(TEXT).text() == TEXT


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("## [Unreleased]\n", "## [0.3.0] - 2026-11-02\n", "the first release is not [Unreleased]"),
        ("## [Unreleased]\n", "## [Unreleased] - 2026-11-02\n", "line 5 is neither"),
        ("## [0.2.0] - 2026-11-01", "## 0.2.0 - 2026-11-01", "line 11 is neither"),
        ("## [0.2.0] - 2026-11-01", "## [0.2.0]", "line 11 is neither"),
        ("[0.2.0] - ", "[0.2] - ", "line 11 is neither"),
        ("[0.1.0]: https://example.org/0.1.0\n", "", "[0.1.0] has no link at the end"),
    ],
)
def test_a_fault_is_named(old, new, fault):
    """Each rule finds the fault it is for."""
    assert old in TEXT
    with pytest.raises(ReleaseError) as raised:
        changelog.parse(TEXT.replace(old, new))
    assert fault in str(raised.value)


def test_a_cut_dates_what_is_unreleased():
    """The entries become those of the version, and the links follow."""
    parsed = changelog.parse(TEXT)
    parsed.cut("0.3.0", "2026-11-23")
    cut = changelog.parse(parsed.text())
    assert [release.version for release in cut.releases[:3]] == ["Unreleased", "0.3.0", "0.2.0"]
    assert cut.latest is not None
    assert (cut.latest.version, cut.latest.date) == ("0.3.0", "2026-11-23")
    assert cut.notes("0.3.0") == "### Added\n\n- A thing."
    assert not cut.releases[0].body
    assert cut.links["0.3.0"].endswith("/compare/v0.2.0...v0.3.0")
    assert cut.links["Unreleased"].endswith("/compare/v0.3.0...main")


def test_nothing_is_cut_from_nothing():
    """A release without entries is refused."""
    parsed = changelog.parse(TEXT.replace("### Added\n\n- A thing.\n\n", ""))
    with pytest.raises(ReleaseError, match=r"no entries under \[Unreleased\]"):
        parsed.cut("0.3.0", "2026-11-23")
