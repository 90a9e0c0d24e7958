"""Requests as bytes, the table of skills, and statuses as typed errors."""

from __future__ import annotations

import dataclasses

import grpc
import numpy as np
import pytest
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from legato.v1 import (
    admin_pb2,
    geometry_pb2,
    inference_pb2,
    media_pb2,
    server_pb2,
    session_pb2,
    task_pb2,
)
from legato.v1 import inference_pb2 as pb
from legato_client import (
    Aborted,
    AlreadyExists,
    Box,
    Busy,
    Client,
    DeadlineExceeded,
    Detection,
    DetectResult,
    DetectTask,
    DuplicateRequest,
    FailedPrecondition,
    FieldViolation,
    FrameDropped,
    ImageNotFound,
    InternalError,
    InvalidArgument,
    LegatoError,
    Load,
    ModelInfo,
    Motion,
    NotFound,
    Options,
    Outline,
    OutlineDelta,
    PermissionDenied,
    Point,
    PointedObject,
    Preempted,
    QueryResult,
    QuotaExceeded,
    ResourceExhausted,
    ResponseInfo,
    Sampling,
    SegmentTask,
    ServerInfo,
    SessionProtocol,
    SessionTerms,
    SharedMemoryRefused,
    Started,
    Token,
    Unauthenticated,
    Unavailable,
    Unimplemented,
)
from legato_client._errors import from_status
from legato_client._grpc import channel
from legato_client._grpc.channel import to_bytes
from legato_client._images.sources import CachedImage, to_image
from legato_client._proto import requests, skills
from legato_service.convert import skills as service_skills

from tests.clients.python.fake_server import Failure, failure, retry_info

# ---------------------------------------------------------------- wire

IMAGES = {
    "none": lambda: None,
    "empty": lambda: to_image(b""),
    "short": lambda: to_image(b"\xff\xd8"),
    "long": lambda: to_image(bytes(range(256)) * 1000),
    "typed": lambda: media_pb2.Image(
        encoded=media_pb2.EncodedImage(data=b"x" * 127, mime_type="image/png")
    ),
    "raw": lambda: to_image(np.arange(60, dtype=np.uint8).reshape(4, 5, 3)),
    "id": lambda: to_image(CachedImage("img_1")),
}


@pytest.mark.parametrize("kind", [pb.QueryRequest, pb.RunTasksRequest, pb.GenerateRequest])
@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_bytes_are_the_request(kind, image):
    """Parsed, the bytes give the request as it was, whatever its image."""
    request = kind(image=image(), options=pb.RequestOptions(request_id="r"))
    expected = kind.FromString(request.SerializeToString())
    assert kind.FromString(to_bytes(request)) == expected


@pytest.mark.parametrize("kind", [pb.QueryRequest, pb.RunTasksRequest, pb.GenerateRequest])
@pytest.mark.parametrize("file", [b"", b"\xff\xd8", bytes(range(256)) * 1000])
def test_a_file_beside_its_request(kind, file):
    """A file's bytes that never were in the message give the same request."""
    options = pb.RequestOptions(request_id="r")
    expected = kind(image=to_image(file), options=options)
    assert kind.FromString(to_bytes(kind(options=options), file)) == expected


@pytest.mark.parametrize("image", IMAGES.values(), ids=IMAGES)
def test_a_frame_of_a_session(image):
    """The same holds for an image inside a session's message."""
    frame = session_pb2.Frame(stamp=media_pb2.FrameStamp(sequence=3), image=image())
    request = session_pb2.SessionRequest(frame=frame)
    expected = request.FromString(request.SerializeToString())
    assert type(request).FromString(to_bytes(request)) == expected


def test_a_request_that_has_no_image():
    """Requests of other services are serialized as ever."""
    requests: list[Message] = [
        server_pb2.ListModelsRequest(page_size=3),
        session_pb2.SessionRequest(grant=session_pb2.GrantCredits(responses=2)),
    ]
    for request in requests:
        assert to_bytes(request) == request.SerializeToString()


# ---------------------------------------------------------------- skills
# The table of skills, which is the contract's.

KINDS = [field.name for field in task_pb2.Task.DESCRIPTOR.oneofs_by_name["kind"].fields]
INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"]
INFO = ResponseInfo("r", "m", "stop")


def test_both_tables_are_the_contract_s():
    """Each skill of the contract has a row in the client and in the service, and no other does."""
    assert set(skills.BY_NAME) == set(KINDS) == set(service_skills.BY_NAME)


@pytest.mark.parametrize("name", KINDS)
def test_a_skill_has_a_call_of_its_own(name):
    """Named after it, with the request and the response of its row."""
    skill = skills.BY_NAME[name]
    call = INFERENCE.methods_by_name[name.capitalize()]
    assert channel.OF_SKILLS[name].path == f"/{INFERENCE.full_name}/{call.name}"
    assert (
        call.input_type,
        call.output_type,
    ) == (skill.request.DESCRIPTOR, skill.response.DESCRIPTOR)
    assert skills.of(skill.make(skill.choices[0] if skill.choices else "cat", Sampling())) is skill


@pytest.mark.parametrize("name", KINDS)
def test_a_task_is_the_same_in_a_call_of_its_own_and_in_one_of_several(name):
    """Its fields have the same values in the request and in the contract's task."""
    skill = skills.BY_NAME[name]
    subject = skill.choices[-1] if skill.choices else "cat"
    task = skill.make(subject, Sampling(seed=7), max_objects=3, min_confidence=0.5)
    alone = requests.question(None, task, Options())
    among = getattr(requests.task_message(task), name)
    assert {field.name for field, _ in among.ListFields()} <= {
        field.name for field, _ in alone.ListFields()
    }
    for field, value in among.ListFields():
        assert getattr(alone, field.name) == value
    assert alone.sampling.seed == 7


@pytest.mark.parametrize(
    ("kind", "message", "given"),
    [
        *((each, getattr(geometry_pb2, each.__name__), ()) for each in (Box, Point, Motion)),
        (Detection, geometry_pb2.DetectedObject, ()),
        (PointedObject, geometry_pb2.PointedObject, ()),
        (Outline, geometry_pb2.Outline, ()),
        (ResponseInfo, inference_pb2.ResponseInfo, ()),
        (Token, inference_pb2.Token, ()),
        (Started, inference_pb2.Started, ()),
        (OutlineDelta, inference_pb2.OutlineDelta, ()),
        (ServerInfo, server_pb2.GetServerInfoResponse, ()),
        (ModelInfo, server_pb2.Model, ()),
        (Load, admin_pb2.GetLoadResponse, ()),
        (SessionTerms, session_pb2.SessionOpened, ()),
        (FrameDropped, session_pb2.FrameDropped, ()),
        *((each.result, each.response, ("info", "task_id")) for each in skills.SKILLS),
    ],
)
def test_values_have_the_names_of_their_messages_fields(kind, message, given):
    """All fields are read from those of the same names, so none is left at its default."""
    names = {each.name for each in dataclasses.fields(kind)} - {*given}
    assert names <= set(message.DESCRIPTOR.fields_by_name)


def test_a_subject_that_a_skill_cannot_have_is_refused():
    """Nothing to look for, and a length that there is not."""
    with pytest.raises(ValueError, match="detect needs a text"):
        skills.DETECT.make(" ", Sampling())
    with pytest.raises(ValueError, match="a caption is one of short, normal, long"):
        skills.CAPTION.make("endless", Sampling())


def test_fields_that_a_task_lacks_are_left_out():
    """An outline has no most objects."""
    assert skills.SEGMENT.make("cat", Sampling(), max_objects=3) == SegmentTask("cat")
    assert skills.DETECT.make("cat", Sampling(), max_objects=3) == DetectTask("cat", 3)


def test_a_result_has_marks_or_text():
    """What lies in the image, or words; neither is a field of the result."""
    found = Detection(Box(0, 0, 1, 1), "cat")
    detected, answered = DetectResult((found,), INFO), QueryResult("two", None, INFO)
    assert (detected.marks, detected.text) == ((found,), "")
    assert (answered.marks, answered.text) == ((), "two")
    assert not {"marks", "text"} & set(dataclasses.asdict(detected))


# ---------------------------------------------------------------- errors

Code = grpc.StatusCode


@pytest.mark.parametrize(
    ("code", "reason", "kind"),
    [
        (Code.INVALID_ARGUMENT, "INVALID_FIELD", InvalidArgument),
        (Code.INVALID_ARGUMENT, "IMAGE_UNDECODABLE", InvalidArgument),
        (Code.NOT_FOUND, "MODEL_NOT_FOUND", NotFound),
        (Code.NOT_FOUND, "IMAGE_NOT_FOUND", ImageNotFound),
        (Code.FAILED_PRECONDITION, "TASK_UNSUPPORTED", FailedPrecondition),
        (Code.FAILED_PRECONDITION, "SHM_REFUSED", SharedMemoryRefused),
        (Code.INVALID_ARGUMENT, "SESSION_PROTOCOL", SessionProtocol),
        (Code.INTERNAL, "PREEMPTED", InternalError),
        (Code.UNIMPLEMENTED, "", Unimplemented),
        (Code.RESOURCE_EXHAUSTED, "QUEUE_FULL", Busy),
        (Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED", QuotaExceeded),
        (Code.RESOURCE_EXHAUSTED, "", ResourceExhausted),
        (Code.ABORTED, "CLIENT_TOO_SLOW", Aborted),
        (Code.ABORTED, "PREEMPTED", Preempted),
        (Code.DEADLINE_EXCEEDED, "DEADLINE_UNREACHABLE", DeadlineExceeded),
        (Code.ALREADY_EXISTS, "DUPLICATE_REQUEST", DuplicateRequest),
        (Code.UNAVAILABLE, "ENGINE_LOST", Unavailable),
        (Code.UNAUTHENTICATED, "UNAUTHENTICATED", Unauthenticated),
        (Code.PERMISSION_DENIED, "FORBIDDEN", PermissionDenied),
        (Code.INTERNAL, "INTERNAL", InternalError),
        (Code.UNKNOWN, "", InternalError),
    ],
)
def test_error_map(code, reason, kind):
    """Each row of the contract's error map has its type, code and reason."""
    error = from_status(failure(code, reason).status())
    assert type(error) is kind
    assert (error.code, error.reason) == (code.name, reason)


def test_details_survive_the_wire(server):
    """Reason, request id, limits, field violations and retry delay reach the caller."""
    violation = error_details_pb2.BadRequest.FieldViolation(field="image", description="too big")
    bad = error_details_pb2.BadRequest(field_violations=[violation])
    server.script["Detect"].append(
        failure(
            Code.INVALID_ARGUMENT, "IMAGE_TOO_LARGE", bad, retry_info(0.5), limit="40", actual="50"
        )
    )
    with Client(server.target) as client, pytest.raises(InvalidArgument) as caught:
        client.detect(b"x", "cat")
    error = caught.value
    assert error.reason == "IMAGE_TOO_LARGE"
    assert error.request_id == "r-9"
    assert error.metadata == {"limit": "40", "actual": "50"}
    assert error.field_violations == (FieldViolation("image", "too big"),)
    assert error.retry_after == 0.5
    assert "r-9" in str(error)


def test_status_without_details(server):
    """A plain status is typed too, with the request id of its trailer."""
    server.script["Detect"].append(
        Failure(Code.NOT_FOUND, "gone", trailers=(("x-request-id", "r-2"),))
    )
    with Client(server.target) as client, pytest.raises(NotFound) as caught:
        client.detect(b"x", "cat")
    assert (caught.value.message, caught.value.request_id) == ("gone", "r-2")


def test_damaged_details(server):
    """Details that are not a Status leave the plain error."""
    broken = (("grpc-status-details-bin", b"\xff\xff"),)
    server.script["Detect"].append(Failure(Code.INTERNAL, "bug", trailers=broken))
    with Client(server.target) as client, pytest.raises(InternalError, match="bug"):
        client.detect(b"x", "cat")


def test_a_damaged_detail():
    """A detail that cannot be parsed is skipped; the others count."""
    status = status_pb2.Status(code=5, message="gone")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason="IMAGE_NOT_FOUND"))
    for kind in ("RequestInfo", "BadRequest", "RetryInfo"):
        status.details.add(type_url=f"type.googleapis.com/google.rpc.{kind}", value=b"\xff\xff")
    assert type(from_status(status)) is ImageNotFound


def test_unknown_code():
    """A code that this client does not know is a `LegatoError`, not a crash."""
    assert type(from_status(status_pb2.Status(code=99, message="new"))) is InternalError


def test_tree():
    """A finer error is still the one of its code; Busy is told apart from transport limits."""
    assert issubclass(ImageNotFound, NotFound)
    assert issubclass(DuplicateRequest, AlreadyExists)
    assert issubclass(Preempted, Aborted)
    assert issubclass(QuotaExceeded, Busy)
    assert issubclass(Busy, ResourceExhausted)
    assert not issubclass(Busy, Unavailable)
    assert issubclass(ResourceExhausted, LegatoError)
