"""Renders and checks manifests, in the venv of deploy/requirements.txt: one JSON request on stdin.

A request has `action` and its arguments, the reply is JSON on stdout:

- render: `chart`, a list of `values` -> for each {documents, lint} or {error}
- kubernetes: `documents`, `version` -> {problems, custom}, the latter the indices of unknown kinds
- custom: `documents`, `crds` (files of definitions) -> {problems}
- schema: `document` (a file of YAML), `schema` (a file) -> {problems}
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

RELEASE, NAMESPACE = "demo", "vision"


def render(chart: str, values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    from helm_python import Chart

    with Chart.load(chart) as loaded:
        return [_rendered(chart, loaded, each) for each in values]


def _rendered(chart: str, loaded: Any, values: dict[str, Any]) -> dict[str, Any]:
    from helm_python import HelmError, lint

    try:
        loaded.validate_schema(values)
        texts = loaded.render(values, name=RELEASE, namespace=NAMESPACE)
    except HelmError as error:
        return {"error": str(error)}
    manifests = [text for path, text in sorted(texts.items()) if path.endswith(".yaml")]
    return {
        "documents": [each for text in manifests for each in yaml.safe_load_all(text) if each],
        "lint": lint(chart, values, strict=True),
    }


def kubernetes(documents: list[dict[str, Any]], version: str) -> dict[str, Any]:
    import kubernetes_validate

    problems, custom = [], []
    for index, document in enumerate(documents):
        try:
            kubernetes_validate.validate(document, version, strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            custom.append(index)
        except kubernetes_validate.ValidationError as error:
            problems.append(_said(document["kind"], error))
    return {"problems": problems, "custom": custom}


def custom(documents: list[dict[str, Any]], crds: list[str]) -> dict[str, Any]:
    import jsonschema

    schemas = dict(_definitions(crds))
    problems = []
    for document in documents:
        schema = schemas.get((document["apiVersion"], document["kind"]))
        if schema is None:
            problems.append(f"{document['kind']}: no definition of {document['apiVersion']}")
            continue
        found = jsonschema.Draft202012Validator(schema).iter_errors(document)
        problems += [_said(document["kind"], error) for error in found]
    return {"problems": problems}


def schema(document: str, schema: str) -> dict[str, Any]:
    import jsonschema

    rules = json.loads(Path(schema).read_text())
    validator = jsonschema.validators.validator_for(rules)(rules)
    found = validator.iter_errors(yaml.safe_load(Path(document).read_text()))
    return {"problems": [_said(document, error) for error in found]}


def _definitions(files: list[str]) -> Iterator[tuple[tuple[str, str], dict[str, Any]]]:
    for file in files:
        text = re.sub(r"^{{.*", "", Path(file).read_text(), flags=re.MULTILINE)  # Envoy Gateway's
        spec = yaml.load(text, Loader=yaml.CSafeLoader)["spec"]
        for version in spec["versions"]:
            key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
            yield key, _strict(version["schema"]["openAPIV3Schema"], is_root=True)


def _strict(node: Any, *, is_root: bool = False) -> Any:
    """As the API server, which drops fields that a definition lacks: here they are errors."""
    if isinstance(node, list):
        return [_strict(each) for each in node]
    if not isinstance(node, dict):
        return node
    made = {key: _strict(value) for key, value in node.items()}
    open_map = "additionalProperties" in made or made.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(made.get("properties"), dict) and made.get("type") == "object" and not open_map:
        made["additionalProperties"] = False
    if is_root:
        made["properties"]["metadata"] = {"type": "object"}
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


def _said(where: str, error: Any) -> str:
    return f"{where} at {'.'.join(map(str, error.absolute_path)) or 'the root'}: {error.message}"


def main() -> None:
    request = json.load(sys.stdin)
    actions: dict[str, Callable[..., Any]] = {
        "render": render,
        "kubernetes": kubernetes,
        "custom": custom,
        "schema": schema,
    }
    json.dump(actions[request.pop("action")](**request), sys.stdout)


if __name__ == "__main__":
    main()
