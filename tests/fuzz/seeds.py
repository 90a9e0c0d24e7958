"""Well-formed files and messages to damage."""

from __future__ import annotations

import base64
import functools

from google.protobuf.message import Message
from legato.kserve import open_inference_pb2
from legato.v1 import (
    geometry_pb2,
    image_pb2,
    inference_pb2,
    media_pb2,
    server_pb2,
    session_pb2,
    task_pb2,
)
from PIL import Image

from tests.hostile_images import exif_entries, file, png, png_chunk, smooth

_INFERENCE = "/legato.v1.InferenceService/"
_KSERVE = "/inference.GRPCInferenceService/"
_OTHERS = "/legato.v1."


@functools.cache
def images() -> tuple[bytes, ...]:
    """One file of each kind and structure."""
    image = smooth(48, 32)
    exif = Image.Exif()
    exif[0x0112] = 6
    block = exif.tobytes()
    frames = [smooth(16, 16), smooth(16, 16).rotate(90)]
    return (
        file(image, "JPEG"),
        file(image, "JPEG", exif=block, restart_marker_rows=1),
        file(image, "JPEG", progressive=True),
        file(image.convert("L"), "JPEG"),
        file(image.convert("CMYK"), "JPEG"),
        file(image, "PNG", exif=block),
        file(image.convert("RGBA"), "PNG"),
        file(image.quantize(16), "PNG", transparency=bytes(16)),
        file(frames[0], "PNG", save_all=True, append_images=frames[1:]),
        png(24, 16, depth=16),
        png(24, 16, depth=1, colour_type=0, extra=png_chunk(b"eXIf", exif_entries(4, 64))),
        file(image, "WEBP", exif=block),
        file(image, "WEBP", lossless=True),
        file(image.convert("RGBA"), "WEBP"),
        file(frames[0], "WEBP", save_all=True, append_images=frames[1:]),
    )


@functools.cache
def messages() -> dict[str, tuple[Message, ...]]:
    """Full messages of the methods that take any, by method."""
    encoded = media_pb2.Image(encoded=media_pb2.EncodedImage(data=images()[0], mime_type=""))
    layout = media_pb2.PixelLayout(width=4, height=2, format=media_pb2.PIXEL_FORMAT_NV12)
    raw = media_pb2.Image(raw=media_pb2.RawImage(layout=layout, data=bytes(12)))
    shared = media_pb2.Image(
        shared=media_pb2.SharedImage(
            region="legato-0-x", offset=64, size_bytes=12, generation=2, layout=layout
        )
    )
    sampling = task_pb2.Sampling(temperature=0.5, top_p=0.9, max_tokens=9, seed=3, stop=["x"])
    point = geometry_pb2.SpatialRef(point=geometry_pb2.Point(x=0.5, y=0.25))
    query = task_pb2.QueryTask(question="what?", spatial_refs=[point])
    detect = task_pb2.DetectTask(object="cat", max_objects=3)
    tasks = [
        task_pb2.Task(task_id="q", query=query, sampling=sampling),
        task_pb2.Task(task_id="d", detect=detect),
    ]
    options = inference_pb2.RequestOptions(model="", cache_image=True, return_tokens=True)
    options.heartbeat_interval.FromMilliseconds(500)
    stamp = media_pb2.FrameStamp(sequence=7)
    stamp.capture_time.FromSeconds(5)
    header = image_pb2.PutImageHeader(mime_type="image/jpeg", size_bytes=len(images()[0]))
    header.ttl.FromSeconds(60)
    frame = session_pb2.Frame(image=encoded, stamp=stamp)
    infer = open_inference_pb2.ModelInferRequest(model_name="fake-1", id="mine")
    for name, data in (("image", images()[0]), ("task", b'{"detect": {"object": "cat"}}')):
        infer.inputs.add(name=name, datatype="BYTES", shape=[1])
        infer.raw_input_contents.append(len(data).to_bytes(4, "little") + data)
    infer.outputs.add(name="boxes")
    infer.parameters["triton_enable_empty_final_response"].bool_param = True
    return {
        _INFERENCE + "Query": (
            inference_pb2.QueryRequest(
                image=encoded, question="what?", spatial_refs=[point], options=options, stamp=stamp
            ),
        ),
        _INFERENCE + "Caption": (inference_pb2.CaptionRequest(image=raw, sampling=sampling),),
        _INFERENCE + "Detect": (
            inference_pb2.DetectRequest(image=shared, object="cat", max_objects=3),
            inference_pb2.DetectRequest(image=raw, object="cat", options=options),
        ),
        _INFERENCE + "Point": (inference_pb2.PointRequest(image=encoded, object="cat"),),
        _INFERENCE + "Segment": (inference_pb2.SegmentRequest(image=raw, object="cat"),),
        _INFERENCE + "RunTasks": (
            inference_pb2.RunTasksRequest(image=encoded, tasks=tasks, options=options),
        ),
        _INFERENCE + "Generate": (
            inference_pb2.GenerateRequest(
                image=encoded, task=tasks[0], options=options, stamp=stamp
            ),
        ),
        _OTHERS + "ImageService/PutImage": (
            image_pb2.PutImageRequest(header=header),
            image_pb2.PutImageRequest(chunk=images()[0]),
        ),
        _OTHERS + "ImageService/DeleteImage": (image_pb2.DeleteImageRequest(image_id="img_0"),),
        _OTHERS + "SessionService/Session": (
            session_pb2.SessionRequest(
                open=session_pb2.SessionOpen(session_name="robot", standing_tasks=tasks)
            ),
            session_pb2.SessionRequest(frame=frame),
            session_pb2.SessionRequest(update=session_pb2.UpdateTasks(standing_tasks=tasks)),
            session_pb2.SessionRequest(cancel=session_pb2.CancelFrame(sequence=7)),
            session_pb2.SessionRequest(grant=session_pb2.GrantCredits(responses=4)),
        ),
        _KSERVE + "ModelInfer": (infer,),
        _KSERVE + "ModelStreamInfer": (infer, infer),
        _KSERVE + "ModelMetadata": (open_inference_pb2.ModelMetadataRequest(name="fake-1"),),
        _OTHERS + "ServerService/GetServerInfo": (server_pb2.GetServerInfoRequest(),),
        _OTHERS + "ServerService/ListModels": (server_pb2.ListModelsRequest(),),
    }


STREAMS_IN = ("PutImage", "Session", "ModelStreamInfer")
STREAMS_OUT = ("Generate", "Session", "ModelStreamInfer")


@functools.cache
def http_bodies() -> dict[str, tuple[object, ...]]:
    """Full bodies of the paths that take any, by path: documents, or bytes as they are sent."""
    picture = f"data:image/jpeg;base64,{base64.b64encode(images()[0]).decode()}"
    place = [[0.25, 0.5], [0.1, 0.2, 0.3, 0.4]]
    settings = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 9, "max_objects": 3}
    question = [
        {"type": "text", "text": "what? \u00e9 \U0001f600"},
        {"type": "image_url", "image_url": {"url": picture}},
    ]
    chat = {
        "model": "fake",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": question},
            {"role": "assistant", "content": "a cat", "tool_calls": []},
            {"role": "user", "content": "why?"},
        ],
        "stop": ["x"],
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "metadata": {"a": "b"},
        "logit_bias": {},
        "tools": [],
        "stream_options": {"include_usage": True},
    }
    said = [{"type": "output_text", "text": "a cat", "annotations": [], "logprobs": []}]
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": []}
    response = {
        "model": "fake",
        "instructions": "be brief",
        "input": [
            {
                "role": "user",
                "content": [
                    {"type": "input_text", "text": "what?"},
                    {"type": "input_image", "image_url": picture, "detail": "auto"},
                ],
            },
            thought,
            {"type": "message", "id": "msg_1", "role": "assistant", "content": said},
            {"type": "message", "role": "user", "content": "why?"},
        ],
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 2,
        "reasoning": {"effort": "none"},
        "text": {"format": {"type": "text"}},
        "metadata": {"a": "b"},
    }
    task = {"detect": {"object": "cat", "min_confidence": 0.5, "tracking": {"max_unseen": "2s"}}}
    talk = {"query": {"messages": [{"role": "CHAT_ROLE_USER", "parts": [{"text": "hi"}]}]}}
    return {
        "/v1/chat/completions": (chat, {**chat, "stream": True}),
        "/v1/responses": (response, {**response, "stream": True}),
        "/v1/query": (
            {"question": "why?", "image_url": picture, "settings": settings, "spatial_refs": place},
            {"question": "why?", "stream": True, "reasoning": True},
        ),
        "/v1/caption": ({"image_url": picture, "length": "short"},),
        "/v1/detect": ({"image_url": picture, "object": "cat", "settings": settings},),
        "/v1/point": ({"image_url": picture, "object": "cat", "spatial_refs": place},),
        "/v1/segment": ({"image_url": picture, "object": "cat", "stream": True},),
        "/playground/pictures": (images()[0],),
        "/playground/generate": ({"task": task, "image_id": "i-1"}, {"task": talk}),
        "/playground/code": ({"task": task, "picture": "cat.jpg", "options": {"model": "fake"}},),
        "/timeline/depth": ({"depth": 1},),
    }
