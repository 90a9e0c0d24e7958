"""The OpenAPI document."""

from __future__ import annotations

import json
import re

import msgspec
from legato_client.web import openapi
from legato_client.web.operations import OperationRoute

PATHS = {
    "/v1/chat/completions": ["post"],
    "/v1/responses": ["post"],
    "/v1/models": ["get"],
    "/v1/models/{name}": ["get"],
    "/v1/caption": ["post"],
    "/v1/query": ["post"],
    "/v1/detect": ["post"],
    "/v1/point": ["post"],
    "/v1/segment": ["post"],
}


def test_every_operation_is_described(web):
    """The document that is served has each path with its summary, body and answers."""
    document = web.get("/openapi.json").json
    assert {path: list(each) for path, each in document["paths"].items()} == PATHS
    for path, (method,) in PATHS.items():
        entry = document["paths"][path][method]
        assert entry["summary"]
        assert ("requestBody" in entry) == (method == "post")
        assert {"200", "default"} == set(entry["responses"])
    ids = [each["operationId"] for path in document["paths"].values() for each in path.values()]
    assert len(set(ids)) == len(ids)


def test_every_reference_leads_somewhere(web):
    """Each schema that is referred to is there, and each that is there is referred to."""
    document = web.get("/openapi.json").json
    named = set(re.findall(r'"#/components/schemas/(\w+)"', json.dumps(document)))
    assert named == set(document["components"]["schemas"])


def test_bodies_are_those_of_the_code():
    """A schema has the fields of the type that is parsed, with their bounds."""
    served = [each for each in openapi.routes() if isinstance(each, OperationRoute)]
    schemas = openapi.make_document(served)["components"]["schemas"]
    for each in served:
        body = each.operation.body
        if body is not None:
            schema = schemas[body.__name__]
            assert issubclass(body, msgspec.Struct)
            assert set(schema["properties"]) == set(body.__struct_fields__)
            assert schema["additionalProperties"] is False
    most = schemas["ChatBody"]["properties"]["max_tokens"]
    assert {"type": "integer", "minimum": 1, "maximum": 2**32 - 1} in most["anyOf"]
    assert {"ChatChunk", "TextEvent", "BoxEvent", "PathEvent", "OutlineEvent"} < set(schemas)
