"""The dashboard and the alert rules, without a server."""

import importlib.util
import json

import promql_parser
import pytest

from tests.deploy.expressions import DASHBOARD, DEPLOY, dashboard, expressions, rules, selectors


@pytest.mark.parametrize("name", expressions())
def test_every_expression_is_promql(name):
    """Prometheus' own grammar accepts it, and it reads something."""
    expression = expressions()[name]
    promql_parser.parse(expression)
    assert list(selectors(expression))


def test_a_selector_within_a_function_is_found():
    """The walk below reads every selector, not only those on top."""
    found = selectors("sum(rate(a_total{x='1'}[5m])) / b and on (instance) c == 1")
    assert [each.name for each in found] == ["a_total", "b", "c"]


def test_the_dashboard_is_what_its_program_writes():
    """A change belongs into make_dashboard.py."""
    path = DEPLOY / "grafana" / "make_dashboard.py"
    spec = importlib.util.spec_from_file_location("make_dashboard", path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert json.loads(DASHBOARD.read_text()) == made.dashboard()


def test_panels_have_places_of_their_own():
    """No two panels overlap, and ids are unique."""
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_an_alert_says_what_is_wrong_and_how_bad():
    """Every alert has a severity and a summary that names the server."""
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 10
    for rule in alerts:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]
