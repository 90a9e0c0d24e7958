"""The Open Inference Protocol: tensors in and out, and refusals that name the tensor."""

from __future__ import annotations

import json
import struct

import grpc
import pytest
from legato.kserve import open_inference_pb2 as pb
from legato.kserve import open_inference_pb2_grpc
from legato_engine.client.monitor import EngineState
from legato_engine.errors import EngineLost
from legato_engine.types import CaptionSpec, DetectSpec, QuerySpec, SamplingParams

from tests.service.access.credentials import Token, write
from tests.service.fakes import BOX, POINT, FakeEngine
from tests.service.harness import image_bytes, refusal, running

DETECT = {"detect": {"object": "cup", "max_objects": 3}, "sampling": {"temperature": 0.5}}
NO_IMAGE = {"prompt": "how are you?"}


def stub(server):
    return open_inference_pb2_grpc.GRPCInferenceServiceStub(server.channel)


def element(data):
    """Return a BYTES tensor of one element."""
    return len(data).to_bytes(4, "little") + data


def infer(*, model="fake-1", raw=True, outputs=(), **inputs):
    """Build a request; a dict is a task."""
    request = pb.ModelInferRequest(model_name=model, id="mine")
    for name, value in inputs.items():
        text = json.dumps(value) if isinstance(value, dict) else value
        data = text.encode() if isinstance(text, str) else text
        tensor = request.inputs.add(name=name, datatype="BYTES", shape=[1])
        if raw:
            request.raw_input_contents.append(element(data))
        else:
            tensor.contents.bytes_contents.append(data)
    for name in outputs:
        request.outputs.add(name=name)
    return request


def found(response):
    """Return the tensors of an answer by name: text, or a shape with numbers."""
    out = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.datatype == "BYTES":
            assert raw[:4] == (len(raw) - 4).to_bytes(4, "little")
            out[tensor.name] = raw[4:].decode()
        else:
            values = struct.unpack(f"<{len(raw) // 4}f", raw)
            out[tensor.name] = (list(tensor.shape), pytest.approx(values))
    return out


@pytest.mark.parametrize("raw", [True, False])
async def test_a_task_reaches_the_engine(raw):
    """Image and task arrive in either form of contents; boxes come as JSON and as a tensor."""
    async with running() as server:
        request = infer(image=image_bytes(), task=DETECT, raw=raw)
        response = await stub(server).ModelInfer(request)
        (asked,) = server.engine.requests
    assert asked.task == DetectSpec(object="cup", max_objects=3)
    assert asked.sampling == SamplingParams(temperature=0.5)
    assert (response.id, response.model_name, response.model_version) == ("mine", "fake-1", "1")
    told = found(response)
    result = json.loads(told["result"])
    boxes = [tuple(each["box"].values()) for each in result["detect"]["objects"]]
    corners = (BOX.x_min, BOX.y_min, BOX.x_max, BOX.y_max)
    assert boxes[0] == pytest.approx(corners)
    assert told["boxes"] == ([len(boxes), 4], [value for each in boxes for value in each])
    assert told["points"][0] == [0, 2]
    assert told["scores"][0] == [len(boxes)]
    assert told["text"] == ""


async def test_outputs_that_are_asked_for():
    """An answer has the outputs that are named, in that order."""
    async with running() as server:
        task = {"point": {"object": "cup"}}
        asked = infer(image=image_bytes(), task=task, outputs=("points", "result"))
        told = found(await stub(server).ModelInfer(asked))
    assert list(told) == ["points", "result"]
    assert told["points"] == ([1, 2], (POINT.x, POINT.y))


async def test_a_prompt_is_a_question():
    """A plain text is a Query, with or without an image."""
    async with running() as server:
        answer = found(await stub(server).ModelInfer(infer(**NO_IMAGE)))
        assert answer["text"] == json.loads(answer["result"])["query"]["answer"]
        await stub(server).ModelInfer(infer(image=image_bytes(), task={"caption": {}}))
        query, caption = server.engine.requests
    assert query.task == QuerySpec(question="how are you?")
    assert (query.image, isinstance(caption.task, CaptionSpec)) == (None, True)
    assert caption.image is not None


async def test_readiness_and_metadata():
    """They follow the engine, know the model only, and list the tensors that ModelInfer takes."""
    async with running() as server:
        calls = stub(server)
        assert (await calls.ServerLive(pb.ServerLiveRequest())).live
        assert (await calls.ServerReady(pb.ServerReadyRequest())).ready
        assert (await calls.ModelReady(pb.ModelReadyRequest(name="fake-1", version="1"))).ready
        assert not (await calls.ModelReady(pb.ModelReadyRequest(name="other"))).ready
        assert (await calls.ServerMetadata(pb.ServerMetadataRequest())).name == "legato"
        told = await calls.ModelMetadata(pb.ModelMetadataRequest(name="fake-1"))
        assert [each.name for each in told.inputs] == ["image", "task", "prompt"]
        assert {each.name: list(each.shape) for each in told.outputs}["boxes"] == [-1, 4]
        server.engine.become(EngineState.LOST)
        assert (await calls.ServerLive(pb.ServerLiveRequest())).live
        assert not (await calls.ServerReady(pb.ServerReadyRequest())).ready
        assert not (await calls.ModelReady(pb.ModelReadyRequest(name="fake-1"))).ready


def changed(change, **inputs):
    """Build a request and spoil it."""
    request = infer(**(inputs or {"image": image_bytes(), "task": DETECT}))
    change(request)
    return request


def _reshape(request):
    request.inputs[0].shape.append(2)


def _numbers(request):
    request.inputs[0].datatype = "FP32"


def _parameter(name, where=lambda request: request):
    def change(request):
        where(request).parameters[name].int64_param = 1

    return change


REFUSED = {
    "input": (infer(picture=b"x", **NO_IMAGE), "inputs[0].name", "'picture' for model 'fake-1'"),
    "shape": (changed(_reshape), "inputs[0].shape", "Expected [1], got [1,2]"),
    "datatype": (changed(_numbers), "inputs[0].datatype", "expects 'BYTES'"),
    "output": (infer(outputs=["mask"], **NO_IMAGE), "outputs[0].name", "'mask'"),
    "no task": (infer(image=b"x"), "inputs", "'task' or input 'prompt'"),
    "both": (infer(task=DETECT, prompt="x"), "inputs", "got both"),
    "twice": (
        changed(lambda request: request.MergeFrom(infer(**NO_IMAGE)), **NO_IMAGE),
        "inputs[1]",
        "'prompt' is given twice",
    ),
    "raw contents": (
        changed(lambda request: request.raw_input_contents.pop()),
        "raw_input_contents",
        "expected 2 raw contents",
    ),
    "element": (
        changed(lambda request: request.raw_input_contents.__setitem__(1, b"\x09\0\0\0{}")),
        "raw_input_contents[1]",
        "total byte size 6 for input 'task'",
    ),
    "no contents": (
        changed(lambda request: request.raw_input_contents.clear()),
        "inputs[0].contents.bytes_contents",
        "'image' has 0 elements",
    ),
    "JSON": (infer(task="{"), "inputs[task]", "'task' is not a Task"),
    "field of the task": (infer(task={"detect": {"objekt": "x"}}), "inputs[task]", "objekt"),
    "deep": (infer(task="[" * 5_000), "inputs[task]", "'task' is not a Task"),
    "many values": (infer(task="[" * 20_000), "inputs[task]", "the limit is 16384"),
    "long": (infer(task=b" " * 2_000_000), "inputs[task]", "the limit is 1500000"),
    "no text": (infer(prompt=b"\xff"), "inputs[prompt]", "not UTF-8"),
    "bound of the task": (
        infer(image=b"x", task={"detect": {"object": "x", "minConfidence": 7}}),
        "task.detect.min_confidence",
        "must be 0 to 1",
    ),
    "several images": (
        infer(image=b"x", task={"query": {"question": "x", "images": [{"image": {}}]}}),
        "task.query.images",
        "about the call's image",
    ),
    "no image": (infer(task=DETECT), "image", "needs an image"),
    "image": (infer(image=b"x", task=DETECT), "image.encoded", "image"),
    "priority": (changed(_parameter("priority")), "parameters[priority]", "'priority'"),
    "shared memory": (
        changed(_parameter("shared_memory_region", lambda request: request.inputs[0])),
        "inputs[0].parameters[shared_memory_region]",
        "of input 'image'",
    ),
    "pieces": (
        changed(lambda r: r.parameters["stream"].__setattr__("bool_param", True)),
        "parameters[stream]",
        "ModelStreamInfer",
    ),
    "too many inputs": (
        changed(lambda request: [request.inputs.add() for _ in range(20)]),
        "inputs",
        "more than 16 entries",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_malformed_requests_name_the_tensor(case):
    """They are INVALID_ARGUMENT with the field, the tensor and what was expected."""
    request, field, words = REFUSED[case]
    async with running() as server:
        failed = await refusal(stub(server).ModelInfer(request))
        assert not server.engine.requests
    assert failed.code is grpc.StatusCode.INVALID_ARGUMENT
    assert failed.details["ErrorInfo"].metadata["field"].startswith(field)
    assert words in failed.message


@pytest.mark.parametrize(("model", "version"), [("other", ""), ("fake-1", "2"), ("fake-1/a", "")])
async def test_unknown_models(model, version):
    """Another name, version or adapter is NOT_FOUND, and is named."""
    async with running() as server:
        request = infer(model=model, **NO_IMAGE)
        request.model_version = version
        failed = await refusal(stub(server).ModelInfer(request))
        metadata = pb.ModelMetadataRequest(name=model, version=version)
        again = await refusal(stub(server).ModelMetadata(metadata))
    assert failed.code is again.code is grpc.StatusCode.NOT_FOUND


async def test_a_stream_answers_in_order():
    """A failed request is told by name and does not end the stream; text comes in pieces."""
    pieces = infer(outputs=["text"], **NO_IMAGE)
    pieces.parameters["stream"].bool_param = True
    pieces.parameters["triton_enable_empty_final_response"].bool_param = True
    sent = [infer(**NO_IMAGE), infer(task=DETECT), pieces, infer(**NO_IMAGE)]
    async with running() as server:
        told = [each async for each in stub(server).ModelStreamInfer(iter(sent))]
        assert len({each.request_id for each in server.engine.requests}) == 3
    first, failed, *streamed, last = told
    assert failed.error_message.startswith("INVALID_ARGUMENT INVALID_FIELD: image: ")
    assert failed.infer_response.id == "mine"
    final = [each.infer_response.parameters["triton_final_response"].bool_param for each in told]
    assert final == [True, False, *[False] * (len(streamed) - 1), True, True]
    texts = [found(each.infer_response)["text"] for each in streamed]
    assert "".join(texts[:-1]) == texts[-1] == found(last.infer_response)["text"]
    assert found(first.infer_response)["result"] == found(last.infer_response)["result"]


async def test_a_failure_of_the_engine_is_an_answer_of_the_stream():
    """Also one that all requests share, so the caller learns what became of each."""

    def fail(_engine, stream):
        stream.fail(EngineLost("the engine process died"))

    async with running(FakeEngine(fail)) as server:
        sent = [infer(**NO_IMAGE)] * 2
        told = [each async for each in stub(server).ModelStreamInfer(iter(sent))]
    lost = [each.error_message.startswith("UNAVAILABLE ENGINE_LOST: ") for each in told]
    assert lost == [True, True]


async def test_each_request_of_a_stream_counts(tmp_path):
    """A quota of requests bounds those in one stream, too."""
    robot = Token("robot", ["infer"])
    tokens = write(tmp_path / "tokens.toml", robot)
    async with running(tokens=tokens, quota_requests=1.0) as server:
        sent = iter([infer(**NO_IMAGE)] * 3)
        calls = stub(server).ModelStreamInfer(sent, metadata=robot.metadata)
        told = [each.error_message.partition(":")[0] async for each in calls]
    assert "RESOURCE_EXHAUSTED QUOTA_EXCEEDED" in told[1:]
