"""The dashboard and the alert rules, without a server."""

import importlib.util
import json
import re

import promql_parser
import pytest

from tests.deploy.expressions import (
    DASHBOARD,
    DEPLOY,
    dashboard,
    expressions,
    panels,
    rules,
    selectors,
)

ROOT = DEPLOY.parent
ALERTS = {rule["alert"]: rule for rule in rules() if "alert" in rule}


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
    """No two panels that are shown together overlap, and ids are unique."""
    shown = dashboard()["panels"]
    groups = [shown, *(panel["panels"] for panel in shown if panel["type"] == "row")]
    ids = [panel["id"] for group in groups for panel in group]
    assert len(set(ids)) == len(ids)
    for group in groups:
        taken: set[tuple[int, int]] = set()
        for panel in group:
            place = panel["gridPos"]
            cells = {
                (place["x"] + x, place["y"] + y)
                for x in range(place["w"])
                for y in range(place["h"])
            }
            assert not cells & taken, panel["title"]
            assert place["x"] + place["w"] <= 24
            taken |= cells


def test_key_figures_come_first_sessions_second_and_the_rest_is_collapsed():
    """The first screen says whether it is up, how fast, how fresh, and what it drops."""
    rows = [panel for panel in dashboard()["panels"] if panel["type"] == "row"]
    assert [row["title"] for row in rows][:2] == ["Overview", "Sessions"]
    assert [row["collapsed"] for row in rows] == [False, False] + [True] * (len(rows) - 2)
    figures = panels("Overview")
    wanted = ["Up", "Request P95", "Frame age P95", "Frames dropped"]
    assert [panel["title"] for panel in figures][:4] == wanted
    assert {panel["type"] for panel in figures} == {"stat"}
    assert len({panel["gridPos"]["y"] for panel in figures}) == 1
    for panel in figures:
        assert len(panel["fieldConfig"]["defaults"]["thresholds"]["steps"]) >= 2, panel["title"]


def test_every_panel_says_what_it_shows_and_in_which_unit():
    """A description is a sentence; a rate is not a bare number."""
    for panel in panels():
        assert panel["description"].endswith("."), panel["title"]
        rates = all(re.match(r"sum.*\(rate\(", each["expr"]) for each in panel["targets"])
        if rates:
            assert panel["fieldConfig"]["defaults"]["unit"] != "short", panel["title"]


@pytest.mark.parametrize(
    ("alert", "title"),
    [
        ("LegatoQueueWait", "Queue"),
        ("LegatoQueueWait", "Queue P95"),
        ("LegatoEngineSilent", "Heartbeat age"),
        ("LegatoEventLoopLag", "Event loop lag"),
    ],
)
def test_a_panel_is_red_from_where_its_alert_fires(alert, title):
    """The dashboard and the rules have one limit for one metric."""
    (panel,) = (each for each in panels() if each["title"] == title)
    limit = float(re.findall(r"> ([0-9.]+)", ALERTS[alert]["expr"])[0])
    last = panel["fieldConfig"]["defaults"]["thresholds"]["steps"][-1]
    assert last == {"color": "red", "value": limit}
    read = {each.name for target in panel["targets"] for each in selectors(_plain(target["expr"]))}
    assert read & {each.name for each in selectors(ALERTS[alert]["expr"])}


def _plain(expression):
    return expression.replace("$__rate_interval", "5m").replace("$instance", ".*")


@pytest.mark.parametrize(
    "method",
    [
        "legato.v1.InferenceService/Query",
        "legato.v1.InferenceService/Generate",
        "inference.GRPCInferenceService/ModelInfer",
    ],
)
def test_rejections_are_compared_with_all_calls_that_can_be_rejected(method):
    """The gate admits the calls of both services."""
    (calls,) = (
        each for each in selectors(ALERTS["LegatoRejections"]["expr"]) if "rpcs" in str(each.name)
    )
    ((name, pattern),) = re.findall(
        r"(\w+)=~\"([^\"]+)", ALERTS["LegatoRejections"]["expr"].split(calls.name)[1]
    )
    assert name == "method"
    assert re.fullmatch(pattern, method)


def test_an_alert_says_what_is_wrong_and_how_bad():
    """Every alert has a severity and a summary that names the server."""
    assert len(ALERTS) == sum("alert" in rule for rule in rules()) > 10
    for rule in ALERTS.values():
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert "{{ $labels.instance }}" in rule["annotations"]["summary"]


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_links_to_its_entry_in_the_runbook(name):
    """The link's page exists and has the anchor, with something to do after it."""
    url = ALERTS[name]["annotations"]["runbook_url"]
    page, _, anchor = url.partition("/blob/main/")[2].partition("#")
    (entry,) = (
        line for line in (ROOT / page).read_text().splitlines() if f'<a id="{anchor}">' in line
    )
    assert f"`{name}`" in entry
    assert all(len(cell.split()) > 2 for cell in entry.strip("| ").split(" | ")[1:])
