"""Rules of the contract that buf does not check, most of them from the AIPs."""

from __future__ import annotations

import re

import grpc
import pytest
from google.protobuf import descriptor_pb2 as pb

from tests.contract import schema

SKILLS = ("Query", "Caption", "Detect", "Point", "Segment")
ALL_REQUESTS = (*SKILLS, "RunTasks", "Generate")


def test_every_element_is_commented() -> None:
    """Whatever reflection shows has a comment."""
    bare = [f"{e.kind} {e.name}" for e in schema.elements() if not e.comment]
    assert bare == []


def test_comments_are_sentences() -> None:
    """A comment starts like a sentence or with a name, and ends with punctuation."""
    pattern = re.compile(r"^[A-Z0-9`{].*([.:?)}\"]|```)$", re.DOTALL)
    odd = [f"{e.name}: {e.comment}" for e in schema.elements() if not pattern.match(e.comment)]
    assert odd == []


def test_every_rpc_has_its_own_request_and_response() -> None:
    """No two RPCs share a message, so each can evolve alone."""
    for method in schema.methods():
        assert method.input_type == f".legato.v1.{method.name}Request"
        assert method.output_type == f".legato.v1.{method.name}Response"
    names = [method.name for method in schema.methods()]
    assert len(names) == len(set(names))


def test_no_request_or_response_without_an_rpc() -> None:
    """A message named like an RPC's belongs to an RPC."""
    rpcs = {method.name for method in schema.methods()}
    ends = re.compile(r"^(.+)(Request|Response)$")
    named = {match[1] for name in schema.messages() if (match := ends.match(name))}
    assert named == rpcs


def test_service_names() -> None:
    """Services end in Service; the list is complete."""
    assert set(schema.services()) == {
        "AdminService",
        "ImageService",
        "InferenceService",
        "ServerService",
        "SessionService",
    }


def test_rpc_names_are_plain_verbs() -> None:
    """AIP-136: no preposition, no Async in an RPC's name."""
    for method in schema.methods():
        words = set(re.findall("[A-Z][a-z]*", method.name))
        assert not words & {"Async", "For", "From", "With", "By", "To", "Of", "In"}, method.name


def test_enums_start_unspecified_and_carry_their_prefix() -> None:
    """AIP-126: value 0 is unspecified, and every value has its enum's prefix."""
    for file in schema.files():
        for enum in file.enum_type:
            prefix = re.sub(r"(?<!^)(?=[A-Z])", "_", enum.name).upper()
            assert enum.value[0].number == 0
            assert enum.value[0].name == f"{prefix}_UNSPECIFIED"
            assert all(value.name.startswith(f"{prefix}_") for value in enum.value)
            assert [value.number for value in enum.value] == list(range(len(enum.value)))


@pytest.mark.parametrize("name", SKILLS)
def test_skills_are_unary_and_safe_to_retry(name: str) -> None:
    """By default a skill has one request, one response, and a safe retry."""
    (method,) = [m for m in schema.services()["InferenceService"].method if m.name == name]
    assert not method.client_streaming
    assert not method.server_streaming
    assert method.options.idempotency_level == pb.MethodOptions.NO_SIDE_EFFECTS


def test_reading_rpcs_have_no_side_effects_and_repeatable_ones_say_so() -> None:
    """Which RPCs may be retried is in the descriptors."""
    levels = {
        method.name: pb.MethodOptions.IdempotencyLevel.Name(method.options.idempotency_level)
        for method in schema.methods()
    }
    safe = {name for name, level in levels.items() if level == "NO_SIDE_EFFECTS"}
    repeatable = {name for name, level in levels.items() if level == "IDEMPOTENT"}
    reading = {"GetServerInfo", "ListModels", "GetLoad", "GetMetrics", "WatchTimeline"}
    assert safe == {*SKILLS, "RunTasks", *reading}
    assert repeatable == {"DeleteImage", "Abort", "Drain", "SetPipelineDepth"}


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ("QueryRequest", {"image", "question", "reasoning", "spatial_refs"}),
        ("CaptionRequest", {"image", "length"}),
        ("DetectRequest", {"image", "object", "max_objects"}),
        ("PointRequest", {"image", "object", "max_objects", "spatial_refs"}),
        ("SegmentRequest", {"image", "object", "spatial_refs"}),
        ("Sampling", {"temperature", "top_p", "max_tokens"}),
        ("QueryResponse", {"answer", "reasoning"}),
        ("CaptionResponse", {"caption"}),
        ("DetectResponse", {"objects"}),
        ("PointResponse", {"points"}),
        ("SegmentResponse", {"segments"}),
        ("Box", {"x_min", "y_min", "x_max", "y_max"}),
        ("Point", {"x", "y"}),
        ("Outline", {"path"}),
    ],
)
def test_names_are_those_of_the_moondream_sdk(message: str, names: set[str]) -> None:
    """JSON for the Moondream SDK works in grpcurl."""
    assert names <= set(schema.fields(message))


@pytest.mark.parametrize("name", SKILLS)
def test_a_skill_is_the_same_alone_and_as_a_task(name: str) -> None:
    """`XRequest` is `XTask` plus the fields of any request; `XResponse` is `XResult` plus info.

    Only what needs the frames before is a task's alone.
    """
    shared = {"image", "sampling", "options", "stamp"}
    of_frames = {"tracking"}
    task, result = schema.messages()[f"{name}Task"], schema.messages()[f"{name}Result"]
    request, response = schema.messages()[f"{name}Request"], schema.messages()[f"{name}Response"]

    def typed(message: pb.DescriptorProto) -> dict[str, tuple[int, str, int]]:
        return {f.name: (f.type, f.type_name, f.label) for f in message.field}

    assert {k: v for k, v in typed(request).items() if k not in shared} == {
        k: v for k, v in typed(task).items() if k not in of_frames
    }
    assert {k: v for k, v in typed(response).items() if k != "info"} == typed(result)


@pytest.mark.parametrize("name", ALL_REQUESTS)
def test_requests_share_their_frame(name: str) -> None:
    """Every request about an image has image, options and stamp under these names and types."""
    types = {f.name: f.type_name for f in schema.messages()[f"{name}Request"].field}
    assert types["image"] == ".legato.v1.Image"
    assert types["options"] == ".legato.v1.RequestOptions"
    assert types["stamp"] == ".legato.v1.FrameStamp"


def test_absent_differs_from_zero_where_it_matters() -> None:
    """Scalars whose zero means something have presence."""
    optional = {
        f"{message.name}.{field.name}"
        for message in schema.messages().values()
        for field in message.field
        if field.proto3_optional
    }
    scalars = {"temperature", "top_p", "top_k", "max_tokens", "seed"}
    assert {f"Sampling.{name}" for name in scalars} <= optional
    confident = {"DetectedObject", "PointedObject", "Outline"}
    assert {f"{name}.confidence" for name in confident} <= optional
    assert {name for name in optional if name.endswith(".max_objects")} == {
        "DetectTask.max_objects",
        "DetectRequest.max_objects",
        "PointTask.max_objects",
        "PointRequest.max_objects",
    }


def test_lists_are_paged() -> None:
    """AIP-158: a List RPC has a page size and page tokens."""
    for method in schema.methods():
        if method.name.startswith("List"):
            assert {"page_size", "page_token"} <= set(schema.fields(f"{method.name}Request"))
            assert "next_page_token" in schema.fields(f"{method.name}Response")


def test_every_error_reason_names_its_code_and_an_example() -> None:
    """A reason's comment starts with a gRPC status code and shows its ErrorInfo."""
    codes = {code.name for code in grpc.StatusCode}
    reasons = [e for e in schema.elements() if e.name.startswith("ERROR_REASON_")]
    for reason in reasons[1:]:
        short = reason.name.removeprefix("ERROR_REASON_")
        assert reason.comment.split(":")[0] in codes, reason.name
        assert f'{{"reason": "{short}", "domain": "legato"' in reason.comment
        assert "Remedy:" in reason.comment


def test_the_event_grammar_is_written_where_it_is_read() -> None:
    """Both the RPC and the message document the grammar of a Generate stream."""
    comments = {e.name: e.comment for e in schema.elements()}
    for name in ("InferenceService.Generate", "GenerateResponse"):
        assert "*queued started *( delta / heartbeat ) finished" in comments[name]
