"""The PromQL of the dashboard and of the alert rules."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD = DEPLOY / "grafana" / "legato.json"
RULES = DEPLOY / "prometheus" / "rules.yml"
_VARIABLES = {"$__rate_interval": "5m", "$instance": ".*"}
_LABEL_VALUES = re.compile(r"label_values\((\w+), (\w+)\)")


def dashboard() -> dict[str, Any]:
    """The dashboard."""
    loaded: dict[str, Any] = json.loads(DASHBOARD.read_text())
    return loaded


def panels(row: str = "") -> list[dict[str, Any]]:
    """All panels but rows, or those of one row, in the order in which they are shown."""
    found: dict[str, list[dict[str, Any]]] = {}
    title = ""
    for panel in dashboard()["panels"]:
        if panel["type"] == "row":
            title = panel["title"]
            found[title] = list(panel["panels"])
        else:
            found[title].append(panel)
    return found[row] if row else [panel for each in found.values() for panel in each]


def rules() -> list[dict[str, Any]]:
    """All rules, of alerts and of recorded series."""
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> dict[str, str]:
    """All expressions by where they are."""
    found: dict[str, str] = {}
    for panel in panels():
        for target in panel["targets"]:
            found[f"panel {panel['title']} {target['refId']}"] = _filled(target["expr"])
    for variable in dashboard()["templating"]["list"]:
        if match := _LABEL_VALUES.fullmatch(variable.get("definition", "")):
            found[f"variable {variable['name']}"] = f"count by ({match[2]}) ({match[1]})"
    for rule in rules():
        found[rule.get("alert") or rule["record"]] = rule["expr"]
    return found


def _filled(expression: str) -> str:
    for name, value in _VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


def selectors(expression: str) -> Iterator[promql_parser.VectorSelector]:
    """All selectors of series in an expression."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: Any) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        return True

    promql_parser.walk(promql_parser.parse(expression), visit)
    return iter(found)
