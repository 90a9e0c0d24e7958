"""The table of metrics on docs/observability.md; what a scrape has is tested in `tests/e2e`."""

from __future__ import annotations

import importlib.util

from tests.docs.pages import ROOT


def test_the_table_is_what_the_catalogue_says() -> None:
    """`python docs/metrics_table.py` writes it."""
    path = ROOT / "docs" / "metrics_table.py"
    spec = importlib.util.spec_from_file_location("metrics_table", path)
    assert spec is not None
    assert spec.loader is not None
    written = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(written)
    assert written.PAGE.read_text() == written.page()
