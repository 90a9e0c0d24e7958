"""The error table, as data and over the wire."""

import errno
import json
import os

import grpc
import pytest
import structlog
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st
from legato.v1 import error_pb2, image_pb2, inference_pb2, media_pb2, task_pb2
from legato_engine import errors
from legato_engine.client.monitor import EngineState
from legato_engine.types import RequestKey
from legato_service.errors import (
    STATUS_MAPPINGS,
    CredentialRejected,
    Forbidden,
    MethodUnknown,
    RequestIdInUse,
    SessionsFull,
    SharedMemoryForbidden,
    SharedMemoryTorn,
    failure,
    status_mapping,
)

from tests.service.fakes import FakeEngine, answer, hold, refuse
from tests.service.harness import image_bytes, image_message, refusal, running, until

QUESTION = inference_pb2.QueryRequest(question="How many?")

# Errors that the engine sends: what the peer sees of them.
FROM_ENGINE = [
    (errors.InvalidField("no", field="sampling.top_k"), "INVALID_ARGUMENT", "INVALID_FIELD"),
    (errors.SessionOutOfOrder("late", field="open"), "INVALID_ARGUMENT", "SESSION_PROTOCOL"),
    (errors.ImageUndecodable("cut", field="image"), "INVALID_ARGUMENT", "IMAGE_UNDECODABLE"),
    (errors.ImageTooLarge("big", limit=1, actual=2), "INVALID_ARGUMENT", "IMAGE_TOO_LARGE"),
    (errors.PromptTooLong("long", limit=1, actual=2), "INVALID_ARGUMENT", "PROMPT_TOO_LONG"),
    (errors.AdapterUnusable("bad", field="options.adapter"), "INVALID_ARGUMENT", "INVALID_FIELD"),
    (errors.ImageNotFound("gone", resource="img_1"), "NOT_FOUND", "IMAGE_NOT_FOUND"),
    (errors.ModelNotFound("none", resource="m"), "NOT_FOUND", "MODEL_NOT_FOUND"),
    (errors.AdapterNotFound("none", resource="a"), "NOT_FOUND", "ADAPTER_NOT_FOUND"),
    (errors.TaskUnsupported("no", task="segment"), "FAILED_PRECONDITION", "TASK_UNSUPPORTED"),
    (errors.QueueFull("full", retry_after_ms=200), "RESOURCE_EXHAUSTED", "QUEUE_FULL"),
    (
        errors.QuotaExceeded("share", quota="waiting_per_tenant", tenant="t", limit=1),
        "RESOURCE_EXHAUSTED",
        "QUOTA_EXCEEDED",
    ),
    (errors.DeadlineExceeded("late"), "DEADLINE_EXCEEDED", ""),
    (errors.DeadlineUnreachable("no"), "DEADLINE_EXCEEDED", "DEADLINE_UNREACHABLE"),
    (errors.ClientTooSlow("slow"), "ABORTED", "CLIENT_TOO_SLOW"),
    (errors.StoppedByOperator("stopped"), "ABORTED", "PREEMPTED"),
    (
        errors.BytesExceeded("full", quota="images_bytes_total", caller="tenant:t"),
        "RESOURCE_EXHAUSTED",
        "QUOTA_EXCEEDED",
    ),
    (errors.EngineStarting("loading"), "UNAVAILABLE", "ENGINE_STARTING"),
    (errors.EngineLost("died"), "UNAVAILABLE", "ENGINE_LOST"),
    (errors.Draining("bye"), "UNAVAILABLE", "DRAINING"),
    (errors.InternalError("secret"), "INTERNAL", "INTERNAL"),
    (errors.NumericError("no number"), "INTERNAL", "NUMERIC"),
    (errors.PoisonedRequest("deadly"), "INTERNAL", "POISONED"),
]
DETAIL_OF = {
    "INVALID_ARGUMENT": "BadRequest",
    "NOT_FOUND": "ResourceInfo",
    "FAILED_PRECONDITION": "PreconditionFailure",
    "RESOURCE_EXHAUSTED": "RetryInfo",
    "UNAVAILABLE": "RetryInfo",
    "ALREADY_EXISTS": "ResourceInfo",
}


def leaves(kind):
    """Return the error types without subtypes below `kind`."""
    below = kind.__subclasses__()
    return {leaf for child in below for leaf in leaves(child)} if below else {kind}


def check_shape(failed, code, reason, request_id):
    """Check code, reason, request id and detail of a failure."""
    assert failed.code is grpc.StatusCode[code]
    assert failed.reason == reason
    assert failed.details["RequestInfo"].request_id == request_id
    assert failed.trailers["x-request-id"] == request_id
    if reason:
        assert failed.details["ErrorInfo"].domain == "legato"
    extra = set(failed.details) - {"ErrorInfo", "RequestInfo"}
    expected = {DETAIL_OF[code]} if code in DETAIL_OF else set()
    if reason == "QUOTA_EXCEEDED":
        if failed.details["ErrorInfo"].metadata["quota"].startswith("images_bytes"):
            expected.clear()  # waiting gives no memory back
        expected.add("QuotaFailure")
        assert failed.details["QuotaFailure"].violations[0].subject == "tenant:t"
    assert extra == expected
    assert ("grpc-retry-pushback-ms" in failed.trailers) == ("RetryInfo" in extra)


@pytest.mark.parametrize(
    ("error", "code", "reason"),
    FROM_ENGINE,
    ids=[type(mapping[0]).__name__ for mapping in FROM_ENGINE],
)
async def test_every_error_of_the_engine_arrives_whole(error, code, reason):
    """Each error type reaches the client as its code, reason and details."""
    request = inference_pb2.QueryRequest(
        question="?", options=inference_pb2.RequestOptions(request_id="r-1")
    )
    async with running(FakeEngine(refuse(error))) as server:
        failed = await refusal(server.inference.Query(request))
    check_shape(failed, code, reason, "r-1")
    if reason:
        expected = {} if reason == "INTERNAL" else error.metadata
        assert dict(failed.details["ErrorInfo"].metadata) == expected
    assert "secret" not in failed.message


def test_the_cases_above_are_all_there_are():
    """Every error type of the engine is among the cases; a new one fails this test."""
    covered = {type(error) for error, _, _ in FROM_ENGINE}
    service_only = {
        SharedMemoryForbidden,
        SharedMemoryTorn,
        RequestIdInUse,
        SessionsFull,
        CredentialRejected,
        Forbidden,
        MethodUnknown,
    }
    assert leaves(errors.LegatoError) - service_only <= covered
    as_their_base = {errors.InvalidField, errors.QueueFull, errors.InternalError, SessionsFull}
    assert covered | service_only <= set(STATUS_MAPPINGS) | as_their_base


def test_every_reason_is_in_the_contract():
    """What is sent as reason names a value of ErrorReason."""
    known = set(error_pb2.ErrorReason.keys())
    for mapping in STATUS_MAPPINGS.values():
        assert not mapping.reason or f"ERROR_REASON_{mapping.reason}" in known


def test_a_type_without_a_mapping_takes_its_nearest_bases():
    """A type without a mapping gets that of its nearest base."""

    class QueueOfImagesFull(errors.QueueFull):
        pass

    class Odd(errors.LegatoError):
        pass

    assert status_mapping(QueueOfImagesFull).reason == "QUEUE_FULL"
    assert status_mapping(Odd).reason == "INTERNAL"


text = st.text(max_size=6000)


@given(
    kind=st.sampled_from(sorted(STATUS_MAPPINGS, key=lambda kind: kind.__name__)),
    message=text,
    metadata=st.dictionaries(st.sampled_from(["field", "resource", "task", "x" * 300]), text)
    | st.dictionaries(st.text(max_size=300), text, max_size=30),
)
def test_details_stay_small(kind, message, metadata):
    """Details stay under 4 KB for errors with long texts."""
    metadata.pop("retry_after_ms", None)
    error = kind(message)
    error.metadata = metadata
    assert len(failure(error, "r" * 64).status.SerializeToString()) <= 4096


@given(hint=st.integers(0, 10**9))
def test_retry_hints_stay_sensible(hint):
    """A hint has jitter of a fifth, and stays within 50 ms and 10 s."""
    failed = failure(errors.QueueFull("full", retry_after_ms=hint), "r")
    assert failed.retry_after is not None
    assert 0.05 <= failed.retry_after <= 10
    assert failed.retry_after >= 0.05
    assert failed.retry_after in (0.05, 10) or 0.8 <= failed.retry_after / (hint / 1000) <= 1.2
    detail = error_details_pb2.RetryInfo()
    assert any(each.Unpack(detail) for each in failed.status.details)
    trailers = dict(failed.trailers())
    assert int(trailers["grpc-retry-pushback-ms"]) == round(failed.retry_after * 1000)


async def test_the_text_of_an_unknown_exception_is_not_sent():
    """A bug is INTERNAL with the request's id and none of its text."""

    def explode(engine, stream):
        raise ValueError("secret")

    request = inference_pb2.QueryRequest(
        question="?", options=inference_pb2.RequestOptions(request_id="r-2")
    )
    async with running(FakeEngine(explode)) as server:
        failed = await refusal(server.inference.Query(request))
    check_shape(failed, "INTERNAL", "INTERNAL", "r-2")
    assert "secret" not in failed.message + str(failed.trailers)


async def test_options_that_this_server_lacks():
    """Adapters, unknown models and shared images are refused by their mappings."""
    options = inference_pb2.RequestOptions
    shared = media_pb2.Image(shared=media_pb2.SharedImage(region="legato-0-x"))
    cases = [
        (options(adapter="cups@12"), None, "NOT_FOUND", "ADAPTER_NOT_FOUND"),
        (options(model="other"), None, "NOT_FOUND", "MODEL_NOT_FOUND"),
        (options(), shared, "FAILED_PRECONDITION", "SHM_REFUSED"),
    ]
    async with running() as server:
        for number, (opts, image, code, reason) in enumerate(cases):
            opts.request_id = f"r-{number}"
            request = inference_pb2.QueryRequest(question="?", options=opts, image=image)
            failed = await refusal(server.inference.Query(request))
            check_shape(failed, code, reason, f"r-{number}")


async def test_resources_are_named():
    """ResourceInfo says what kind of thing is missing, and which."""
    options = inference_pb2.RequestOptions(model="other")
    async with running() as server:
        failed = await refusal(
            server.inference.Query(inference_pb2.QueryRequest(question="?", options=options))
        )
    resource = failed.details["ResourceInfo"]
    assert (resource.resource_type, resource.resource_name) == ("model", "other")


async def test_an_engine_that_loads_is_unavailable():
    """Requests get a retry delay until the model is known."""
    engine = FakeEngine()
    engine.state, engine.model = EngineState.STARTING, None
    async with running(engine) as server:
        failed = await refusal(server.inference.Query(QUESTION))
    assert failed.reason == "ENGINE_STARTING"


async def test_an_id_in_flight_is_not_taken_twice():
    """ALREADY_EXISTS names the id, as a resource too."""
    options = inference_pb2.RequestOptions(request_id="mine")
    engine = FakeEngine(hold)
    async with running(engine) as server:
        first = server.inference.Query(inference_pb2.QueryRequest(question="?", options=options))
        await until(lambda: bool(engine.streams))
        other = inference_pb2.QueryRequest(question="!", options=options)
        failed = await refusal(server.inference.Query(other))
        check_shape(failed, "ALREADY_EXISTS", "DUPLICATE_REQUEST", "mine")
        assert failed.details["ResourceInfo"].resource_name == "mine"
        answer(engine, engine.streams[RequestKey("mine")])
        assert (await first).answer


async def test_a_client_retries_by_its_own_policy():
    """A refusal before admission carries no headers, so gRPC's own retry works."""

    def fail_twice(engine, stream):
        attempt = len(engine.requests) % 3
        if attempt == 1:
            engine.fail(stream, errors.QueueFull("full", retry_after_ms=1))
        elif attempt == 2:
            engine.fail(stream, errors.EngineLost("died"))
        else:
            answer(engine, stream)

    policy = {
        "maxAttempts": 3,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.1s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"],
    }
    config = {"methodConfig": [{"name": [{}], "retryPolicy": policy}]}
    options = [("grpc.service_config", json.dumps(config))]
    async with running(FakeEngine(fail_twice), options) as server:
        assert (await server.inference.Query(QUESTION)).answer
        task = task_pb2.Task(query=task_pb2.QueryTask(question="?"))
        call = server.inference.Generate(inference_pb2.GenerateRequest(task=task))
        events = [event async for event in call]
        assert events[-1].HasField("finished")
        assert len(server.engine.requests) == 6


async def test_bad_requests_with_an_image_leave_no_blob():
    """A request that is refused after its image was staged leaves nothing in shared memory."""
    engine = FakeEngine()
    engine.become(EngineState.LOST)
    async with running(engine) as server:
        failed = await refusal(
            server.inference.Caption(inference_pb2.CaptionRequest(image=image_message()))
        )
        assert len(engine.blobs) == 0
    assert failed.reason == "ENGINE_LOST"


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"encoded": media_pb2.EncodedImage(data=image_bytes())}, "image.encoded.data"),
        (
            {
                "raw": media_pb2.RawImage(
                    layout=media_pb2.PixelLayout(
                        width=1, height=1, format=media_pb2.PIXEL_FORMAT_MONO8
                    ),
                    data=b"0",
                )
            },
            "image.raw.data",
        ),
    ],
)
@pytest.mark.parametrize("rpc", ["Query", "RunTasks", "Generate"])
async def test_a_broken_image_is_refused_by_its_field(rpc, source, field):
    """An error about the image that only the engine finds names the request's field."""
    image = media_pb2.Image(**source)
    task = task_pb2.Task(query=task_pb2.QueryTask(question="?"))
    async with running(FakeEngine(refuse(errors.ImageUndecodable("cut", field="image")))) as server:
        calls = {
            "Query": lambda: server.inference.Query(
                inference_pb2.QueryRequest(image=image, question="?")
            ),
            "RunTasks": lambda: server.inference.RunTasks(
                inference_pb2.RunTasksRequest(image=image, tasks=[task, task])
            ),
            "Generate": lambda: server.inference.Generate(
                inference_pb2.GenerateRequest(image=image, task=task)
            ).read(),
        }
        failed = await refusal(calls[rpc]())
    assert failed.details["BadRequest"].field_violations[0].field == field
    assert failed.details["ErrorInfo"].metadata["field"] == field


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC])
async def test_a_host_without_room_is_busy_and_not_broken(number, monkeypatch):
    """A system call that lacks descriptors, memory or space ends a call with a time to retry."""
    async with running() as server:

        def full():
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(server.engine.blobs, "open_writer", full)
        header = image_pb2.PutImageRequest(header=image_pb2.PutImageHeader())
        with structlog.testing.capture_logs() as logs:
            failed = await refusal(server.images.PutImage(iter([header])))
    assert failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.reason == "QUEUE_FULL"
    assert "RetryInfo" in failed.details
    assert os.strerror(number) in failed.message
    assert "resources_exhausted" in [line["event"] for line in logs]
    assert "uncaught_exception" not in [line["event"] for line in logs]


def test_another_failure_of_the_system_is_a_bug():
    """A file that is gone is no lack of room."""
    assert errors.exhaustion(FileNotFoundError(errno.ENOENT, "gone")) is None
    assert failure(PermissionError(errno.EACCES, "no"), "r").code is grpc.StatusCode.INTERNAL
