"""The chart as Helm renders it, and the tools that judge what is in deploy/."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
