"""The files of deploy/ as tests read them: chart, Containerfile and PromQL."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm" / "legato"
TOOLS = ROOT / ".venv-deploy" / "bin"
EXAMPLES = ("default", "gpu", "all")


def tool(action: str, **arguments: Any) -> Any:
    """Ask tests/deploy/manifest_tool.py, which has a venv of its own."""
    done = subprocess.run(
        [str(TOOLS / "python"), str(Path(__file__).with_name("manifest_tool.py"))],
        input=json.dumps({"action": action, **arguments}),
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return json.loads(done.stdout)


class Rendered:
    """The manifests of a release; `error` says why there are none."""

    def __init__(self, reply: Mapping[str, Any]) -> None:
        self.error: str = reply.get("error", "")
        self.lint: dict[str, Any] = reply.get("lint", {})
        self.documents: list[dict[str, Any]] = reply.get("documents", [])

    def one(self, kind: str, name: str = "") -> dict[str, Any]:
        """The only one of a kind and, if given, with this end of its name."""
        (found,) = [
            each
            for each in self.documents
            if each["kind"] == kind and each["metadata"]["name"].endswith(name)
        ]
        return found

    @property
    def kinds(self) -> set[str]:
        return {each["kind"] for each in self.documents}

    @property
    def pod(self) -> dict[str, Any]:
        """The specification of a pod."""
        spec: dict[str, Any] = self.one("Deployment")["spec"]["template"]["spec"]
        return spec

    @property
    def container(self) -> dict[str, Any]:
        (container,) = self.pod["containers"]
        made: dict[str, Any] = container
        return made


def render(values: Sequence[Mapping[str, Any]]) -> list[Rendered]:
    """A release for each."""
    return [Rendered(reply) for reply in tool("render", chart=str(CHART), values=values)]


def rendered(example: str) -> Rendered:
    """By the values of the chart's ci/EXAMPLE-values.yaml."""
    return _examples()[EXAMPLES.index(example)]


@functools.cache
def _examples() -> list[Rendered]:
    files = [CHART / "ci" / f"{example}-values.yaml" for example in EXAMPLES]
    return render([yaml.safe_load(file.read_text()) for file in files])


@functools.cache
def go_module(module: str) -> Path:
    """The folder of a Go module's files, downloaded without what it needs itself."""
    if shutil.which("go") is None:
        pytest.skip("no go, which downloads the definitions of custom resources")
    done = subprocess.run(
        ["go", "mod", "download", "-json", module], stdout=subprocess.PIPE, check=True, cwd="/"
    )
    return Path(json.loads(done.stdout)["Dir"])


# ---------------------------------------------------------------- containerfile

FILE = DEPLOY / "Containerfile"


class Step(NamedTuple):
    """An instruction and its arguments."""

    instruction: str
    arguments: str

    @property
    def words(self) -> list[str]:
        """Of the exec form, which no shell reads."""
        words: list[str] = json.loads(self.arguments)
        return words


def stages() -> dict[str, list[Step]]:
    """The steps of each stage, without those of the stage that it begins with."""
    text = re.sub(r"^\s*#.*\n", "", FILE.read_text(), flags=re.MULTILINE)
    found: dict[str, list[Step]] = {}
    name = ""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        if not line.strip():
            continue
        step = Step(*line.split(None, 1))
        if step.instruction == "FROM":
            name = step.arguments.rpartition(" AS ")[2]
        found.setdefault(name, []).append(step)
    return found


def image(target: str) -> list[Step]:
    """The steps of a target, with those of the stages that it begins with."""
    all_stages = stages()
    base = all_stages[target][0].arguments.partition(" AS ")[0]
    return [*(image(base) if base in all_stages else []), *all_stages[target]]


def last(target: str, instruction: str) -> Step:
    """What is in force in an image."""
    return [step for step in image(target) if step.instruction == instruction][-1]


def environment(target: str) -> dict[str, str]:
    steps = [step.arguments for step in image(target) if step.instruction == "ENV"]
    return dict(pair.split("=", 1) for step in steps for pair in step.split())


def copied() -> set[Path]:
    """What the build takes from the repository."""
    steps = [step for steps in stages().values() for step in steps if step.instruction == "COPY"]
    sources = [each.arguments.split()[:-1] for each in steps if "--from" not in each.arguments]
    return {Path(source) for step in sources for source in step}


# ---------------------------------------------------------------- expressions
# The PromQL of the dashboard and of the alert rules.

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
