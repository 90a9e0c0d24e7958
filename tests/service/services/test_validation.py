"""Requests refused before they reach the engine, and the limits that ServerService states."""

import io
import math
from typing import Any

import grpc
import numpy as np
import pytest
from google.protobuf import json_format
from legato.v1 import image_pb2, inference_pb2, media_pb2, server_pb2
from legato_engine.client.monitor import EngineState
from PIL import Image

from tests.service.fakes import FakeEngine
from tests.service.harness import image_bytes, refusal, running

MAX_BYTES, MAX_PIXELS = 65_536, 1000


def file(data, mime_type=""):
    """Return a Caption of an image file."""
    return {"image": {"encoded": {"data": data, "mime_type": mime_type}}}


def raw(size=24, **layout):
    """Return a Caption of `size` raw bytes, 4 by 2 pixels unless given."""
    shape = {"width": 4, "height": 2, "format": "PIXEL_FORMAT_RGB8", **layout}
    return {"image": {"raw": {"layout": shape, "data": bytes(size)}}}


def query_fields(**fields):
    """Return a valid Query with these fields."""
    return {"question": "?", **fields}


def sampling_fields(**fields):
    """Return a valid Query with this sampling."""
    return query_fields(sampling=fields)


def cup(**fields):
    """Return a valid image and object, with these fields."""
    return {**file(PNG), "object": "cup", **fields}


def placed(**ref):
    """Return a valid Point with this spatial reference."""
    return cup(spatial_refs=[ref])


PNG = image_bytes()
UNDECODABLE, TOO_LARGE, TOO_LONG = "IMAGE_UNDECODABLE", "IMAGE_TOO_LARGE", "PROMPT_TOO_LONG"
FORMAT, NV12, YUYV = "image.raw.layout.format", "PIXEL_FORMAT_NV12", "PIXEL_FORMAT_YUYV"

# Field and how a request gets it wrong; the reason is INVALID_FIELD unless a third says otherwise.
TABLE: dict[str, list[Any]] = {
    "Query": [
        ("question", {}),
        ("sampling.temperature", sampling_fields(temperature=-0.1)),
        ("sampling.temperature", sampling_fields(temperature=math.inf)),
        ("sampling.temperature", sampling_fields(temperature=math.nan)),
        ("sampling.top_p", sampling_fields(top_p=0)),
        ("sampling.top_p", sampling_fields(top_p=1.01)),
        ("sampling.top_p", sampling_fields(top_p=math.nan)),
        ("sampling.max_tokens", sampling_fields(max_tokens=0)),
        ("sampling.max_tokens", sampling_fields(max_tokens=513)),
        ("sampling.stop", sampling_fields(stop=["."] * 9)),
        ("sampling.stop[1]", sampling_fields(stop=[".", ""])),
        ("sampling.stop[0]", sampling_fields(stop=["x" * 65])),
        ("spatial_refs", query_fields(spatial_refs=[{"point": {}}])),
        ("options.request_id", query_fields(options={"request_id": "a b"})),
        ("options.request_id", query_fields(options={"request_id": "x" * 65})),
    ],
    "Caption": [
        ("image", {}),
        ("image", {"image": {}}),
        ("image.image_id", {"image": {"image_id": ""}}),
        ("length", {**file(PNG), "length": 9}),
        ("image.encoded.data", file(b""), UNDECODABLE),
        ("image.encoded.data", file(b"hello"), UNDECODABLE),
        ("image.encoded.data", file(PNG[:20]), UNDECODABLE),
        ("image.encoded.data", file(image_bytes("BMP")), UNDECODABLE),
        ("image.encoded.mime_type", file(PNG, "image/jpeg"), UNDECODABLE),
        ("image.encoded.data", file(image_bytes(size=(40, 40))), TOO_LARGE),
        ("image.encoded.data", file(PNG + bytes(MAX_BYTES)), TOO_LARGE),
        ("image.raw", raw(width=1 << 31, height=1 << 31), TOO_LARGE),
        ("image.raw", raw(MAX_BYTES + 1), TOO_LARGE),
        ("image.raw.layout.width", raw(width=0)),
        ("image.raw.layout.height", raw(height=0)),
        (FORMAT, raw(format="PIXEL_FORMAT_UNSPECIFIED")),
        (FORMAT, raw(format=99)),
        (FORMAT, {"image": {"raw": {"data": b"x"}}}),
        ("image.raw.layout.row_stride_bytes", raw(row_stride_bytes=11)),
        ("image.raw.layout.width", raw(width=3, format=NV12)),
        ("image.raw.layout.height", raw(height=3, format=NV12)),
        ("image.raw.layout.row_stride_bytes", raw(row_stride_bytes=3, format=NV12)),
        ("image.raw.layout.width", raw(width=5, format=YUYV)),
        ("image.raw.layout.row_stride_bytes", raw(row_stride_bytes=7, format=YUYV)),
        ("image.raw.data", raw(11, format=NV12), UNDECODABLE),
        ("image.raw.data", raw(13, row_stride_bytes=5, format=NV12), UNDECODABLE),
        ("image.raw.data", raw(15, format=YUYV), UNDECODABLE),
        ("image.raw.data", raw(23), UNDECODABLE),
        ("image.raw.data", raw(27, row_stride_bytes=16), UNDECODABLE),
    ],
    "Detect": [
        ("image", {"object": "cup"}),
        ("object", file(PNG)),
        ("max_objects", cup(max_objects=0)),
    ],
    "Point": [
        ("object", cup(object=" \n")),
        ("max_objects", cup(max_objects=0)),
        ("spatial_refs[0]", placed()),
        ("spatial_refs[0].point.x", placed(point={"x": 1.1})),
        ("spatial_refs[0].point.x", placed(point={"x": math.nan})),
        ("spatial_refs", cup(spatial_refs=[{"point": {}}] * 65)),
    ],
    "Segment": [
        ("object", cup(object="x" * 2000), TOO_LONG),
        ("spatial_refs[0].box", placed(box={"x_min": 0.5, "x_max": 0.4})),
        ("spatial_refs[0].box.y_min", placed(box={"y_min": -0.1, "y_max": 0.4})),
    ],
    "Generate": [
        ("task", file(PNG)),
        ("image", {"task": {"caption": {}}}),
        ("task.point.object", {"task": {"point": {}}}),
        (
            "task.query.spatial_refs",
            {"task": {"query": query_fields(spatial_refs=[{"point": {}}])}},
        ),
        ("task.sampling.top_p", {"task": {"query": query_fields(), "sampling": {"top_p": 2}}}),
        (
            "task.sampling.max_tokens",
            {"task": {"query": query_fields(), "sampling": {"maxTokens": 600}}},
        ),
        (
            "options.heartbeat_interval",
            {"task": {"query": query_fields()}, "options": {"heartbeat_interval": "0s"}},
        ),
        (
            "options.heartbeat_interval",
            {"task": {"query": query_fields()}, "options": {"heartbeat_interval": "-1s"}},
        ),
    ],
}
CASES = [
    pytest.param(rpc, *case, *(["INVALID_FIELD"] if len(case) == 2 else []), id=f"{rpc}-{case[0]}")
    for rpc, cases in TABLE.items()
    for case in cases
]


@pytest.mark.parametrize(("rpc", "field", "request_fields", "reason"), CASES)
async def test_a_bad_request_is_refused_by_its_field(rpc, field, request_fields, reason):
    """INVALID_ARGUMENT names reason and field, and the engine gets no request."""
    limits = {"max_image_pixels": MAX_PIXELS}
    async with running(engine_settings=limits, max_request_bytes=MAX_BYTES) as server:
        call = getattr(server.inference, rpc)(_message(rpc, request_fields))
        failed = await refusal(call.read() if rpc == "Generate" else call)
        assert not server.engine.requests
        assert len(server.engine.blobs) == 0
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.reason == reason
    (violation,) = failed.details["BadRequest"].field_violations
    assert violation.field == field
    metadata = failed.details["ErrorInfo"].metadata
    assert metadata["field"] == field
    assert field in failed.message
    if reason in (TOO_LARGE, TOO_LONG):
        assert int(metadata["actual"]) > int(metadata["limit"])


@pytest.mark.parametrize("kind", ["encoded", "raw"])
async def test_an_image_beyond_a_request_is_for_put_image(kind):
    """The message names the way around the limit, and the bytes pass there."""
    width = MAX_BYTES // 4
    pixels = np.random.default_rng(0).integers(0, 256, (8, width, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    header, request = image_pb2.PutImageHeader(), inference_pb2.CaptionRequest()
    if kind == "encoded":
        data = request.image.encoded.data = buffer.getvalue()
    else:
        data = request.image.raw.data = pixels.tobytes()
        header.layout.width, header.layout.height = width, 8
        header.layout.format = media_pb2.PIXEL_FORMAT_RGB8
        request.image.raw.layout.CopyFrom(header.layout)
    async with running(max_request_bytes=MAX_BYTES * 5, max_image_bytes=len(data)) as server:
        failed = await refusal(server.inference.Caption(request))
        upload = server.images.PutImage()
        await upload.write(image_pb2.PutImageRequest(header=header))
        for start in range(0, len(data), MAX_BYTES):
            chunk = data[start : start + MAX_BYTES]
            await upload.write(image_pb2.PutImageRequest(chunk=chunk))
        await upload.done_writing()
        assert (await upload).image.image_id
    assert failed.reason == TOO_LARGE
    assert f"a request carries up to {MAX_BYTES * 5}: upload it with PutImage" in failed.message


def _message(rpc, fields):
    """Build a message; bytes and non-finite numbers, which JSON lacks, are translated."""
    message = getattr(inference_pb2, f"{rpc}Request")()
    json_format.ParseDict(_json(fields), message)
    for kind, source in fields.get("image", {}).items():
        if kind != "image_id":
            getattr(message.image, kind).data = source["data"]
    return message


def _json(value):
    if isinstance(value, dict):
        return {key: _json(each) for key, each in value.items() if key != "data"}
    if isinstance(value, list):
        return [_json(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity"
    return value


# ---------------------------------------------------------------- server info


async def test_limits_are_those_that_hold():
    """The limits are those of the settings and of the model."""
    settings = {"max_image_pixels": 1234, "max_running": 3, "max_waiting": 5}
    async with running(
        engine_settings=settings, max_request_bytes=4321, unary_deadline=7.5, max_sessions=9
    ) as server:
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
    limits = info.limits
    assert (limits.max_request_bytes, limits.max_image_pixels) == (4321, 1234)
    assert (limits.max_running, limits.max_waiting) == (3, 5)
    assert (limits.max_context_tokens, limits.max_output_tokens) == (2048, 512)
    assert limits.default_deadline.ToMilliseconds() == 7500
    assert limits.max_sessions == 9
    assert {"sessions", "tracking"} <= set(info.capabilities)
    assert info.name == "legato"
    assert info.version
    assert info.instance_id
    assert info.contract_revision >= info.minimum_client_revision >= 1
    assert {"pixel_format.nv12", "pixel_format.yuyv"} <= set(info.capabilities)
    assert not info.shm_namespace


async def test_info_answers_while_the_model_loads():
    """GetServerInfo needs no model; ListModels is refused until there is one."""
    engine = FakeEngine()
    engine.state, engine.model = EngineState.STARTING, None
    async with running(engine) as server:
        info = await server.info.GetServerInfo(server_pb2.GetServerInfoRequest())
        failed = await refusal(server.info.ListModels(server_pb2.ListModelsRequest()))
    assert info.limits.max_context_tokens == 0
    assert failed.reason == "ENGINE_STARTING"


async def test_the_model_is_listed():
    """Name, tasks and context of the served model; one page holds it."""
    async with running() as server:
        response = await server.info.ListModels(server_pb2.ListModelsRequest(page_size=1))
    (model,) = response.models
    assert model.name == "fake-1"
    assert "segment" in model.tasks
    assert model.streaming_regions
    assert model.max_context_tokens == 2048
    assert not response.next_page_token


@pytest.mark.parametrize(
    ("request_fields", "field"),
    [
        ({"page_size": -1}, "page_size"),
        ({"page_token": "x"}, "page_token"),
        ({"page_token": "1"}, "page_token"),
        ({"page_token": "-1"}, "page_token"),
        ({"page_token": "²"}, "page_token"),
    ],
)
async def test_bad_pages_are_refused(request_fields, field):
    """A token that this server did not give, or a negative size, is INVALID_FIELD."""
    async with running() as server:
        failed = await refusal(
            server.info.ListModels(server_pb2.ListModelsRequest(**request_fields))
        )
    assert failed.reason == "INVALID_FIELD"
    assert failed.details["BadRequest"].field_violations[0].field == field
