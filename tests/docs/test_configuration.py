"""docs/configuration.md lists the options of `legato serve`."""

from __future__ import annotations

import re

import pytest
from legato_service import arguments

from tests.docs.pages import ROOT


def test_every_option_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    """The page names each option of the help text, and no other."""
    with pytest.raises(SystemExit):
        arguments.parse(["--help"])
    offered = set(re.findall(r"(--[a-z-]+)", capsys.readouterr().out)) - {"--help"}
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert set(re.findall(r"`(--[a-z-]+)", page)) == offered
